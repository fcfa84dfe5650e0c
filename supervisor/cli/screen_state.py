"""Keep what `shardctl top` shows and what its keys change, without a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

HELP: Final = (
    "1-5, tab: list   s, S: sort by next, previous column   r: reverse   /: filter   v: vhost"
    "   space: pause   q: quit"
)
HELP_OF_CLUSTER: Final = HELP.replace("1-5, tab: list", "1-6, tab: list   n: nodes")
ESCAPE: Final = "\x1b"
RIGHT: Final = "\x1b[C"
LEFT: Final = "\x1b[D"
ENTER: Final = ("\n", "\r")
BACKSPACE: Final = ("\x7f", "\b")


class Column(NamedTuple):
    """A column: its heading, and the key of the HTTP API, with dots for what lies deeper."""

    shown: str
    key: str

    def value(self, row: dict[str, Any]) -> Any:
        """Return the value of a row, or None if the row has none."""
        found: Any = row
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found


class View(NamedTuple):
    """A list that can be looked at.

    `sort` is the heading by which it is sorted at first. The broker sorts and filters a list that
    `is_paged`, and this program the others.
    """

    name: str
    columns: tuple[Column, ...]
    sort: str
    kind: str
    is_paged: bool

    def path(self, vhost: str | None) -> tuple[str, ...]:
        """Return the path of the list in the HTTP API."""
        if vhost is None:
            return (self.kind,)
        if self.kind == "connections":
            return ("vhosts", vhost, self.kind)
        return (self.kind,) if self.kind in WITHOUT_VHOST else (self.kind, vhost)


QUEUE_COLUMNS: Final = (
    Column("vhost", "vhost"),
    Column("name", "name"),
    Column("shard", "shard"),
    Column("ready", "messages_ready"),
    Column("unacked", "messages_unacknowledged"),
    Column("consumers", "consumers"),
)
VIEWS: Final = (
    View("overview", QUEUE_COLUMNS, "ready", "queues", True),
    View(
        "queues",
        (
            *QUEUE_COLUMNS,
            Column("in/s", "message_stats.publish_details.rate"),
            Column("out/s", "message_stats.deliver_get_details.rate"),
            Column("acked/s", "message_stats.ack_details.rate"),
            Column("bytes", "message_bytes"),
            Column("state", "state"),
        ),
        "ready",
        "queues",
        True,
    ),
    View(
        "connections",
        (
            Column("name", "name"),
            Column("user", "user"),
            Column("vhost", "vhost"),
            Column("channels", "channels"),
            Column("received B/s", "recv_oct_details.rate"),
            Column("sent B/s", "send_oct_details.rate"),
            Column("state", "state"),
        ),
        "name",
        "connections",
        True,
    ),
    View(
        "groups",
        (
            Column("vhost", "vhost"),
            Column("name", "name"),
            Column("shards", "shards"),
            Column("consumers", "consumers"),
            Column("groups", "groups"),
            Column("moving", "moving"),
        ),
        "consumers",
        "virtual-queues",
        False,
    ),
    View(
        "shards",
        (
            Column("shard", "shard"),
            Column("queues", "queues"),
            Column("messages", "live_messages"),
            Column("cpu %", "cpu %"),
            Column("disk MB", "disk MB"),
            Column("syncs", "syncs"),
            Column("segments", "segments"),
            Column("alarm", "alarm"),
        ),
        "cpu %",
        "shards",
        False,
    ),
)
# The list of a cluster, and the column that rows of queues, connections and shards have there.
NODES: Final = View(
    "nodes",
    (
        Column("name", "name"),
        Column("state", "state"),
        Column("leads", "is_leader"),
        Column("shards", "shards"),
        Column("queues", "queues"),
        Column("connections", "sockets_used"),
        Column("cores", "processors"),
        Column("memory MB", "memory MB"),
        Column("disk free MB", "disk free MB"),
        Column("up s", "up s"),
        Column("version", "version"),
        Column("alarms", "alarms"),
    ),
    "name",
    "nodes",
    False,
)
NODE: Final = Column("node", "node")
WITH_NODE: Final = ("overview", "queues", "connections", "shards")
CLUSTER_VIEWS: Final = (
    *(v._replace(columns=(*v.columns, NODE)) if v.name in WITH_NODE else v for v in VIEWS),
    NODES,
)
WITHOUT_VHOST: Final = ("shards", "nodes")  # lists that neither a vhost nor a filter cuts
# Texts begin with A.
FROM_LEAST: Final = ("name", "vhost", "user", "state", "alarm", "alarms", "node", "version")


@dataclass
class ScreenState:
    """The list that is looked at, its order, its filter and its vhost."""

    filter: str = ""
    vhost: str | None = None
    is_cluster: bool = False
    is_over: bool = False
    is_paused: bool = False
    is_typing: bool = False  # Keys go into the filter.
    _at: int = 0
    _sorts: dict[str, str] = field(default_factory=dict)
    _reverses: dict[str, bool] = field(default_factory=dict)

    @property
    def views(self) -> tuple[View, ...]:
        """The lists that there are."""
        return CLUSTER_VIEWS if self.is_cluster else VIEWS

    @property
    def view(self) -> View:
        """The list that is looked at."""
        return self.views[self._at]

    @property
    def column(self) -> Column:
        """The column that the list is sorted by."""
        wanted = self._sorts.get(self.view.name, self.view.sort)
        return next(column for column in self.view.columns if column.shown == wanted)

    @property
    def is_reverse(self) -> bool:
        """Return whether the greatest comes first."""
        shown = self.column.shown
        return self._reverses.get(f"{self.view.name} {shown}", shown not in FROM_LEAST)

    def look_at(self, name: str) -> bool:
        """Choose a list by its name, and return whether there is such a list."""
        found = [at for at, view in enumerate(self.views) if view.name == name]
        self._at = found[0] if found else self._at
        return bool(found)

    def sort_by(self, shown: str) -> bool:
        """Choose a column by its heading, and return whether there is such a column."""
        is_known = any(column.shown == shown for column in self.view.columns)
        if is_known:
            self._sorts[self.view.name] = shown
        return is_known

    def shows(self, row: dict[str, Any]) -> bool:
        """Return whether the filter and the vhost let a row through."""
        if self.view.name in WITHOUT_VHOST:
            return True
        is_here = self.vhost is None or row.get("vhost") == self.vhost
        return is_here and self.filter.lower() in str(row.get("name", "")).lower()

    def line(self) -> str:
        """Return a line about the list."""
        order = "descending" if self.is_reverse else "ascending"
        parts = [f"[{self.view.name}] by {self.column.shown}, {order}"]
        parts.append(f"vhost {self.vhost}" if self.vhost is not None else "all vhosts")
        if self.is_typing:
            parts.append(f"filter: {self.filter}_")
        elif self.filter:
            parts.append(f"filter: {self.filter}")
        if self.is_paused:
            parts.append("paused")
        return "   ".join(parts)

    def press(self, key: str, vhosts: Callable[[], list[str]]) -> None:
        """Do what a key says.

        Args:
            key: The text that the terminal sends for one key, or for several quick ones.
            vhosts: Gives the names of the vhosts.
        """
        if key in (RIGHT, LEFT):
            self._at = (self._at + (1 if key == RIGHT else -1)) % len(self.views)
            return
        if key.startswith(ESCAPE):
            self.is_typing, self.filter = False, ""
            return
        for one in key:
            if self.is_typing:
                self._type(one)
            else:
                self._command(one, vhosts)

    def _type(self, key: str) -> None:
        if key in ENTER:
            self.is_typing = False
        elif key in BACKSPACE:
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key

    def _command(self, key: str, vhosts: Callable[[], list[str]]) -> None:
        names = [column.shown for column in self.view.columns]
        at = names.index(self.column.shown)
        match key:
            case "q" | "Q":
                self.is_over = True
            case "s" | "S":
                step = 1 if key == "s" else -1
                self._sorts[self.view.name] = names[(at + step) % len(names)]
            case "r":
                self._reverses[f"{self.view.name} {names[at]}"] = not self.is_reverse
            case "/":
                self.is_typing, self.filter = True, ""
            case "v":
                choices = [None, *vhosts()]
                here = choices.index(self.vhost) if self.vhost in choices else 0
                self.vhost = choices[(here + 1) % len(choices)]
            case " ":
                self.is_paused = not self.is_paused
            case "\t":
                self._at = (self._at + 1) % len(self.views)
            case "n":
                self.look_at(NODES.name)
            case _ if key.isdecimal() and 1 <= int(key) <= len(self.views):
                self._at = int(key) - 1
