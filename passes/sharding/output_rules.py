"""Resolve the option `outputs`: the placement of each output, and the outputs that stay sharded.

An output is gathered for "gather", and never for "local". For "lazy" it stays sharded, and for "auto" it does if it is
large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import current_bytes

from .placement import Placement, PlacementPlan

LARGE_OUTPUT = 1 << 20  # bytes; outputs="auto" gathers smaller outputs, at most a millisecond on a slow link

GATHER_REASON = "a result of the model (outputs='gather')"
SMALL_REASON = f"a result of the model, smaller than {LARGE_OUTPUT >> 20} MiB"


class OutputInfo(NamedTuple):
    """The placement and the source of an output."""

    placement: Placement  # of the local value
    value: torch.Tensor  # in the global view
    where: str  # the user's line that computes it


# Key of `GraphModule.meta` for the result of `output_infos`
OUTPUT_INFOS = "sp_results"


def output_infos(gm: GraphModule, plan: PlacementPlan) -> list[OutputInfo | None]:
    """Return an OutputInfo for each flattened output of a graph in the global view; None for a non-tensor."""
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    return [OutputInfo(plan.of(n), n.meta["val"], node_line(n)) if is_tensor(n) else None for n in leaves]


def output_options(output: Node, outputs: str | Sequence[str]) -> dict[Node, list[str]]:
    """Return the values of the option `outputs` ("gather", "lazy", ...) for each node that the graph returns.

    Args:
        output: The graph's output node.
        outputs: One value for all outputs, or one for each of the flattened outputs.

    Returns:
        The values by node; a node that is returned at several positions has one for each.
    """
    leaves = pytree.tree_leaves(output.args[0])
    leaf_options = [outputs] * len(leaves) if isinstance(outputs, str) else outputs
    options_of: dict[Node, list[str]] = {}
    for leaf, option in zip(leaves, leaf_options, strict=True):
        if isinstance(leaf, Node):
            options_of.setdefault(leaf, []).append(option)
    return options_of


def gather_reason(value: torch.Tensor, options: Sequence[str]) -> str:
    """Return the reason, for the report, why a sharded output is gathered; "" if it stays sharded.

    Args:
        value: The output in the global view.
        options: The values of the option `outputs` at the positions where it is returned.
    """
    if "gather" in options:
        return GATHER_REASON
    if "local" in options or "lazy" in options:
        return ""
    return SMALL_REASON if current_bytes(value) < LARGE_OUTPUT else ""  # "auto"
