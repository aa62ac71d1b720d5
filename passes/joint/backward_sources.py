"""Which node of the program each exchange of its backward belongs to: what a wait in vain is told by.

AOTAutograd notes that of a forward's nodes alone, and Inductor writes it into its code, which caches keep: a program
that was found in one has no graph to ask.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.sharding.group_names import is_collective


class AnnotateBackwardSources(Pass):
    """The exchanges of the backward get the source of the first forward node that made their node of autograd."""

    provides = frozenset({"sources are named"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        first: dict[Any, Any] = {}
        named = 0
        for node in gm.graph.nodes:
            if "from_node" in node.meta and "seq_nr" in node.meta:
                first.setdefault(node.meta["seq_nr"], node.meta["from_node"])
            elif is_collective(node) and node.meta.get("seq_nr") in first:
                node.meta["from_node"] = first[node.meta["seq_nr"]]
                named += 1
        return named
