"""Annotate the collectives of a backward with their forward node, for timeout messages.

The message about a collective that does not complete in time names the user's line. AOTAutograd annotates only forward
nodes with it. Inductor writes the annotation into its code, which caches keep: a program that is loaded from a cache
has no graph.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_collective


class AnnotateBackwardSources(Pass):
    """Pass that sets meta["from_node"] of collectives in the backward to that of their forward node.

    This is the first forward node with the same autograd sequence number (`seq_nr`): AOTAutograd sets the
    same one for a forward op and the nodes of its backward.
    """

    provides = frozenset({"named sources"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Annotate the collectives of the backward in place, and return their number.

        AOTAutograd sets "from_node", the source of a node, on forward nodes only. A node of the backward has the
        sequence number (`seq_nr`) of the forward op of which it computes the gradient.
        """
        sources: dict[Any, Any] = {}  # seq_nr -> meta["from_node"] of the first forward node with this number
        changes = 0
        for node in gm.graph.nodes:
            if "from_node" in node.meta and "seq_nr" in node.meta:
                sources.setdefault(node.meta["seq_nr"], node.meta["from_node"])
            elif is_collective(node) and node.meta.get("seq_nr") in sources:
                node.meta["from_node"] = sources[node.meta["seq_nr"]]
                changes += 1
        return changes
