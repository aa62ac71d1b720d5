"""Three layers without an import upwards, no cycle of files or folders, and no large folder."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_ENTRIES = 16

LAYERS = ("lowering", "passes", "sp_compile")
"""Layers, low to high: operators of a rank, the compiler, the public interface. An import never goes up."""


def module_of(file: Path) -> str:
    """Return the name under which a file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "sp_compile" else ("sp_compile", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_of(*folders: str) -> list[Path]:
    """Return the Python files below the folders, without those reached by symlinks."""
    found = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return [file for file in found if file.resolve() == file]


FILES = {module_of(file): file for file in files_of("sp_compile", "passes", "lowering")}


def folder_of(module: str) -> str:
    """Return the folder of a module; a file of a layer's own folder counts as a folder, since it belongs to none."""
    path = FILES[module].relative_to(ROOT)
    return path.as_posix() if path.parent.as_posix() in LAYERS else path.parent.as_posix()


def layer_of(module: str) -> int:
    """Return the number of a module's layer, 0 for the lowest."""
    return LAYERS.index(FILES[module].relative_to(ROOT).parts[0])


def imported(source: str, module: str, package: str) -> Iterator[str]:
    """Yield the modules of the product that a source imports, at any place in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in FILES)
        if not isinstance(node, ast.ImportFrom):
            continue
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for name in node.names:
            found = next((m for m in (f"{base}.{name.name}", base) if m in FILES), None)
            if found is not None and found != module:
                yield found


@cache
def edges() -> dict[str, set[str]]:
    packages = {m: m if FILES[m].stem == "__init__" else m.rpartition(".")[0] for m in FILES}
    return {m: set(imported(FILES[m].read_text(), m, packages[m])) for m in FILES}


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of the graph, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_goes_up() -> None:
    wrong = [f"{a} imports {b}" for a, targets in edges().items() for b in targets if layer_of(a) < layer_of(b)]
    assert not sorted(wrong)


def test_no_cycle_of_files() -> None:
    assert not cycle(edges())


def test_no_cycle_of_folders() -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for source, targets in edges().items():
        folders[folder_of(source)] |= {folder_of(t) for t in targets} - {folder_of(source)}
    assert not cycle(folders)


WITH_PAGES = ("docs", "docs/recipes", "docs/reference", "docs/tutorials", "benchmarks/results")
CODE = files_of("sp_compile", "passes", "lowering", "tests", "benchmarks", "examples")
FOLDERS = sorted(
    {file.parent.relative_to(ROOT).as_posix() for file in CODE}
    | {page.parent.relative_to(ROOT).as_posix() for folder in WITH_PAGES for page in (ROOT / folder).rglob("*.md")}
)


def test_folders_include_those_of_pages() -> None:
    assert {*WITH_PAGES, "benchmarks", "benchmarks/measuring/scans", "benchmarks/results/memory", "examples"} <= {
        *FOLDERS
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_entries_of_a_folder_are_limited(folder: str) -> None:
    """A folder has at most 16 entries of any kind; the links to other layers in `sp_compile` are no folders of it."""
    found = [p for p in (ROOT / folder).iterdir() if not p.is_symlink()]
    entries = [p.name for p in found if not p.name.startswith((".", "__pycache__"))]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def types_of(file: Path) -> set[str]:
    """Names of the classes and aliases that a file makes; one letter is a type variable, capitals are a constant."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name.lstrip("_") for name in found if name.lstrip("_")[:1].isupper() and not name.isupper()}


def test_a_type_has_one_meaning() -> None:
    """`ShardScans` and `_Scan` in two files are two things of one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, file in FILES.items():
        for name in types_of(file):
            places[name].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_long_files_have_a_reason() -> None:
    """More than 500 lines: the docstring says "One file because ..."."""
    long = [m for m, f in FILES.items() if f.read_text().count("\n") > 500]
    assert not [m for m in long if "One file because" not in FILES[m].read_text()]


def test_the_entry_point_is_short() -> None:
    assert (ROOT / "sp_compile/backend.py").read_text().count("\n") <= 150


def test_long_functions_have_a_reason() -> None:
    """A file with a function of more than 60 lines has a comment "Functions of more than 60 lines because ..."."""
    for file in FILES.values():
        text = file.read_text()
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long = [node.name for node in functions if node.end_lineno - node.lineno >= 60]  # type: ignore[operator]
        assert not long or "# Functions of more than 60 lines because" in text, (file, long)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from sp_compile.passes.graph.call import Call", {"sp_compile.passes.graph.call"}),
        ("def f():\n    from .rule import rule", {"sp_compile.passes.sharding.rule"}),
        (
            "if TYPE_CHECKING:\n    from . import axes, rules",
            {"sp_compile.passes.sharding.axes", "sp_compile.passes.sharding.rules"},
        ),
        ("import sp_compile.lowering.base.errors\nimport torch", {"sp_compile.lowering.base.errors"}),
        ("from ..graph.call import Call", {"sp_compile.passes.graph.call"}),
    ],
)
def test_imports_are_recognized(source: str, found: set[str]) -> None:
    assert set(imported(source, "sp_compile.passes.sharding.placement", "sp_compile.passes.sharding")) == found


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})
    assert layer_of("sp_compile.lowering.base.errors") < layer_of("sp_compile.passes.context")
    assert layer_of("sp_compile.passes.context") < layer_of("sp_compile.backend")
