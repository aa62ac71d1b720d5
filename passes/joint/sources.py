"""Which node of the program each exchange of its backward belongs to: what a wait in vain is told by.

AOTAutograd notes that of a forward's nodes alone, and Inductor writes it into its code, which caches keep: a program
that was found in one has no graph to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.fx import GraphModule

from sp_compile.spmd.named_groups import is_collective


def with_sources(transform: Callable[[GraphModule], Any]) -> Callable[[GraphModule], None]:
    """The same change of a joint graph, once its backward's exchanges have sources."""

    @wraps(transform)
    def run(gm: GraphModule) -> None:
        name_sources(gm)
        transform(gm)

    return run


def name_sources(joint: GraphModule) -> None:
    """Give the exchanges of the backward the source of the first forward node that made their node of autograd."""
    first: dict[Any, Any] = {}
    for node in joint.graph.nodes:
        if "from_node" in node.meta and "seq_nr" in node.meta:
            first.setdefault(node.meta["seq_nr"], node.meta["from_node"])
        elif is_collective(node) and node.meta.get("seq_nr") in first:
            node.meta["from_node"] = first[node.meta["seq_nr"]]
