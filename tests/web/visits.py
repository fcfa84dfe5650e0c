"""Visits to the page: a real browser, and the HTTP API beside it to compare with.

A test file names the fixtures that it uses: `browser, visit = visits.browser, visits.visit`. The
fixture `broker` is that of the file.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from tests.support.real_broker import RealBroker, wait_until

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="part of the extra `test`, large, and not everywhere"
)
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (.ci/chromium)"
)

WAIT_MS = 60_000  # on a busy machine; nobody waits longer than it takes
expect.set_options(timeout=WAIT_MS)
SHOWN_WAIT_MS = 5_000
SHOWN_MAX = 4000  # characters of a page that a failed test shows
WIDE = {"width": 1280, "height": 860}
# The page asks anew when it becomes visible. So tests do not wait for its next turn, in up to 5 s.
ASK_OFTEN = 'setInterval(() => document.dispatchEvent(new Event("visibilitychange")), 300)'
# Until the page has noticed: its listener is there before this one.
GO = """where => location.hash === where || new Promise((done) => {
  addEventListener("hashchange", done, {once: true});
  location.hash = where;
}).then(() => true)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """The browser of one person, closed at the end of the context.

    Closing it checks what must always hold: nothing was requested from another host, no script
    failed, nothing was refused by the page's own policy, and no foreign script ran. A test that
    fails says what the page showed.
    """

    def __init__(
        self, browser: Browser, broker: RealBroker, *, asks_often: bool = True, **how: Any
    ) -> None:
        """Open a page. Without `asks_often` it asks anew each 5 s, as it does for its users.

        Then the time of the processor is left to what looks at the page. `how` is for the context
        of the browser.
        """
        self.root = f"http://{broker.http}"
        self.context = browser.new_context(**{"viewport": WIDE, **how})
        if asks_often:
            self.context.add_init_script(ASK_OFTEN)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if "Policy" in said.text else None
        )
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._close()
            return
        print(self.page.url, self._shown(), self.wrong, sep="\n")
        self.context.close()

    def _shown(self) -> str:
        """Return what the page shows. A page that hangs must not hide why the test failed."""
        try:
            return self.page.inner_text("body", timeout=SHOWN_WAIT_MS)[:SHOWN_MAX]
        except sync_api.Error as error:
            return f"nothing that could be read: {error}"

    def log_in(self, user: str = "guest", password: str = "guest") -> Page:
        self.page.goto(self.root)
        self.page.get_by_label("User").fill(user)
        self.page.get_by_label("Password").fill(password)
        self.page.get_by_role("button", name="Log in").click()
        expect(self.page.locator("#menu, .wrong:not(:empty)").first).to_be_attached()
        return self.page

    def go(self, where: str) -> None:
        self.page.evaluate(GO, f"#/{where}")

    def see(self, where: str) -> None:
        """Go to a view and wait until everything that it asked for is there."""
        self.go(where)
        expect(self.page.locator("#view .faint").filter(has_text=re.compile("^…"))).to_have_count(0)

    def _close(self) -> None:
        ran = self.page.evaluate("window.wasRun")
        self.context.close()
        assert ran is None
        assert self.wrong == []
        hosts = {urlsplit(url).netloc for url in self.asked if not url.startswith("blob:")}
        assert hosts == {urlsplit(self.root).netloc}


@pytest.fixture
def visit(browser: Browser, broker: RealBroker) -> Iterator[Visit]:
    with Visit(browser, broker) as made:
        yield made


def ask(broker: RealBroker, method: str, path: str, body: Any = None) -> Any:
    headers = {
        "Authorization": "Basic " + b64encode(b"guest:guest").decode(),
        "Content-Type": "application/json",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{broker.http}/api/{path}", data, headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")
    except HTTPError as refused:
        raise AssertionError(f"{method} {path[:200]}: {refused.read().decode()}") from refused


def make(broker: RealBroker, path: str, body: Any) -> None:
    ask(broker, "PUT", path, body)


def named(broker: RealBroker, name: str) -> list[str]:
    """Return the connections whose clients chose that name, as soon as there is one."""
    found: list[str] = []

    def are_there() -> bool:
        found[:] = [
            row["name"]
            for row in ask(broker, "GET", "connections")
            if row["user_provided_name"] == name
        ]
        return bool(found)

    wait_until(are_there, f"a connection called {name}")
    return found


def titled(page: Page, text: str) -> None:
    expect(page.locator("h1")).to_have_text(text)
