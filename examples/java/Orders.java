// Publish orders with confirms, or consume them with acks. Both connect again after an error.
//
//     java -cp 'amqp-client.jar:slf4j-api.jar' Orders.java publish 10
//     java -cp 'amqp-client.jar:slf4j-api.jar' Orders.java consume
//
// The jars are Debian's librabbitmq-client-java in /usr/share/java, or com.rabbitmq:amqp-client.

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.MessageProperties;
import com.rabbitmq.client.PossibleAuthenticationFailureException;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.IOException;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeoutException;

public class Orders {
    static final String QUEUE = "orders";
    static final int RETRY_MS = 1000;
    // Refused, not found, in conflict, not allowed: to repeat it does not help.
    static final Set<Integer> FINAL = Set.of(403, 404, 406, 530);

    public static void main(String[] arguments) throws Exception {
        String url = System.getenv().getOrDefault("AMQP_URL", "amqp://guest:guest@localhost");
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(url);
        factory.setAutomaticRecoveryEnabled(false); // the loops below do it
        if (arguments.length > 1 && arguments[0].equals("publish")) {
            publish(factory, Integer.parseInt(arguments[1]));
        } else {
            consume(factory);
        }
    }

    static void publish(ConnectionFactory factory, int count) throws Exception {
        int number = 0;
        while (number < count) {
            try (Connection connection = factory.newConnection()) {
                Channel channel = connection.createChannel();
                channel.queueDeclare(QUEUE, true, false, false, null);
                channel.confirmSelect();
                for (; number < count; number++) {
                    byte[] body = ("order " + number).getBytes();
                    channel.basicPublish("", QUEUE, MessageProperties.PERSISTENT_BASIC, body);
                    channel.waitForConfirmsOrDie(30_000); // the broker has the message on its disk
                }
            } catch (IOException | TimeoutException | ShutdownSignalException error) {
                again("publishing", error);
            }
        }
        System.out.println("published " + count);
    }

    static void again(String what, Exception error) throws InterruptedException {
        Throwable cause = error.getCause() instanceof ShutdownSignalException
                ? error.getCause() : error;
        Object reason = cause instanceof ShutdownSignalException signal ? signal.getReason() : null;
        int code = cause instanceof PossibleAuthenticationFailureException ? 403
                : reason instanceof AMQP.Channel.Close close ? close.getReplyCode()
                : reason instanceof AMQP.Connection.Close closed ? closed.getReplyCode() : 0;
        boolean isFinal = FINAL.contains(code);
        System.err.println(what + (isFinal ? " ends: " : " again: ") + cause);
        if (isFinal) {
            System.exit(1);
        }
        Thread.sleep(RETRY_MS);
    }

    static void consume(ConnectionFactory factory) throws Exception {
        while (true) {
            try (Connection connection = factory.newConnection()) {
                Channel channel = connection.createChannel();
                CountDownLatch ended = new CountDownLatch(1);
                channel.addShutdownListener(cause -> ended.countDown());
                channel.queueDeclare(QUEUE, true, false, false, null);
                channel.basicQos(100);
                channel.basicConsume(QUEUE, false, new DefaultConsumer(channel) {
                    @Override
                    public void handleDelivery(
                            String tag, Envelope envelope, AMQP.BasicProperties properties,
                            byte[] body) throws IOException {
                        // The work; it may be done twice.
                        System.out.println("got " + new String(body));
                        channel.basicAck(envelope.getDeliveryTag(), false);
                    }
                });
                ended.await();
                throw channel.getCloseReason();
            } catch (IOException | TimeoutException | ShutdownSignalException error) {
                again("consuming", error);
            }
        }
    }
}
