"""Annotate the collectives of a backward with their forward node, for timeout messages.

AOTAutograd annotates only forward nodes. Inductor writes the annotation into its code, which caches keep: a program
that is loaded from a cache has no graph.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_collective


class AnnotateBackwardSources(Pass):
    """Pass that copies `from_node` to the collectives of the backward.

    The source is the first forward node with the same autograd sequence number.
    """

    provides = frozenset({"named sources"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        first: dict[Any, Any] = {}
        named = 0
        for node in gm.graph.nodes:
            if "from_node" in node.meta and "seq_nr" in node.meta:
                first.setdefault(node.meta["seq_nr"], node.meta["from_node"])
            elif is_collective(node) and node.meta.get("seq_nr") in first:
                node.meta["from_node"] = first[node.meta["seq_nr"]]
                named += 1
        return named
