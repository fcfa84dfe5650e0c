"""/api/index.html shows all that /api/openapi.json describes, to readers without a script."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management import api_page, page
from tests.http_api.conftest import Api

VOID = {"meta", "link"}


class Document(HTMLParser):
    """Reads a document whose elements must all be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert name != "style" and not name.startswith("on"), "the policy forbids it"
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


async def test_the_page_shows_every_operation_under_the_policy_of_the_page(api: Api) -> None:
    api.login = None
    description = await api.get("/api/openapi.json")
    status, text = await api.call("GET", api_page.INDEX)
    assert (status, api.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert api.headers["Content-Security-Policy"] == page.POLICY
    found = Document(text)
    assert "script" not in found.tags and "style" not in found.tags
    assert found.tags.count("details") == sum(map(len, description["paths"].values()))
    words = "".join(found.text)
    for path, operations in description["paths"].items():
        assert path in words
        for operation in operations.values():
            assert operation["description"] in words
    for name in ("x-max-length", "partitions", "binding-keys", "consumer_tag", "if-unused"):
        assert name in found.text, name
    assert "`" not in words, "what is between backticks is shown as code"
    for link in found.links:
        if link.startswith("#"):
            assert link[1:] in found.ids
        else:
            reached = link.removeprefix("../ui/") if "ui/" in link else link
            assert reached in ("", "openapi.json", *page.read_files())
    headers = {"If-None-Match": api.headers["ETag"]}
    assert await api.call("GET", api_page.INDEX, headers=headers) == (304, "")


def test_names_and_texts_stay_text() -> None:
    bad = "<u>&\"'"
    schema: dict[str, Any] = {"type": "string", "enum": [bad], "description": bad}
    parameter = {"name": bad, "in": "query", "schema": schema}
    operation = {
        "operationId": "x", "tags": [bad], "summary": f"{bad} `<u>`", "description": bad,
        "parameters": [parameter],
        "requestBody": {"content": {"application/json": {"schema": {"properties": {bad: schema}}}}},
        "responses": {"200": {"description": bad}},
    }  # fmt: skip
    text = api_page.html({
        "info": {"title": bad, "version": bad, "description": bad},
        "paths": {f"/{bad}": {"get": operation}},
        "components": {"schemas": {}, "responses": {"400": {"description": bad}}},
    })  # fmt: skip
    assert bad not in text
    assert "<code>&lt;u&gt;</code>" in text
    assert "u" not in Document(text).tags


def test_the_menu_of_the_page_leads_to_it() -> None:
    script = page.read_files()["app.js"].body.decode()
    assert f'API_PAGE = "..{api_page.INDEX}"' in script
    assert "href: API_PAGE" in script


@pytest.mark.parametrize("path", api_page.LEADING_HERE)
async def test_the_paths_of_rabbitmqs_page_lead_to_it(api: Api, path: str) -> None:
    api.login = None
    async with api.client.get(path) as answer:
        assert (answer.status, answer.url.path) == (200, api_page.INDEX)
    async with api.client.get(path, allow_redirects=False) as answer:
        assert answer.status == 301
        assert not answer.headers["Location"].startswith("/"), "a proxy may serve it elsewhere"


@pytest.mark.parametrize("path", ["/api/openapi.json", api_page.INDEX])
async def test_the_descriptions_have_the_bounds_of_long_responses(api: Api, path: str) -> None:
    api.login = None
    _, unzipped = await api.call("GET", path, headers={"Accept-Encoding": "identity"})
    status, zipped = await api.call("GET", path, headers={"Accept-Encoding": "gzip"})
    assert (status, zipped, api.headers["Content-Encoding"]) == (200, unzipped, "gzip")
    assert api.context.long_responses.made == 2
    assert (await api.call("HEAD", path))[0] == 200
    limits = HttpLimits(answers_per_address_max=0)
    config = msgspec.structs.replace(api.context.config, http=limits)
    object.__setattr__(api.context, "config_now", lambda: config)
    assert (await api.call("GET", path))[0] == 429
