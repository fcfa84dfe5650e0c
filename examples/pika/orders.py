"""Publish orders with confirms, or consume them with acks. Reconnect when the connection is lost.

python orders.py publish 10
python orders.py consume
"""

import os
import sys
import time

import pika
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    NackError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
QUEUE = "orders"
PERSISTENT = pika.BasicProperties(delivery_mode=2)
RETRY_S = 1
# Refused, not found, in conflict, not allowed: to repeat it does not help.
FINAL_CODES = {403, 404, 406, 530}
FINAL = (ProbableAuthenticationError, ProbableAccessDeniedError)


def opened(connection):
    channel = connection.channel()
    channel.queue_declare(QUEUE, durable=True)
    return channel


def publish(count):
    number = 0
    while number < count:
        try:
            with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
                channel = opened(connection)
                channel.confirm_delivery()
                while number < count:
                    # The call returns when the broker has the message on its disk.
                    channel.basic_publish("", QUEUE, b"order %d" % number, PERSISTENT)
                    number += 1
        except (AMQPConnectionError, ChannelClosedByBroker, NackError) as error:
            again("publishing", error)
    print(f"published {count}")


def consume():
    while True:
        try:
            with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
                channel = opened(connection)
                channel.basic_qos(prefetch_count=100)
                for method, _, body in channel.consume(QUEUE):
                    print("got", body.decode(), flush=True)  # the work; it may be done twice
                    channel.basic_ack(method.delivery_tag)
        except (AMQPConnectionError, ChannelClosedByBroker) as error:
            again("consuming", error)


def again(what, error):
    if isinstance(error, FINAL) or getattr(error, "reply_code", 0) in FINAL_CODES:
        sys.exit(f"{what} ends: {error!r}")
    print(f"{what} again: {error!r}", file=sys.stderr, flush=True)
    time.sleep(RETRY_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        publish(int(sys.argv[2]))
    else:
        consume()
