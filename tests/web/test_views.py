"""Look at all views, with long names and big numbers, in both themes and on three screens.

Nothing is wider than the screen, text stands out from what is behind it, and axe-core finds nothing
that shuts people out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until
from tests.web import visits
from tests.web.visits import Browser, Page, Visit, ask, expect, make, named, titled

browser, pytestmark = visits.browser, visits.needs_chromium

HERE = Path(__file__).parent
AXE = HERE.parent / "clients" / "node" / "node_modules" / "axe-core" / "axe.min.js"
PALE = (HERE / "pale.js").read_text()
CONTRAST_MIN = 4.5  # WCAG 2, AA
# All rules, or these.
FIND = """async (rules) => (await axe.run(document, {
  resultTypes: ["violations"], ...(rules ? {runOnly: rules} : {}),
})).violations.flatMap(({id, nodes}) =>
  nodes.map(({target, failureSummary}) => `${id}: ${target} ${failureSummary}`))"""
OPEN = "document.querySelectorAll('#view details').forEach((one) => { one.open = true })"
WIDTHS = (1280, 390, 375)
HEIGHT = 860
LONG = "a" * 60 + "_very_long_name_without_a_single_space_" + "z" * 100
PATH = quote(LONG, safe="")
SHOVEL = {
    "src-uri": f"amqp:///{LONG}", "src-exchange": LONG, "src-exchange-key": LONG,
    "dest-uri": f"amqp://127.0.0.1:1/{LONG}", "dest-exchange": LONG, "dest-exchange-key": LONG,
}  # fmt: skip
# Answers of the API have numbers of 13 digits where a busy broker has large ones.
NUMBERS = (
    "messages|message_bytes|publish|deliver|ack|consumers|lag|next|recv_oct|send_oct|queues|rate"
    "|total|rss_bytes|cpu_seconds|fd_used|mem_used|prefetch_count|unacked_for"
)
BIG_NUMBERS = f"""(() => {{
  const ask = window.fetch;
  window.fetch = async (...asked) => {{
    const answer = await ask(...asked);
    const text = (await answer.text()).replace(/("(?:{NUMBERS})\\w*": ?)\\d+/g, "$19876543210987");
    return new Response(text || null, {{status: answer.status, headers: answer.headers}});
  }};
}})()"""
VIEWS = {
    "broker": [
        "", "shards", "shards/0", "streams", f"streams/%2F/{PATH}", "streams/%2F/log", "logs",
    ],
    "traffic": [
        "connections", "connections/CONNECTION", "channels", "channels/CHANNEL", "consumers",
        "exchanges", f"exchanges/%2F/{PATH}", "exchanges/%2F/amq.topic", "exchanges/%2F/",
        "queues", f"queues/%2F/{PATH}", "queues/%2F/read", "shovels", "federation",
    ],
    "rules": [
        "users", f"users/{PATH}", "vhosts", "vhosts/%2F", f"vhosts/{PATH}", "policies",
        "parameters", "definitions", "nothing/of/this/name",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("views") / "data", shards=2)
    try:
        with filled(made):
            yield made
        made.stop()
    finally:
        made.clean_up()


def filled(broker: RealBroker) -> Any:
    """Return the connection of a consumer, after everything that a view can show was made."""
    log = {"x-shards": 2, "x-shard-arguments": {"x-queue-type": "stream"}}
    every = {"configure": ".*", "write": ".*", "read": ".*"}
    make(broker, f"vhosts/{PATH}", {"description": LONG, "tags": [LONG]})
    make(broker, f"users/{PATH}", {"password": "x", "tags": f"monitoring,{LONG}"})
    for path, body in (
        (f"permissions/{PATH}/guest", every),
        (f"permissions/%2F/{PATH}", {**every, "read": LONG}),
        (f"topic-permissions/%2F/{PATH}", {"exchange": "amq.topic", "write": LONG, "read": LONG}),
        (f"user-limits/{PATH}/max-connections", {"value": 2**31 - 1}),
        (f"vhost-limits/{PATH}/max-queues", {"value": 2**31 - 1}),
        (f"queues/%2F/{PATH}", {"arguments": {"x-dead-letter-exchange": LONG}}),
        ("queues/%2F/read", {"arguments": {"x-queue-type": "stream"}}),
        (f"exchanges/%2F/{PATH}", {"type": "x-consistent-hash", "arguments": {"x-shards": 5}}),
        ("exchanges/%2F/log", {"type": "x-modulus-hash", "arguments": log}),
        (
            f"policies/%2F/{PATH}",
            policy(
                {
                    "dead-letter-exchange": LONG,
                    "max-length": 10**15,
                    "federation-upstream": LONG,
                }
            ),
        ),
        (f"operator-policies/%2F/{PATH}", policy({"max-length": 10**15})),
        (f"parameters/stream/%2F/{PATH}", {"value": {LONG: [LONG, 10**15]}}),
        (f"global-parameters/{PATH}", {"value": LONG}),
        (f"parameters/shovel/%2F/{PATH}", {"value": SHOVEL}),
        (f"parameters/federation-upstream/%2F/{PATH}", {"value": {"uri": SHOVEL["dest-uri"]}}),
    ):
        make(broker, path, body)
    ask(broker, "POST", f"bindings/%2F/e/amq.topic/q/{PATH}", {"routing_key": LONG})
    parameters = pika.URLParameters(broker.url)
    parameters.client_properties = {"connection_name": LONG, LONG: LONG}
    parameters.heartbeat = 0  # nobody sends any while the tests look at the page
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_qos(prefetch_count=10)
    for name in ("log", LONG):
        channel.basic_publish(name, "key", b"x" * 1000)
        channel.basic_publish("", LONG, LONG.encode())
    for queue in (LONG, "read"):
        channel.basic_consume(queue, lambda *_: None, consumer_tag=f"{queue[:9]}{LONG}")
    make(broker, f"streams/%2F/log/groups/{PATH}", {"shards": {"0": {"next": 0}, "1": {"next": 0}}})
    return connection


def policy(definition: dict[str, Any]) -> dict[str, Any]:
    return {"pattern": LONG, "definition": definition, "priority": 10**6, "apply-to": "queues"}


def found_in(page: Page) -> list[str]:
    """Return what axe-core and the measure of contrast find, in the light and the dark theme.

    The dark theme has other colours and nothing else, so all rules but that of contrast hold or
    fail in both.
    """
    found = []
    for scheme, rules in (("light", None), ("dark", ["color-contrast"])):
        page.emulate_media(color_scheme=scheme)
        found += [f"{scheme} {text}" for text in page.evaluate(FIND, rules)]
        found += [f"{scheme} {text}" for text in page.evaluate(PALE, CONTRAST_MIN)]
    return found


@pytest.mark.parametrize("part", VIEWS)
def test_each_view_fits_all_screens_and_shuts_nobody_out_in_both_themes(
    browser: Browser, broker: RealBroker, part: str
) -> None:
    wait_until(lambda: bool(named(broker, LONG)), "the connection to be listed")
    (connected,) = named(broker, LONG)
    with Visit(browser, broker, asks_often=False) as visit:
        visit.context.add_init_script(BIG_NUMBERS)
        page = visit.log_in()
        titled(page, "Overview")
        page.evaluate(AXE.read_text())
        wrong: list[str] = []
        for view in VIEWS[part]:
            where = view.replace("CONNECTION", quote(connected, safe=""))
            visit.see(where.replace("CHANNEL", quote(f"{connected} (1)", safe="")))
            page.evaluate(OPEN)
            wrong += [f"{view}: {text}" for text in found_in(page)]
            for wide in WIDTHS:
                page.set_viewport_size({"width": wide, "height": HEIGHT})
                taken = page.evaluate("document.documentElement.scrollWidth")
                wrong += [f"{view}: {taken} px on {wide} px"] if taken > wide else []
        assert not wrong, "\n".join(wrong)


DIALOGS = (
    ("policies", f"Edit {LONG}"), ("parameters", f"Edit {LONG}"),
    (f"queues/%2F/{PATH}", "Purge some"), (f"queues/%2F/{PATH}", "Delete"),
    ("streams/%2F/log", f"Set offset of {LONG}"),
)  # fmt: skip


def test_dialogs_fit_a_phone_and_shut_nobody_out(browser: Browser, broker: RealBroker) -> None:
    size = {"width": WIDTHS[-1], "height": HEIGHT}
    with Visit(browser, broker, asks_often=False, viewport=size) as visit:
        page = visit.log_in()
        titled(page, "Overview")
        page.evaluate(AXE.read_text())
        for where, button in DIALOGS:
            visit.see(where)
            page.get_by_role("button", name=button, exact=True).first.click()
            dialog = page.get_by_role("dialog")
            box = dialog.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= WIDTHS[-1], button
            assert dialog.evaluate("one => one.scrollWidth <= one.clientWidth"), button
            assert found_in(page) == [], button
            page.keyboard.press("Escape")
            expect(dialog).to_have_count(0)


def test_the_look_at_a_view_finds_what_is_wrong_with_it(
    browser: Browser, broker: RealBroker
) -> None:
    with Visit(browser, broker, asks_often=False) as visit:
        visit.context.add_init_script(BIG_NUMBERS)
        page = visit.log_in()
        titled(page, "Overview")
        expect(page.locator(".figures")).to_contain_text("9,876,543,210,987")
        page.evaluate(AXE.read_text())
        page.evaluate("""() => {
          const input = document.createElement("input");
          const text = document.createElement("p");
          text.append("pale");
          text.style.color = "silver";
          text.style.width = "2000px";
          document.getElementById("view").append(input, text);
        }""")
        found = found_in(page)
        assert any("label:" in text for text in found)
        assert {text.split()[0] for text in found if '"pale"' in text} == {"light"}
        assert page.evaluate("document.documentElement.scrollWidth") > WIDTHS[0]
