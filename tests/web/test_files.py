"""The page has nothing that turns data into markup, and nothing from elsewhere.

All of it is shipped.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from setuptools.dist import Distribution

from shardmq.broker.controller.management import page
from tests.http_api import conftest
from tests.http_api.conftest import Api

api = conftest.api

ROOT = Path(__file__).parents[2]
ALL = page.read_files()
VENDORED = "vendor/"  # libraries as they are published; test_vendored_files_are_those_of_npm
FILES = {name: file for name, file in ALL.items() if not name.startswith(VENDORED)}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
# Each makes markup, code or a style out of a string.
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|\beval\b|new "
    r"Function|DOMParser|srcdoc|javascript:|createContextualFragment|\bstyle=|\.cssText|setTimeout\(\s*[\"'`]"
)
ELSEWHERE = re.compile(r"(https?:)?//[\w.-]+\.\w{2,}")
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org"}
IMPORT = re.compile(r"""^import (?:[^"';]* from )?["']([^"']+)["'];""", re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_of_strings(name: str) -> None:
    text = FILES[name].body.decode()
    assert not MARKUP.findall(text)
    if name != "dom.js":
        assert "createElement" not in text, "elements are made in dom.js alone"


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = FILES[name].body.decode()
    assert {found.group() for found in ELSEWHERE.finditer(text)} <= NAMESPACES
    for wanted in IMPORT.findall(text):
        assert wanted.startswith(("./", "../"))
        lies = os.path.normpath(Path(name).parent / wanted)
        assert lies in FILES


def test_nothing_is_inline_in_the_document() -> None:
    text = FILES[page.INDEX].body.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    for wanted in re.findall(r'(?:src|href)="([^"#]+)"', text):
        assert wanted in ALL


def test_vendored_files_are_those_of_npm() -> None:
    assert {
        name: hashlib.sha1(file.body).hexdigest() for name, file in ALL.items() if name not in FILES
    } == {
        "vendor/uplot/uPlot.iife.min.js": "5b16e85a17eecc7bac76f68229682e426083ee3f",
        "vendor/uplot/uPlot.min.css": "67765ea7ba4809bf6f4bb691fac615673891c53c",
    }
    assert "MIT" in (page.FILES / "vendor/uplot/LICENSE").read_text()


def test_files_stay_small() -> None:
    assert {name for name, file in FILES.items() if len(file.body.splitlines()) > 400} == set()
    assert sum(len(file.body) for file in FILES.values()) < 200_000


async def test_the_page_may_run_nothing_but_its_own_files(api: Api) -> None:
    api.login = None
    for name, file in [("", FILES[page.INDEX]), *ALL.items()]:
        status, body = await api.call("GET", page.BASE + name)
        assert (status, body) == (200, file.body.decode())
        assert api.headers["Content-Type"] == f"{file.type}; charset=utf-8"
        policy = dict(
            part.strip().split(" ", 1) for part in api.headers["Content-Security-Policy"].split(";")
        )
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert set(policy.values()) == {"'self'", "'none'"}
        assert api.headers["X-Frame-Options"] == "DENY"
        assert api.headers["X-Content-Type-Options"] == "nosniff"
        assert api.headers["Referrer-Policy"] == "no-referrer"


async def test_a_browser_asks_anew_and_gets_no_second_copy(api: Api) -> None:
    await api.call("GET", page.BASE + "app.js")
    assert api.headers["Cache-Control"] == "no-cache"
    etag = api.headers["ETag"]
    assert await api.call("GET", page.BASE + "app.js", headers={"If-None-Match": etag}) == (304, "")
    assert api.headers["ETag"] == etag
    assert (await api.call("GET", page.BASE + "app.js", headers={"If-None-Match": '"other"'}))[
        0
    ] == 200
    assert await api.call("HEAD", page.BASE + "app.js") == (200, "")


@pytest.mark.parametrize(
    "path",
    ["../app.py", "%2e%2e/app.py", "..%2f..%2fmanagement%2fapp.py", "/etc/passwd", "views", "x.js"],
)
async def test_only_the_pages_files_are_served(api: Api, path: str) -> None:
    status, found = await api.call("GET", page.BASE + path)
    assert (status, found["error"]) == (404, "Object Not Found")


async def test_a_browser_is_led_to_the_page_and_others_are_told_where_it_is(api: Api) -> None:
    api.login = None
    html = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    assert (await api.call("GET", "/", headers=html, allow_redirects=False))[0] == 302
    assert api.headers["Location"] == "ui/"
    assert (await api.call("GET", "/", headers=html))[1] == FILES[page.INDEX].body.decode()
    assert page.BASE in (await api.call("GET", "/"))[1]
    assert (await api.call("GET", "/ui"))[1] == FILES[page.INDEX].body.decode()


def test_the_wheel_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution()
    project.parse_config_files(["pyproject.toml"])
    build = project.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}  # type: ignore[attr-defined] # without an sdist's list
    folder = os.path.join("shardmq", "broker", "controller")
    packed = build.find_data_files("shardmq.broker.controller", folder)  # type: ignore[attr-defined]
    assert {f"{folder}/web/{name}" for name in ALL} <= {Path(path).as_posix() for path in packed}
