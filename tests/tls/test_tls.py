"""TLS for clients and operators: certificates decide who is let in.

All else is as without TLS.

The broker listens with a certificate of the tests' own authority and asks clients for theirs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pika.credentials
import pika.exceptions
import pytest
from pamqp import body, commands
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.support.certificates import Authority
from tests.support.raw_client import HEADER, PATIENCE_S, RawClient, method, publish
from tests.support.real_broker import RealBroker, wait_until

SETTINGS = """
[front_doors]
handshake_timeout_s = 3
[listen]
bind = "127.0.0.2"
tls_bind = "127.0.0.1"
amqps_port = 0
https_port = 0
[tls]
cert = "{directory}/server.pem"
ca = "{directory}/clients-ca.pem"
verify = "peer"
login_from = "common_name"
sni = [{{ host = "*.example.org", cert = "{directory}/example.pem" }}]
"""
MIB = 1 << 20

pytestmark = [pytest.mark.row("I14"), pytest.mark.broker]


class Secured:
    """A broker with TLS, and the files of those who talk to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers = Authority(directory, "servers")
        self.clients = Authority(directory, "clients")
        self.strangers = Authority(directory, "strangers")
        self.show("localhost")
        self.servers.make("example.pem", "CN=example", hosts=("*.example.org",))
        self.guest = self.clients.make("guest.pem", "O=Example,CN=guest")
        self.nobody = self.clients.make("nobody.pem", "O=Example,CN=nobody")
        self.stranger = self.strangers.make("stranger.pem", "O=Example,CN=guest")
        (directory / "broker.toml").write_text(SETTINGS.format(directory=directory))
        self.broker = RealBroker(
            directory / "data", front_doors=2, more=("--config", str(directory / "broker.toml"))
        )
        self.port = int(self.broker.addresses["amqps"].rpartition(":")[2])
        self.https_port = int(self.broker.addresses["https"].rpartition(":")[2])

    def show(self, name: str) -> None:
        """Put another certificate of ours in the place of the one that is there."""
        made = self.servers.make("new.pem", f"CN={name}", hosts=("localhost", "127.0.0.1"))
        shutil.move(made, self.directory / "server.pem")

    def trusting(self, certificate: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.servers.ca))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def parameters(self, certificate: Path | None = None, **more: Any) -> pika.ConnectionParameters:
        options = pika.SSLOptions(self.trusting(certificate), "localhost")
        return pika.ConnectionParameters("127.0.0.1", self.port, ssl_options=options, **more)

    def external(self, certificate: Path | None) -> pika.ConnectionParameters:
        return self.parameters(certificate, credentials=pika.credentials.ExternalCredentials())

    def subject_shown(self, port: int, host: str = "localhost") -> str:
        """Return the common name of the certificate that a new client is shown."""
        with socket.create_connection(("127.0.0.1", port)) as plain:
            with self.trusting().wrap_socket(plain, server_hostname=host) as sock:
                subject = sock.getpeercert()["subject"]  # type: ignore[index]
                return str(dict(pair[0] for pair in subject)["commonName"])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("tls"))
    try:
        yield made
        made.broker.stop()
        assert "Traceback" not in made.broker.log_path.read_text()
    finally:
        made.broker.clean_up()


def test_a_message_of_many_records_comes_back_as_it_was(secured: Secured, name: str) -> None:
    content = os.urandom(20 * MIB)
    with pika.BlockingConnection(secured.parameters()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(name, exclusive=True)
        channel.basic_publish("", name, content)
        assert channel.basic_get(name, auto_ack=True)[2] == content


async def test_many_small_messages_pass_in_order_with_acks_and_confirms(
    secured: Secured, name: str
) -> None:
    url = f"amqps://guest:guest@localhost:{secured.port}/?cafile={secured.servers.ca}"
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=50)
        queue = await channel.declare_queue(name, exclusive=True)
        for number in range(500):
            await channel.default_exchange.publish(aio_pika.Message(str(number).encode()), name)
        got = []
        async with queue.iterator() as messages:
            async for message in messages:
                got.append(int(message.body))
                await message.ack()
                if len(got) == 500:
                    break
    assert got == list(range(500))


