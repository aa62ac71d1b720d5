"""Repeat grouped heads after the exchange, for kernels without support for a mask with them.

    sdpa(q, k, v, mask, enable_gqa=True)  ->  sdpa(q, repeat(k), repeat(v), mask)     on accelerators

Grouped heads are Hkv key heads, each of which H / Hkv query heads use. On CUDA the fused kernels with a mask do not
support them: attention would fall back to the kernel with an S x S matrix. The exchange of k and v came before, so only
Hkv heads were sent. Bytes moved: none. Unchanged: grouped heads of the user's program, attention without a mask, and
the CPU, whose kernel supports both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.attention.op_args import HEADS
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import exact_quotient
from sp_compile.passes.strategies.discharge import DemandPass

aten = torch.ops.aten


class ExpandHeads(DemandPass):
    """Repetition of key and value heads before masked attention, except on the devices `except_on`."""

    requires = frozenset({"no demands"})
    provides = frozenset({"planned"})

    def __init__(self, *args: Any, except_on: tuple[str, ...] = ("cpu",), **options: Any) -> None:
        """Create the pass; `except_on` has the types of devices whose kernels support grouped heads with a mask."""
        super().__init__(*args, **options)
        self.except_on = except_on

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Repeat the key and value heads of each masked attention whose heads a pass has grouped; return their number.

        The fused kernels of CUDA do not support a mask together with grouped heads.
        """
        target = aten.scaled_dot_product_attention.default
        nodes = [n for n in gm.graph.find_nodes(op="call_function", target=target) if self._needs_expansion(n)]
        for node in nodes:
            self._expand(node)
        return len(nodes)

    def _needs_expansion(self, node: Node) -> bool:
        """Return True for attention with a mask and grouped heads, on a device without a fused kernel for both.

        Heads that the user's program has grouped are excluded.
        """
        call = OpCall(node)
        grouped_by_pass = node_info(node).grouped and call["enable_gqa"]
        return grouped_by_pass and call["attn_mask"] is not None and node.meta["val"].device.type not in self.except_on

    def _expand(self, node: Node) -> None:
        """Repeat the key and value heads of an attention to the number of query heads."""
        call = OpCall(node)
        query, *keys_and_values = call.operands[:3]
        repeated = []
        with self.graph.inserting_before(node):
            for i, x in enumerate(keys_and_values, 1):
                times = exact_quotient(call.shape(0)[HEADS], call.shape(i)[HEADS])
                repeated.append(self.repeat_each(x, HEADS, times, node))
        operands = [query, *repeated, *call.operands[3:]]
        node.args, node.kwargs = call.with_operands(operands, enable_gqa=False)
