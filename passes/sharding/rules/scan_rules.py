"""Rules of scans, such as cumsum: those of torch, and sp::scan and its relatives.

A rule names the dims of the operands and results of a call. Along the scanned dim (kind "scan") every position needs
the combined values before it, so a strategy replaces the call if that dim is sharded. All other dims pass: they may
remain sharded. An sp:: op with a frame already runs on shards. The frame describes how the rows of the scanned dim are
distributed over the ranks, and defines the placements. Segments are ids per position; the scan starts again where the
id changes. A state is the initial value of a recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function

from ._build import align_names, along_dims, factor_names
from .exchange_rules import call_frame

aten, sp = torch.ops.aten, torch.ops.sp
# The dims of operands of linear attention: batch, sequence, heads, and the rows and columns of the state.
LINEAR_ATTENTION_DIMS = {
    "q": "bshk",
    "k": "bshk",
    "v": "bshv",
    "decay": "bshk",
    "beta": "bsh",
    "a": "bshk",
    "b": "bshk",
    "starts": "bs",
    "opened": "bs",
    "closed": "bs",
    "initial": "bhkv",
}


@register_rule_function(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.cumsum.default, aten.logcumsumexp.default
)
def _cumulative_rule(call: OpCall) -> BoundRule:
    """Return the rule of a scan of torch, such as cumsum, along its argument `dim`, which has the kind "scan"."""
    return along_dims(call, [call.dim()], kind="scan")


@register_rule_function(sp.scan.default, sp.extremes.default)
def _scan_rule(call: OpCall) -> BoundRule:
    """Return the rule of a scan of x, "... s ... -> ... s ..." with s of kind "scan"; its optional segments pass, too.

    Segments have an id for each position: one vector, or a tensor that broadcasts to x.
    """
    dims = factor_names(call.ndim())
    scanned = dims[call.dim() :][:1]  # () if x has no dims
    segment_shapes = [call.shape(i) for i in range(1, len(call.operands))]
    segments = [scanned if len(shape) == 1 else align_names(shape, call.shape(), dims) for shape in segment_shapes]
    return _framed_scan_rule(call, (dims, *segments), dims, scanned)


@register_rule_function(sp.linear_scan.default)
def _linear_scan_rule(call: OpCall) -> BoundRule:
    """Return the rule of h[t] = a[t] * h[t - 1] + b[t], a scan along the dim s of t, which has the kind "scan".

    It is "... s ..., ... s ..., ... ... -> ... s ..." for a, b and the optional initial state, which has no dim s.
    """
    shape, dim = call.result_shapes()[0], call.dim(operand=1)
    names = factor_names(len(shape))
    a, b = (align_names(call.shape(i), shape, names) for i in range(2))
    state_shape, state_names = shape[:dim] + shape[dim + 1 :], names[:dim] + names[dim + 1 :]
    states = [align_names(call.shape(i), state_shape, state_names) for i in range(2, len(call.operands))]
    # invariant: the gradient of operand 2, the state, is equal on all ranks.
    return _framed_scan_rule(call, (a, b, *states), names, names[dim : dim + 1], invariant=(2,))


@register_rule_function(sp.affine_scan.default)
def _affine_scan_rule(call: OpCall) -> BoundRule:
    """Return the rule of h[t] = m[t] @ h[t - 1] + b[t], a scan along the dim s of t, which has the kind "scan".

    It is "... s k j, ... s k v, ... k v -> ... s k v" for m, b and the optional initial state. k and j are the same dim
    of the state, which is gathered.
    """
    names = factor_names(call.ndim(1))
    *batch, rows, k, v = names
    state = [(*batch, k, v)] if call["initial"] is not None else []
    operands = ((*batch, rows, k, "j"), names, *state)
    # invariant: the gradient of operand 2, the state, is equal on all ranks.
    return _framed_scan_rule(call, operands, names, (rows,), invariant=(2,), gathered=(k, "j"))


@register_rule_function(*LINEAR_ATTENTION_OPS)
def _linear_attention_rule(call: OpCall) -> BoundRule:
    """Return the rule of linear attention, a scan along the sequence s, which has the kind "scan".

    It is "b s h k, b s h k, b s h v, ... -> b s h v", or "-> b h k v" for the op that returns the final state. Each
    token reads and updates the state (k, v) of its head, so k is gathered. With documents (`opened`), there is a state
    of each of n documents, (n, h, k, v), and the batch is gathered, too.
    """
    operands = {name: tuple(dims) for name, dims in LINEAR_ATTENTION_DIMS.items() if call[name] is not None}
    if is_same_size(call.shape("decay")[-1], 1):  # one decay for all k
        operands["decay"] = ("b", "s", "h", "")
    # The dims of the state and the gathered dims, one letter for each.
    state, gathered, invariant = "bhkv", "k", list[int]()
    if call["opened"] is not None:  # documents; such calls have initial states
        state, gathered = "nhkv", "kbn"
        operands["initial"] = tuple(state)
    elif "initial" in operands:
        invariant = [list(operands).index("initial")]
    result = tuple("bshv" if call.node.target is sp.linear_attention.default else state)
    return _framed_scan_rule(call, tuple(operands.values()), result, ("s",), invariant=invariant, gathered=gathered)


def _framed_scan_rule(
    call: OpCall,
    operands: tuple[Dims, ...],
    result: Dims,
    scanned: Dims,
    invariant: Sequence[int] = (),
    gathered: Sequence[str] = (),
) -> BoundRule:
    """Return the rule of a scan, whose scanned dim has the kind "scan".

    If the call has a frame, it runs on shards and the rule has fixed placements: operands and results with the scanned
    dim are sharded along it as the frame describes, all others are replicated. Gradients of replicated operands are
    partial (each rank has a summand), except those of `invariant`.

    Args:
        call: Call of the op.
        operands: Names of the dims of each operand.
        result: Names of the dims of each result.
        scanned: The name of the scanned dim, as a tuple of one name; () for tensors without dims.
        invariant: Indices of operands whose gradients are equal on all ranks, such as the initial state: the op itself
            sends its gradient, the final state of the backward scan, to all ranks.
        gathered: Names of dims that are gathered.
    """
    results = tuple(result for _ in call.results())
    kinds = dict.fromkeys(scanned, "scan") | dict.fromkeys(gathered, "replicate")
    if call["frame"] is None or not scanned:
        return BoundRule(operands, results, kinds)
    frame = call_frame(call)
    wants: list[Placement] = [
        Shard(dims.index(scanned[0]), frame) if scanned[0] in dims else Replicate(partial_grad=i not in invariant)
        for i, dims in enumerate(operands)
    ]
    placed = Shard(result.index(scanned[0]), frame) if scanned[0] in result else Replicate()
    return BoundRule(operands, results, kinds, operand_placements=tuple(wants), result_placements=placed)