def test_shardctl_sends_and_reads_messages_by_tls_if_it_knows_the_authority(
    secured: Secured, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shardctl(*words: str, status: int = 0) -> bytes:
        to = ["--url", f"https://localhost:{secured.https_port}", "--user", "guest"]
        found = CliRunner().invoke(app, [*words, *to, "--password", "guest"])
        assert found.exit_code == status, found.output
        return found.stdout_bytes or found.stderr_bytes

    assert b"certificate verify failed" in shardctl("ping", status=69)
    monkeypatch.setenv("SSL_CERT_FILE", str(secured.servers.ca))
    shardctl("create_queue", name, "--queue-type", "stream")
    text = "x" * 100_000
    shardctl("publish", name, text, "--count", "30")
    assert (
        shardctl("tail", name, "--from", "first", "--count", "30").split() == [text.encode()] * 30
    )


def test_a_client_that_reads_late_gets_everything_and_holds_up_nobody(
    secured: Secured, name: str
) -> None:
    """Deliveries wait for the client's window, encrypted or not; others go on meanwhile."""
    count, size = 400, 100_000
    with pika.BlockingConnection(secured.parameters()) as connection:
        channel = connection.channel()
        channel.queue_declare(name, auto_delete=False)
        for number in range(count):
            channel.basic_publish("", name, number.to_bytes(4, "big") * (size // 4))
        lazy = TlsRawClient(secured).shake_hands()
        lazy.ask(1, commands.Basic.Consume(queue=name, no_ack=True), commands.Basic.ConsumeOk)
        time.sleep(0.3)
        channel.queue_declare(f"{name}-other", exclusive=True)
        channel.basic_publish("", f"{name}-other", b"meanwhile")
        bodies = b""
        while len(bodies) < count * size:
            read = lazy.read()
            assert read is not None
            bodies += read[1].value if isinstance(read[1], body.ContentBody) else b""
        firsts = [bodies[at : at + 4] for at in range(0, len(bodies), size)]
        assert firsts == [number.to_bytes(4, "big") for number in range(count)]
        channel.queue_delete(name)
        lazy.sock.close()


class TlsRawClient(RawClient):
    """The client that says whatever bytes it is told to, within TLS."""

    def __init__(self, secured: Secured, certificate: Path | None = None) -> None:
        super().__init__(secured.port)
        self.sock = secured.trusting(certificate).wrap_socket(
            self.sock, server_hostname="localhost"
        )

    def send_and_hear(self, data: bytes) -> None:
        """Send all of `data` while answers are taken in.

        One thread does both: a TLS connection of OpenSSL cannot serve two.
        """
        view = memoryview(data)
        self.sock.setblocking(False)
        while view:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                view = view[self.sock.send(view[: 1 << 16]) :]
                continue
            with contextlib.suppress(ssl.SSLWantReadError):
                self._buffer += self.sock.recv(1 << 16)
                continue
            assert any(select.select([self.sock], [self.sock], [], PATIENCE_S)), (
                "neither takes nor says anything"
            )
        self.sock.settimeout(PATIENCE_S)


def test_back_pressure_reaches_a_publisher_through_tls(secured: Secured, name: str) -> None:
    """What is published faster than it is stored is all there in the end."""
    client = TlsRawClient(secured).shake_hands()
    client.ask(1, commands.Queue.Declare(queue=name), commands.Queue.DeclareOk)
    client.ask(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.send_and_hear(b"".join(publish(1, "", name, bytes(50_000)) for _ in range(600)))
    acked = 0
    while acked < 600:
        acked = client.expect(commands.Basic.Ack).delivery_tag
    assert (
        client.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk).message_count
        == 600
    )
    client.sock.close()


@pytest.mark.row("I12")
def test_a_certificate_is_as_good_as_a_password(secured: Secured) -> None:
    with pika.BlockingConnection(secured.external(secured.guest)) as connection:
        connection.channel().queue_declare("", exclusive=True)
        told = _http(secured, "/api/connections")
    mine = [one for one in told if one["auth_mechanism"] == "EXTERNAL"]
    assert [(one["user"], one["ssl"], one["ssl_protocol"]) for one in mine] == [
        ("guest", True, "tlsv1.3")
    ]
    assert mine[0]["peer_cert_subject"] == "CN=guest,O=Example"


def _http(secured: Secured, path: str) -> Any:
    request = urllib.request.Request(f"https://localhost:{secured.https_port}{path}")
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    with urllib.request.urlopen(request, context=secured.trusting(), timeout=60) as answer:
        return json.load(answer)


def test_external_is_offered_only_to_those_who_showed_a_certificate(secured: Secured) -> None:
    offered = []
    for certificate in (None, secured.guest):
        client = TlsRawClient(secured, certificate)
        client.send(HEADER)
        offered.append(client.expect(commands.Connection.Start).mechanisms)
        client.sock.close()
    assert offered == ["AMQPLAIN PLAIN", "AMQPLAIN PLAIN EXTERNAL"]


def test_external_without_a_certificate_is_no_mechanism(secured: Secured) -> None:
    client = TlsRawClient(secured)
    client.send(HEADER)
    client.expect(commands.Connection.Start)
    client.send(method(0, commands.Connection.StartOk({}, "EXTERNAL", "", "en_US")))
    client.expect_close(503, "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'")
    client.sock.close()


def test_a_certificate_of_nobody_is_refused_in_words(secured: Secured) -> None:
    with pytest.raises(
        pika.exceptions.ProbableAuthenticationError, match="authentication mechanism EXTERNAL"
    ):
        pika.BlockingConnection(secured.external(secured.nobody))


def test_a_certificate_of_strangers_does_not_get_in(secured: Secured) -> None:
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        pika.BlockingConnection(secured.external(secured.stranger))
    wait_until(
        lambda: "the client's certificate: " in secured.broker.log_tail(), "a word in the log"
    )


def test_a_password_is_enough_where_a_certificate_is_only_asked_for(secured: Secured) -> None:
    with pika.BlockingConnection(secured.parameters(secured.nobody)) as connection:
        assert connection.is_open


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", "localhost"), ("a.example.org", "example")]
)
def test_a_client_is_shown_the_certificate_of_the_name_it_asks_for(
    secured: Secured, host: str, shown: str
) -> None:
    assert secured.subject_shown(secured.port, host) == shown
    assert secured.subject_shown(secured.https_port, host) == shown


def test_an_old_version_is_refused(secured: Secured) -> None:
    context = secured.trusting()
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", secured.port)) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    "said", [HEADER, b"GET / HTTP/1.0\r\n\r\n", os.urandom(2000)], ids=["amqp", "http", "noise"]
)
def test_what_is_not_tls_is_hung_up_on_and_nobody_else_notices(
    secured: Secured, said: bytes
) -> None:
    with pika.BlockingConnection(secured.parameters()) as connection:
        with socket.create_connection(("127.0.0.1", secured.port), timeout=60) as sock:
            sock.sendall(said)
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        connection.process_data_events(0)
        assert connection.is_open


def test_who_says_nothing_or_stops_after_the_handshake_is_hung_up_on(secured: Secured) -> None:
    silent = socket.create_connection(("127.0.0.1", secured.port), timeout=PATIENCE_S)
    shaken = TlsRawClient(secured)
    assert silent.recv(1) == b""
    shaken.expect_end()


def test_sighup_shows_new_clients_the_new_certificate_and_keeps_the_old_ones(
    secured: Secured,
) -> None:
    with pika.BlockingConnection(secured.parameters()) as connection:
        secured.show("renewed")
        assert secured.subject_shown(secured.port) == "localhost"
        os.kill(secured.broker.process.pid, signal.SIGHUP)
        for port in (secured.port, secured.https_port):
            wait_until(
                lambda port=port: secured.subject_shown(port) == "renewed", "the new certificate"
            )  # type: ignore[misc]
        connection.channel().queue_declare("", exclusive=True)
        assert connection.is_open


def test_the_check_of_certificates_looks_at_those_of_the_settings_as_they_are_now(
    secured: Secured,
) -> None:
    settings = secured.directory / "broker.toml"
    before, moved = settings.read_text(), secured.directory / "moved.pem"

    def ending() -> list[str]:
        """Which certificates end within a week: all that are made here."""
        request = urllib.request.Request(
            f"http://{secured.broker.http}/api/health/checks/certificate-expiration/1/week"
        )
        request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(request)
        return [str(one["certificate"]) for one in json.load(answer.value)["expired"]]

    first, other = ending()
    shutil.copy(first, moved)
    try:
        settings.write_text(before.replace("server.pem", moved.name))
        os.kill(secured.broker.process.pid, signal.SIGHUP)
        wait_until(
            lambda: ending() == [str(moved), other],
            "the certificates as the settings name them now",
        )
    finally:
        settings.write_text(before)
        os.kill(secured.broker.process.pid, signal.SIGHUP)
    wait_until(lambda: ending() == [first, other], "the certificates of before")


def test_a_certificate_that_cannot_be_read_leaves_the_old_one_in_force(secured: Secured) -> None:
    shown = secured.subject_shown(secured.port)
    good = (secured.directory / "server.pem").read_bytes()
    (secured.directory / "server.pem").write_bytes(good[:300])
    os.kill(secured.broker.process.pid, signal.SIGHUP)
    wait_until(
        lambda: "certificates stay as they were: tls.cert" in secured.broker.log_tail(), "a word"
    )
    assert secured.subject_shown(secured.port) == shown
    (secured.directory / "server.pem").write_bytes(good)


def test_the_plain_ports_may_be_at_another_address_than_those_of_tls(secured: Secured) -> None:
    where = {name: address.rpartition(":")[0] for name, address in secured.broker.addresses.items()}
    plain, tls = "127.0.0.2", "127.0.0.1"
    assert where == {"amqp": plain, "http": plain, "metrics": plain, "amqps": tls, "https": tls}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", secured.broker.port), timeout=60)


def test_a_broker_whose_certificate_cannot_be_used_says_so_and_does_not_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(AssertionError, match="tls.cert: .*bad.pem"):
        RealBroker(
            tmp_path / "data",
            more=("--tls-cert", str(tmp_path / "bad.pem"), "--amqps-port=0", "--https-port=0"),
        )
