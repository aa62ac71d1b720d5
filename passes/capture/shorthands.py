"""Decompose shorthands, so that rules and passes need to know one name of an op only.

    multiply(x, y)         ->  mul(x, y)                torch has two names for one op
    x.mT                   ->  transpose(x, -2, -1)
    hstack([x, y])         ->  cat([x, y], 1)
    x.expand_as(y)         ->  expand(x, size of y)     y is not read
    take_along_dim(x, i)   ->  gather(expand(x), expand(i) % n)

A *shorthand* is an op that torch computes by calls of other ops before autograd runs. Its decomposition is torch's own,
so that values, gradients and views are those of the program. The trace of a Dynamo graph decomposes the shorthands in
`SHORTHANDS`, and `decompose_shorthands` those of an exported graph. A graph that was not captured may contain them:
they have no rule then, and run on gathered operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import OpOverload, can_decompose
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.inline import inline_op
from sp_compile.passes.graph.modes import restore_autocast

aten = torch.ops.aten

# Not in the list: ops that autocast computes in another dtype, as the casts would be lost (losses, cosine_similarity),
# ops that passes match or emit (type_as, where.Scalar, argsort, flatten), and ops that write to values of their own.
_NAMES = """
    absolute adjoint arccos arccosh arcsin arcsinh arctan arctan2 arctanh atleast_1d atleast_2d atleast_3d
    broadcast_tensors broadcast_to clip concat concatenate conj divide dsplit dstack expand_as fix fliplr flipud
    greater greater_equal hsplit hstack imag isreal less less_equal linalg_matmul mH mT meshgrid moveaxis movedim
    multiply negative not_equal numpy_T pairwise_distance real reshape_as row_stack special_digamma special_erf
    special_erfc special_exp2 special_expit special_expm1 special_gammaln special_i0 special_log1p
    special_log_softmax special_logit special_logsumexp special_ndtr special_round special_sinc special_softmax
    special_xlogy subtract swapaxes swapdims take_along_dim tensor_split tile true_divide view_as vsplit vstack
"""


def _find_shorthands() -> Iterator[OpOverload]:
    """Yield the overloads of the ops in `_NAMES`, and those of their in-place forms, that torch decomposes."""
    for name in _NAMES.split():
        for packet in (getattr(aten, name), getattr(aten, f"{name}_", None)):
            overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
            yield from filter(can_decompose, overloads)


# decomposition of each shorthand, for make_fx
SHORTHANDS: dict[OpOverload, Callable[..., Any]] = {op: op.decompose for op in _find_shorthands()}


def decompose_shorthands(gm: GraphModule) -> None:
    """Replace the shorthands in an exported graph, and in the bodies of its region ops, by the ops that they call."""
    for _, body in gm.named_children():
        if isinstance(body, GraphModule):
            decompose_shorthands(body)
    editor = GraphEditor().edit(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target in SHORTHANDS:
            with restore_autocast(node):
                inline_op(editor, node, SHORTHANDS, pre_dispatch=True)
