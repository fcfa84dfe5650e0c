"""Publish orders with confirms, or consume them with acks. aio-pika reconnects by itself.

python orders.py publish 10
python orders.py consume
"""

import asyncio
import os
import sys

import aio_pika
from aio_pika.exceptions import AMQPError, AuthenticationError, ProbableAuthenticationError
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionNotAllowed,
)

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
QUEUE = "orders"
RETRY_S = 1
# To repeat it does not help.
FINAL = (
    AuthenticationError,
    ProbableAuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionNotAllowed,
)


async def publish(count):
    connection = await aio_pika.connect_robust(URL, reconnect_interval=RETRY_S)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(QUEUE, durable=True)
        number = 0
        while number < count:
            message = aio_pika.Message(
                b"order %d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            try:
                # The call returns when the broker has the message on its disk.
                await channel.default_exchange.publish(message, QUEUE, timeout=30)
                number += 1
            except FINAL:
                raise
            except (AMQPError, ConnectionError, RuntimeError, TimeoutError) as error:
                print(f"publishing again: {error!r}", file=sys.stderr, flush=True)
                await asyncio.sleep(RETRY_S)
    print(f"published {count}")


async def consume():
    connection = await aio_pika.connect_robust(URL, reconnect_interval=RETRY_S)
    async with connection:
        connection.reconnect_callbacks.add(
            lambda _: print("consuming again", file=sys.stderr, flush=True)
        )
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=100)
        queue = await channel.declare_queue(QUEUE, durable=True)
        await queue.consume(take)
        await asyncio.Future()  # until Ctrl-C


async def take(message):
    async with message.process():  # acknowledges at the end, or requeues after an error
        print("got", message.body.decode(), flush=True)  # the work; it may be done twice


if __name__ == "__main__":
    try:
        asyncio.run(publish(int(sys.argv[2])) if sys.argv[1:2] == ["publish"] else consume())
    except FINAL as error:
        sys.exit(f"refused: {error!r}")
