"""The same broker twice: with the compiled short way for plain messages, and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.real_broker import RealBroker
from tests.support.recording_proxy import Conversation, RecordingProxy
from tests.support.seen import Names, NormalForm, seen

SWITCH = "SHARDMQ_FASTPATH"  # 0: each message takes the way of Python
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}


class Way:
    """A broker in one of the two modes behind a proxy that records what both sides send."""

    def __init__(
        self, data_dir: Path, environment: dict[str, str], *, front_doors: int = 1
    ) -> None:
        self.broker = RealBroker(data_dir, environment=environment, front_doors=front_doors)
        self.proxy = RecordingProxy(self.broker.port)

    def seen_by(self, play: Callable[[int], None]) -> list[NormalForm]:
        """Return what each connection saw that `play` made to the port it is given, in order."""
        try:
            play(self.proxy.port)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.broker.log_tail()}") from error
        finally:
            taken = self.proxy.taken()
        names = Names()
        return [normal(each, names) for each in taken]

    def close(self) -> None:
        self.proxy.close()
        self.broker.clean_up()


def normal(conversation: Conversation, names: Names) -> NormalForm:
    return seen(bytes(conversation.server), conversation.ended_by, names)


@contextmanager
def both_ways(directory: Path, *, front_doors: int = 1) -> Iterator[tuple[Way, Way]]:
    """Yield the broker without the short way and the broker with it."""
    ways: list[Way] = []
    try:
        for name, environment in (("off", OFF), ("on", ON)):
            ways.append(Way(directory / name, environment, front_doors=front_doors))
        off, on = ways
        yield off, on
        for way in ways:
            way.broker.stop()
            assert "Traceback" not in way.broker.log_path.read_text()
    finally:
        for way in ways:
            way.close()
