"""A strategy is one file: what it is called, and its mesh axes, are words of no other."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree.test_layers import FILES

from sp_compile.config import STRATEGIES

OTHER_MEANINGS = {
    "gather": {
        "sp_compile.config",  # what the options outputs and fallback may be
        "sp_compile.passes.job",
        "sp_compile.passes.propagate",
        "sp_compile.passes.results",
        "sp_compile.pipeline",
        "sp_compile.verify",
        "sp_compile.passes",  # the pass that gathers what no other takes
        "sp_compile.passes.strategies.gather",
        "sp_compile.passes.report",
        "sp_compile.cost.scan",  # how scans exchange
        "sp_compile.functional.scan_shards",
        "sp_compile.lowering.scan.across",
        "sp_compile.lowering.scan.autograd",
        "sp_compile.lowering.scan.ops",
        "sp_compile.passes.tensor_parallel.varying",  # a verb
    }
}
"""Files in which the word is not the strategy's name."""


def test_no_other_file_names_a_strategy() -> None:
    own = {strategy.name: strategy.candidates.__module__ for strategy in STRATEGIES.values()}
    axes = {name: {s.candidates.__module__ for s in STRATEGIES.values() if name in s.axes} for name in own}
    found: dict[str, set[str]] = defaultdict(set)
    for module, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in own:
                found[node.value].add(module)
    assert {"ring", "ulysses", "hybrid", "gather"} <= set(own)
    assert {name: found[name] - {home} - axes[name] for name, home in own.items()} == {
        name: OTHER_MEANINGS.get(name, set()) for name in own
    }
