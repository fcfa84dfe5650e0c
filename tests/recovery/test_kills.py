"""Processes are killed under load: nothing confirmed is lost, and the order per key holds."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pika
import pika.exceptions
import pytest

from tests.support.brokers import killable_broker
from tests.support.history import History, make_body
from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.crash
broker = killable_broker

QUEUES = 3
CONFIRMS_MORE = 500  # before and after each kill
QUIET_S = 60.0
STILL_S = 8.0  # longer than any wait between the lives of a shard that died once or twice
BATCH = 50


def connect(broker: RealBroker) -> pika.BlockingConnection:
    parameters = pika.URLParameters(broker.url)
    parameters.socket_timeout = 20
    parameters.blocked_connection_timeout = 60
    return pika.BlockingConnection(parameters)


LOST = (pika.exceptions.AMQPError, OSError)


class Load:
    """A publisher and a consumer per key, each on a queue of its own.

    They come back when their connection is lost.

    `consuming`: from the start; else consumers come when publishers have gone, and find what the
    disk kept.
    """

    def __init__(
        self, broker: RealBroker, name: str, *, consuming: bool = True, still_s: float = STILL_S
    ) -> None:
        self.broker, self.history, self.still_s = broker, History(), still_s
        keys = [f"{name}-{number}" for number in range(QUEUES)]
        self._publishing = threading.Event()
        self._consuming = threading.Event()
        self._publishing.set()
        self._consuming.set()
        self.errors: list[BaseException] = []
        self._arrived = (0, time.monotonic())  # deliveries, and when there was the last one
        with connect(broker) as connection:
            channel = connection.channel()
            for key in keys:
                channel.queue_declare(key, durable=True)
        self._publishers = [
            threading.Thread(target=self._guard, args=(self._publish, key)) for key in keys
        ]
        self._consumers = [
            threading.Thread(target=self._guard, args=(self._consume, key)) for key in keys
        ]
        for thread in (*self._publishers, *(self._consumers if consuming else ())):
            thread.start()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        """End all threads, also of a test that failed: they would try to connect for ever."""
        self._publishing.clear()
        self._consuming.clear()
        for thread in (*self._publishers, *self._consumers):
            if thread.ident is not None:
                thread.join(QUIET_S)

    def _guard(self, work: object, key: str) -> None:
        try:
            work(key)  # type: ignore[operator]
        except BaseException as error:
            self.errors.append(error)

    def _publish(self, key: str) -> None:
        """Publish numbered messages, each number once, until told to stop.

        A message without a confirm is not published again, so a duplicate is the broker's fault.
        """
        number = 0
        while self._publishing.is_set():
            try:
                with connect(self.broker) as connection:
                    channel = connection.channel()
                    channel.confirm_delivery()
                    while self._publishing.is_set():
                        number += 1
                        self.history.was_published(key, number)
                        try:
                            channel.basic_publish(
                                "",
                                key,
                                make_body(key, number),
                                pika.BasicProperties(delivery_mode=2),
                            )
                        except pika.exceptions.NackError:
                            continue
                        self.history.was_confirmed(key, number)
            except LOST:
                time.sleep(0.05)

    def _consume(self, key: str) -> None:
        while self._consuming.is_set():
            try:
                with connect(self.broker) as connection:
                    channel = connection.channel()
                    channel.basic_qos(prefetch_count=BATCH)
                    for method, _, body in channel.consume(key, inactivity_timeout=0.1):
                        if method is not None:
                            known = self.history.was_delivered(body, method.redelivered)
                            channel.basic_ack(method.delivery_tag)
                            self.history.was_acked(*known)
                        if not self._consuming.is_set():
                            break
            except LOST:
                time.sleep(0.05)

    def goes_on(self, more: int = CONFIRMS_MORE) -> None:
        """Wait until so many more messages were confirmed."""
        goal = len(self.history.confirmed) + more
        wait_until(lambda: len(self.history.confirmed) >= goal, "more confirms", QUIET_S)

    def finish(self) -> None:
        """Stop publishing, let everything arrive, stop consuming, check."""
        self._publishing.clear()
        for thread in self._publishers:
            thread.join(QUIET_S)
            assert not thread.is_alive(), "a publisher waits for a confirm that never comes"
        for thread in self._consumers:
            if thread.ident is None:
                thread.start()
        # those that start only now have had no time yet
        self._arrived = self._arrived[0], time.monotonic()
        with contextlib.suppress(AssertionError):  # the check says what is missing
            wait_until(self._is_still, "all confirmed messages to arrive", QUIET_S)
        self._consuming.clear()
        for thread in self._consumers:
            thread.join(QUIET_S)
        assert not self.errors, self.errors
        assert len(self.history.confirmed) > QUEUES, "there was no load to speak of"
        self.history.check()

    def _is_still(self) -> bool:
        """All is there, or nothing has arrived for a while."""
        arrived = sum(map(len, self.history.delivered.values()))
        now = time.monotonic()
        if arrived != self._arrived[0]:
            self._arrived = arrived, now
        return not self.history.missing() or now - self._arrived[1] > self.still_s


@pytest.mark.parametrize(
    ("kind", "consuming"),
    [("shard", True), ("shard", False), ("front-door", True), ("controller", True)],
)
def test_nothing_confirmed_is_lost_when_a_process_is_killed(
    broker: RealBroker, name: str, kind: str, consuming: bool
) -> None:
    with Load(broker, name, consuming=consuming) as load:
        for index in range(2):
            load.goes_on()
            broker.kill(kind, 0 if kind == "controller" else index)
        load.goes_on()
        load.finish()


@pytest.mark.broker
def test_a_broker_that_confirms_before_it_stores_is_caught(tmp_path: Path) -> None:
    hasty = RealBroker(tmp_path / "data", command=("tests.support.hasty_broker",))
    try:
        with Load(hasty, "hasty", consuming=False, still_s=3.0) as load:
            load.goes_on()
            for shard in range(2):
                hasty.kill("shard", shard)
            with pytest.raises(AssertionError, match="confirmed messages were never delivered"):
                load.finish()
            hasty.stop()
    finally:
        hasty.clean_up()


def test_nothing_confirmed_is_lost_when_everything_is_killed_at_once(
    broker: RealBroker, name: str
) -> None:
    with Load(broker, name) as load:
        for _ in range(2):
            load.goes_on()
            broker.kill_all()
            broker.restart()
        load.goes_on()
        load.finish()


def test_a_clean_stop_under_load_loses_nothing_and_exits_with_0(
    broker: RealBroker, name: str
) -> None:
    with Load(broker, name) as load:
        load.goes_on()
        broker.stop()
        broker.restart()
        load.goes_on()
        load.finish()


def test_messages_flow_while_the_controller_is_away(broker: RealBroker, name: str) -> None:
    """The controller is killed again and again.

    Publishers get confirms in between.
    """
    with Load(broker, name) as load:
        for _ in range(3):
            broker.kill("controller")
            load.goes_on(1)
        load.finish()
