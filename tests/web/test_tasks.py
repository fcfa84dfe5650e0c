"""Test tasks that people finish on the page, from the first look to the last question.

Each is done in a real browser and compared with what the HTTP API then says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until
from tests.web import visits
from tests.web.visits import Browser, Page, Visit, ask, expect, make, named, titled

browser, visit, pytestmark = visits.browser, visits.visit, visits.needs_chromium

STREAM = {"x-queue-type": "stream"}
ONCE = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("tasks") / "data", shards=2)
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


@pytest.fixture(autouse=True)
def swept(broker: RealBroker) -> Iterator[None]:
    """Delete what a test leaves: tests count messages, shard queues and rows of lists."""
    yield
    for kind in ("parameters/shards", "exchanges", "queues"):
        for row in ask(broker, "GET", f"{kind}/%2F"):
            name = row["name"]
            if name and not name.startswith("amq."):
                ask(broker, "DELETE", f"{kind}/%2F/{quote(name, safe='')}")


@pytest.fixture
def connection(broker: RealBroker) -> Iterator[Any]:
    parameters = pika.URLParameters(broker.url)
    parameters.client_properties = {"connection_name": "billing worker"}
    with pika.BlockingConnection(parameters) as made:
        yield made


def spread(broker: RealBroker, name: str, parts: int) -> None:
    arguments = {"x-shards": parts}
    make(broker, f"exchanges/%2F/{name}", {"type": "x-consistent-hash", "arguments": arguments})


def section(page: Page, title: str) -> Any:
    return page.locator("section, details").filter(
        has=page.get_by_role("heading", name=title, exact=True)
    )


def answer(page: Page, button: str) -> None:
    """Press a button of the question that is on top."""
    page.get_by_role("dialog").last.get_by_role("button", name=button, exact=True).click()


def lists(page: Page, texts: list[str]) -> None:
    """Wait until the first cells of the list are these."""
    expect(page.locator(".list tbody th")).to_have_text(texts)


# -- stream exchanges ------------------------------------------------------------------------------


def test_the_number_of_shard_queues_is_changed_after_a_look_at_the_plan_and_watched_to_the_end(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    spread(broker, "orders", 2)
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("orders", f"key {number}", b"x")
    page = visit.log_in()
    visit.go("streams/%2F/orders")
    place = section(page, "Number of shard queues")
    expect(section(page, "Share of the keys")).to_contain_text("shard queues")
    expect(place).to_contain_text("There are 2 shard queues. No change is under way.")
    place.get_by_label("Number of shard queues").fill("3")
    place.get_by_role("button", name="Show the plan").click()
    expect(place).to_contain_text("From 2 shard queues to 3 shard queues")
    expect(place).to_contain_text("33.3 % of all keys get another shard queue")
    expect(place).to_contain_text("20 messages that are there now")
    expect(place.locator(".plan li")).to_have_count(1)
    assert len(ask(broker, "GET", "exchanges/%2F/orders/shards")["queues"]) == 2

    place.get_by_role("button", name="Change to 3 shard queues").click()
    expect(place).to_contain_text("Step 3 of 4")
    expect(place.locator(".meter")).to_contain_text("0 of 20 consumed")
    for _ in itertools.islice(channel.consume("orders", auto_ack=True), 20):
        pass
    channel.cancel()
    expect(place).to_contain_text("The change is done. There are 3 shard queues now.")
    found = ask(broker, "GET", "exchanges/%2F/orders/shards")
    assert (found["step"], len(found["queues"])) == ("none", 3)


def test_a_plan_changes_nothing_by_itself_and_a_wrong_number_is_refused(
    visit: Visit, broker: RealBroker
) -> None:
    spread(broker, "kept", 2)
    page = visit.log_in()
    visit.go("streams/%2F/kept")
    place = section(page, "Number of shard queues")
    place.get_by_label("Number of shard queues").fill("2")
    place.get_by_role("button", name="Show the plan").click()
    expect(place).to_contain_text("There are 2 shard queues already: nothing would change.")
    expect(place.get_by_role("button", name=re.compile("^Change"))).to_have_count(0)
    place.get_by_role("button", name="Close the plan").click()
    place.get_by_label("Number of shard queues").fill("100000")
    place.get_by_role("button", name="Show the plan").click()
    expect(page.locator("#errors")).to_contain_text("number")
    assert len(ask(broker, "GET", "exchanges/%2F/kept/shards")["queues"]) == 2


def test_who_makes_no_policies_sees_the_parts_and_cannot_change_their_number(
    visit: Visit, broker: RealBroker
) -> None:
    spread(broker, "seen", 2)
    make(broker, "users/watcher", {"password": "x", "tags": "management"})
    make(broker, "permissions/%2F/watcher", {"configure": "", "write": "", "read": ".*"})
    page = visit.log_in("watcher", "x")
    titled(page, "Overview")
    visit.go("streams/%2F/seen")
    expect(section(page, "Number of shard queues")).to_contain_text("There are 2 shard queues.")
    expect(page.get_by_role("button", name="Show the plan")).to_have_count(0)


def test_skew_shows_which_part_has_more_messages_and_bytes_than_the_others(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    spread(broker, "skewed", 4)
    channel = connection.channel()
    channel.confirm_delivery()
    for _ in range(30):
        channel.basic_publish("skewed", "the only key", b"x" * 1024)
    page = visit.log_in()
    visit.go("streams/%2F/skewed")
    place = section(page, "How evenly the shard queues are filled")
    full: list[int] = []

    def all_are_counted() -> bool:
        rows = ask(broker, "GET", "queues?name=skewed")
        full[:] = [row["index"] for row in rows if row["messages"] == 30]
        return len(full) == 1

    wait_until(all_are_counted, "30 messages in one shard queue")
    # Facts of messages that arrived, messages and bytes; the share of all keys does not depend on
    # what was published.
    said = f"shard queue {full[0]} has 4.0 times the average"
    expect(place.locator("dd").filter(has_text=said)).to_have_count(3)
    row = place.get_by_role("row").filter(has_text=f"Shard queue {full[0]}")
    expect(row).to_contain_text("100 %")
    expect(row).to_contain_text("30")
    expect(place.get_by_role("row").filter(has_text="0 B")).to_have_count(3)
    expect(place.locator("dd").first).to_have_text(re.compile("even|times"))
    shares = place.locator("tbody td:nth-child(2)").all_inner_texts()
    assert sum(float(text.split()[0]) for text in shares) == pytest.approx(100, abs=0.3)


def test_a_group_reads_on_where_it_is_told_to_and_its_lag_is_shown_for_each_part(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    arguments = {"x-shards": 2, "x-shard-arguments": STREAM}
    make(broker, "exchanges/%2F/log", {"type": "x-modulus-hash", "arguments": arguments})
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("log", f"key {number}", b"x")
    ends = {
        str(part["shard"]): part["next"] for part in ask(broker, "GET", "streams/%2F/log")["shards"]
    }
    assert sum(ends.values()) == 20
    group = "streams/%2F/log/groups/spark"
    make(broker, group, {"shards": {shard: {"next": end} for shard, end in ends.items()}})
    page = visit.log_in()
    visit.go("streams/%2F/log")
    place = section(page, "Groups")
    expect(place).to_contain_text("Lag 0")

    def set_offset(where: str, part: str = "all", **more: str) -> None:
        place.get_by_role("button", name="Set offset of spark").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Read on at").select_option(where)
        for label, value in more.items():
            dialog.get_by_label(label).fill(value)
        dialog.get_by_label("In", exact=True).select_option(part)
        dialog.get_by_role("button", name="Set offset", exact=True).click()
        expect(dialog).to_have_count(0)

    def is_at(offsets: dict[str, int]) -> None:
        lags = [str(ends[part] - offsets[part]) for part in sorted(ends)]
        expect(place.locator("tbody td:nth-child(3)")).to_have_text(lags)
        found = ask(broker, "GET", group)
        assert {str(row["shard"]): row["next"] for row in found["shards"]} == offsets

    set_offset("first")
    is_at({"0": 0, "1": 0})
    set_offset("last")
    is_at({part: end - 1 for part, end in ends.items()})
    set_offset("number", "1", Offset="2")
    is_at({"0": ends["0"] - 1, "1": 2})
    set_offset("next")
    is_at(ends)
    hour_ago = datetime.now() - timedelta(hours=1)
    set_offset("time", **{"Messages since": hour_ago.strftime("%Y-%m-%dT%H:%M:%S")})
    is_at({"0": 0, "1": 0})
    place.get_by_role("button", name="Forget spark").click()
    answer(page, "Forget")
    expect(place).to_contain_text("Nobody has read it under a name yet.")
    assert ask(broker, "GET", "streams/%2F/log/groups") == []


def test_the_offset_of_a_group_with_a_connected_consumer_is_not_changed_and_the_page_says_why(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    make(broker, "queues/%2F/read", {"arguments": STREAM})
    channel = connection.channel()
    channel.confirm_delivery()
    for _ in range(5):
        channel.basic_publish("", "read", b"x")
    make(broker, "streams/%2F/read/groups/reader", {"shards": {"0": {"next": 1}}})
    make(broker, "streams/%2F/read/groups/other", {"shards": {"0": {"next": 1}}})
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume("read", lambda *_: None, consumer_tag="reader")
    page = visit.log_in()
    visit.go("queues/%2F/read")
    block = page.locator(".readers").filter(has_text="reader")
    expect(block).to_contain_text("1 consumer")
    block.get_by_role("button", name="Set offset of reader").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Read on at").select_option("next")
    dialog.get_by_role("button", name="Set offset", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("consumers are reading under this name")
    channel.close()
    dialog.get_by_role("button", name="Set offset", exact=True).click()
    expect(dialog).to_have_count(0)
    expect(block).to_contain_text("Lag 0")
    expect(block).to_contain_text("0 consumers")


# -- queues and those who consume them -------------------------------------------------------------


def test_all_consumers_are_listed_sorted_found_and_lead_to_their_queues_and_channels(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    channel = connection.channel()
    for name, prefetch in (("bills", 5), ("mails", 9), ("parcels", 7)):
        make(broker, f"queues/%2F/{name}", {})
        channel.basic_qos(prefetch_count=prefetch)
        channel.basic_consume(name, lambda *_: None, consumer_tag=f"{name} reader")
    page = visit.log_in()
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Consumers").click()
    titled(page, "Consumers")
    page.get_by_role("button", name="Prefetch").click()
    lists(page, ["mails reader", "parcels reader", "bills reader"])
    page.get_by_role("button", name="Queue").click()
    lists(page, ["bills reader", "mails reader", "parcels reader"])
    page.get_by_label("Search Consumers").fill("PARCELS")
    lists(page, ["parcels reader"])
    page.locator("tbody").get_by_role("link", name="parcels").click()
    titled(page, "parcels")
    page.go_back()
    (connected,) = named(broker, "billing worker")
    page.locator("tbody").get_by_role("link", name=f"{connected} (1)").click()
    titled(page, f"{connected} (1)")


def test_unacknowledged_messages_are_shown_with_who_holds_them_and_for_how_long(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    make(broker, "queues/%2F/held", {})
    channel, other = connection.channel(), connection.channel()
    channel.basic_qos(prefetch_count=3)
    channel.basic_consume("held", lambda *_: None, consumer_tag="slow one")
    for _ in range(10):
        channel.basic_publish("", "held", b"x")
    connection.process_data_events(0)

    def is_delivered() -> bool:
        return bool(ask(broker, "GET", "queues/%2F/held")["messages_unacknowledged"] == 3)

    wait_until(is_delivered, "the first three to be delivered")
    other.basic_get("held")
    page = visit.log_in()
    visit.go("queues/%2F/held")
    page.get_by_text("Unacknowledged messages").click()
    place = section(page, "Unacknowledged messages")
    (connected,) = named(broker, "billing worker")
    rows = place.locator("tbody").first.get_by_role("row")
    expect(rows).to_have_count(2)
    slow, got = rows.all()
    expect(slow).to_have_text(re.compile(rf"slow one{re.escape(connected)} \(1\)3\d+ s"))
    expect(got).to_have_text(re.compile(rf"basic.get{re.escape(connected)} \(2\)1\d+ s"))
    expect(place.locator(".list tbody tr")).to_have_count(4)
    # The numbers of holders and of the queue are of two moments: their difference means nothing.
    expect(place).not_to_contain_text("Others")
    slow.get_by_role("link").click()
    titled(page, f"{connected} (1)")
    channel.close()  # what it holds goes back


def test_some_messages_are_purged_from_the_head_after_a_question(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    make(broker, "queues/%2F/full", {})
    channel = connection.channel()
    channel.confirm_delivery()
    for number in range(10):
        channel.basic_publish("", "full", str(number).encode())

    def has(count: int) -> None:
        # The API may show a number of a second ago.
        wait_until(
            lambda: bool(ask(broker, "GET", "queues/%2F/full")["messages"] == count),
            f"the queue to have {count} messages",
        )

    page = visit.log_in()
    visit.go("queues/%2F/full")
    page.get_by_role("button", name="Purge some").click()
    page.get_by_label("How many").fill("4")
    answer(page, "Purge them")
    expect(page.get_by_role("dialog").last).to_contain_text("Drop the next 4 messages of full?")
    answer(page, "Cancel")
    has(10)
    page.get_by_role("button", name="Purge some").click()
    page.get_by_label("How many").fill("4")
    answer(page, "Purge them")
    answer(page, "Drop them")
    expect(page.locator("#notices")).to_contain_text("Purged the next 4 messages of full.")
    (head,) = ask(broker, "POST", "queues/%2F/full/get", ONCE)
    assert (head["payload"], head["message_count"]) == ("4", 5)
    page.get_by_role("button", name="Purge all").click()
    answer(page, "Cancel")
    has(5)
    page.get_by_role("button", name="Purge some").click()
    page.get_by_label("How many").fill("500")
    answer(page, "Purge them")
    answer(page, "Drop them")
    expect(page.locator("#notices")).to_contain_text("Purged the next 5 messages of full.")
    channel.basic_publish("", "full", b"one more")
    page.get_by_role("button", name="Purge all").click()
    answer(page, "Purge all")
    expect(page.locator("#notices")).to_contain_text("The queue is empty.")
    assert ask(broker, "POST", "queues/%2F/full/get", ONCE) == []


def test_connections_go_by_the_names_that_their_clients_have_chosen(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as nameless:
        (connected,) = named(broker, "billing worker")
        everybody = [row["name"] for row in ask(broker, "GET", "connections")]
        page = visit.log_in()
        visit.go("connections")
        page.get_by_role("button", name="Name").click()
        first = [name for name in everybody if name != connected]
        lists(page, [*first, f"billing worker{connected}"])
        page.get_by_label("Search Connections").fill("billing")
        lists(page, [f"billing worker{connected}"])
        page.get_by_role("link", name="billing worker").click()
        titled(page, "billing worker")
        expect(page.locator(".facts").first).to_contain_text(connected)
        assert page.title().startswith("billing worker")
        nameless.process_data_events(0)


# -- rules -----------------------------------------------------------------------------------------


def test_topic_permissions_are_set_and_revoked_for_a_user_and_in_a_virtual_host(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "users/topical", {"password": "x", "tags": ""})
    page = visit.log_in()
    visit.go("users/topical")
    page.get_by_text("Set a topic permission").click()
    page.get_by_label("May publish with routing keys").fill("^out[.]")
    page.get_by_label("May bind with routing keys").fill("^in[.]")
    page.get_by_role("button", name="Set topic permission").click()
    expect(page.get_by_role("cell", name="^out[.]")).to_be_visible()
    given = {"exchange": "amq.topic", "write": "^out[.]", "read": "^in[.]"}
    assert ask(broker, "GET", "topic-permissions/%2F/topical") == [
        {"user": "topical", "vhost": "/", **given}
    ]
    visit.go("vhosts/%2F")
    row = section(page, "Topic permissions").get_by_role("row").filter(has_text="topical")
    expect(row).to_contain_text("amq.topic")
    row.get_by_role("button", name="Revoke").click()
    answer(page, "Cancel")
    assert len(ask(broker, "GET", "users/topical/topic-permissions")) == 1
    row.get_by_role("button", name="Revoke").click()
    answer(page, "Revoke")
    expect(row).to_have_count(0)
    assert ask(broker, "GET", "users/topical/topic-permissions") == []


def test_permissions_are_revoked_after_a_question(visit: Visit, broker: RealBroker) -> None:
    make(broker, "users/allowed", {"password": "x", "tags": ""})
    make(broker, "permissions/%2F/allowed", {"configure": "", "write": ".*", "read": ".*"})
    page = visit.log_in()
    visit.go("users/allowed")
    row = section(page, "Permissions").get_by_role("row").filter(has_text="allowed")
    row.get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("dialog")).to_contain_text("Revoke all permissions of allowed in /?")
    answer(page, "Cancel")
    assert len(ask(broker, "GET", "users/allowed/permissions")) == 1
    row.get_by_role("button", name="Revoke").click()
    answer(page, "Revoke")
    expect(row).to_have_count(0)
    assert ask(broker, "GET", "users/allowed/permissions") == []


@pytest.mark.parametrize(
    ("view", "limits", "limit"),
    [
        ("vhosts/limited", "vhost-limits/limited", "max-queues"),
        ("users/limited", "user-limits/limited", "max-channels"),
    ],
)
def test_a_limit_is_cleared_after_a_question(
    visit: Visit, broker: RealBroker, view: str, limits: str, limit: str
) -> None:
    make(broker, "vhosts/limited", {})
    make(broker, "users/limited", {"password": "x", "tags": ""})
    make(broker, f"{limits}/{limit}", {"value": 7})
    page = visit.log_in()
    visit.go(view)
    place = section(page, "Limits")
    clear = place.get_by_role("button", name="Clear", exact=True)
    clear.click()
    expect(page.get_by_role("dialog").last).to_contain_text(f"Clear {limit}?")
    answer(page, "Cancel")
    (row,) = ask(broker, "GET", limits)
    assert row["value"] == {limit: 7}
    clear.click()
    answer(page, "Clear")
    expect(page.locator("#notices")).to_contain_text("The limit is cleared.")
    expect(place).to_contain_text("No limits.")


def test_tags_are_edited_where_they_stand(visit: Visit, broker: RealBroker) -> None:
    make(broker, "users/tagged", {"password": "x", "tags": "monitoring,ops"})
    page = visit.log_in()
    visit.go("users/tagged")
    page.get_by_role("heading", name="Tags", exact=True).click()
    tags = page.get_by_label("Tags")
    expect(tags).to_have_value("monitoring, ops")
    page.get_by_role("button", name="Set tags").click()
    expect(page.locator("#notices")).to_contain_text("The tags are set.")
    assert ask(broker, "GET", "users/tagged")["tags"] == ["monitoring", "ops"]
    tags.fill("management")
    page.get_by_role("button", name="Set tags").click()
    expect(page.locator(".facts .badge")).to_have_text(["management"])
    expect(tags).to_have_value("management")
    tags.fill("unfinished")
    make(broker, "users/tagged", {"password": "x", "tags": "policymaker"})
    expect(page.locator(".facts .badge")).to_have_text(["policymaker"])
    expect(tags).to_have_value("unfinished")


@pytest.mark.parametrize("is_global", [False, True], ids=["of a component", "global"])
def test_parameters_are_added_edited_and_deleted(
    visit: Visit, broker: RealBroker, is_global: bool
) -> None:
    page = visit.log_in()
    visit.go("parameters")
    kind, path = ("global parameter", "global-parameters") if is_global else ("parameter", "")
    page.get_by_text(f"Add a {kind}", exact=True).click()
    asks = page.locator("form").filter(has=page.get_by_role("button", name=f"Add {kind}"))
    if not is_global:
        path = "parameters/stream-definition/%2F"
        asks.get_by_label("Component").fill("stream-definition")
    asks.get_by_label("Name").fill("tuned")
    asks.get_by_label("Value").fill('{"shards-per-node": 2')
    asks.get_by_role("button", name=f"Add {kind}").click()
    expect(page.locator("#errors")).to_contain_text(
        'Value: {"shards-per-node": 2 begins like JSON and has a mistake'
    )
    assert all(found["name"] != "tuned" for found in ask(broker, "GET", path))
    asks.get_by_label("Value").fill('{"shards-per-node": 2}')
    asks.get_by_role("button", name=f"Add {kind}").click()
    row = page.locator("tbody tr").filter(has_text="tuned")
    expect(row).to_contain_text('{"shards-per-node":2}')
    assert ask(broker, "GET", f"{path}/tuned")["value"] == {"shards-per-node": 2}
    row.get_by_role("button", name="Edit tuned").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_label("Value").input_value() == '{"shards-per-node":2}'
    dialog.get_by_label("Value").fill('{"shards-per-node": 3}')
    answer(page, "Save")
    expect(row).to_contain_text('{"shards-per-node":3}')
    assert ask(broker, "GET", f"{path}/tuned")["value"] == {"shards-per-node": 3}
    row.get_by_role("button", name="Delete tuned").click()
    answer(page, "Delete")
    expect(row).to_have_count(0)
    assert all(found["name"] != "tuned" for found in ask(broker, "GET", path))


def test_a_text_that_looks_like_json_is_edited_in_quotes(visit: Visit, broker: RealBroker) -> None:
    make(broker, "global-parameters/half", {"value": "[half"})
    page = visit.log_in()
    visit.go("parameters")
    page.get_by_role("button", name="Edit half").click()
    dialog = page.get_by_role("dialog")
    value = dialog.get_by_label("Value")
    expect(value).to_have_value('"[half"')
    value.fill("[half")
    answer(page, "Save")
    expect(dialog.get_by_role("alert")).to_contain_text("begins like JSON and has a mistake")
    value.fill('"{whole"')
    answer(page, "Save")
    expect(dialog).to_have_count(0)
    assert ask(broker, "GET", "global-parameters/half")["value"] == "{whole"


def test_a_policy_is_edited_where_it_stands(visit: Visit, broker: RealBroker) -> None:
    made = {"pattern": "^tmp", "definition": {"max-length": 5, "overflow": "reject-publish"}}
    make(broker, "policies/%2F/short", {**made, "priority": 3, "apply-to": "queues"})
    page = visit.log_in()
    visit.go("policies")
    page.get_by_role("button", name="Edit short").click()
    dialog = page.get_by_role("dialog")
    lines = "max-length = 5\noverflow = reject-publish"
    assert dialog.get_by_label("Definition").input_value() == lines
    assert dialog.get_by_label("Pattern").input_value() == "^tmp"
    dialog.get_by_label("Definition").fill("max-length = many")
    answer(page, "Save")
    expect(dialog.get_by_role("alert")).to_contain_text("is not a valid maximum length")
    dialog.get_by_label("Definition").fill("max-length = 7")
    dialog.get_by_label("Priority").fill("4")
    answer(page, "Save")
    expect(page.get_by_text("max-length = 7")).to_be_visible()
    found = ask(broker, "GET", "policies/%2F/short")
    assert (found["definition"], found["priority"]) == ({"max-length": 7}, 4)
    assert (found["pattern"], found["apply-to"]) == ("^tmp", "queues")


def test_a_shovel_is_added_watched_paused_resumed_restarted_and_deleted(
    visit: Visit, broker: RealBroker, connection: Any
) -> None:
    page = visit.log_in()
    visit.go("shovels")
    page.get_by_text("Add a shovel", exact=True).click()
    asks = page.locator("form").filter(has=page.get_by_role("button", name="Add shovel"))
    asks.get_by_label("Name", exact=True).fill("mover")
    asks.get_by_label("Source queue").fill("old")
    asks.get_by_label("Destination queue").fill("new")
    asks.get_by_label("More").fill("reconnect-delay = soon")
    asks.get_by_role("button", name="Add shovel").click()
    expect(page.locator("#errors")).to_contain_text("reconnect-delay should be a number")
    asks.get_by_label("More").fill("reconnect-delay = 0.2")
    asks.get_by_role("button", name="Add shovel").click()
    row = page.locator("tbody tr").filter(has_text="mover")
    expect(row).to_contain_text("running")
    assert ask(broker, "GET", "parameters/shovel/%2F/mover")["value"] == {
        "src-uri": "amqp://", "src-queue": "old", "dest-uri": "amqp://", "dest-queue": "new",
        "ack-mode": "on-confirm", "src-delete-after": "never", "reconnect-delay": 0.2,
    }  # fmt: skip
    page.get_by_text("Add a shovel", exact=True).click()  # notices would lie above the row
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", "old", b"x")
    moved = row.locator("td.number").first
    expect(moved).to_have_text("1")
    row.get_by_role("button", name="Pause mover").click()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name="Resume mover").click()
    expect(row).to_contain_text("running")
    expect(moved).to_have_text("0")  # it has begun anew
    row.get_by_role("button", name="Restart mover").click()
    expect(page.locator("#notices")).to_contain_text("mover is started anew.")
    row.get_by_role("button", name="Delete mover").click()
    answer(page, "Delete")
    expect(row).to_have_count(0)
    assert ask(broker, "GET", "shovels") == []


def test_a_shovel_that_fails_says_why_and_who_only_watches_does_not_change_it(
    visit: Visit, broker: RealBroker
) -> None:
    value = {
        "src-uri": "amqp://127.0.0.1:1", "src-exchange": "amq.topic", "src-exchange-key": "a.#",
        "dest-uri": "http://user:secret@127.0.0.1:1/in", "dest-address": "orders",
    }  # fmt: skip
    make(broker, "parameters/shovel/%2F/stuck", {"value": value})
    make(broker, "users/watcher", {"password": "x", "tags": "monitoring"})
    page = visit.log_in("watcher", "x")
    visit.go("shovels")
    row = page.locator("tbody tr").filter(has_text="stuck")
    expect(row).to_contain_text("cannot connect")
    expect(row).to_contain_text("amq.topic with key a.#")
    expect(row).to_contain_text("http://127.0.0.1:1/in")
    expect(row).not_to_contain_text("secret")
    expect(page.get_by_role("button", name="Pause stuck")).to_have_count(0)
    expect(page.get_by_text("Add a shovel", exact=True)).to_have_count(0)
    ask(broker, "DELETE", "parameters/shovel/%2F/stuck")


def test_an_upstream_is_added_and_links_are_watched_and_started_anew(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "vhosts/there", {})
    make(broker, "queues/%2F/federated", {"durable": True})
    policy = {"pattern": "^federated$", "definition": {"federation-upstream-set": "all"}}
    make(broker, "policies/%2F/federation", {**policy, "apply-to": "queues"})
    page = visit.log_in()
    visit.go("federation")
    page.get_by_text("Add an upstream", exact=True).click()
    asks = page.locator("form").filter(has=page.get_by_role("button", name="Add upstream"))
    asks.get_by_label("Name", exact=True).fill("up")
    asks.get_by_label("URI").fill("amqp:///there")
    asks.get_by_label("More").fill("prefetch-count = 10")
    asks.get_by_role("button", name="Add upstream").click()
    row = page.locator("tbody tr").filter(has_text="federated")
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("federated at amqp:///there")
    assert ask(broker, "GET", "parameters/federation-upstream/%2F/up")["value"] == {
        "uri": "amqp:///there", "ack-mode": "on-confirm", "prefetch-count": 10,
    }  # fmt: skip
    page.get_by_text("Add an upstream", exact=True).click()  # notices would lie above the row
    row.get_by_role("button", name="Restart federated from up").click()
    expect(page.locator("#notices")).to_contain_text("The link of federated is started anew.")
    for path in (
        "policies/%2F/federation", "parameters/federation-upstream/%2F/up", "vhosts/there",
        "queues/%2F/federated",
    ):  # fmt: skip
        ask(broker, "DELETE", path)


# -- lists -----------------------------------------------------------------------------------------


def test_columns_are_chosen_kept_for_the_next_visit_and_reset(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "queues/%2F/wide", {})
    page = visit.log_in()
    visit.go("queues")
    heads = page.locator(".list thead th")
    usual = [
        "Name", "Virtual host", "Features", "State", "Ready", "Unacked", "Consumers", "In", "Out",
        "Shard",
    ]  # fmt: skip
    expect(heads).to_have_text(usual)
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="State").uncheck()
    page.get_by_role("checkbox", name="Bytes", exact=True).check()
    chosen = [*usual, "Bytes"]
    chosen.remove("State")
    expect(heads).to_have_text(chosen)
    expect(page.locator(".list tbody tr").first.locator("th, td")).to_have_count(len(chosen))
    page.get_by_role("button", name="Bytes").click()  # a chosen column sorts like the others
    expect(page.get_by_role("columnheader", name="Bytes")).to_have_attribute(
        "aria-sort", "descending"
    )
    page.reload()
    expect(heads).to_have_text(chosen)
    visit.go("exchanges")  # has a choice of its own
    expect(heads.first).to_have_text("Name")
    expect(page.get_by_role("columnheader", name="Type")).to_be_visible()
    visit.go("queues")
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("button", name="Reset columns").click()
    expect(heads).to_have_text(usual)
    expect(page.get_by_role("checkbox", name="State")).to_be_checked()
    assert page.evaluate("localStorage.getItem('shardmq.columns.queues')") is None


def test_on_a_phone_the_boxes_say_which_columns_are_shown_and_each_can_be_chosen(
    browser: Browser, broker: RealBroker
) -> None:
    with Visit(browser, broker, viewport={"width": 390, "height": 860}) as visit:
        page = visit.log_in()
        titled(page, "Overview")
        visit.go("consumers")
        head = page.get_by_role("columnheader", name="Acknowledges")
        box = page.get_by_role("checkbox", name="Acknowledges")
        page.get_by_text("Columns", exact=True).click()
        expect(page.get_by_role("checkbox", name="Prefetch")).to_be_checked()
        expect(box).not_to_be_checked()
        expect(head).to_have_count(0)  # none is visible
        box.check()
        expect(head).to_be_visible()
        page.reload()
        expect(head).to_be_visible()
        page.get_by_text("Columns", exact=True).click()
        expect(box).to_be_checked()
        box.uncheck()
        expect(head).to_have_count(0)
        page.set_viewport_size(visits.WIDE)
        expect(head).to_be_visible()


@pytest.mark.parametrize(
    ("where", "adds"),
    [
        ("queues", "Add a queue"), ("exchanges", "Add an exchange"), ("users", "Add a user"),
        ("vhosts", "Add a virtual host"), ("policies", "Add a policy"),
        ("streams", "Add a stream exchange"), ("parameters", "Add a parameter"),
        ("shovels", "Add a shovel"), ("federation", "Add an upstream"),
    ],
)  # fmt: skip
def test_what_adds_stands_above_the_rows(
    visit: Visit, broker: RealBroker, where: str, adds: str
) -> None:
    page = visit.log_in()
    visit.go(where)
    adder = page.get_by_text(adds, exact=True)
    expect(adder).to_be_in_viewport()
    above, list_box = adder.bounding_box(), page.locator(".list").first.bounding_box()
    assert above is not None
    assert list_box is not None
    assert above["y"] + above["height"] <= list_box["y"]
