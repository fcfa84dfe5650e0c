"""The programs of the folder examples do what they say, also when the connection breaks."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.brokers import Api
from tests.support.real_broker import RealBroker, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = 200
# Of a connection that publishes or consumes so many messages, less than half.
CUT_BYTES = 6000
JARS = [Path("/usr/share/java") / name for name in ("amqp-client.jar", "slf4j-api.jar")]
GO_PATH = Path("/usr/share/gocode")
# Debian's library is used without a module of our own.
GO = {"GO111MODULE": "off", "GOPATH": str(GO_PATH)}


def installed(missing: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(missing), reason=missing)


def without(program: str, files: list[Path], packages: str) -> str:
    """Return why an example cannot run, or "" if its program and files are there."""
    if not shutil.which(program):
        return f"no {program} (as root: apt-get install {packages})"
    lost = [str(path) for path in files if not path.exists()]
    return f"no {lost[0]} (as root: apt-get install {packages})" if lost else ""


PROGRAMS = {
    "pika": ([sys.executable, "pika/orders.py"], ""),
    "aio-pika": ([sys.executable, "aio_pika/orders.py"], ""),
    "node": (
        ["node", "node/orders.mjs"],
        ""
        if (EXAMPLES / "node" / "node_modules").exists()
        else "no amqplib (.ci/node installs it)",
    ),
    "php": (
        ["php", "php/orders.php"],
        without("php", [Path("/usr/share/php/PhpAmqpLib")], "php-cli php-amqplib"),
    ),
    "java": (
        ["java", "-Xshare:auto", "-cp", ":".join(map(str, JARS)), "java/Orders.java"],
        without("java", JARS, "default-jre-headless librabbitmq-client-java"),
    ),
    "go": (
        ["go", "run", "go/orders.go"],
        without(
            "go",
            [GO_PATH / "src/github.com/rabbitmq/amqp091-go"],
            "golang-go golang-github-rabbitmq-amqp091-go-dev",
        ),
    ),
}


class CuttingProxy:
    """A TCP proxy that cuts its first connection after a number of bytes, both ways together."""

    def __init__(self, port: int, cut_bytes: int) -> None:
        self.connections = 0
        self._to, self._left = port, cut_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._to))
            is_first = self.connections == 1
            for one, other in ((client, server), (server, client)):
                threading.Thread(
                    target=self._pass, args=(one, other, is_first), daemon=True
                ).start()

    def _pass(self, one: socket.socket, other: socket.socket, is_first: bool) -> None:
        try:
            while data := one.recv(4096):
                if is_first:
                    self._left -= len(data)
                    if self._left < 0:
                        break
                other.sendall(data)
        except OSError:
            pass
        for each in (one, other):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@contextmanager
def proxied(broker: RealBroker, vhost: str) -> Iterator[tuple[CuttingProxy, dict[str, str]]]:
    """Yield a proxy before the broker, and the environment with the URL of a vhost behind it."""
    proxy = CuttingProxy(broker.port, CUT_BYTES)
    try:
        yield proxy, environment(proxy.port, vhost)
    finally:
        proxy.close()


def environment(port: int, vhost: str) -> dict[str, str]:
    url = f"amqp://guest:guest@127.0.0.1:{port}/{vhost}"
    return {**os.environ, **GO, "AMQP_URL": url, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def vhost(api: Api, name: str) -> Iterator[str]:
    api(f"/api/vhosts/{name}", method="PUT", body={})
    yield name
    api(f"/api/vhosts/{name}", method="DELETE")


def ran(command: list[str], environment: dict[str, str]) -> str:
    ended = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def running(
    command: list[str], environment: dict[str, str], out: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that does not end by itself; its output goes to a file."""
    with out.open("w") as file:
        started = subprocess.Popen(
            command, cwd=EXAMPLES, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield started
        assert started.poll() is None, out.read_text()
    finally:
        # go starts the program as a child of its own.
        os.killpg(started.pid, 9)
        started.wait()
        print(out.read_text())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=installed(missing))
        for name, (command, missing) in PROGRAMS.items()
    ],
)
def test_no_order_is_lost_when_the_connection_of_publisher_or_consumer_breaks(
    broker: RealBroker, vhost: str, command: list[str], tmp_path: Path
) -> None:
    with proxied(broker, vhost) as (proxy, variables):
        assert ran([*command, "publish", str(COUNT)], variables) == f"published {COUNT}\n"
        assert proxy.connections > 1
    out = tmp_path / "out"
    wanted = {f"got order {number}" for number in range(COUNT)}
    with (
        proxied(broker, vhost) as (proxy, variables),
        running([*command, "consume"], variables, out) as consumer,
    ):
        wait_until(
            lambda: wanted <= set(out.read_text().splitlines()) or consumer.poll() is not None,
            "all orders",
        )
        assert proxy.connections > 1


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=installed(missing))
        for name, (command, missing) in PROGRAMS.items()
    ],
)
@pytest.mark.parametrize("action", [["publish", "1"], ["consume"]], ids=["publish", "consume"])
def test_what_cannot_succeed_ends_with_the_text_of_the_broker(
    broker: RealBroker, api: Api, vhost: str, command: list[str], action: list[str]
) -> None:
    api(f"/api/queues/{vhost}/orders", method="PUT", body={"durable": False})
    variables = environment(broker.port, vhost)
    wrong = variables | {"AMQP_URL": variables["AMQP_URL"].replace(":guest@", ":wrong@")}
    for given, said in (
        (variables, r"PRECONDITION_FAILED - inequivalent arg 'durable'"),
        # Go's client has a text of its own.
        (wrong, r"ACCESS_REFUSED|username or password not allowed"),
    ):
        ended = subprocess.run(
            [*command, *action], cwd=EXAMPLES, env=given, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 1 and re.search(said, ended.stderr), ended.stderr
        assert "again" not in ended.stderr and "Traceback" not in ended.stderr


def test_a_stream_exchange_keeps_the_orders_of_a_customer_in_order(
    broker: RealBroker, vhost: str, tmp_path: Path
) -> None:
    command = [sys.executable, "pika/stream_exchange.py"]
    variables, out = environment(broker.port, vhost), tmp_path / "out"
    assert ran([*command, "publish", str(COUNT)], variables) == f"published {COUNT}\n"
    with running([*command, "work"], variables, out):
        wait_until(lambda: len(out.read_text().splitlines()) == COUNT, "all orders")
    lines = [line.split() for line in out.read_text().splitlines()]
    for customer in {line[0] for line in lines}:
        numbers = [int(line[2]) for line in lines if line[0] == customer]
        assert numbers == sorted(numbers) and len(numbers) == COUNT // 50


def test_celery_runs_tasks_and_brings_the_results(
    broker: RealBroker, vhost: str, tmp_path: Path
) -> None:
    variables = environment(broker.port, vhost) | {"PYTHONPATH": str(EXAMPLES / "celery")}
    worker = [sys.executable, "-m", "celery", "--app", "tasks", "worker", "--concurrency", "1"]
    with running(worker, variables, tmp_path / "out"):
        said = ran([sys.executable, "celery/tasks.py", "5"], variables)
    assert said == "results [1, 2, 3, 4, 5]\n"


def test_the_readme_names_each_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    programs = [
        path.relative_to(EXAMPLES).as_posix()
        for path in sorted(EXAMPLES.rglob("*.*"))
        if path.suffix in (".py", ".mjs", ".php", ".java", ".go")
        and "node_modules" not in path.parts
    ]
    assert len(programs) == len(PROGRAMS) + 2
    assert [path for path in programs if f"({path})" not in text] == []
    # Go is run as the test runs it.
    assert " ".join(f"{name}={value}" for name, value in GO.items()) + " go run orders.go" in text
