"""Names of strategies, of their mesh axes and of layouts are each in one file."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree.test_layers import FILES

from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.base.ranks import STRATEGIES

OTHER_MEANINGS = {
    "gather": {
        "sp_compile.lowering.base.options",  # values of the options outputs and fallback
        "sp_compile.passes.context",
        "sp_compile.passes.propagation.propagate",
        "sp_compile.passes.sharding.output_rules",
        "sp_compile.pipeline",
        "sp_compile.planner.dry_run",
        "sp_compile.passes.strategies.gather_demands",
        "sp_compile.passes.cost.scan_cost",  # exchanges of scans
        "sp_compile.functional.scan_shards",
        "sp_compile.functional.scan_functions",
        "sp_compile.lowering.scan.carries",
        "sp_compile.lowering.scan.scan_autograd",
        "sp_compile.lowering.scan.scan_ops",
        "sp_compile.integrations._compat.counting",  # a function of accelerate
        "sp_compile.integrations._compat.sampling",  # a function of accelerate
        "sp_compile.passes.tensor_parallel.varying",  # a verb
    }
}
"""Files in which the name is not the strategy's."""


def places(names: set[str]) -> dict[str, set[str]]:
    """Return the files in which each name is a string."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
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
    defaults = {
        "sp_compile.functional.attention_functions",
        "sp_compile.functional.scan_functions",
    }  # of public signatures
    found = places(set(LAYOUTS))
    assert found == {name: {"sp_compile.lowering.base.frames"} | found[name] & defaults for name in LAYOUTS}
    assert {name for name in LAYOUTS if found[name] & defaults} == {"contiguous"}
