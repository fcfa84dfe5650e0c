"""A group of typer that makes a command when it is asked for.

shardctl has more than two hundred commands. To import and build all of them takes longer than what
most of them do, and a completion must be quicker than that. For the same reason a completion leaves
the words before the cursor as they are: to check and convert a word, typer loads pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from inspect import cleandoc
from typing import Any, Final, NamedTuple

from typer.core import TyperArgument, TyperGroup, TyperOption

Make = Callable[[], Any]


def _leave_as_given(kind: Any) -> None:
    checked = kind.process_value

    def process_value(self: Any, ctx: Any, value: Any) -> Any:
        # typer parses resiliently for completions only.
        return value if ctx.resilient_parsing else checked(self, ctx, value)

    kind.process_value = process_value


_leave_as_given(TyperArgument)
_leave_as_given(TyperOption)


class Completion(NamedTuple):
    """A word that is offered in a shell, with what the classes of typer ask of it."""

    value: str
    type: str = "plain"
    help: str | None = None


def _reflowed(command: Any) -> Any:
    """Let the help of a command, or of those of a group, break its lines where the terminal ends.

    typer keeps the line breaks of the source in all paragraphs but the first.
    """
    if command.help:
        paragraphs = cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    inner = getattr(command, "commands", {})
    if not isinstance(inner, Commands):
        for each in inner.values():
            _reflowed(each)
    return command


class Commands(Mapping[str, Any]):
    """Commands of typer by name. Each is made once, when it is asked for."""

    def __init__(self, makers: Mapping[str, Make]) -> None:
        self._makers: Final = makers
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _reflowed(self._makers[name]())
            self._made[name].name = name
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def moved_behind(command: list[str], early: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the words of a command with the options that stood before it, by their names."""
    moved = [
        word
        for name in names
        if early.get(name) is not None
        for word in (f"--{name.replace('_', '-')}", str(early[name]))
    ]
    end = command.index("--") if "--" in command else len(command)
    return [*command[:end], *moved, *command[end:]]


def group_of(
    visible: Mapping[str, Make], hidden: Mapping[str, Make], early: Collection[str] = ()
) -> type[TyperGroup]:
    """Return a class of groups with these commands.

    Args:
        visible: The commands that help and completion show, in this order.
        hidden: The commands that can be called only.
        early: Parameters of the group that are given to the command as if they stood behind it.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands: Any = Commands({**visible, **hidden})

        def list_commands(self, ctx: Any) -> list[str]:
            return [*visible]

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, command, moved_behind(rest, ctx.params, early)

        def shell_complete(self, ctx: Any, incomplete: str) -> Any:
            found: list[Any] = [Completion(name) for name in visible if name.startswith(incomplete)]
            # The options of the group; the commands begin with letters.
            return found or super().shell_complete(ctx, incomplete)

    return LazyGroup
