"""Pages of deploy/ for operators name commands, formats, sections and log lines that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shardmq.broker.shared import failures
from shardmq.supervisor.cli.app import app
from shardmq.supervisor.config import kinds
from shardmq.supervisor.formats import KINDS, VERSION

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = sorted(DEPLOY.glob("*.md"))
COMMAND = re.compile(r"(?<![\w/.-])shardctl ((?:[a-z_]+ )*[a-z_]+(?:-[a-z]+)?)")
LINK = re.compile(r"\]\(([^)\s:]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
GROUPS = (
    "cluster",
    "context",
    "definitions",
    "diagnostics",
    "pipeline",
    "ring",
    "route",
    "shards",
    "store",
)


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a document."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(document.read_text())
    }


def test_the_table_of_contents_names_each_page() -> None:
    contents = (DEPLOY / "README.md").read_text()
    assert [page.name for page in PAGES if f"| [{page.name}]({page.name}) |" not in contents] == [
        "README.md"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_to_a_section_leads_to_one(page: Path) -> None:
    wrong = [
        f"{path}#{anchor}"
        for path, anchor in LINK.findall(page.read_text())
        if anchor not in anchors(page.parent / path if path else page)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_of_shardctl_that_a_page_names_is_there(page: Path) -> None:
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]

    def is_there(first: str, second: str = "", *_: str) -> bool:
        if first not in GROUPS or not second:
            return first in commands
        return second in commands[first].commands

    named = COMMAND.findall(page.read_text())
    assert [words for words in named if not is_there(*words.split())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_setting_that_a_page_names_is_there(page: Path) -> None:
    tables = {key.partition(".")[0] for key in kinds() if "." in key}
    named = re.findall(rf"`((?:{'|'.join(tables)})\.[a-z_]+)`", page.read_text())
    assert [key for key in named if key not in kinds()] == []


def test_the_page_of_security_has_the_limits_of_wrong_passwords_and_their_times() -> None:
    page = " ".join((DEPLOY / "SECURITY.md").read_text().split())
    user = f"after {failures.USER_FAILURES_MAX} for one user"
    address = f"or {failures.ADDRESS_FAILURES_MAX} for all users"
    times = f"each {failures.USER_FAILURE_S:g} s for one user, and each"
    assert f"{user}, {address}. One more is checked {times}" in page
    assert f"each {failures.ADDRESS_FAILURE_S:g} s for all." in page


def test_a_figure_of_one_front_door_has_its_condition() -> None:
    for name in ("SIZING.md", "broker.toml"):
        text = (DEPLOY / name).read_text()
        assert "600,000" in text and "20,000" in text.partition("600,000")[0][-300:]


@pytest.mark.parametrize("name", ["shardmq.service", "compose.yaml", "shardmq-amqp.socket",
                                  "shardmq-amqps.socket", "shardmq-http.socket"])  # fmt: skip
def test_comments_of_units_keep_to_100_columns(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    assert [line for line in lines if line.lstrip().startswith("#") and len(line) > 100] == []


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    unreleased = re.compile(r"pip install[^`\n]* '?shardmq\b")
    assert [page.name for page in PAGES if unreleased.search(page.read_text())] == []


def test_the_page_of_upgrades_has_each_format() -> None:
    rows = re.findall(
        r"^\| `([A-Z]+)` \| .* \| (?:1 and )?(\d+)\b.* \|$",
        (DEPLOY / "UPGRADE.md").read_text(),
        re.MULTILINE,
    )
    formats = {kind.decode(): known.latest for kind, known in KINDS.items()}
    assert {name: int(latest) for name, latest in rows} == {"VERSION": VERSION, **formats}


def test_each_line_of_the_log_that_the_page_of_alarms_explains_is_in_the_code() -> None:
    page = (DEPLOY / "ALARMS.md").read_text()
    tables = page.partition("\n## Other lines of the log\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    # A text that goes over several lines of code is joined.
    code = "\n".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for folder in ("broker", "shardd", "supervisor")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert len(lines) > 30
    # N stands for a number, ... for any text.
    parts = [part.strip(" '") for line in lines for part in re.split(r"\.\.\.|\bN\b", line)]
    assert [part for part in parts if part not in code] == []
