"""Test the page in a real browser with a real broker.

The page works by mouse, by keyboard, on a phone and in the dark. Names and messages that others
have written are shown as text and never run.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until
from tests.web import visits
from tests.web.visits import (
    WAIT_MS,
    Browser,
    Page,
    Visit,
    ask,
    expect,
    make,
    named,
    titled,
)

browser, visit, pytestmark = visits.browser, visits.visit, visits.needs_chromium

PLAIN = {"properties": {}, "payload": "x", "payload_encoding": "string"}
PHONE = {"width": 375, "height": 700}
MARKUP = '<img src=x onerror="window.wasRun=1"><script>window.wasRun=1</script>\'"&amp;'
# A browser whose clock moves on by a millisecond each time that it is read.
CLOCK_THAT_MOVES = """const real = Date.now;
let reads = 0;
Date.now = () => real() + ++reads;"""
HEAT_COLUMNS_MAX = 90
SPAN_SHOWN = {"Minute": "1 min 0 s", "Day": "1 d 0 h"}
VIEWS = (
    "", "shards", "shards/0", "streams", "streams/%2F/orders", "connections", "channels",
    "consumers", "exchanges", "exchanges/%2F/orders", "exchanges/%2F/amq.topic", "queues",
    "queues/%2F/first", "users", "users/guest", "vhosts", "vhosts/%2F", "policies", "parameters",
    "definitions", "logs",
)  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("page") / "data", shards=2)
    is_over = threading.Event()
    try:
        make(
            made,
            "policies/%2F/spread",
            {"pattern": "^orders$", "definition": {"shards-per-node": 4}},
        )
        make(made, "exchanges/%2F/orders", {"type": "x-consistent-hash"})
        make(made, "queues/%2F/first", {})
        make(made, "queues/%2F/charted", {"arguments": {"x-max-length": 10}})
        # While other tests run, the samples come that the last test wants to see.
        publisher = threading.Thread(target=publish_until, args=(is_over, made), daemon=True)
        publisher.start()
        yield made
        is_over.set()
        publisher.join()
        made.stop()
    finally:
        is_over.set()
        made.clean_up()


def one_sample_is_kept(route: Any) -> None:
    """Answer as a broker does that has taken its first sample of each shard."""
    answer = route.fetch()
    rows = answer.json()
    for row in rows:
        first = {"timestamp": (time.time() - 60) * 1_000, "sample": 0}
        row["published_details"]["samples"] = [first]
    route.fulfill(response=answer, json=rows)


def publish_until(is_over: threading.Event, broker: RealBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        while not is_over.is_set():
            for _ in range(10):
                channel.basic_publish("", "charted", b"x")
            connection.process_data_events(0.1)


# -- what people do --------------------------------------------------------------------------------


def test_who_logs_in_stays_until_the_tab_ends_or_they_leave(visit: Visit) -> None:
    page = visit.log_in("guest", "wrong")
    expect(page.get_by_role("alert").filter(has_text="wrong")).to_be_visible()
    visit.log_in()
    titled(page, "Overview")
    assert visit.context.cookies() == []  # nothing another site's page could make the browser send
    page.reload()
    titled(page, "Overview")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Password")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('shardmq.login')") is None
    page.reload()
    expect(page.get_by_label("Password")).to_be_visible()


def test_a_queue_is_made_filled_looked_into_bound_emptied_and_deleted(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    page.get_by_role("link", name="Queues", exact=True).click()
    page.get_by_text("Add a queue").click()
    page.get_by_label("Name", exact=True).fill("made/by hand")
    page.get_by_label("Arguments").fill("x-max-length = 1000\nx-overflow = reject-publish")
    page.get_by_role("button", name="Add queue").click()
    page.get_by_role("link", name="made/by hand").click()
    titled(page, "made/by hand")
    made = ask(broker, "GET", "queues/%2F/made%2Fby%20hand")
    assert (made["durable"], made["arguments"]) == (
        True,
        {"x-max-length": 1000, "x-overflow": "reject-publish"},
    )

    page.get_by_text("Add a binding").click()
    page.get_by_label("From exchange").fill("amq.topic")
    page.get_by_role("group").filter(has_text="Add a binding").get_by_label("Routing key").fill(
        "a.*"
    )
    page.get_by_role("button", name="Bind", exact=True).click()
    expect(page.get_by_role("cell", name="a.*")).to_be_visible()

    visit.go("exchanges/%2F/amq.topic")
    titled(page, "amq.topic")
    page.get_by_text("Publish a message").click()
    form = page.locator("form").filter(has=page.get_by_role("button", name="Publish message"))
    form.get_by_label("Routing key").fill("a.b")
    form.get_by_label("Payload").fill("grüß <b>dich</b>")
    form.get_by_label("Headers").fill("n = 7")
    form.get_by_role("button", name="Publish message").click()
    expect(page.get_by_text("Message published.")).to_be_visible()
    page.get_by_text("Where would a message go?").click()
    asks = page.locator("form").filter(has=page.get_by_role("button", name="Explain"))
    asks.get_by_label("Routing key").fill("a.c")
    asks.get_by_role("button", name="Explain").click()
    expect(page.get_by_text("To made/by hand", exact=True)).to_be_visible()

    visit.go("queues/%2F/made%2Fby%20hand")
    page.get_by_text("Get messages").first.click()
    page.get_by_role("button", name="Get messages").click()
    shown = page.locator(".message")
    expect(shown.locator("pre")).to_have_text("grüß <b>dich</b>")
    expect(shown).to_contain_text("n = 7")
    expect(page.locator(".figures")).to_contain_text(re.compile("^(Ready1|1Ready)"))

    ask(broker, "PUT", "queues/%2F/other", {})
    page.get_by_text("Move messages").first.click()
    page.get_by_label("To queue").fill("other")
    page.get_by_role("button", name="Move messages").click()
    expect(page.get_by_text("1 moved, 0 left.")).to_be_visible()
    moved = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
    (other,) = ask(broker, "POST", "queues/%2F/other/get", moved)
    assert (other["payload"], other["properties"]["headers"]) == ("grüß <b>dich</b>", {"n": 7})
    ask(
        broker,
        "POST",
        "exchanges/%2F/amq.default/publish",
        {**PLAIN, "routing_key": "made/by hand"},
    )

    page.get_by_role("button", name="Purge all").click()
    page.get_by_role("dialog").get_by_role("button", name="Purge all").click()
    expect(page.get_by_text("The queue is empty.").first).to_be_visible()
    assert (
        ask(
            broker,
            "POST",
            "queues/%2F/made%2Fby%20hand/get",
            {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"},
        )
        == []
    )
    page.get_by_role("button", name="Unbind").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("cell", name="a.*")).to_have_count(1)
    page.get_by_role("button", name="Unbind").click()
    page.get_by_role("dialog").get_by_role("button", name="Unbind").click()
    expect(page.get_by_role("cell", name="a.*")).to_have_count(0)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    titled(page, "Queues")
    assert all(row["name"] != "made/by hand" for row in ask(broker, "GET", "queues"))


def test_what_is_refused_is_said_and_changes_nothing(visit: Visit, broker: RealBroker) -> None:
    page = visit.log_in()
    visit.go("queues")
    page.get_by_text("Add a queue").click()
    page.get_by_label("Name", exact=True).fill("refused")
    page.get_by_label("Arguments").fill("x-max-length = many")
    page.get_by_role("button", name="Add queue").click()
    expect(page.locator("#errors")).to_contain_text("x-max-length")
    assert page.get_by_label("Name", exact=True).input_value() == "refused"
    page.get_by_label("Name", exact=True).fill("..")  # a browser would ask for another thing
    page.get_by_label("Arguments").fill("")
    page.get_by_role("button", name="Add queue").click()
    expect(page.locator("#errors")).to_contain_text("shardctl")
    assert {row["name"] for row in ask(broker, "GET", "queues")} & {"refused", ".."} == set()


def test_users_policies_and_definitions_are_kept_by_forms(
    visit: Visit, broker: RealBroker, tmp_path: Path
) -> None:
    page = visit.log_in()
    visit.go("users")
    page.get_by_text("Add a user").click()
    page.get_by_label("Name", exact=True).fill("ann")
    page.get_by_label("Password", exact=True).fill("secret")
    page.get_by_label("Tags").fill("monitoring")
    page.get_by_role("button", name="Add user").click()
    page.get_by_role("link", name="ann", exact=True).click()
    page.get_by_text("Set a permission").click()
    page.get_by_label("May write").fill("^out")
    page.get_by_role("button", name="Set permission").click()
    expect(page.get_by_role("cell", name="^out")).to_be_visible()

    visit.go("policies")
    page.get_by_text("Add a policy").click()
    form = page.locator("form").filter(has=page.get_by_label("Pattern")).first
    form.get_by_label("Name").fill("short")
    form.get_by_label("Pattern").fill("^tmp")
    form.get_by_role("button", name="max-length", exact=True).click()
    form.get_by_label("Definition").press_sequentially("5")
    form.get_by_role("button", name="Add policy").click()
    expect(page.get_by_text("max-length = 5")).to_be_visible()
    assert ask(broker, "GET", "policies/%2F/short")["definition"] == {"max-length": 5}

    visit.go("definitions")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download definitions").click()
    document = json.loads(Path(download.value.path()).read_bytes())
    assert "ann" in [user["name"] for user in document["users"]]
    given = tmp_path / "given.json"
    given.write_text(
        json.dumps(
            {"queues": [{"name": "from file", "vhost": "/", "durable": True, "arguments": {}}]}
        )
    )
    page.get_by_label("File").set_input_files(given)
    page.get_by_role("button", name="Upload definitions").click()
    page.get_by_role("dialog").get_by_role("button", name="Import").click()
    expect(page.get_by_text("The definitions are imported.")).to_be_visible()
    assert ask(broker, "GET", "queues/%2F/from%20file")["durable"]


def test_what_has_no_effect_is_said_when_it_is_made_and_listed_whatever_way_it_came(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    visit.go("queues")
    page.get_by_text("Add a queue").click()
    page.get_by_label("Name", exact=True).fill('quorate "x"')
    page.get_by_label("Arguments").fill("x-queue-mode = lazy")
    page.get_by_role("button", name="Add queue").click()
    said = "argument x-queue-mode of queue 'quorate \"x\"' in vhost '/' is kept without effect"
    expect(page.locator("#notices")).to_contain_text(f"Warning: {said}")
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        connection.channel().queue_declare(
            "by amqp", durable=True, arguments={"x-queue-type": "quorum"}
        )
    visit.go("definitions")
    listed = page.locator("section").filter(
        has=page.get_by_role("heading", name="Kept without effect")
    )
    expect(listed).to_contain_text(said)
    expect(listed).to_contain_text(
        "queue type quorum of queue 'by amqp' in vhost '/' is kept without effect"
    )


def test_who_may_see_less_is_shown_less(visit: Visit, broker: RealBroker) -> None:
    make(broker, "users/low", {"password": "low", "tags": "management"})
    make(broker, "permissions/%2F/low", {"configure": "", "write": "", "read": ".*"})
    page = visit.log_in("low", "low")
    titled(page, "Overview")
    menu = page.get_by_role("navigation", name="Main")
    expect(menu.get_by_role("link", name="Queues")).to_be_visible()
    description = menu.get_by_role("link", name="HTTP API")
    expect(description).to_have_attribute("href", "../api/index.html")
    for name in ("Shards", "Users", "Logs", "Definitions"):
        expect(menu.get_by_role("link", name=name)).to_have_count(0)


def test_shards_show_load_placement_ring_and_owners(visit: Visit, broker: RealBroker) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.basic_consume("orders", lambda *_: None, consumer_tag="owner of all")
    for key in range(200):
        channel.basic_publish("orders", f"key {key}", b"x" * 100)
    connection.process_data_events(0)
    page = visit.log_in()
    visit.go("shards")
    expect(page.locator(".heatrow")).to_have_count(2)
    page.get_by_text("Messages held", exact=True).click()
    expect(page.locator(".heat rect.h8").first).to_be_attached()
    page.get_by_role("link", name="Shard 1").first.click()
    titled(page, "Shard 1")
    placed = {row["name"] for row in ask(broker, "GET", "queues") if row["shard"] == 1}
    expect(page.locator("tbody th a")).to_have_count(len(placed))
    assert set(page.locator("tbody th a").all_inner_texts()) == placed
    visit.go("streams/%2F/orders")
    expect(page.locator(".ring .arc")).to_have_count(4)
    expect(page.locator(".shares output").first).to_be_attached()
    assert sum(
        float(text.split()[0]) for text in page.locator(".shares output").all_inner_texts()
    ) == pytest.approx(100, abs=0.3)
    expect(page.locator(".matrix td.owned")).to_have_count(4)
    expect(page.locator(".matrix tbody th")).to_contain_text("owner of all")
    connection.close()
    expect(page.get_by_text("No consumer uses the name of the exchange.")).to_be_visible()


@pytest.mark.parametrize("wide", [390, 1280])
def test_charts_of_each_span_fit_the_screen(
    browser: Browser, broker: RealBroker, wide: int
) -> None:
    with Visit(browser, broker, viewport={"width": wide, "height": 844}) as visit:
        page = visit.log_in()
        for where in ("", "shards", "queues/%2F/first", "exchanges/%2F/orders"):
            visit.go(where)
            for span in ("Minute", "10 minutes", "Hour", "8 hours", "Day"):
                page.get_by_text(span, exact=True).click()
                expect(page.locator(".plot canvas, .heat").first).to_be_attached()
                assert page.evaluate("document.documentElement.scrollWidth") <= wide, (where, span)


def test_shards_have_few_columns_though_the_clock_moves_while_they_are_read(
    visit: Visit, broker: RealBroker
) -> None:
    visit.context.add_init_script(CLOCK_THAT_MOVES)
    visit.page.route("**/api/shards/load*", one_sample_is_kept)
    page = visit.log_in()
    visit.go("shards")
    for span in ("Day", "Minute"):
        page.get_by_text(span, exact=True).click()
        expect(page.get_by_label(f"the last {SPAN_SHOWN[span]}")).to_be_attached()
        assert 1 <= page.locator(".heat").first.locator("rect").count() <= HEAT_COLUMNS_MAX
    page.unroute_all(behavior="wait")


def test_logs_of_all_processes_come_as_they_are_said(visit: Visit, broker: RealBroker) -> None:
    page = visit.log_in()
    visit.go("logs")
    expect(page.locator(".log li").filter(has_text="controller").first).to_be_visible()
    assert {"supervisor", "controller", "shard-0", "shard-1"} <= {
        row["process"] for row in ask(broker, "GET", "logs")
    }
    other = pika.ConnectionParameters(
        "127.0.0.1", broker.port, credentials=pika.PlainCredentials("<i>nobody</i>", "x")
    )
    with pytest.raises(pika.exceptions.AMQPError):
        pika.BlockingConnection(other)
    expect(page.locator(".log li").filter(has_text="<i>nobody</i>").first).to_be_visible()


# -- whoever they are, wherever they are -----------------------------------------------------------


def test_markup_in_names_and_messages_stays_text(visit: Visit, broker: RealBroker) -> None:
    name = quote(MARKUP, safe="")
    make(broker, f"vhosts/{name}", {"description": MARKUP, "tags": [MARKUP]})
    make(broker, f"users/{name}", {"password": "x", "tags": MARKUP.replace(",", "")})
    for where in ("%2F", name):
        make(broker, f"permissions/{where}/guest", {"configure": ".*", "write": ".*", "read": ".*"})
        make(broker, f"queues/{where}/{name}", {"arguments": {"x-dead-letter-exchange": MARKUP}})
        make(
            broker,
            f"exchanges/{where}/{name}",
            {"type": "topic", "arguments": {"alternate-exchange": MARKUP}},
        )
        ask(
            broker,
            "POST",
            f"bindings/{where}/e/{name}/q/{name}",
            {"routing_key": MARKUP, "arguments": {MARKUP: MARKUP}},
        )
        make(
            broker,
            f"policies/{where}/{name}",
            {"pattern": "^no", "definition": {"dead-letter-exchange": MARKUP}},
        )
    properties = pika.BasicProperties(headers={MARKUP: MARKUP}, content_type=MARKUP, type=MARKUP)
    parameters = pika.URLParameters(broker.url)
    parameters.client_properties = {"connection_name": MARKUP, MARKUP: MARKUP}
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.basic_publish("", MARKUP, MARKUP.encode(), properties)
    channel.basic_consume("first", lambda *_: None, consumer_tag=MARKUP)
    page = visit.log_in()
    wait_until(lambda: bool(named(broker, MARKUP)), "the connection to be listed")
    (connected,) = named(broker, MARKUP)
    for where in (
        *VIEWS, f"queues/{name}/{name}", f"exchanges/%2F/{name}", f"users/{name}", f"vhosts/{name}",
        f"connections/{quote(connected, safe='')}",
        f"channels/{quote(connected + ' (1)', safe='')}", name,
        f"queues/%2F/{name}",
    ):  # fmt: skip
        visit.see(where)
    page.get_by_text("Get messages").first.click()
    page.get_by_role("button", name="Get messages").click()
    expect(page.locator(".message pre")).to_have_text(MARKUP)
    expect(page.locator(".message")).to_contain_text(f"{MARKUP} = {MARKUP}")
    titled(page, MARKUP)
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog")).to_contain_text(MARKUP)
    page.keyboard.press("Escape")
    assert page.locator("#app img:not([src='mark.svg']), #app script").count() == 0
    connection.close()


def test_everything_is_reached_by_the_keyboard(visit: Visit, broker: RealBroker) -> None:
    page, press = visit.page, visit.page.keyboard.press
    make(broker, "queues/%2F/second", {})
    page.goto(visit.root)
    expect(page.get_by_label("User")).to_be_focused()
    page.keyboard.type("guest")
    press("Tab")
    page.keyboard.type("guest")
    press("Enter")
    titled(page, "Overview")
    page.reload()
    titled(page, "Overview")
    press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    press("Enter")
    expect(page.locator("main")).to_be_focused()
    walk_to(page, "Queues", back=True)
    press("Enter")
    titled(page, "Queues")
    expect(page.locator("h1")).to_be_focused()
    walk_to(page, "Name")
    press("Enter")
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute(
        "aria-sort", "ascending"
    )
    press("Enter")
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute(
        "aria-sort", "descending"
    )
    # the list has come in the new order
    expect(page.locator("tbody th").first).to_contain_text("sharding: orders")
    walk_to(page, "first")
    # stands before: what follows moves up when the list is asked for anew
    ask(broker, "DELETE", "queues/%2F/second")
    expect(page.locator("tbody th", has_text="second")).to_have_count(0, timeout=WAIT_MS)
    wait_until(lambda: focused(page) == "first", "the focus to be where it was")
    press("Enter")
    titled(page, "first")
    walk_to(page, "Delete")
    press("Enter")
    expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
    press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    wait_until(lambda: focused(page) == "Delete", "the focus to be where it was")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def focused(page: Page) -> str:
    found: str = page.evaluate("document.activeElement.textContent.trim()")
    return found


def walk_to(page: Page, text: str, back: bool = False) -> None:
    for _ in range(80):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if focused(page) == text:
            return
    raise AssertionError(f"{text} is not reached by the keyboard")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, broker: RealBroker) -> None:
    with Visit(browser, broker, viewport=PHONE, has_touch=True, is_mobile=True) as visit:
        page = visit.log_in()
        titled(page, "Overview")
        menu = page.get_by_role("navigation", name="Main")
        expect(menu).to_be_hidden()
        page.get_by_role("button", name="Menu").tap()
        menu.get_by_role("link", name="Queues").tap()
        titled(page, "Queues")
        expect(menu).to_be_hidden()
        for where in ("", "queues/%2F/first", "streams/%2F/orders"):  # the others: test_views.py
            visit.see(where)
            page.evaluate(
                "document.querySelectorAll('details').forEach((one) => { one.open = true })"
            )
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], where


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_that_of_the_system_until_another_is_chosen(
    browser: Browser, broker: RealBroker, scheme: str
) -> None:
    with Visit(browser, broker, color_scheme=scheme) as visit:
        page = visit.log_in()
        titled(page, "Overview")
        assert (
            page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light dark"
        )
        background = "getComputedStyle(document.body).backgroundColor"
        first = page.evaluate(background)
        page.get_by_label("Colours").select_option("Light" if scheme == "dark" else "Dark")
        chosen = page.evaluate(background)
        assert chosen != first
        page.reload()
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate(background) == chosen


# -- the past, which takes some time to come about -------------------------------------------------

POINTS = re.compile("^[1-9]")
SAMPLED_S_MAX = 150.0


@pytest.mark.row("M2.3")
def test_charts_are_full_when_a_queue_is_opened(visit: Visit, broker: RealBroker) -> None:
    def is_sampled() -> bool:
        # A list is no look at the queue. On a busy machine there are fewer samples.
        (row,) = ask(broker, "GET", "queues?name=charted&msg_rates_age=60&msg_rates_incr=5")
        details = row.get("message_stats", {}).get("publish_details", {})
        return len(details.get("samples", ())) >= 4

    wait_until(is_sampled, "samples of the queue", SAMPLED_S_MAX)
    page = visit.log_in()
    visit.go("queues/%2F/charted")
    titled(page, "charted")
    plot = page.locator(".plot").first
    expect(plot).to_have_attribute("data-points", POINTS)  # before, a chart without any is drawn
    assert int(plot.get_attribute("data-points") or 0) >= 3, "what was before"
    expect(plot).to_have_attribute("aria-label", re.compile(r"\bin [\d.,]+/s"))
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + box["height"] / 2)
    expect(page.locator(".tip .tiptext").first).to_have_text(re.compile(r"in [\d.,]+/s"))
    said = page.locator(".tip .tiptext").first.text_content() or ""
    assert 20 <= float(said.split()[1].removesuffix("/s").replace(",", "")) <= 120
    before = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    page.mouse.move(0, 0)
    expect(page.locator(".tip:visible")).to_have_count(0)
    page.get_by_label("Colours").select_option("dark")
    assert plot.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before
    page.get_by_text("Day", exact=True).click()
    expect(page.locator(".kept")).to_contain_text("Samples are kept for 10 minutes")
    page.get_by_text("Minute", exact=True).click()
    expect(page.locator(".kept")).not_to_contain_text("Samples are kept")
