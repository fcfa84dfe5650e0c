"""One queue over all cores: a stream exchange, and a worker that consumes it under its name.

python stream_exchange.py publish 1000
python stream_exchange.py work          # as many as you like, at the same time

The messages of one customer come to one worker at a time, in order.
"""

import os
import sys

import pika

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
EXCHANGE = "customers"
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def opened(connection):
    channel = connection.channel()
    channel.exchange_declare(EXCHANGE, "x-consistent-hash", durable=True, arguments={"x-shards": 4})
    return channel


def publish(count):
    with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
        channel = opened(connection)
        channel.confirm_delivery()
        for number in range(count):
            customer = f"customer-{number % 50}"
            channel.basic_publish(EXCHANGE, customer, b"order %d" % number, PERSISTENT)
    print(f"published {count}")


def work():
    with pika.BlockingConnection(pika.URLParameters(URL)) as connection:
        channel = opened(connection)
        channel.basic_qos(prefetch_count=100)
        # The name of the exchange is the name of the queue over all its shard queues.
        for method, _, body in channel.consume(EXCHANGE):
            print(method.routing_key, body.decode(), flush=True)
            channel.basic_ack(method.delivery_tag)


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish"]:
        publish(int(sys.argv[2]))
    else:
        work()
