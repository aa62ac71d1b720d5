"""A name has one meaning in the product: module-level names, file names and the names of functions."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [f for top in ("sp_compile", "passes", "lowering") for f in sorted((ROOT / top).rglob("*.py"))]
FILES = [f for f in FILES if not any(folder.is_symlink() for folder in f.parents)]

# Shorthands for the same object in every file: operator namespaces, the file's logger, type variables, exports.
SHORTHANDS = {"aten", "sp", "c10d", "prims", "autograd", "log", "T", "P", "__all__", "__getattr__", "__dir__"}
# An operator and the public function that calls it: `torch.ops.sp.NAME` and `sp_compile.functional.NAME`.
OPERATOR_CALLS = {
    "affine_scan", "all_to_all_permute", "gathered_attention", "hybrid_attention", "linear_scan", "ring_attention",
}  # fmt: skip
# Operators whose name is a participle: `sp::` names stay.
OPERATORS = {"offloaded", "reloaded"}
SHARED_FILES = {"__init__.py", "base.py", "__main__.py"}

IRREGULAR = """
begun born bought brought built caught chosen come cut dealt done drawn felt forgotten found given gone got grown heard
held hidden kept known laid lain led left lent lost made meant met paid put said seen sent shown spelt spent split spoken
stood stuck sunk taken taught thought told understood undone woken won worn written
""".split()
VERBS = {"cut", "put", "split", "need", "seed", "embed", "feed", "exceed", "speed", "proceed", "succeed"}
NOUNS = {"padding", "string", "ring", "sharding", "mapping", "timing", "setting"}


def module_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, without those that it imports."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def without_underscores(name: str) -> str:
    """Return a name without leading underscores, since `_walk` and `walk` read as one name; `__all__` keeps them."""
    return name if name.startswith("__") else name.lstrip("_")


def is_participle(name: str) -> bool:
    """Return True if a function's name is a participle alone."""
    word = name.strip("_")
    if "_" in word or word in VERBS | NOUNS:
        return False
    return word in IRREGULAR or (word.endswith(("ed", "ing")) and len(word) > 4)


def participles(tree: ast.Module) -> Iterator[str]:
    """Yield the functions and methods, except properties, whose name is a participle alone."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (n for owner in (tree, *classes) for n in owner.body):
        if not isinstance(node, ast.FunctionDef) or node.name in OPERATORS or not is_participle(node.name):
            continue
        if not any("property" in ast.unparse(d) or is_setter(d) for d in node.decorator_list):
            yield f"{node.name}:{node.lineno}"


def is_setter(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute) and decorator.attr == "setter"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("drawn", True), ("_made", True), ("merged", True), ("running", True),
        ("parse_mask", False), ("is_sharded", False), ("split", False), ("padding", False), ("red", False),
    ],
)  # fmt: skip
def test_participles_are_recognized(name: str, found: bool) -> None:
    assert is_participle(name) == found


def test_a_module_level_name_is_defined_in_one_file() -> None:
    places = collections.defaultdict(list)
    for file in FILES:
        for name in {without_underscores(name) for name in module_names(ast.parse(file.read_text()))}:
            places[name].append(str(file.relative_to(ROOT)))
    twice = {n: f for n, f in places.items() if len(f) > 1 and n not in SHORTHANDS | OPERATOR_CALLS}
    assert not twice, "\n".join(f"{n}: {', '.join(f)}" for n, f in sorted(twice.items()))


def test_the_allow_list_holds_no_name_that_is_unique() -> None:
    count = collections.Counter(n for f in FILES for n in module_names(ast.parse(f.read_text())))
    assert {n for n in OPERATOR_CALLS if count[n] < 2} == set()


def test_a_file_name_is_unique() -> None:
    count = collections.Counter(f.name for f in FILES)
    assert {n for n, c in count.items() if c > 1} <= SHARED_FILES


def test_no_function_is_named_by_a_participle_alone() -> None:
    found = [f"{f.relative_to(ROOT)}: {p}" for f in FILES for p in participles(ast.parse(f.read_text()))]
    assert not found, "\n".join(found)
