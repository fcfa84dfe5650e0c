"""The description of the API is readable in a browser, wide or narrow, by mouse and keyboard."""

from __future__ import annotations

import shutil

import pytest

from tests.http_api import conftest
from tests.http_api.conftest import Api

playwright = pytest.importorskip("playwright.async_api", reason="part of the extra `test`")
api = conftest.api

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (.ci/chromium)"
)
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"


@pytest.mark.parametrize("width", [390, 1280])
async def test_nothing_is_wider_than_the_screen(api: Api, width: int) -> None:
    wrong: list[str] = []
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda said: wrong.append(said.text))
        page.on("requestfailed", lambda request: wrong.append(request.url))
        await page.goto(str(api.client.make_url("/api")))
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            assert await page.evaluate("document.documentElement.scrollWidth") == width
        await page.get_by_role("link", name="queues", exact=True).click()
        first = page.locator("#queues + details")
        await first.locator("summary").press("Enter")
        await playwright.expect(first.get_by_text("Fields of 200")).to_be_visible()
        await page.evaluate(OPEN_ALL)
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        await browser.close()
    assert wrong == []
