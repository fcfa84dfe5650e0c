<?php

// Publish orders with confirms, or consume them with acks. Reconnect when the connection is lost.
//
//     composer require php-amqplib/php-amqplib      (or Debian's php-cli and php-amqplib)
//     php orders.php publish 10
//     php orders.php consume

require file_exists(__DIR__ . '/vendor/autoload.php')
    ? __DIR__ . '/vendor/autoload.php'
    : '/usr/share/php/PhpAmqpLib/autoload.php';

use PhpAmqpLib\Connection\AMQPStreamConnection;
use PhpAmqpLib\Exception\AMQPExceptionInterface;
use PhpAmqpLib\Message\AMQPMessage;

const QUEUE = 'orders';
const RETRY_S = 1;
// Refused, not found, in conflict, not allowed: to repeat it does not help.
const FINAL_CODES = [403, 404, 406, 530];

function connected(): AMQPStreamConnection
{
    $url = parse_url(getenv('AMQP_URL') ?: 'amqp://guest:guest@localhost/');
    return new AMQPStreamConnection(
        $url['host'],
        $url['port'] ?? 5672,
        urldecode($url['user'] ?? 'guest'),
        urldecode($url['pass'] ?? 'guest'),
        urldecode(substr($url['path'] ?? '/', 1)) ?: '/',
        heartbeat: 30,
        read_write_timeout: 60,
    );
}

function publish(int $count): void
{
    $number = 0;
    while ($number < $count) {
        try {
            $connection = connected();
            $channel = $connection->channel();
            $channel->queue_declare(QUEUE, durable: true, auto_delete: false);
            $channel->confirm_select();
            $channel->set_nack_handler(fn () => throw new RuntimeException('refused'));
            for (; $number < $count; $number++) {
                $message = new AMQPMessage(
                    "order $number",
                    ['delivery_mode' => AMQPMessage::DELIVERY_MODE_PERSISTENT],
                );
                $channel->basic_publish($message, '', QUEUE);
                $channel->wait_for_pending_acks(30); // the broker has the message on its disk
            }
            $connection->close();
        } catch (AMQPExceptionInterface | RuntimeException $error) {
            again('publishing', $error);
        }
    }
    echo "published $count\n";
}

function consume(): void
{
    while (true) {
        try {
            $connection = connected();
            $channel = $connection->channel();
            $channel->queue_declare(QUEUE, durable: true, auto_delete: false);
            $channel->basic_qos(0, 100, false);
            $channel->basic_consume(QUEUE, callback: function (AMQPMessage $message): void {
                echo "got {$message->getBody()}\n"; // the work; it may be done twice
                $message->ack();
            });
            while ($channel->is_consuming()) {
                $channel->wait();
            }
        } catch (AMQPExceptionInterface $error) {
            again('consuming', $error);
        }
    }
}

function again(string $what, Throwable $error): void
{
    if (in_array($error->getCode(), FINAL_CODES, true)) {
        fwrite(STDERR, "$what ends: {$error->getMessage()}\n");
        exit(1);
    }
    fwrite(STDERR, "$what again: {$error->getMessage()}\n");
    sleep(RETRY_S);
}

($argv[1] ?? '') === 'publish' ? publish((int) $argv[2]) : consume();
