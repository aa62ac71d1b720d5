"""Save the results of attention in checkpointed blocks, in place of recomputation in the backward.

At a million tokens attention is 95 % of the work, and its recomputation, with its ring, a fifth of a step. In addition
to q, k and v, the backward needs only the result and the log-sum-exp: about the size of the block's input, which
is saved in any case. They are saved if memory suffices, or if saved values may be offloaded to the host. Regions with a
selective policy are unchanged.
"""

from __future__ import annotations

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
    """Marking of every attention of a checkpointed region, unless the results are too large together."""

    requires = frozenset({"local", "mask tables"})  # attention in its final form
    provides = frozenset({"saved attention"})

    def apply(self, gm: GraphModule, context: Any) -> int:
        """Mark the results of attention in checkpointed regions as saved, and return their number.

        Regions with a selective policy of the user are unchanged. So are all regions if the results, together with all
        other values, would exceed the memory of the device, and no values may be offloaded.
        """
        # torch's checkpoint records its region in the nodes as "ac_graph_id".
        found = [node for node in all_attention_nodes(gm) if "ac_graph_id" in node.meta and not has_policy(node)]
        if not found:
            return 0
        counts = [context.times(node) for node in found]  # the number of equal layers that each node represents
        nbytes = sum(count * _output_bytes(node) for node, count in zip(found, counts))
        memory = (
            context.memory[-1] if context.memory else None
        )  # the current estimate; `used_with_tiles` excludes attention
        subject = f"results of {sum(counts)} attentions in checkpointed regions, {nbytes / GIB:.2f} GiB"
        # Saved values that exceed the memory are moved to the host later, unless the options forbid it.
        if (
            memory is not None
            and context.options.offload == "never"
            and memory.used_with_tiles + nbytes > memory.device
        ):
            why = f"with all other values they exceed the {memory.device / GIB:.1f} GiB of the device"
            self.notes.append(Note(NoteKind.RECOMPUTED, "attention", why, where=subject))
            return 0
        if memory is not None:
            context.memory[-1] = replace(memory, saved=memory.saved + nbytes)
        for node in found:
            mark_saved(node)
        self.notes.append(Note(NoteKind.SAVED, "attention", "the backward does not recompute them", where=subject))
        return len(found)


def _output_bytes(node: Node) -> int:
    """Return the bytes of an attention's result (B, H, s, E) and of the log-sum-exps, one float32 for each row."""
    x = node.meta["val"]
    num_rows = size_hint(x.numel()) // size_hint(x.shape[-1])
    return int(current_bytes(x) + num_rows * 4)
