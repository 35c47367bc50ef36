"""The rule of the house (docs/architecture.md): a file imports from the floors below its own, or its own room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = [
    {"errors"},
    {"storage", "model", "trainer_utils"},
    {"dataset"},
    {"training"},
    {"training.saving"},
    {"training.during"},
    {"training.before"},
    {"train_pretrain"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
CORE = sorted(
    path
    for pattern in ("*.py", "storage/*.py", "model/*.py", "dataset/*.py", "training/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "__init__.py"
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module: str) -> str | None:
    """The room a module of ours lies in; None for other packages."""
    parts = module.split(".")
    if parts[0] not in {name.split(".")[0] for name in FLOOR_OF}:
        return None
    inner = ".".join(parts[:2])
    return inner if inner in FLOOR_OF else parts[0]


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in `if TYPE_CHECKING`, which never runs."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield from nodes_of(child)


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in nodes_of(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in whole if (ROOT / (name.replace(".", "/") + ".py")).exists()} or {node.module}
    return {name for name in names if room_of(name)}


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_a_file_imports_only_from_floors_below_or_its_own_room(path):
    mine = room_of(name_of(path))
    assert mine is not None
    for module in imports_of(path):
        theirs = room_of(module)
        assert theirs is not None
        below = FLOOR_OF[theirs] < FLOOR_OF[mine]
        assert below or theirs == mine, f"{name_of(path)} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    graph = {name_of(path): imports_of(path) for path in CORE}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_nothing_but_the_benchmark_imports_the_script():
    others = [*CORE, *(ROOT / "scripts").glob("*.py")]
    importing = {name_of(path) for path in others if "train_pretrain" in imports_of(path)}
    assert importing <= {"scripts.benchmark"}


def functions(path: Path) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in nodes if isinstance(node, kinds)]


@pytest.mark.parametrize("path", [path for path in CORE if path.name != "make_sample.py"], ids=name_of)
def test_no_module_over_350_lines_no_function_over_50(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350
    assert [(name, lines) for name, lines in functions(path) if lines > 50] == []


def test_the_script_stays_short():
    assert len((ROOT / "train_pretrain.py").read_text(encoding="utf-8").splitlines()) < 260


def test_the_help_needs_no_torch():
    """What --help imports is torch-free, or it would take seconds."""
    reached, waiting = set(), ["training.command_line"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports_at_the_top(ROOT / (module.replace(".", "/") + ".py"))
    assert "torch" not in reached and "training.config" in reached


def imports_at_the_top(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names
