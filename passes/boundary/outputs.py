"""The results of a program: where each lies, and which stay in shards, as the option `outputs` says of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.placement import Placement, PlacementPlan

LARGE_OUTPUT = 1 << 20  # bytes of a result that outputs="auto" leaves in shards: a millisecond of a slow link, or less

GATHER_REASON = "a result of the model (outputs='gather')"
SMALL_REASON = f"a result of the model, smaller than {LARGE_OUTPUT >> 20} MiB"


class OutputInfo(NamedTuple):
    """Where a result lies, its value in the global view, and the user's line that makes it."""

    placement: Placement
    value: torch.Tensor
    where: str


OUTPUT_RULES = "sp_results"
"""Where a local graph keeps an `OutputInfo` of each of its results, in order; None of what is no tensor."""


def output_infos(gm: GraphModule, plan: PlacementPlan) -> list[OutputInfo | None]:
    """Of each result of a graph in the global view, by the plan that its local graph is made from."""
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    return [OutputInfo(plan.of(n), n.meta["val"], node_line(n)) if is_tensor(n) else None for n in leaves]


def output_options(output: Node, outputs: str | Sequence[str]) -> dict[Node, list[str]]:
    """What the option says of each value that the graph returns, once for each time that it does.

    outputs: one word for all, or one for each of the results, nested ones in order.
    """
    leaves = pytree.tree_leaves(output.args[0])
    words = [outputs] * len(leaves) if isinstance(outputs, str) else outputs
    asked: dict[Node, list[str]] = {}
    for leaf, word in zip(leaves, words, strict=True):
        if isinstance(leaf, Node):
            asked.setdefault(leaf, []).append(word)
    return asked


def gather_reason(value: torch.Tensor, words: Sequence[str]) -> str:
    """Why a result that lies in shards is gathered; "" if it stays."""
    if "gather" in words:
        return GATHER_REASON
    if "local" in words:
        return ""
    return SMALL_REASON if "lazy" not in words and current_bytes(value) < LARGE_OUTPUT else ""
