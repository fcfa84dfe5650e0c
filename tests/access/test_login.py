"""Test who gets in.

Credentials come in both forms, guest only comes from this host, and a vhost needs a permission.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.front_door import login
from shardmq.broker.front_door.login import LoginRefused
from shardmq.broker.model import checks, passwords
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ParameterPut, PermissionPut, UserPut, VhostPut
from tests.support.proving import proving

CLOSES = {"capabilities": {"authentication_failure_close": True}}


def hashed(password: str) -> str:
    return base64.b64encode(b"salt" + hashlib.sha256(b"salt" + password.encode()).digest()).decode()


def catalog() -> Catalog:
    made = Catalog()
    for change in (
        VhostPut("/"),
        VhostPut("closed"),
        UserPut("guest", hashed("guest")),
        UserPut("u", hashed("pässword")),
        UserPut("nologin", ""),
        PermissionPut("/", "u", "", "", ""),
    ):
        made.apply(change)
    return made


def enter(
    mechanism: str, response: bytes, peer: str = "10.0.0.7", client: dict[str, Any] | None = None
) -> str:
    users = catalog()
    return login.authenticate(
        mechanism,
        response,
        client or {},
        users,
        verdict=lambda user, password: (
            "" if passwords.matches(users.users.get(user), password) else "wrong"
        ),
        peer_host=peer,
        loopback_users=frozenset({"guest"}),
    )


def amqplain(**fields: str) -> bytes:
    made = b""
    for name, value in fields.items():
        made += (
            bytes([len(name)])
            + name.encode()
            + b"S"
            + struct.pack(">I", len(value.encode()))
            + value.encode()
        )
    return made


def test_both_mechanisms_let_the_right_password_in() -> None:
    assert enter("PLAIN", "\0u\0pässword".encode()) == "u"
    assert enter("PLAIN", "acts-as\0u\0pässword".encode()) == "u"
    assert enter("AMQPLAIN", amqplain(LOGIN="u", PASSWORD="pässword")) == "u"


@pytest.mark.parametrize(
    "response", [b"\0u\0wrong", b"\0nobody\0x", b"\0u\0", b"\0nologin\0", b"\0\0"]
)
def test_a_refused_login_says_the_same_whatever_was_wrong(response: bytes) -> None:
    with pytest.raises(LoginRefused) as refused:
        enter("PLAIN", response, client=CLOSES)
    answer = refused.value.answer
    assert refused.value.tell
    assert answer.code == 403
    assert answer.text == (
        "Login was refused using authentication mechanism PLAIN. For details see the broker "
        "logfile."
    )


@pytest.mark.parametrize("client", [{}, {"capabilities": {}}, {"capabilities": 1}])
def test_a_client_that_does_not_expect_a_refusal_sees_only_the_stream_end(
    client: dict[str, Any],
) -> None:
    with pytest.raises(LoginRefused) as refused:
        enter("AMQPLAIN", amqplain(LOGIN="u", PASSWORD="x"), client=client)
    assert not refused.value.tell


@pytest.mark.row("A1.6")
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", ""])
def test_guest_enters_from_this_host(peer: str) -> None:
    assert enter("PLAIN", b"\0guest\0guest", peer) == "guest"


@pytest.mark.row("A1.6")
@pytest.mark.parametrize(
    "peer", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0", "2001:db8::1", "not an address"]
)
def test_guest_enters_from_nowhere_else(peer: str) -> None:
    with pytest.raises(LoginRefused, match="user 'guest' can only connect via localhost"):
        enter("PLAIN", b"\0guest\0guest", peer)


@given(st.sampled_from(["PLAIN", "AMQPLAIN"]), st.binary(max_size=80))
def test_any_bytes_are_credentials_or_a_named_refusal(mechanism: str, response: bytes) -> None:
    with pytest.raises((ConnectionException, LoginRefused)):
        enter(mechanism, response)


def test_what_is_no_response_at_all_is_a_syntax_error_that_repeats_nothing() -> None:
    for mechanism in ("PLAIN", "AMQPLAIN"):
        for response in (b"secret", b"\0u\0\xff", bytes(5000)):
            with pytest.raises(ConnectionException) as error:
                enter(mechanism, response)
            assert (error.value.code, error.value.text) == (502, f"{mechanism} response invalid")


def test_an_unknown_mechanism_is_refused() -> None:
    with pytest.raises(
        ConnectionException, match="unknown authentication mechanism 'EXTERNAL'"
    ) as error:
        enter("EXTERNAL", b"")
    assert error.value.code == 503


# -- connection.open -------------------------------------------------------------------------------


def test_a_vhost_opens_to_a_user_with_any_permission_in_it() -> None:
    login.check_open(catalog(), "u", "/")


@pytest.mark.row("A1.9")
@pytest.mark.parametrize(
    ("vhost", "connected", "text"),
    [
        pytest.param("missing", 0, "vhost missing not found", id="no vhost"),
        proving(
            "I4", "no permission", "closed", 0, "access to vhost 'closed' refused for user 'u'"
        ),
        pytest.param(
            "/", 9, "connection refused: node connection limit (9) is reached", id="node limit"
        ),
    ],
)
def test_a_refused_open_has_rabbitmqs_texts(vhost: str, connected: int, text: str) -> None:
    with pytest.raises(ConnectionException) as refused:
        login.check_open(catalog(), "u", vhost, connected, connections_max=9)
    assert (refused.value.code, refused.value.text) == (530, text)
    assert (refused.value.class_id, refused.value.method_id) == (10, 40)


LIMIT = {"max-connections": 2, "max-channels": 3}


@pytest.mark.parametrize(
    ("of_vhost", "of_user", "text"),
    [
        proving(
            "I8",
            "of the vhost",
            2,
            0,
            "access to vhost '/' refused for user 'u': connection limit (2) is reached",
        ),
        proving(
            "I9",
            "of the user",
            0,
            2,
            "connection refused for user 'u': user connection limit (2) is reached",
        ),
        proving("I9", "below", 1, 1, ""),
    ],
)
def test_limits_of_vhosts_and_users_have_rabbitmqs_texts(
    of_vhost: int, of_user: int, text: str
) -> None:
    known = catalog()
    known.apply(ParameterPut("/", "vhost-limits", "limits", LIMIT))
    known.apply(ParameterPut("", "user-limits", "u", LIMIT))
    assert login.has_limits(known, "u", "/")
    try:
        checks.check_connection_limits(known, "/", "u", of_vhost, of_user)
    except checks.Refusal as refused:
        assert (refused.code, refused.text) == (530, text)
    else:
        assert not text


@pytest.mark.row("I8")
def test_a_negative_limit_is_none() -> None:
    known = catalog()
    known.apply(ParameterPut("/", "vhost-limits", "limits", {"max-connections": -1}))
    assert not login.has_limits(known, "u", "/")
    checks.check_connection_limits(known, "/", "u", 100, 100)


@pytest.mark.row("A2.5")
def test_channels_are_counted_only_where_there_is_a_limit() -> None:
    known = catalog()
    assert not login.has_channel_limit(known, "u")
    checks.check_channel_limits(known, "u", 100, 1000, 0, "node")
    known.apply(ParameterPut("", "user-limits", "u", {"max-channels": 2}))
    assert login.has_channel_limit(known, "u") and not login.has_channel_limit(known, "v")
    checks.check_channel_limits(known, "u", 2, 1000, 1000, "node")
    text = (
        r"number of channels opened for user 'u' has reached the maximum allowed user limit of "
        r"\(2\)"
    )
    with pytest.raises(checks.Refusal, match=text) as refused:
        checks.check_channel_limits(known, "u", 3, 3, 0, "node")
    assert refused.value.code == 530
    with pytest.raises(
        checks.Refusal, match=r"on node 'node' has reached the maximum allowed limit of \(5\)"
    ):
        checks.check_channel_limits(known, "v", 1, 6, 5, "node")


def test_who_showed_a_certificate_enters_as_whom_it_names_and_nobody_else_does() -> None:
    def external(name: str, has_certificate: bool = True, peer: str = "10.0.0.7") -> str:
        tls = login.TlsPeer("tlsv1.3", "", name, has_certificate)
        return login.authenticate(
            "EXTERNAL",
            b"",
            CLOSES,
            catalog(),
            verdict=lambda user, password: "nobody is asked for one",
            peer_host=peer,
            loopback_users=frozenset({"guest"}),
            tls=tls,
        )

    assert external("u") == "u" and external("guest", peer="::1") == "guest"
    for name in ("nobody", "", "guest"):
        with pytest.raises(LoginRefused) as refused:
            external(name)
        assert refused.value.tell and "mechanism EXTERNAL" in refused.value.answer.text
    with pytest.raises(ConnectionException, match="unknown authentication mechanism 'EXTERNAL'"):
        external("u", has_certificate=False)


def test_server_properties_promise_all_nine_capabilities() -> None:
    properties = login.server_properties("c1")
    assert properties["product"] == "RabbitMQ"
    assert properties["cluster_name"] == "c1"
    assert len(properties["capabilities"]) == 9
    assert all(properties["capabilities"].values())
