"""What a strategy is called, its mesh axes, and what a layout is called are words of one file each."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree.test_layers import FILES

from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.base.ranks import STRATEGIES

OTHER_MEANINGS = {
    "gather": {
        "sp_compile.lowering.base.options",  # what the options outputs and fallback may be
        "sp_compile.passes.context",
        "sp_compile.passes.propagate",
        "sp_compile.passes.sharding.output_rules",
        "sp_compile.pipeline",
        "sp_compile.planner.dry_run",
        "sp_compile.passes.strategies.gather_demands",
        "sp_compile.passes.cost.scan_cost",  # how scans exchange
        "sp_compile.functional.scan_shards",
        "sp_compile.lowering.scan.carries",
        "sp_compile.lowering.scan.scan_autograd",
        "sp_compile.lowering.scan.scan_ops",
        "sp_compile.passes.tensor_parallel.varying",  # a verb
    }
}
"""Files in which the word is not the strategy's name."""


def places(words: set[str]) -> dict[str, set[str]]:
    """The files in which each of these is a string."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in words:
                found[node.value].add(module)
    return found


def test_no_other_file_names_a_strategy() -> None:
    own = {strategy.name: strategy.candidates.__module__ for strategy in STRATEGIES.values()}
    axes = {name: {s.candidates.__module__ for s in STRATEGIES.values() if name in s.axes} for name in own}
    assert {"ring", "ulysses", "hybrid", "gather"} <= set(own)
    found = places(set(own))
    assert {name: found[name] - {home} - axes[name] for name, home in own.items()} == {
        name: OTHER_MEANINGS.get(name, set()) for name in own
    }


def test_no_other_file_names_a_layout() -> None:
    by_hand = {
        "sp_compile.functional.attention_calls",
        "sp_compile.functional.scans",
    }  # the default of a public signature
    found = places(set(LAYOUTS))
    assert found == {name: {"sp_compile.lowering.base.frames"} | found[name] & by_hand for name in LAYOUTS}
    assert {name for name in LAYOUTS if found[name] & by_hand} == {"contiguous"}
