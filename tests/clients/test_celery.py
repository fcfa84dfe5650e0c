"""Test Celery and kombu: a worker takes tasks, also those that wait for their time."""

from __future__ import annotations

import kombu
from celery import Celery
from celery.contrib.testing.worker import start_worker

from tests.support.real_broker import RealBroker


def test_kombu_publishes_and_drains(broker: RealBroker, name: str) -> None:
    with kombu.Connection(broker.url) as connection:
        queue = connection.SimpleQueue(name)
        queue.put({"hello": "world"})
        message = queue.get(timeout=60)
        assert message.payload == {"hello": "world"}
        message.ack()
        queue.close()


def test_a_celery_worker_runs_tasks_and_answers(broker: RealBroker, name: str) -> None:
    app = Celery(name, broker=broker.url.replace("amqp://", "pyamqp://"), backend="rpc://")
    app.conf.update(
        task_default_queue=name,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=False,
    )
    app.conf.update(broker_heartbeat=2)  # its worker looks around as often, for its end too

    @app.task(name=f"{name}.add")
    def add(a: int, b: int) -> int:
        return a + b

    with start_worker(app, perform_ping_check=False, pool="solo", shutdown_timeout=90):
        assert [add.delay(n, 1).get(timeout=60) for n in range(5)] == [1, 2, 3, 4, 5]
        # More tasks with a time to come than the prefetch allows: the worker raises its prefetch to
        # see those behind.
        later = [add.apply_async((n, 2), countdown=0.5) for n in range(10)]
        assert add.delay(40, 2).get(timeout=60) == 42
        assert [result.get(timeout=60) for result in later] == [n + 2 for n in range(10)]
