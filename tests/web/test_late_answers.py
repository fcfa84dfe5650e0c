"""Test that nothing a person does is lost or undone by an answer that comes meanwhile or late.

Tests hold answers of the HTTP API back, or make them up, and let them arrive at a moment of their
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pika
import pytest

from tests.support.real_broker import RealBroker, wait_until
from tests.web import visits
from tests.web.visits import Browser, Page, Visit, ask, expect, make, titled

browser, visit, pytestmark = visits.browser, visits.visit, visits.needs_chromium

CONSUMERS = {"bills": 5, "mails": 9, "parcels": 7}  # the prefetch of the consumer of each queue
BY_NAME = ["bills reader", "mails reader", "parcels reader"]
BY_PREFETCH = ["mails reader", "parcels reader", "bills reader"]
LISTED, USERS = "**/api/consumers?*", "**/api/users?*"
LAST_PAGE = 5
# The connection breaks while the first list of consumers is read.
BREAK_ONCE = """const text = Response.prototype.text;
let isBroken = false;
Response.prototype.text = function () {
  if (isBroken || !this.url.includes("/api/consumers?")) return text.call(this);
  isBroken = true;
  return Promise.reject(new TypeError("network error"));
};"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("late") / "data", shards=1)
    try:
        with pika.BlockingConnection(pika.URLParameters(made.url)) as connection:
            channel = connection.channel()
            for name, prefetch in CONSUMERS.items():
                make(made, f"queues/%2F/{name}", {})
                channel.basic_qos(prefetch_count=prefetch)
                channel.basic_consume(name, lambda *_: None, consumer_tag=f"{name} reader")
            yield made
        made.stop()
    finally:
        made.clean_up()


class Held:
    """Requests that match a pattern. The page gets no answer to them before they are let go."""

    def __init__(self, page: Page, pattern: str, method: str = "GET") -> None:
        self._page, self._pattern, self._method = page, pattern, method
        self._routes: list[Any] | None = []
        page.route(pattern, self._keep)

    def _keep(self, route: Any) -> None:
        if self._routes is None or route.request.method != self._method:
            route.fallback()
        else:
            self._routes.append(route)

    def wait(self, count: int = 1) -> None:
        """Wait until the page has asked so often."""

        def has_asked() -> bool:
            self._page.evaluate("0")  # Playwright tells of requests while it waits for an answer
            return len(self._routes or ()) >= count

        wait_until(has_asked, f"{count} requests like {self._pattern}")

    def let_go(self) -> None:
        """Let the broker answer, now and later, and wait until the page has an answer."""
        routes, self._routes = self._routes or [], None
        with self._page.expect_response(self._pattern) as first:
            for route in routes:
                route.fallback()
        first.value.finished()
        self._page.evaluate("new Promise(requestAnimationFrame)")  # the page has read it


def lists(page: Page, texts: list[str]) -> None:
    expect(page.locator(".list tbody th")).to_have_text(texts)


