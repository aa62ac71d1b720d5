"""The parts of ARCHITECTURE.md that are made from the code: the rooms, the layers, and a graph on its way through them."""

from __future__ import annotations

import ast
import difflib
import itertools
import re

import torch
from test_layers import FILES, LAYERS, ROOT
from torch.fx import GraphModule

from sp_compile.config import Ranks
from sp_compile.lowering.simulate import GROUP
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.job import analyse, settings
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.strategies.attention.ulysses import Ulysses
from sp_compile.passes.strategies.reduce import Means, Reduce

from .golden import captured, show

PAGE = ROOT / "ARCHITECTURE.md"
TWO = Ranks(2, GROUP)


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention as eager code spells it; x is (batch, sequence, width), 1 x 6 x 8."""
    q = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = (q @ q.transpose(-2, -1) / 2).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2).square().mean()


def example() -> dict[str, str]:
    """What each room makes of the program: the whole graph first, then the lines that change."""
    gm = captured(program, torch.randn(1, 6, 8), torch.randn(8, 8))
    first = show(gm)
    Canonicalize()(gm)
    canonical, placed = show(gm), _placed(gm)
    for rewrite in (Means(TWO), Ulysses(TWO), Reduce(TWO)):
        rewrite(gm)
    rewritten, local = show(gm), show(Localize(TWO)(gm).graph_module)
    return {
        "capture": first,
        "canonical": _changed(first, canonical),
        "propagate": placed,
        "strategies": _changed(canonical, rewritten),
        "localize": _changed(rewritten, local),
    }


def _changed(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0, lineterm="")
    return "\n".join(f"{line[0]} {line[1:]}" for line in lines if not line.startswith(("---", "+++", "@@")))


def _placed(gm: GraphModule) -> str:
    plan = analyse(gm, settings(TWO))[1]
    values = [node for node in gm.graph.nodes if node.op != "output"]
    runs = itertools.groupby(values, lambda node: str(plan.of(node)))
    lines = [f"{placement:>5}  {', '.join(node.name for node in nodes)}" for placement, nodes in runs]
    demands = [f"demand: {d.node.name} of operand {d.operand}, which is {d.have} ({d.kind})" for d in plan.demands]
    return "\n".join(lines + demands)


def rooms() -> str:
    """Every folder with a module in it, and what its docstring says it is for."""
    rows = ["| room | what it makes |", "|---|---|"]
    for file in sorted(FILES.values()):
        if file.stem == "__init__":
            said = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            rows.append(f"| `{file.parent.relative_to(ROOT).as_posix()}/` | {said} |")
    return "\n".join(rows)


def layers() -> str:
    return "```\n" + LAYERS.strip("\n") + "\n```"


def parts() -> dict[str, str]:
    """Name of each generated part of the page -> its text."""
    made: dict[str, str] = {"rooms": rooms(), "layers": layers()}
    return made | {name: f"```\n{text}\n```" for name, text in example().items()}


def filled(page: str) -> str:
    """The page with its generated parts made anew; every part has to have its place."""
    made = parts()

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made.pop(match[1])}\n<!-- end -->"

    page = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", part, page, flags=re.DOTALL)
    assert not made, f"parts without a place in {PAGE.name}: {sorted(made)}"
    return page
