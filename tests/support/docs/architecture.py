"""The generated parts of ARCHITECTURE.md: the layers, and a graph after each stage."""

from __future__ import annotations

import difflib
import itertools
import re

import torch
from support.golden import captured, show
from torch.fx import GraphModule
from tree.test_layers import LAYERS, ROOT

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.context import PassContext
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.validate_shapes import validate
from sp_compile.passes.strategies.reduce_demands import ReducePartials
from sp_compile.passes.strategies.scan_demands import ShardScans

PAGE = ROOT / "ARCHITECTURE.md"
TWO = Ranks(2, SIMULATED_GROUP)


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the sum of an exclusive scan, as eager code computes it. x: (batch, sequence, width)."""
    h = x @ w
    return (h.cumsum(1) - h).sum()


def example() -> str:
    """Return the captured graph, then the lines that each stage changes."""
    gm = captured(program, torch.randn(1, 6, 4), torch.randn(4, 4))
    first = show(gm)
    Canonicalize()(gm)
    canonical, placed = show(gm), _placed(gm)
    for rewrite in (ShardScans(TWO), ReducePartials(TWO)):
        rewrite(gm)
    rewritten, plan = show(gm), PassContext.of(TWO).plan(gm)
    local = Localize(TWO)(gm).graph_module
    validate(local, plan, TWO.n)
    made = {
        "capture": "  " + first.replace("\n", "\n  "),
        "canonical": _changed(first, canonical),
        "propagate": "  " + placed.replace("\n", "\n  "),
        "strategies": _changed(canonical, rewritten),
        "localize": _changed(rewritten, show(local)),
    }
    lines = [(stage if i == 0 else "", line) for stage, text in made.items() for i, line in enumerate(text.split("\n"))]
    return "\n".join(f"{stage:10} {line}" for stage, line in lines)


def _changed(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0, lineterm="")
    return "\n".join(f"{line[0]} {line[1:]}" for line in lines if not line.startswith(("---", "+++", "@@")))


def _placed(gm: GraphModule) -> str:
    plan = PassContext.of(TWO).plan(gm)
    values = [node for node in gm.graph.nodes if node.op != "output"]
    runs = itertools.groupby(values, lambda node: str(plan.of(node)))
    lines = [f"{placement:>5}  {', '.join(node.name for node in nodes)}" for placement, nodes in runs]
    demands = [f"demand: {d.node.name} of operand {d.operand}, which is {d.have} ({d.kind})" for d in plan.demands]
    return "\n".join(lines + demands)


def layers() -> str:
    """Return the layers, low to high, each with its folders."""
    lines = []
    for layer in LAYERS:
        folders = sorted(
            p.name for p in (ROOT / layer).iterdir() if (p / "__init__.py").exists() and not p.is_symlink()
        )
        lines.append(f"{layer + '/':12} {' '.join(folders)}")
    return "\n".join(lines)


def parts() -> dict[str, str]:
    """Return the text of each generated part by its name."""
    return {name: f"```\n{text}\n```" for name, text in (("example", example()), ("layers", layers()))}


def filled(page: str) -> str:
    """Return the page with its parts generated again. Every part needs a place."""
    made = parts()

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made.pop(match[1])}\n<!-- end -->"

    page = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", part, page, flags=re.DOTALL)
    assert not made, f"parts without a place in {PAGE.name}: {sorted(made)}"
    return page