def go_by_menu(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Main").get_by_role("link", name=name, exact=True).click()
    titled(page, name)


def middle_of(button: Any) -> tuple[float, float]:
    box = button.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def press(page: Page, button: Any) -> None:
    page.mouse.move(*middle_of(button))
    page.mouse.down()


def many_users(page: Page, answered: Callable[[int], Any] = lambda _: None) -> None:
    """Make up pages of one user each. `answered(page)` may say another answer."""

    def answer(route: Any) -> None:
        number = int(parse_qs(urlsplit(route.request.url).query)["page"][0])
        made = answered(number)
        row = {"name": f"user {number}", "tags": [], "password_hash": "x"}
        found = {
            "items": [row], "page": number, "page_count": LAST_PAGE, "item_count": 1,
            "filtered_count": LAST_PAGE, "total_count": LAST_PAGE,
        }  # fmt: skip
        route.fulfill(**(made or {"json": found}))

    page.route(USERS, answer)


# -- clicks ----------------------------------------------------------------------------------------


def test_a_click_counts_though_the_first_rows_arrive_between_press_and_release(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    held = Held(page, LISTED)
    go_by_menu(page, "Consumers")
    held.wait()
    button = page.get_by_role("button", name="Prefetch")
    empty = middle_of(button)
    press(page, button)
    held.let_go()
    page.mouse.up()
    lists(page, BY_PREFETCH)
    assert middle_of(button) != empty  # the rows have moved the button


def test_a_tap_counts_though_the_first_rows_arrive_before_the_finger_leaves(
    browser: Browser, broker: RealBroker
) -> None:
    """The click of a finger comes after its release."""
    with Visit(browser, broker, has_touch=True) as visit:
        page = visit.log_in()
        held = Held(page, LISTED)
        go_by_menu(page, "Consumers")
        held.wait()
        x, y = middle_of(page.get_by_role("button", name="Prefetch"))
        finger = visit.context.new_cdp_session(page)
        point = {"x": x, "y": y}
        finger.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
        held.let_go()
        finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        lists(page, BY_PREFETCH)


def test_a_long_press_does_not_keep_answers_from_the_page(visit: Visit, broker: RealBroker) -> None:
    page = visit.log_in()
    held = Held(page, LISTED)
    go_by_menu(page, "Consumers")
    held.wait()
    press(page, page.get_by_role("heading", name="Consumers"))
    held.let_go()
    lists(page, BY_NAME)
    page.mouse.up()


def test_an_answer_that_waits_for_the_release_is_not_drawn_into_the_next_view(
    visit: Visit, broker: RealBroker
) -> None:
    (row,) = ask(broker, "GET", "connections")
    page = visit.log_in()
    where = f"connections/{quote(row['name'], safe='')}"
    held = Held(page, f"**/api/{where}")
    visit.go(where)
    held.wait()
    press(page, page.get_by_role("heading", name=row["name"]))
    held.let_go()
    visit.go("consumers")
    page.mouse.up()
    lists(page, BY_NAME)
    titled(page, "Consumers")


def test_a_click_before_the_first_answer_sorts_the_list(visit: Visit, broker: RealBroker) -> None:
    page = visit.log_in()
    held = Held(page, LISTED)
    go_by_menu(page, "Consumers")
    held.wait()
    page.get_by_role("button", name="Prefetch").click()
    held.let_go()
    lists(page, BY_PREFETCH)


def test_clicks_that_come_faster_than_the_answers_go_a_page_on_each(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    many_users(page)
    go_by_menu(page, "Users")
    lists(page, ["user 1"])
    held = Held(page, USERS)
    onward = page.get_by_role("button", name="Next page")
    for _ in range(3):
        onward.click()
    expect(onward).to_be_focused()
    expect(page.get_by_role("navigation", name="Pages of Users")).to_contain_text("4 / 5")
    held.let_go()
    lists(page, ["user 4"])
    page.get_by_role("button", name="Last page").click()
    lists(page, ["user 5"])
    page.get_by_role("button", name="Previous page").click()
    lists(page, ["user 4"])
    page.get_by_role("button", name="First page").click()
    lists(page, ["user 1"])


def test_a_page_that_is_not_there_any_more_does_not_undo_the_choice_of_another(
    visit: Visit, broker: RealBroker
) -> None:
    behind = {"status": 400, "json": {"error": "page_out_of_range", "reason": "Page out of range"}}
    page = visit.log_in()
    many_users(page, lambda number: behind if number == 4 else None)
    visit.go("users?page=3")
    lists(page, ["user 3"])
    held = Held(page, USERS)
    page.get_by_role("button", name="Next page").click()
    held.wait()
    page.get_by_role("button", name="Previous page").click()
    page.get_by_role("button", name="Previous page").click()
    held.let_go()
    lists(page, ["user 2"])
    expect(page.get_by_role("navigation", name="Pages of Users")).to_contain_text("2 / 5")
    # Nobody has chosen another page here: the first one is shown, and the address says so.
    page.get_by_role("button", name="Next page").click()
    lists(page, ["user 3"])
    page.get_by_role("button", name="Next page").click()
    lists(page, ["user 1"])
    assert "page=" not in page.url


# -- other views -----------------------------------------------------------------------------------


def test_a_search_that_is_typed_last_does_not_filter_the_next_view(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    go_by_menu(page, "Consumers")
    lists(page, BY_NAME)
    page.clock.install()
    page.get_by_label("Search Consumers").fill("parcels")
    go_by_menu(page, "Queues")
    page.clock.run_for(1_000)
    page.reload()
    lists(page, ["bills", "mails", "parcels"])
    assert page.url.endswith("#/queues")


@pytest.mark.parametrize(
    ("kind", "title"),
    [("exchanges", "Exchanges"), ("queues", "Queues"), ("vhosts", "Virtual hosts")],
)
def test_an_answer_to_a_delete_does_not_take_back_who_has_gone_on(
    visit: Visit, broker: RealBroker, kind: str, title: str
) -> None:
    named = f"{kind}/old" if kind == "vhosts" else f"{kind}/%2F/old"
    page = visit.log_in()
    for goes_on in (True, False):
        make(broker, named, {})
        visit.go(named)
        titled(page, "old")
        held = Held(page, f"**/api/{named}", "DELETE")
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        held.wait()
        if goes_on:
            go_by_menu(page, "Consumers")
        held.let_go()
        expect(page.locator("#notices")).to_contain_text("is deleted.")
        titled(page, "Consumers" if goes_on else title)
        page.get_by_role("button", name="Dismiss").click()


# -- virtual hosts ---------------------------------------------------------------------------------


def choose_vhost(page: Page, label: str) -> None:
    page.get_by_label("Virtual host", exact=True).first.select_option(label=label)


@pytest.mark.parametrize("first", ["list", "vhosts"])
def test_lists_show_all_virtual_hosts_when_the_chosen_one_is_deleted(
    visit: Visit, broker: RealBroker, first: str
) -> None:
    make(broker, "vhosts/brief", {})
    page = visit.log_in()
    go_by_menu(page, "Consumers")
    choose_vhost(page, "brief")
    expect(page.locator(".list")).to_contain_text("Nobody consumes.")
    go_by_menu(page, "Logs")
    ask(broker, "DELETE", "vhosts/brief")
    late = Held(page, "**/api/vhosts?*" if first == "list" else "**/api/consumers/brief?*")
    go_by_menu(page, "Consumers")
    late.wait()
    if first == "list":
        lists(page, BY_NAME)
    else:
        expect(page.get_by_label("Virtual host")).to_have_value("")
    late.let_go()
    lists(page, BY_NAME)
    titled(page, "Consumers")
    expect(page.get_by_label("Virtual host")).to_have_value("")


def test_rows_of_the_virtual_host_that_was_chosen_before_are_not_shown(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "vhosts/other", {})
    page = visit.log_in()
    early = Held(page, LISTED)
    go_by_menu(page, "Consumers")
    early.wait()
    late = Held(page, "**/api/consumers/other?*")
    choose_vhost(page, "other")
    early.let_go()
    late.wait()
    expect(page.locator(".list tbody tr")).to_have_count(0)
    late.let_go()
    expect(page.locator(".list")).to_contain_text("Nobody consumes.")
    ask(broker, "DELETE", "vhosts/other")


# -- forms -----------------------------------------------------------------------------------------


def test_the_plan_of_a_second_change_stays_until_it_is_answered(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "exchanges/%2F/twice", {"type": "x-consistent-hash", "arguments": {"x-shards": 2}})
    page = visit.log_in()
    visit.go("streams/%2F/twice")
    for number in (3, 4):
        page.get_by_label("Number of shard queues").fill(str(number))
        page.get_by_role("button", name="Show the plan").click()
        change = page.get_by_role("button", name=f"Change to {number} shard queues")
        expect(change).to_be_visible()
        for _ in range(2):  # what was asked before the plan, and behind it
            with page.expect_response("**/api/exchanges/%2F/twice/shards"):
                pass
        change.click()
        done = f"The change is done. There are {number} shard queues now."
        expect(page.locator("#view")).to_contain_text(done)
        expect(page.locator(".plan")).to_have_count(0)
    ask(broker, "DELETE", "exchanges/%2F/twice")


def test_a_password_that_is_set_before_the_first_answer_leaves_the_tags(
    visit: Visit, broker: RealBroker
) -> None:
    make(broker, "users/early", {"password": "x", "tags": "monitoring"})
    page = visit.log_in()
    held = Held(page, "**/api/users/early")
    visit.go("users/early")
    held.wait()
    page.locator("summary").filter(has_text="Tags").click()
    page.get_by_role("button", name="Set tags").click()
    expect(page.locator("#errors")).to_contain_text("not known yet")
    page.locator("summary").filter(has_text="Password").click()
    page.get_by_label("New password").fill("y")
    page.get_by_role("button", name="Set password").click()
    held.wait(2)  # the form asks for the tags
    held.let_go()
    expect(page.locator("#notices")).to_contain_text("The password is changed.")
    assert ask(broker, "GET", "users/early")["tags"] == ["monitoring"]
    ask(broker, "DELETE", "users/early")


def test_the_definitions_of_each_virtual_host_are_offered_once(
    visit: Visit, broker: RealBroker
) -> None:
    page = visit.log_in()
    visit.go("definitions")
    for choice in page.get_by_label("Definitions of").all():
        expect(choice.locator("option")).to_have_text(["everything", "virtual host /"])


# -- connections -----------------------------------------------------------------------------------


def test_a_list_whose_answer_broke_off_is_asked_for_again(visit: Visit, broker: RealBroker) -> None:
    visit.context.add_init_script(BREAK_ONCE)
    page = visit.log_in()
    go_by_menu(page, "Consumers")
    lists(page, BY_NAME)
    expect(page.locator("#errors")).to_be_empty()
