"""Options are accepted with their plain meaning or refused in one line; nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyspark_shardmq.options import (
    EARLIEST,
    IGNORED,
    LATEST,
    READ,
    WRITE,
    OptionError,
    for_batch,
    for_stream,
    for_stream_writer,
    read_options,
    write_options,
)

ROOT = Path(__file__).parents[2]
ORDERS = {"subscribe": "orders"}


@pytest.mark.parametrize("parse", [lambda more: read_options({**ORDERS, **more}), write_options])
def test_an_option_nobody_knows_is_an_error_that_names_the_nearest(parse: object) -> None:
    with pytest.raises(
        OptionError, match=r"unknown option 'shardmq.ulr'; did you mean shardmq.url\?"
    ):
        parse({"shardmq.ulr": "http://localhost:1"})  # type: ignore[operator]


@pytest.mark.parametrize("name", sorted(READ))
def test_options_are_known_whatever_their_case(name: str) -> None:
    with pytest.raises(OptionError) as refused:
        read_options({name.upper(): "\x00", "no.such.option": "1"})
    assert "unknown option" not in str(refused.value) or "'no.such.option'" in str(refused.value)


@pytest.mark.parametrize("name", sorted({*READ, *WRITE} - {"path"}))
def test_options_are_in_the_reference(name: str) -> None:
    assert f"`{name}`" in (ROOT / "pyspark_shardmq" / "OPTIONS.md").read_text()


def test_what_spark_itself_hands_over_is_passed_by() -> None:
    write_options(dict.fromkeys(IGNORED, "x"))


@pytest.mark.parametrize(
    ("option", "text", "why"),
    [
        ("startingOffsets", "yesterday", "must be earliest, latest or JSON"),
        ("startingOffsets", '{"orders":5}', "must be of the form"),
        ("startingOffsets", '{"orders":{"0":-3}}', "must be of the form"),
        ("startingOffsets", '{"orders":{"0":true}}', "must be of the form"),
        ("endingOffsets", "earliest", "would read nothing"),
        ("endingOffsets", '{"orders":{"0":-2}}', "would read nothing"),
        ("startingOffsets", "{}", "names at least one queue"),
        ("columns", " , ", "at least one column"),
        ("maxOffsetsPerTrigger", "0", "at least 1"),
        ("maxOffsetsPerTrigger", "1.5", "at least 1"),
        ("maxOffsetsPerTrigger", "-5", "at least 1"),
        ("maxTriggerDelay", "15", "15m"),
        ("failOnDataLoss", "yes", "true or false"),
        ("rowFormat", "avro", "one of amqp, kafka"),
        ("shardmq.url", "localhost:15672", "http://host:port"),
        ("shardmq.url", "http://guest:guest@localhost:1", "must not hold a password"),
        ("shardmq.url", " , ", "at least one"),
        ("shardmq.passwordFile", "/nowhere/at/all", "No such file"),
        ("minPartitions", "none", "at least 1"),
        ("transport", "file", "one of http"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_what_is_right(
    option: str, text: str, why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        read_options({**ORDERS, option: text})


@pytest.mark.parametrize(
    "given", [{}, {"subscribe": " , "}, {"subscribePattern": "("}, {"assign": '{"a":[]}'}]
)
def test_what_is_read_must_be_said(given: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        read_options(given)


@pytest.mark.parametrize(
    "both",
    [
        {"subscribe": "a", "subscribePattern": "b"},
        {"subscribe": "a", "path": "a"},
        {"startingOffsets": "earliest", "startingTimestamp": "1"},
        {"endingOffsets": "latest", "endingTimestamp": "1"},
        {"maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"},
        {"columns": "value", "rowFormat": "kafka"},
        {"shardmq.password": "p", "shardmq.passwordFile": "/x"},
    ],
)
def test_two_options_that_exclude_each_other_are_refused(both: dict[str, str]) -> None:
    given = both if "subscribe" in both else {**ORDERS, **both}
    with pytest.raises(OptionError, match="give only one of"):
        read_options(given)


def test_what_is_for_streams_is_refused_in_a_batch_and_the_other_way_round() -> None:
    for option in (
        "maxOffsetsPerTrigger",
        "maxBytesPerTrigger",
        "minOffsetsPerTrigger",
        "groupName",
    ):
        with pytest.raises(OptionError, match=option):
            for_batch(read_options({**ORDERS, option: "5"}))
    for start in ("latest", '{"orders":{"0":5,"1":-1}}'):
        with pytest.raises(OptionError, match="reads nothing"):
            for_batch(read_options({**ORDERS, "startingOffsets": start}))
    with pytest.raises(OptionError, match="pushFilters is for batch reads"):
        for_stream(read_options({**ORDERS, "pushFilters": "true"}))
    with pytest.raises(OptionError, match="producerName is for batch writes"):
        for_stream_writer(write_options({"producerName": "nightly"}))
    for option in ("endingOffsets", "endingTimestamp"):
        with pytest.raises(OptionError, match="batch"):
            for_stream(
                read_options(
                    {**ORDERS, option: '{"orders":{"0":1}}' if "Offsets" in option else "5"}
                )
            )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"startingOffsetsByTimestampStrategy": "latest"},
            "goes with startingOffsetsByTimestamp or startingTimestamp",
        ),
        ({"maxTriggerDelay": "1m"}, "goes with minOffsetsPerTrigger"),
        (
            {"columns": "value", "includeHeaders": "true"},
            "give only one of columns and includeHeaders",
        ),
        (
            {"columns": "value", "includeProperties": "true"},
            "give only one of columns and includeProperties",
        ),
        ({"rowFormat": "kafka", "includeProperties": "true"}, "rowFormat=kafka have no properties"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        read_options({**ORDERS, **options})


def test_a_name_of_a_producer_without_numbers_is_refused() -> None:
    with pytest.raises(OptionError, match="producerName does nothing with delivery=atLeastOnce"):
        write_options({"producerName": "p", "delivery": "atLeastOnce"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {
                "startingOffsets": '{"orders":{"0":9,"1":5}}',
                "endingOffsets": '{"orders":{"0":-1,"1":4}}',
            },
            "endingOffsets of orders/1 is 4, before startingOffsets, which is 5",
        ),
        (
            {"startingTimestamp": "1000", "endingTimestamp": "999"},
            "endingTimestamp=999 is before startingTimestamp=1000",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"orders":{"0":9}}',
                "endingOffsetsByTimestamp": '{"orders":{"0":8}}',
            },
            "endingOffsetsByTimestamp of orders/0 is 8",
        ),
    ],
)
def test_an_end_before_its_start_is_refused_before_the_broker_is_asked(
    options: dict[str, str], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        read_options({**ORDERS, **options})


def test_an_end_at_its_start_or_not_known_yet_is_no_error() -> None:
    for start, end in [
        ('{"orders":{"0":9}}', '{"orders":{"0":9}}'),
        ('{"orders":{"0":-1}}', '{"orders":{"0":-1}}'),
    ]:
        read_options({**ORDERS, "startingOffsets": start, "endingOffsets": end})
    read_options({**ORDERS, "startingTimestamp": "7", "endingTimestamp": "7"})


def test_offsets_by_shard_and_their_two_names() -> None:
    read = read_options(
        {**ORDERS, "startingOffsets": '{"orders":{"0":23,"1":-2,"2":-1}}', "endingOffsets": "next"}
    )
    assert read.starting == {"orders": {0: 23, 1: EARLIEST, 2: LATEST}}
    assert read.ending == LATEST
    assert read_options({**ORDERS, "startingOffsets": "First"}).starting == EARLIEST


def test_the_password_comes_from_a_file_or_the_environment_and_is_never_shown(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    environment = {"SHARDMQ_USER": "spark", "SHARDMQ_PASSWORD": "from-environment"}
    by_environment = write_options({}, environment)
    by_file = write_options({"shardmq.passwordFile": str(tmp_path / "secret")}, environment)
    assert (by_environment.connection.user, by_environment.connection.password) == (
        "spark",
        "from-environment",
    )
    assert by_file.connection.password == "from-file"
    assert "from-file" not in repr(by_file)


def test_durations_have_their_units() -> None:
    for text, ms in [("250ms", 250), ("2 s", 2_000), ("15m", 900_000), ("1h", 3_600_000)]:
        read = read_options({**ORDERS, "minOffsetsPerTrigger": "1", "maxTriggerDelay": text})
        assert read.trigger_delay_max_ms == ms


def test_a_limit_below_its_least_is_refused() -> None:
    with pytest.raises(OptionError, match="more than maxOffsetsPerTrigger"):
        read_options({**ORDERS, "minOffsetsPerTrigger": "10", "maxOffsetsPerTrigger": "5"})


def test_offsets_of_what_is_not_assigned_are_refused() -> None:
    starting = json.dumps({"a": {"0": 1}, "b": {"0": 1}})
    with pytest.raises(OptionError, match="startingOffsets names b"):
        read_options({"assign": '{"a":[0]}', "startingOffsets": starting})


def test_a_writer_is_told_its_exchange_once() -> None:
    assert write_options({"path": "logs"}).exchange == "logs"
    assert write_options({"exchange": ""}).exchange == ""
    assert write_options({}).exchange is None
    with pytest.raises(OptionError, match="only one"):
        write_options({"path": "logs", "exchange": "x"})
    assert set(WRITE) >= {"exchange", "routingKey", "mandatory", "delivery", "producerName"}


def test_confirms_have_a_time_of_their_own_where_one_is_said() -> None:
    assert write_options({"requestTimeoutMs": "5000"}).connection.timeout_ms == 5000
    assert (
        write_options({"requestTimeoutMs": "5000", "confirmTimeoutMs": "700"}).connection.timeout_ms
        == 700
    )
    with pytest.raises(OptionError, match="unknown option"):
        read_options({**ORDERS, "confirmTimeoutMs": "700"})
