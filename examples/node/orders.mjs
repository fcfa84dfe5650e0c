// Publish orders with confirms, or consume them with acks. Reconnect when the connection is lost.
//
//     npm install amqplib
//     node orders.mjs publish 10
//     node orders.mjs consume
import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost/';
const QUEUE = 'orders';
const RETRY_MS = 1000;
// Refused, not found, in conflict, not allowed: to repeat it does not help.
const FINAL = [403, 404, 406, 530];

async function connected() {
  const connection = await amqp.connect(URL);
  connection.on('error', () => {}); // the event 'close' comes in any case
  return connection;
}

/** A channel that the broker closes has an event 'error', which ends a program that ignores it. */
function watched(channel, what) {
  channel.on('error', (error) => {
    endIfFinal(what, error);
    channel.connection.close(() => {});
  });
  return channel;
}

function endIfFinal(what, error) {
  const handshake = /Handshake terminated by server: (\d+)/.exec(error);
  if (!FINAL.includes(error.code ?? Number(handshake?.[1]))) return;
  console.error(`${what} ends: ${error}`);
  process.exit(1);
}

async function publish(count) {
  let number = 0;
  while (number < count) {
    try {
      const connection = await connected();
      const channel = watched(await connection.createConfirmChannel(), 'publishing');
      await channel.assertQueue(QUEUE, { durable: true });
      for (; number < count; number++) {
        channel.sendToQueue(QUEUE, Buffer.from(`order ${number}`), { persistent: true });
        await channel.waitForConfirms(); // the broker has the message on its disk
      }
      await connection.close();
    } catch (error) {
      await again('publishing', error);
    }
  }
  console.log(`published ${count}`);
}

async function consume() {
  for (;;) {
    try {
      const connection = await connected();
      const closed = once(connection, 'close');
      const channel = watched(await connection.createChannel(), 'consuming');
      await channel.assertQueue(QUEUE, { durable: true });
      await channel.prefetch(100);
      await channel.consume(QUEUE, (message) => {
        if (message === null) return void connection.close(); // the queue has been deleted
        console.log(`got ${message.content}`); // the work; it may be done twice
        channel.ack(message);
      });
      await closed;
      await again('consuming', 'the connection is closed');
    } catch (error) {
      await again('consuming', error);
    }
  }
}

async function again(what, error) {
  endIfFinal(what, error);
  console.error(`${what} again: ${error}`);
  await sleep(RETRY_MS);
}

await (process.argv[2] === 'publish' ? publish(Number(process.argv[3])) : consume());
