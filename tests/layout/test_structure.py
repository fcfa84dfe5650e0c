"""The files of the product import each other in one direction, and each class lies in one file."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("combined", "bridges", "broker", "shardd", "supervisor", "cluster", "pyspark_shardmq")
METHODS_MAX = 30
# Classes that may have more methods, each with its reason. At most five.
LARGE: dict[str, str] = {}
LARGE_MAX = 5
# Bases that say what a thing must do, which others than the product implement too.
OPEN_BASES: dict[str, str] = {}


class Module(NamedTuple):
    """One file of the product: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module
    nodes: list[ast.AST]  # all of the tree


def module(name: str, text: str) -> Module:
    """Return a file of that text, whose nodes are looked for once."""
    tree = ast.parse(text)
    return Module(name, tree, list(ast.walk(tree)))


def product(root: Path) -> list[Module]:
    """Return all files of the product below `root`; compiled ones import none of the others."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py*")):
            if path.suffix not in (".py", ".pyx"):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts if package == "pyspark_shardmq" else ("shardmq", *parts))
            text = path.read_text() if path.suffix == ".py" else ""
            found.append(module(name.removesuffix(".__init__"), text))
    return found


def imports(modules: list[Module]) -> dict[str, set[str]]:
    """Return which files each file imports, wherever in the file the import stands."""
    names = {module.name for module in modules}
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Import):
                said = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                said = [name if name in names else node.module for name in inside]
            else:
                continue
            found[module.name].update(
                name for name in said if name in names and name != module.name
            )
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return each set of files of which every one reaches every other (Tarjan's components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in path:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = path.index(name)
            if len(path) - at > 1:
                found.append(sorted(path[at:]))
            del path[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return found


def type_checking_imports(module: Module) -> Iterator[str]:
    """Give the imports of our own packages that the file hides under TYPE_CHECKING."""
    for node in module.nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for line in node.body:
                if "shardmq" in (text := ast.unparse(line)):
                    yield f"{module.name}: {text}"


def classes(modules: list[Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Give each class with the file it lies in."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                yield module, node


def large_classes(modules: list[Module]) -> list[str]:
    """Return the classes with more methods of their own than METHODS_MAX."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{module.name}.{node.name}"
        for module, node in classes(modules)
        if sum(isinstance(each, kinds) for each in node.body) > METHODS_MAX
    ]


def classes_in_pieces(modules: list[Module]) -> list[str]:
    """Return the bases that have one subclass only, which lies in another file.

    A Protocol is no base: it says what a function needs, and has no code to hand down.
    """
    where = {
        f"{module.name}.{node.name}": module.name
        for module, node in classes(modules)
        if not any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    }
    origins = {module.name: imported_names(module) for module in modules}
    subclasses: dict[str, list[str]] = defaultdict(list)
    for module, node in classes(modules):
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            first, dot, rest = name.partition(".")
            origin = origins[module.name].get(first, f"{module.name}.{first}")
            subclasses[origin + dot + rest].append(module.name)
    return [
        base
        for base, files in sorted(subclasses.items())
        if base in where and len(files) == 1 and files[0] != where[base]
    ]


def imported_names(module: Module) -> dict[str, str]:
    """Return what the names that a file imports stand for."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """Return the product. Its trees are 700,000 objects, which no other test is to carry along."""
    return product(ROOT)


def test_no_files_import_each_other_in_a_circle(modules: list[Module]) -> None:
    assert len(modules) > 200
    assert circles(imports(modules)) == []


def test_no_import_of_our_own_is_hidden_from_the_interpreter(modules: list[Module]) -> None:
    assert [line for module in modules for line in type_checking_imports(module)] == []


def test_no_class_has_more_methods_than_a_reader_can_hold(modules: list[Module]) -> None:
    large = set(large_classes(modules))
    assert sorted(large - set(LARGE)) == []
    assert sorted(set(LARGE) - large) == [], "take these off LARGE"
    assert len(LARGE) <= LARGE_MAX


def test_no_class_is_cut_in_pieces_by_inheritance(modules: list[Module]) -> None:
    cut = set(classes_in_pieces(modules))
    assert sorted(cut - set(OPEN_BASES)) == []
    assert sorted(set(OPEN_BASES) - cut) == [], "take these off"


def test_the_rules_would_notice() -> None:
    three = [
        module("a", "from b import x"),
        module("b", "def f() -> None:\n    import c"),
        module("c", "from d import y\nimport a"),
        module("d", "import os"),
    ]
    assert circles(imports(three)) == [["a", "b", "c"]]
    hidden = module("a", "if TYPE_CHECKING:\n    import os\n    from shardmq.broker import amqp")
    assert list(type_checking_imports(hidden)) == ["a: from shardmq.broker import amqp"]
    whole = "from a import Half\nclass Whole(Half): ..."
    cut = [module("a", "class Half: ..."), module("b", whole)]
    assert classes_in_pieces(cut) == ["a.Half"]
    assert classes_in_pieces([*cut, module("c", whole)]) == []
    assert classes_in_pieces([module("a", "class Half(Protocol): ..."), cut[1]]) == []
    methods = "\n".join(f"    def m{i}(self) -> None: ..." for i in range(METHODS_MAX + 1))
    assert large_classes([module("a", f"class Large:\n{methods}")]) == ["a.Large"]
