"""The broker listens at every address, at those that are named, or on systemd's sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmq.supervisor import systemd
from shardmq.supervisor.config import ConfigError, FrontDoors, Listen, Settings, Tls
from shardmq.supervisor.sockets import Sockets, listen

HAS_IPV6 = Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text() != ""
PORTS = {"amqp_port": 0, "http_port": 0, "metrics_port": 0, "amqps_port": 0, "https_port": 0}


def settings(bind: str | list[str], doors: int = 1, **more: int) -> Settings:
    return Settings(listen=Listen(bind=bind, **PORTS | more), front_doors=FrontDoors(count=doors))


@pytest.fixture
def opened() -> Iterator[list[Sockets]]:
    found: list[Sockets] = []
    yield found
    for sockets in found:
        sockets.close()


def can_connect(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=60):
        return True


@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 on this host")
@pytest.mark.parametrize("bind", ["*", "::", ["127.0.0.1", "::1"]])
@pytest.mark.parametrize("doors", [1, 2])
def test_one_port_is_reached_by_ipv4_and_ipv6(
    bind: str | list[str], doors: int, opened: list[Sockets]
) -> None:
    sockets = listen(settings(bind, doors))
    opened.append(sockets)
    for listener in (sockets.amqp[-1], sockets.http, sockets.metrics):
        ports = {sock.getsockname()[1] for sock in listener}
        assert len(ports) == 1
        assert can_connect("127.0.0.1", *ports) and can_connect("::1", *ports)
    assert len(sockets.amqp) == doors
    assert len({sock.fileno() for door in sockets.amqp for sock in door}) == doors * len(
        sockets.amqp[0]
    )


def test_all_addresses_are_told_and_the_first_of_each_in_the_ready_line(
    opened: list[Sockets],
) -> None:
    sockets = listen(settings(["127.0.0.1", "127.0.0.2"]))
    opened.append(sockets)
    port = sockets.amqp[0][0].getsockname()[1]
    assert sockets.listeners()["amqp"] == [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    assert sockets.addresses()["amqp"] == f"127.0.0.1:{port}"


def test_a_host_without_ipv6_is_listened_at_by_ipv4(
    opened: list[Sockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnlyIpv4(socket.socket):
        def __init__(self, family: int = -1, *rest: int, **more: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family, *rest, **more)

    monkeypatch.setattr("shardmq.supervisor.sockets.socket.socket", OnlyIpv4)
    sockets = listen(settings("*"))
    opened.append(sockets)
    assert [sock.getsockname()[0] for sock in sockets.http] == ["0.0.0.0"]


@pytest.mark.parametrize("bind", [[], ["127.0.0.1", "no.such.host.invalid"]])
def test_an_address_that_is_none_is_named(bind: list[str]) -> None:
    with pytest.raises(ConfigError, match="listen.bind: "):
        listen(settings(bind))


def test_a_port_that_is_taken_at_the_second_address_is_named_and_nothing_stays_open() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"listen.amqp_port: 127.0.0.2:{port}: Address already in use"
        ):
            listen(settings(["127.0.0.1", "127.0.0.2"], amqp_port=port))
        socket.create_server(("127.0.0.1", port)).close()


def activation(monkeypatch: pytest.MonkeyPatch, names: str, *given: socket.socket) -> None:
    """Pass sockets as systemd does, from descriptor 3 on.

    Here they begin where a run of free numbers is.
    """
    first = max(sock.fileno() for sock in given) + 100
    for at, sock in enumerate(given):
        os.dup2(sock.fileno(), first + at)
    monkeypatch.setattr(systemd, "FIRST_SOCKET", first)
    monkeypatch.setenv("LISTEN_FDS", str(len(given)))
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDNAMES", names)


@pytest.mark.row("N3")
@pytest.mark.parametrize("names", ["amqp:http", "shardmq-amqp.socket:shardmq-http.socket"])
def test_what_systemd_has_opened_is_used_and_the_rest_is_bound(
    opened: list[Sockets], monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as amqp,
        socket.create_server(("127.0.0.1", 0)) as http,
    ):
        activation(monkeypatch, names, amqp, http)
        sockets = listen(settings("127.0.0.1", doors=2, amqp_port=1), systemd.sockets())
        opened.append(sockets)
        where = sockets.listeners()
        assert where["amqp"] == [f"127.0.0.1:{amqp.getsockname()[1]}"]
        assert where["http"] == [f"127.0.0.1:{http.getsockname()[1]}"]
        assert where["metrics"][0].startswith("127.0.0.1:")
        # both doors share it
        assert sockets.listening().amqp_fds[0] == sockets.listening().amqp_fds[1]
        assert not os.get_inheritable(sockets.amqp[0][0].fileno())


def test_sockets_meant_for_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert systemd.sockets() == {}


@pytest.mark.parametrize(
    ("name", "tls", "says"),
    [
        ("mqtt", Tls(), "socket activation: mqtt: no name of ours"),
        ("amqps", Tls(), "socket activation: amqps: there is no tls.cert"),
    ],
)
def test_a_socket_that_is_of_no_use_is_named(name: str, tls: Tls, says: str) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ConfigError, match=says):
        listen(Settings(listen=Listen(bind="127.0.0.1", **PORTS), tls=tls), {name: [sock]})
    assert sock.fileno() == -1


def test_a_front_door_that_does_not_listen_leaves_its_connections_to_the_others(
    opened: list[Sockets],
) -> None:
    sockets = listen(settings("127.0.0.1", doors=0), cores=2)
    opened.append(sockets)
    (first,), (second,) = sockets.amqp
    where = first.getsockname()
    for _ in range(2):  # its process may die again before it has listened
        sockets.stop_listening(0)
    clients = [socket.create_connection(where) for _ in range(20)]
    for _ in clients:
        second.accept()[0].close()
    first.listen()
    while not accepted(first):
        clients.append(socket.create_connection(where))
        accepted(second)
    for client in clients:
        client.close()


def accepted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True
