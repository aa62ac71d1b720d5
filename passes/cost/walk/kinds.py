"""Classify operators for the liveness walk, and define limits of Inductor's fusion.

The limits are those of torch._inductor.config and of Inductor's scheduler.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from sp_compile.lowering import offload_ops as offload  # noqa: F401  (registers the operators)
from sp_compile.lowering.tiles import tile_ops as ops  # noqa: F401
from sp_compile.lowering.tiles.tile_flops import is_grouped_product
from sp_compile.lowering.torch_compat import auto_functionalized, auto_functionalized_v2, namespace_of
from sp_compile.passes.graph.call import WAIT_OP, parse_overloads

# ops that start a copy to and from host memory; those in `ARRIVALS` wait for it
TO_HOST, FROM_HOST = torch.ops.sp.offload.default, torch.ops.sp.reload.default
# ops without results whose operands stay alive until the op runs
ARRIVALS = frozenset({torch.ops.sp.offloaded.default, torch.ops.sp.reloaded.default})
# functional collectives that Inductor runs in place
IN_PLACE_COLLECTIVES = frozenset({torch.ops._c10d_functional.all_reduce.default})
# ops that mutate their operands in Inductor's code
MUTATIONS = frozenset({auto_functionalized, auto_functionalized_v2})
# ops whose operands are not overwritten before the op runs
LATE_WRITE_OPS = frozenset({WAIT_OP}) | ARRIVALS | MUTATIONS
CAT = torch.ops.aten.cat.default
# results contain the operands or parts of them
CONCAT_CALLS = frozenset({CAT, WAIT_OP, operator.getitem, *parse_overloads("split_with_sizes split.Tensor")})
VIEW_CALLS = frozenset(
    parse_overloads("view _unsafe_view reshape expand permute squeeze.dim squeeze.dims unsqueeze t alias")
)
# row size above which rows need several steps, and maximum row size of a persistent GPU kernel
WIDE_ROW, WIDEST_ROW = 1024, 16384
FEWEST_ROWS, FEWEST_ELEMENTS = 4096, 5 << 20  # minimum rows and elements for which such a kernel sums over rows, too
# maximum storages that Inductor inlines into one value, for one reader and for several
INLINED_ONCE, INLINED_OFTEN = 8, 4
# prefixes of inputs that Inductor considers not freeable: `is_nonfreeable_buffers`
UNFREEABLE_INPUTS = "primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents"
MATRIX_PRODUCTS = frozenset(parse_overloads("mm bmm addmm baddbmm convolution"))
# ops that compute their operands inline and store their results
REDUCTIONS = frozenset(
    parse_overloads(
        "sum sum.dim_IntList mean mean.dim amax amin max.dim min.dim max min var_mean.correction var.correction any "
        "any.dim argmax argmin prod prod.dim_int logsumexp index_put scatter.src scatter_add index_add "
        "_unsafe_masked_index_put_accumulate _unsafe_index_put scatter_reduce.two"
    )
)
ELEMENTWISE = frozenset(
    parse_overloads(
        "embedding index.Tensor gather cat constant_pad_nd full zeros ones empty.memory_format arange.start_step "
        "full_like zeros_like ones_like empty_like clone _to_copy slice_scatter select_scatter where.self "
        "scatter.value repeat flip roll lift_fresh_copy scalar_tensor _unsafe_index.Tensor _unsafe_masked_index "
        "triu tril new_zeros new_full new_ones new_empty copy masked_fill.Scalar index_select expand view permute"
    )
)
TILE_LOOP = torch.ops.sp.run_tiles.default
ARITHMETIC_OPS = frozenset(parse_overloads("add.Tensor sub.Tensor mul.Tensor div.Tensor"))
DROPOUT_CALLS = frozenset(parse_overloads("native_dropout native_dropout_backward"))
# number of blocks of scores that a thread stores, by attention op on a CPU
CPU_FLASH_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 2,
    torch.ops.sp.attend.default: 1,
    torch.ops.sp.attend_backward.default: 2,
    torch.ops.sp.attend_backward_parts.default: 2,
}
ATTENTIONS = frozenset(
    parse_overloads(
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
        "_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward"
    )
).union(CPU_FLASH_OPS)
MAX_FUSION_DISTANCE = 64  # Maximum distance of kernels that Inductor fuses: `Scheduler.are_long_distant_nodes`
PRIMS = frozenset(f"prims::{name}" for name in "iota convert_element_type fma inductor_seeds inductor_random".split())


def is_product(node: Node) -> bool:
    """Return True for a matrix product or an attention."""
    return node.target in MATRIX_PRODUCTS or node.target in ATTENTIONS or is_grouped_product(node)


def needs_operands_in_memory(node: Node) -> bool:
    """Return True if the op needs operands in memory with certain strides, although other kernels recompute them."""
    return node.target in ATTENTIONS or namespace_of(node.target) == "sp"
