"""Whether attention inside checkpointed blocks is computed again in the backward, or its results stay.

At a million tokens attention is 95 % of the work, and running it again, with its ring, a fifth of a step. Its result
and its log-sum-exp are all that its backward takes of it beside q, k and v: about as many bytes as the block's input,
which stays in any case. They stay if there is room, or if what is kept may wait on the host. A selective policy decides
for its own region.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import has_policy, mark_saved, size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Note, NoteKind
from sp_compile.passes.cost.attention_memory import GIB
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.attention_axes import all_attention_nodes


class SaveAttentionOutputs(Pass):
    """Marks every attention of a checkpointed region, unless they are too large together."""

    requires = frozenset({"local", "tables are made"})  # attention as it will be
    provides = frozenset({"attention is kept"})

    def apply(self, gm: GraphModule, job: Any) -> int:
        found = [node for node in all_attention_nodes(gm) if "ac_graph_id" in node.meta and not has_policy(node)]
        if not found:
            return 0
        times = [job.times(node) for node in found]
        taken, memory = sum(map(operator.mul, map(_output_bytes, found), times)), job.memory[-1] if job.memory else None
        what = f"results of {sum(times)} attentions in checkpointed regions, {taken / GIB:.2f} GiB"
        if memory is not None and job.offload == "never" and memory.used_with_tiles + taken > memory.device:
            why = f"with all else they are more than the {memory.device / GIB:.1f} GiB of the device"
            self.notes.append(Note(NoteKind.RECOMPUTED, "attention", why, where=what))
            return 0
        if memory is not None:
            job.memory[-1] = replace(memory, saved=memory.saved + taken)
        for node in found:
            mark_saved(node)
        self.notes.append(Note(NoteKind.SAVED, "attention", "the backward attends no second time", where=what))
        return len(found)


def _output_bytes(node: Node) -> int:
    """Of its result (B, H, s, E), and of a log-sum-exp in float32 or wider for every row."""
    x = node.meta["val"]
    return int(current_bytes(x) + size_hint(x.numel()) // size_hint(x.shape[-1]) * 4)
