"""Refusals have RabbitMQ's codes and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.model import checks
from shardmq.broker.model.changes import ExchangePut, QueuePut

QUEUE = QueuePut("/", "q", 1, 0)


def refusal(check: Callable[..., None], *args: Any) -> tuple[int, str]:
    with pytest.raises(checks.Refusal) as refused:
        check(*args)
    return refused.value.code, refused.value.text


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"x-message-ttl": -1}, "'x-message-ttl' for queue 'q' in vhost '/': {value_negative,-1}"),
        (
            {"x-message-ttl": "1"},
            "'x-message-ttl' for queue 'q' in vhost '/': \"expected integer, got longstr\"",
        ),
        (
            {"x-message-ttl": 1 << 39},
            f"'x-message-ttl' for queue 'q' in vhost '/': {{value_too_large,{1 << 39}}}",
        ),
        (
            {"x-message-ttl": True},
            "'x-message-ttl' for queue 'q' in vhost '/': \"expected integer, got bool\"",
        ),
        ({"x-expires": 0}, "'x-expires' for queue 'q' in vhost '/': {value_zero,0}"),
        ({"x-max-length": -5}, "'x-max-length' for queue 'q' in vhost '/': {value_negative,-5}"),
        (
            {"x-max-priority": 256},
            "'x-max-priority' for queue 'q' in vhost '/': {max_value_exceeded,256}",
        ),
        ({"x-overflow": "no"}, "'x-overflow' for queue 'q' in vhost '/': invalid_overflow"),
        (
            {"x-dead-letter-routing-key": "k"},
            "'x-dead-letter-routing-key' for queue 'q' in vhost '/': "
            "routing_key_but_no_dlx_defined",
        ),
        (
            {"x-queue-type": "no"},
            "'x-queue-type' for queue 'q' in vhost '/': \"unsupported queue type 'no'\"",
        ),
        (
            {"x-single-active-consumer": "true"},
            "'x-single-active-consumer' for queue 'q' in vhost '/': {unacceptable_type,longstr}",
        ),
    ],
)
def test_bad_queue_arguments_are_refused_in_rabbitmqs_words(
    arguments: dict[str, Any], wrong: str
) -> None:
    assert refusal(checks.check_queue_arguments, "/", "q", arguments) == (
        406,
        f"invalid arg {wrong}",
    )


def test_a_dead_letter_exchange_has_a_name() -> None:
    text = "invalid type 'signedint' for arg 'x-dead-letter-exchange' in queue 'q' in vhost '/'"
    assert refusal(checks.check_queue_arguments, "/", "q", {"x-dead-letter-exchange": 5}) == (
        406,
        text,
    )


@pytest.mark.parametrize("key", ["x-message-ttl", "x-expires"])
def test_ten_years_are_a_time(key: str) -> None:
    checks.check_queue_arguments("/", "q", {key: 315_360_000_000})


def test_good_and_unknown_queue_arguments_are_taken() -> None:
    known = {
        "x-message-ttl": 0,
        "x-expires": 1,
        "x-max-length": 0,
        "x-max-priority": 255,
        "x-queue-mode": "lazy",
    }
    checks.check_queue_arguments(
        "/",
        "q",
        {**known, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "k", "my": []},
    )


@pytest.mark.parametrize(
    ("current", "received", "words"),
    [
        (
            {},
            {"x-message-ttl": 10},
            "received the value '10' of type 'signedint' but current is none",
        ),
        (
            {"x-message-ttl": 10},
            {},
            "received none but current is the value '10' of type 'signedint'",
        ),
        ({"x-message-ttl": 10}, {"x-message-ttl": 20}, "received '20' but current is '10'"),
        ({"x-message-ttl": 10}, {"x-message-ttl": 10.0}, "received '10.0' but current is '10'"),
    ],
)
def test_other_arguments_of_a_queue_are_named(
    current: dict[str, Any], received: dict[str, Any], words: str
) -> None:
    queue = QueuePut("/", "q", 1, 0, arguments=current)
    code, text = refusal(checks.check_same_queue, queue, True, False, "", False, received)
    assert (code, text) == (
        406,
        f"inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': {words}",
    )


def test_the_classic_type_and_unknown_arguments_make_no_difference_to_a_queue() -> None:
    checks.check_same_queue(QUEUE, True, False, "", False, {"x-queue-type": "classic", "mine": 1})


def test_an_exclusive_declare_of_a_shared_queue_is_refused() -> None:
    assert refusal(checks.check_same_queue, QUEUE, True, False, "0.1.1", True, {})[0] == 405


def test_what_makes_another_exchange_of_it_is_named() -> None:
    current = ExchangePut("/", "e", "topic")
    checks.check_same_exchange(current, "topic", True, False, False, {})
    assert refusal(checks.check_same_exchange, current, "topic", False, False, False, {}) == (
        406,
        "inequivalent arg 'durable' for exchange 'e' in vhost '/': received 'false' but current is "
        "'true'",
    )
    assert refusal(checks.check_same_exchange, current, "fanout", True, False, False, {})[
        1
    ].endswith("received 'fanout' but current is 'topic'")
    assert refusal(
        checks.check_same_exchange,
        current,
        "topic",
        True,
        False,
        False,
        {"alternate-exchange": "x"},
    )[1].endswith("received the value 'x' of type 'longstr' but current is none")


@pytest.mark.row("B1.19")
def test_arguments_that_mean_nothing_make_no_other_exchange() -> None:
    checks.check_same_exchange(
        ExchangePut("/", "e", "topic"), "topic", True, False, False, {"colour": "red"}
    )


def test_reserved_names_unknown_types_and_the_default_exchange_are_refused() -> None:
    assert refusal(checks.check_new_exchange, "/", "amq.x", "topic", {}) == (
        403,
        "exchange name 'amq.x' contains reserved prefix 'amq.*'",
    )
    assert refusal(checks.check_new_exchange, "/", "e", "x", {}) == (
        503,
        "unknown exchange type 'x'",
    )
    assert refusal(checks.check_new_exchange, "/", "e", "topic", {"alternate-exchange": 1}) == (
        406,
        "invalid type 'signedint' for arg 'alternate-exchange' in exchange 'e' in vhost '/'",
    )
    assert refusal(checks.check_not_default, "") == (
        403,
        "operation not permitted on the default exchange",
    )


def test_only_known_x_match_values_bind_to_a_headers_exchange() -> None:
    checks.check_binding("headers", "", {"x-match": "any-with-x"})
    checks.check_binding("topic", "", {"x-match": "nonsense"})
    assert refusal(checks.check_binding, "headers", "", {"x-match": "some"}) == (
        406,
        'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x',
    )


def test_line_breaks_fall_out_of_names() -> None:
    assert checks.clean_name("a\r\nb") == "ab"


@given(st.integers(0, checks.EXPIRY_MS_MAX))
def test_a_record_says_when_a_message_expires_however_far_off(ttl_ms: int) -> None:
    late_ms, own_ms = checks.in_record(ttl_ms)
    assert late_ms + own_ms == ttl_ms and 0 <= own_ms < 0xFFFFFFFF and late_ms >= 0
    assert not late_ms or own_ms == 0xFFFFFFFE
