"""The graphs of docs/how.md: one program after each stage of the compiler, on two ranks."""

from __future__ import annotations

import re

import torch
from support.docs.architecture import TWO, _changed, _placed
from support.docs.pages import DOCS
from support.golden import captured, show

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.context import PassContext
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.validate_shapes import validate
from sp_compile.passes.strategies.attention.ulysses_strategy import AttendWithUlysses
from sp_compile.passes.strategies.reduce_demands import ReducePartials

PAGE = DOCS / "how.md"
MARKED = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return a scalar loss of eager attention with two heads. x: (batch, sequence, width)."""
    q = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
    weights = (q @ q.mT / 2).softmax(-1)
    return (weights @ q).square().sum()


def graphs() -> dict[str, str]:
    """Return the text of each stage by its name."""
    gm = captured(program, torch.randn(1, 6, 8), torch.randn(8, 8))
    texts = {"capture": show(gm)}
    Canonicalize()(gm)
    canonical = show(gm)
    texts |= {"canonical": _changed(texts["capture"], canonical), "propagate": _placed(gm)}
    for rewrite in (AttendWithUlysses(TWO), ReducePartials(TWO)):
        rewrite(gm)
    texts["strategies"] = _changed(canonical, show(gm))
    plan = PassContext.of(TWO).plan(gm)
    local = Localize(TWO)(gm).graph_module
    validate(local, plan, TWO.n)
    return {**texts, "localize": show(local)}


def fill(page: str) -> str:
    """Return the page with its marked blocks generated again. Every stage needs a block, every block a stage."""
    texts = graphs()

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n```\n{texts.pop(match[1])}\n```\n<!-- end -->"

    page = MARKED.sub(block, page)
    assert not texts, f"stages without a block in {PAGE.name}: {sorted(texts)}"
    return page
