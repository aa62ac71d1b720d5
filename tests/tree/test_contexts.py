"""An option is defined once, in `SPConfig`. A context of passes holds the options as the user passed them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from tree.test_layers import FILES

from sp_compile import SPConfig, SpError, passes
from sp_compile.passes import PassContext

OPTIONS = {field.name for field in fields(SPConfig)}
RESOLVED = {"seq_dims", "inputs", "outputs"}  # fields of the context that the options determine together with the graph
UNVALIDATED = {"options", "given", "config"}  # names of mappings of options
READERS = {  # read mappings
    "sp_compile.runtime.session",
    "sp_compile.planner.plan",
    "sp_compile.planner.planned_steps",
    "sp_compile.planner.variants",
}
CONTEXTS = [
    one for name in dir(passes) if isinstance(one := getattr(passes, name), type) and issubclass(one, PassContext)
]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_context_repeats_no_option(context: type[PassContext]) -> None:
    assert {field.name for field in fields(context)} & OPTIONS == RESOLVED


def test_a_context_separates_options_from_fields() -> None:
    context = PassContext.of(2, tiles=8, folds=2, seq_dims={"x": 1})
    assert (context.options, context.folds, context.seq_dims) == (SPConfig(tiles=8), 2, {"x": 1})
    assert PassContext.of(context) is context


@pytest.mark.parametrize(
    ("given", "words"),
    [({"tile": 8}, "SP102: .*'tile'.*'tiles'"), ({"tiles": 0}, "SP103: tiles"), ({"cost": {"flop": 1}}, "SP703")],
)
def test_a_context_validates_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpError, match=words):
        PassContext.of(2, **given)


def mapping_reads(source: str) -> Iterator[str]:
    """Yield the expressions of a file that read an option from a mapping."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        else:
            continue
        if (
            isinstance(key, ast.Constant)
            and ast.unparse(holder).rpartition(".")[2] in UNVALIDATED
            and key.value in OPTIONS
        ):
            yield ast.unparse(node)


def test_options_are_validated_before_they_are_read() -> None:
    found = {module: list(mapping_reads(file.read_text())) for module, file in FILES.items()}
    assert {module for module, where in found.items() if where} == READERS, found


@pytest.mark.parametrize("source", ["options.get('layout', 'auto')", "self.given['layout']"])
def test_a_read_of_a_mapping(source: str) -> None:
    assert list(mapping_reads(source)) == [source]


def test_a_read_of_an_attribute() -> None:
    assert not list(mapping_reads("def f(context: PassContext): return context.options.layout"))
