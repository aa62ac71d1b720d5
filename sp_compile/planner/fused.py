"""Replace attention on the meta device by the kernels that a GPU runs.

torch itself traces it there as products, with all scores in memory.

    scaled_dot_product_attention(q, k, v)         ->  _scaled_dot_product_flash_attention(q, k, v)[0]      half types
    scaled_dot_product_attention(q, k, v, mask)   ->  _scaled_dot_product_efficient_attention(...)[0]      otherwise

This is for dry runs of a model on the meta device; the result never runs. Attention without such a kernel remains:
grouped heads in float32, and inputs that do not have four dims.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.edit import GraphEditor

aten = torch.ops.aten
SDPA_META_OP = aten.scaled_dot_product_attention.default
FLASH_OP = aten._scaled_dot_product_flash_attention.default
EFFICIENT_OP = aten._scaled_dot_product_efficient_attention.default
MAX_HEAD_DIM = 256  # maximum head dim of flash attention


def fuse_on_meta(gm: GraphModule) -> None:
    """Replace attention on the meta device by GPU kernels, so that its predicted memory is that of a GPU."""
    edit = GraphEditor().edit(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=SDPA_META_OP):
        if node.meta["val"].device.type != "meta":
            continue
        with gm.graph.inserting_before(node):
            kernel = _fuse_node(edit, node)
            if kernel is not None:  # the first of its results is the attention
                edit.replace(node, edit.emit(operator.getitem, (kernel, 0), kernel.meta["val"][0], node))


def _fuse_node(edit: GraphEditor, node: Node) -> Node | None:
    """Add a call of a kernel with the operands of an attention to the graph, and return it; None if none supports them.

    The kernel is that of flash attention (half types, no mask, equal head dims up to `MAX_HEAD_DIM`), else that of
    memory-efficient attention (equal numbers of query and key heads).
    """
    call = OpCall(node)
    q, k, v = call.operands[:3]
    mask, dropout, causal = (call[name] for name in ("attn_mask", "dropout_p", "is_causal"))
    q_shape, k_shape, v_shape = (x.meta["val"].shape for x in (q, k, v))  # (batch, heads, rows, head dim)
    if {len(q_shape), len(k_shape), len(v_shape)} != {4}:
        return None
    kwargs, dtype = {"scale": call["scale"]}, q.meta["val"].dtype
    if mask is None and dtype in HALF and q_shape[3] == v_shape[3] <= MAX_HEAD_DIM:
        return edit.compute(FLASH_OP, (q, k, v, dropout, causal), node, kwargs)
    if q_shape[1] != k_shape[1]:
        return None
    if mask is not None:  # it is added to the scores
        mask = edit.cast(mask, dtype, node)
    computes_lse = True  # the backward of the kernel reads the log-sum-exp
    return edit.compute(EFFICIENT_OP, (q, k, v, mask, computes_lse, dropout, causal), node, kwargs)
