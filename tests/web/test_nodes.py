"""The page of a cluster shows its nodes.

A broker runs, and what a cluster would answer otherwise is made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from tests.support.real_broker import RealBroker
from tests.web import visits
from tests.web.test_views import AXE, HEIGHT, found_in
from tests.web.visits import Browser, Page, Visit, expect, titled

browser, pytestmark = visits.browser, visits.needs_chromium

WIDTHS = (1280, 390)
NAMES = ["shardmq@first.example.org", "shardmq@second.example.org", "shardmq@third.example.org"]
OWN = "amqp 0.0.0.0"
ROOM: dict[str, Any] = {
    "fd_used": 90, "fd_total": 4096, "sockets_used": 3, "connections_max": 0, "mem_limit": 2**34,
    "disk_free_alarm": False, "disk_free_limit": 10**8, "db_dir": "/var/lib/shardmq",
}  # fmt: skip
NODES: list[dict[str, Any]] = [
    {"name": NAMES[0], "running": True, "is_leader": True, "shards": [0, 1], "processors": 8,
     "mem_used": 2**30, "disk_free": 2**40, "uptime": 90_000_000, "version": "1.2.3",
     "alarms": [], "has_definitions": True, "etcd_up": True, "etcd_silent_s": 1.0,
     "in_sync_shards": [0, 2], **ROOM},
    {"name": NAMES[1], "running": True, "is_leader": False, "shards": [2], "processors": 4,
     "mem_used": 2**29, "disk_free": 2**39, "uptime": 60_000, "version": "1.2.4",
     "alarms": ["etcd does not answer"], "has_definitions": True, "etcd_up": False,
     "etcd_silent_s": 75.0, **ROOM},
    {"name": NAMES[2], "running": False, "is_leader": False, "shards": [3], "alarms": [],
     "has_definitions": False, "partitions": []},
]  # fmt: skip
PROCESSES = [
    {"name": "shard-0", "kind": "shard", "index": index, "front_door": None, "state": "ready",
     "uptime": 60.0, "rss_bytes": 10**8, "fd_used": 40, "restarts": 0, "pid": 100 + index,
     "last_end": None, "node": NAMES[index]}
    for index in (0, 1)
]  # fmt: skip
ALARMS = {
    "status": "failed", "reason": "There are alarms in effect",
    "alarms": [{"node": NAMES[1], "alarm": "etcd does not answer"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("nodes") / "data", shards=2)
    try:
        parameters = pika.URLParameters(made.url)
        parameters.heartbeat = 0
        with pika.BlockingConnection(parameters) as connection:
            connection.channel().queue_declare("orders")
            yield made
        made.stop()
    finally:
        made.clean_up()


def answers(path: str, found: Any) -> tuple[int, Any]:
    """Return the answer of a cluster instead of that of one host."""
    match path.removeprefix("/api/").split("/"):
        case ["cluster-name"]:
            keys = ("name", "running", "is_leader")
            return 200, {**found, "nodes": [{key: row[key] for key in keys} for row in NODES]}
        case ["nodes"]:
            return 200, NODES
        case ["nodes", name]:
            return 200, next(row for row in NODES if row["name"] == name.replace("%40", "@"))
        case ["processes"]:
            return 200, PROCESSES
        case ["health", "checks", "alarms"]:
            return 503, ALARMS
        case ["overview"] if "listeners" in found:
            listeners = [{**one, "node": NAMES[1]} for one in found["listeners"]]
            return 200, {**found, "listeners": listeners, "node": NAMES[1]}
        case ["queues" | "connections" | "shards", *_] if isinstance(found, dict):
            if "items" in found:
                return 200, {
                    **found,
                    "items": [{**row, "node": NAMES[0]} for row in found["items"]],
                }
            return 200, {**found, "node": NAMES[0], **COPIES, "replicas_wanted": 5}
        case ["shards", *_]:
            return 200, [{**row, "node": NAMES[row["shard"]], **COPIES} for row in found]
    return 200, found


# Of a shard, or a queue on it.
COPIES: dict[str, Any] = {
    "replicas": 3, "min_in_sync": 2, "in_sync": list(NAMES[:2]), "members": list(NAMES[:2]),
}  # fmt: skip


@pytest.fixture
def visit(browser: Browser, broker: RealBroker) -> Iterator[Visit]:
    with Visit(browser, broker, asks_often=False) as made:

        def answer(route: Any) -> None:
            real = route.fetch()
            path = route.request.url.partition("?")[0].removeprefix(made.root)
            if not real.ok and not path.startswith("/api/nodes/"):
                route.fulfill(response=real)
                return
            status, found = answers(path, real.json())
            route.fulfill(status=status, body=json.dumps(found), content_type="application/json")

        made.context.route("**/api/**", answer)
        yield made
        # The page asks again and again, and must not get the answers of one host now.
        assert made.page.evaluate("window.wasRun") is None
        made.page.goto("about:blank")
        made.context.unroute_all(behavior="ignoreErrors")


def row_of(page: Page, caption: str, text: str) -> Any:
    return page.get_by_role("region", name=caption).get_by_role("row").filter(has_text=text)


def test_the_overview_shows_the_nodes_and_their_alarms(visit: Visit) -> None:
    page = visit.log_in()
    titled(page, "Overview")
    leader = row_of(page, "Nodes", NAMES[0])
    for text in ("running", "leads", "0, 1", "8", "1.0 GiB", "1.0 TiB", "1 d 1 h", "1.2.3"):
        expect(leader).to_contain_text(text)
    expect(row_of(page, "Nodes", NAMES[1])).to_contain_text("etcd does not answer")
    expect(row_of(page, "Nodes", NAMES[2])).to_contain_text("down")
    alarm = f"{NAMES[1]}: etcd does not answer"
    expect(page.locator(".banner").filter(has_text=alarm)).to_have_count(1)
    # Processes of different nodes have the same name.
    expect(row_of(page, "Processes", "shard-0")).to_have_count(2)


def test_a_node_is_reached_from_the_menu_a_queue_and_a_connection(visit: Visit) -> None:
    page = visit.log_in()
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Nodes").click()
    titled(page, "Nodes")
    page.get_by_role("link", name=NAMES[1]).click()
    titled(page, NAMES[1])
    facts = page.locator(".facts").first
    for text in ("running", "silent for 1 min 15 s", "1.2.4", "/var/lib/shardmq", OWN):
        expect(facts).to_contain_text(text)
    expect(row_of(page, "Processes", "101")).to_have_count(1)
    expect(row_of(page, "Processes", "100")).to_have_count(0)
    for where in ("queues", "connections", "shards"):
        visit.see(where)
        page.locator("#view").get_by_role("link", name="first.example.org").first.click()
        titled(page, NAMES[0])
    visit.see("queues/%2F/orders")
    for text in (NAMES[0], "2 of 3 in sync; 5 are asked for"):
        expect(page.locator(".facts").first).to_contain_text(text)
    visit.see("shards")
    expect(page.get_by_role("cell", name="2 of 3", exact=True).first).to_be_visible()
    visit.see("shards/0")
    expect(page.locator(".facts").first).to_contain_text("3 nodes; 2 in sync confirm")


def test_a_node_that_is_down_says_so(visit: Visit) -> None:
    page = visit.log_in()
    titled(page, "Overview")
    visit.see(f"nodes/{NAMES[2]}")
    expect(page.locator(".facts").first).to_contain_text("down")
    expect(page.locator(".meters")).to_contain_text("The node tells nothing.")


def test_views_of_nodes_fit_the_screen_and_shut_nobody_out_in_both_themes(visit: Visit) -> None:
    page = visit.log_in()
    titled(page, "Overview")
    page.evaluate(AXE.read_text())
    wrong: list[str] = []
    views = ["", "nodes", *(f"nodes/{name}" for name in NAMES), "queues", "connections", "shards"]
    for view in views:
        visit.see(view)
        for wide in WIDTHS:
            page.set_viewport_size({"width": wide, "height": HEIGHT})
            taken = page.evaluate("document.documentElement.scrollWidth")
            wrong += [f"{view}: {taken} px on {wide} px"] if taken > wide else []
            wrong += [f"{view} at {wide} px: {text}" for text in found_in(page)]
    assert not wrong, "\n".join(wrong)


def test_without_a_cluster_there_are_no_nodes_in_the_menu(
    browser: Browser, broker: RealBroker
) -> None:
    with Visit(browser, broker, asks_often=False) as visit:
        page = visit.log_in()
        titled(page, "Overview")
        menu = page.get_by_role("navigation", name="Main")
        expect(menu.get_by_role("link", name="Shards")).to_have_count(1)
        expect(menu.get_by_role("link", name="Nodes")).to_have_count(0)
        expect(page.locator("#view").get_by_text("Memory, files and disk")).to_have_count(1)
