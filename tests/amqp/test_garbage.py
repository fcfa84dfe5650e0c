"""Whatever a client sends, it gets events or a connection error, never anything else."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from shardmq.broker.amqp import Connection, Failed
from tests.amqp.bytes_of import HEADER, method, publish, received, shake_hands

FRAMES = st.builds(
    lambda kind, channel, payload: (
        struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"
    ),
    st.sampled_from([1, 1, 2, 3, 8]),
    st.integers(0, 3),
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda ids, rest: struct.pack(">HH", *ids) + rest,
            st.tuples(
                st.sampled_from([10, 20, 40, 50, 60, 85, 90]),
                st.sampled_from([10, 11, 20, 40, 41, 50, 80, 90]),
            ),
            st.binary(max_size=30),
        ),
    ),
)
VALID = b"".join(
    publish(1, "e", "k", b"x" * 50, priority=3, expiration="5", headers={"CC": ["a", {"b": 1}]})
) + method(1, commands.Queue.Declare(queue="q", arguments={"a": [1, {"b": None}]}))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    received(Connection(server_properties={}), data)
    received(Connection(server_properties={}), HEADER + data)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES, max_size=6))
def test_any_frames(some: list[bytes]) -> None:
    made = Connection(server_properties={})
    shake_hands(made, 2)
    received(made, b"".join(some))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.integers(0, 255))
def test_one_wrong_byte(at: int, value: int) -> None:
    made = Connection(server_properties={})
    shake_hands(made, 1)
    received(made, VALID[:at] + bytes([value]) + VALID[at + 1 :])


def test_tables_as_deep_as_a_frame_allows_are_refused() -> None:
    deep = b""
    for _ in range(1000):
        deep = b"\x01aF" + struct.pack(">I", len(deep)) + deep
    made = Connection(server_properties={})
    shake_hands(made, 1)
    payload = struct.pack(">HHH", 50, 10, 0) + b"\x01q\0" + struct.pack(">I", len(deep)) + deep
    (event,) = received(made, struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce")
    assert isinstance(event, Failed)
    assert (event.exception.code, event.exception.class_id, event.exception.method_id) == (
        502,
        50,
        10,
    )
