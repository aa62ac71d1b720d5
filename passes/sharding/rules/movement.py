"""Rules of ops that permute, add, remove, repeat, slice, flip, pad or shift dims; most only move data.

A rule names the dims of the operands and results of a call. A dim with the same name in an operand and a result passes:
both may be sharded along it. A dim of kind "replicate" is gathered before the call; so is a name that only a result
has. A dim named "" has size 1 or broadcasts. A lazy rule is that of an op that only moves data, so it is no reason to
shard a replicated operand. A rule function returns the rule of a call, or None: the call then runs on gathered
operands.

A contiguous piece of a dim, such as a slice, has the kind "window". Its rows remain on their ranks if it has most rows
of the dim. For other slices the dim is gathered, and `picks` records the dim from which the result selects positions.
Shifts by known numbers are described in `sharding/window_rules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads, wrap_dim
from sp_compile.passes.graph.sizes import Size, as_size, is_same_size, position_from_start
from sp_compile.passes.sharding.reshape import reshape_rule
from sp_compile.passes.sharding.rule import BoundRule, Dims, RuleFunction, register_rule_function, rule

from ._build import align_names, along_dims, bind_rule, factor_names, normalize_dims, replace_dims

aten = torch.ops.aten

_gathered_at = partial(along_dims, lazy=True)  # data moves within these dims


def _permute_rule(permute: Any) -> RuleFunction:
    """Return a rule function for an op that permutes the dims of its operand.

    Args:
        permute: Function (names of the operand's dims, call) -> names of the result's dims.
    """

    def instantiate(call: OpCall) -> BoundRule:
        """Return the rule of a call, with the dims of its result permuted."""
        dims = factor_names(call.ndim())
        return BoundRule((dims,), (tuple(permute(dims, call)),), lazy=True)

    return instantiate


rule(aten.mT.default, "... a b -> ... b a", lazy=True)


@register_rule_function(aten.adjoint.default, aten.mH.default)
def _adjoint_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a transpose that conjugates complex elements, and only moves others."""
    is_complex = call.operands[0].meta["val"].is_complex()
    return bind_rule(call, "... a b -> ... b a", lazy=not is_complex)


register_rule_function(aten.numpy_T.default, aten.t.default)(_permute_rule(lambda dims, call: dims[::-1]))
register_rule_function(aten.permute.default)(
    _permute_rule(lambda dims, call: [dims[wrap_dim(d, len(dims))] for d in call["dims"]])
)


@register_rule_function(*parse_overloads("movedim.int movedim.intlist moveaxis.int moveaxis.intlist"))
@_permute_rule
def _move_dims(dims: Dims, call: OpCall) -> Dims:
    """Return the names of the result's dims of movedim: those of `source` are at `destination`, the others in order."""
    if not dims:  # of a tensor without dims, torch permits to move dim 0
        return dims
    source, destination = (normalize_dims(call[name], len(dims)) for name in ("source", "destination"))
    moved = {d: dims[s] for s, d in zip(source, destination, strict=True)}  # by dim of the result
    others = iter(f for f in dims if f not in moved.values())
    return tuple(moved[d] if d in moved else next(others) for d in range(len(dims)))


@register_rule_function(*parse_overloads("swapaxes swapdims transpose.int"))
@_permute_rule
def _swap_dims(dims: Dims, call: OpCall) -> Dims:
    """Return the names of the result's dims of transpose: those of the two dim arguments are swapped."""
    first, second = ("axis0", "axis1") if "axis0" in call.args else ("dim0", "dim1")
    a, b = call.dim(first), call.dim(second)
    swapped = {a: b, b: a}
    return tuple(dims[swapped.get(d, d)] for d in range(len(dims)))


rule(aten.view_as_complex.default, "... c -> ...", replicate="c", lazy=True)
rule(aten.view_as_real.default, "... -> ... c", lazy=True)
register_rule_function(aten.atleast_1d.default)(lambda call: bind_rule(call, "... -> ..." if call.ndim() else "-> one"))


@register_rule_function(
    *parse_overloads("_reshape_alias _unsafe_view flatten.using_ints ravel reshape unflatten.int view")
)
def _view_rule(call: OpCall) -> BoundRule:
    """Return the rule of a view, in which dims may be groups of factors: "b s d -> (b s) d"."""
    return reshape_rule(call.shape(), call.result_shapes()[0])


@register_rule_function(aten.reshape_as.default, aten.view_as.default)
def _reshape_as_rule(call: OpCall) -> BoundRule:
    """Return the rule of x.view_as(other), which reads only the shape of `other` (`lenders`).

    `other` has the dims of the result. It need not be gathered, because a rank's shard of it has the local shape.
    """
    reshape = _view_rule(call)
    return replace(reshape, operands=(*reshape.operands, *reshape.results), lenders=(1,))


@register_rule_function(
    aten.broadcast_tensors.default, aten.broadcast_to.default, aten.expand.default, aten.expand_as.default
)
def _expand_rule(call: OpCall) -> BoundRule:
    """Return the rule of expand: a dim of size 1 that is expanded has the name "" in its operand; all others pass.

    If the op has an argument with the sizes (`sizes`), a rank passes the local sizes of a sharded result there.
    """
    result = call.result_shapes()[0]
    dims = factor_names(len(result))
    operands = tuple(align_names(call.shape(i), result, dims) for i in range(len(call.operands)))
    sizes = "size" if "size" in call.args else None
    return BoundRule(operands, tuple(dims for _ in call.results()), sizes=sizes, lazy=True)


@register_rule_function(aten.stack.default, aten.unsqueeze.default)
def _new_dim_rule(call: OpCall) -> BoundRule:
    """Return the rule of unsqueeze or stack, in which all dims of the operands pass.

    The new dim has the name "" in unsqueeze, where its size is 1, and in stack a name that no operand has.
    """
    names = factor_names(call.ndim())
    new_dim = wrap_dim(call["dim"], len(names) + 1)
    new_name = "" if call.node.target is aten.unsqueeze.default else "stacked"
    result = (*names[:new_dim], new_name, *names[new_dim:])
    return BoundRule(tuple(names for _ in call.operands), (result,), lazy=True)


@register_rule_function(aten.diag_embed.default)
def _diag_embed_rule(call: OpCall) -> BoundRule:
    """Return the rule of diag_embed: the last dim becomes two dims of the result, and the others pass in order."""
    names = factor_names(call.ndim())
    new_dims = normalize_dims((call["dim1"], call["dim2"]), len(names) + 1)
    others = iter(names[:-1])
    new_names = dict(zip(new_dims, ("row", "column")))
    result = tuple(new_names[d] if d in new_names else next(others) for d in range(len(names) + 1))
    return BoundRule((names,), (result,), {names[-1]: "replicate"}, lazy=True)


@register_rule_function(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of squeeze, which removes the dims of size 1 among the requested ones (all by default).

    A requested dim that is longer remains in the result. It is gathered, because a rank's part of it may have size 1,
    which the local call would remove. None if it is not known whether a symbolic size is 1.
    """
    shape = call.shape()
    names = factor_names(len(shape))
    requested: Sequence[int] = range(len(shape))
    if "dim" in call.args and shape:
        requested = normalize_dims(call["dim"], len(shape)) if call["dim"] != [] else ()  # squeeze(x, []) removes none
    removed = {d for d in requested if is_same_size(shape[d], 1)}
    if len(shape) - len(removed) != len(call.result_shapes()[0]):
        return None
    kinds = {names[d]: "replicate" for d in requested if d not in removed}
    result = tuple(f for d, f in enumerate(names) if d not in removed)
    return BoundRule((replace_dims(names, removed, ""),), (result,), kinds, lazy=True)


@register_rule_function(aten.repeat.default, aten.tile.default)
def _repeat_rule(call: OpCall) -> BoundRule:
    """Return the rule of repeat or tile: dims that are not repeated (count 1) pass, and the others are gathered.

    With more counts than dims, the result has new leading dims.
    """
    counts = call["repeats"] if "repeats" in call.args else call["dims"]
    ndim = max(call.ndim(), len(counts))
    num_new = ndim - call.ndim()  # leading dims of the result that the operand does not have
    counts = [1] * (ndim - len(counts)) + list(counts)
    names = factor_names(ndim)
    changed = [d for d, count in enumerate(counts) if d < num_new or not is_same_size(as_size(count), 1)]
    kinds = {names[d]: "replicate" for d in changed if d >= num_new}
    return BoundRule((names[num_new:],), (replace_dims(names, changed, "new"),), kinds, lazy=True)


@register_rule_function(aten.repeat_interleave.self_int)
def _repeat_interleave_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of repeat_interleave, which gathers the repeated dim, because its size differs in the result.

    None without a dim, for which torch flattens x.
    """
    if call["dim"] is None:
        return None
    result = replace_dims(factor_names(call.ndim()), [call.dim()], "new")
    return _gathered_at(call, [call.dim()], result)


# Dims of row_stack, vstack, hsplit, dsplit, ..., by the first letter of the name
DIM_BY_LETTER = {"r": 0, "v": 0, "h": 1, "d": 2}


def _dim_argument(call: OpCall, ndim: int) -> int:
    """Return the dim of a cat, stack or split: its argument, or that of the first letter in hstack, vsplit, .."""
    if "dim" in call.args:
        return wrap_dim(call["dim"], ndim)
    op_name = str(call.node.target).removeprefix("aten.")
    return min(DIM_BY_LETTER[op_name[0]], ndim - 1)  # hstack joins vectors along their only dim


@register_rule_function(*parse_overloads("hstack vstack row_stack dstack"))
def _stacked_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of hstack, vstack, ..: that of cat, or None if the op first adds dims to its operands."""
    ndim = len(call.result_shapes()[0])
    adds_dims = any(call.ndim(i) != ndim for i in range(len(call.operands)))
    return None if adds_dims else _cat_rule(call)


@register_rule_function(aten.cat.default, aten.concat.default, aten.concatenate.default)
def _cat_rule(call: OpCall) -> BoundRule:
    """Return the rule of cat, which gathers the joined dim of all operands; the other dims pass.

    If all operands but one are empty, such as a new KV cache, all dims of that operand pass. An operand of shape (0,)
    may be joined with operands of any dims: torch skips it.
    """
    ndim = len(call.result_shapes()[0])
    names, dim = factor_names(ndim), _dim_argument(call, ndim)
    shapes = [call.shape(i) for i in range(len(call.operands))]
    is_skipped = [len(shape) == 1 and is_same_size(shape[0], 0) and ndim > 1 for shape in shapes]
    nonempty = [i for i, shape in enumerate(shapes) if not is_skipped[i] and not is_same_size(shape[dim], 0)]
    kinds: dict[str, str] = {}
    if len(nonempty) == 1:
        joined_names = [names[dim] if i in nonempty else "" for i in range(len(shapes))]  # "": no rows to shard
        result = names
    else:
        joined_names = [f"part{i}" for i in range(len(shapes))]
        kinds = {name: "replicate" for name, skipped in zip(joined_names, is_skipped, strict=True) if not skipped}
        result = (*names[:dim], "all", *names[dim + 1 :])
    operands = tuple(
        ("",) if skipped else (*names[:dim], joined_name, *names[dim + 1 :])
        for joined_name, skipped in zip(joined_names, is_skipped, strict=True)
    )
    return BoundRule(operands, (result,), kinds, lazy=True)


@register_rule_function(aten.meshgrid.default, aten.meshgrid.indexing)
def _meshgrid_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of meshgrid of vectors: the dim of vector i is dim i of all results. None for other operands.

    With indexing="xy", the first two dims of the results are swapped.
    """
    if any(call.ndim(i) != 1 for i in range(len(call.operands))):
        return None
    dims = factor_names(len(call.operands))
    result = (*reversed(dims[:2]), *dims[2:]) if call.get("indexing") == "xy" else dims
    return BoundRule(tuple((f,) for f in dims), tuple(result for _ in dims), lazy=True)


def _pieces_rule(call: OpCall, dim: int, spans: Sequence[tuple[Size, Size]]) -> BoundRule:
    """Return the rule of a slice or split, whose results are contiguous pieces of one dim; the other dims pass.

    The dim has the kind "window": a piece with most of the rows may be sharded as the operand. Further tensor operands
    are positions (tensor_split), which are gathered.

    Args:
        call: Call of the op.
        dim: Dim of the pieces.
        spans: The pieces, as (start, length) for each result.
    """
    names = factor_names(call.ndim())
    positions = [factor_names(call.ndim(i), f"where{i}_") for i in range(1, len(call.operands))]
    kinds = {names[dim]: "window", **{f: "replicate" for operand in positions for f in operand}}
    return BoundRule((names, *positions), (names,) * len(spans), kinds, lazy=True, spans=tuple(spans))


@register_rule_function(aten.flip.default)
def _flip_rule(call: OpCall) -> BoundRule:
    """Return the rule of flip, which gathers the flipped dims."""
    return _gathered_at(call, [wrap_dim(d, call.ndim()) for d in call["dims"]])


def roll_rule(call: OpCall) -> BoundRule:
    """Return the rule of a roll with unknown shifts, which gathers the rolled dims.

    `_sliding_rule` starts from it, and lets dims with known shifts be sharded. Without dims, torch rolls the flattened
    tensor, and all dims are gathered.
    """
    return _gathered_at(call, [wrap_dim(d, call.ndim()) for d in call["dims"] or range(call.ndim())])


def pad_rule(call: OpCall) -> BoundRule:
    """Return the rule of a pad with unknown numbers, which gathers the padded dims.

    `_sliding_rule` starts from it, and lets dims with known numbers be sharded. A pad that only cuts (with negative
    numbers) is a slice.
    """
    widths = [as_size(w) for w in call["pad"]]  # (before, after) for each dim, from the last dim on
    ndim = call.ndim()
    widths_of_dim = {ndim - 1 - i // 2: widths[i : i + 2] for i in range(0, len(widths), 2)}
    padded = [d for d, pair in widths_of_dim.items() if not all(is_same_size(w, 0) for w in pair)]
    if len(padded) == 1 and all(isinstance(w, int) and w <= 0 for w in widths_of_dim[padded[0]]):
        (dim,) = padded
        before, _ = widths_of_dim[dim]
        return _pieces_rule(call, dim, [(-before, call.result_shapes()[0][dim])])
    return _gathered_at(call, padded, replace_dims(factor_names(ndim), padded, "padded"))


@register_rule_function(aten.diagonal.default)
def _diagonal_rule(call: OpCall) -> BoundRule:
    """Return the rule of diagonal, which gathers both dims; the result has the diagonal as its last dim."""
    names = factor_names(call.ndim())
    dims = [wrap_dim(call["dim1"], len(names)), wrap_dim(call["dim2"], len(names))]
    others = [f for d, f in enumerate(names) if d not in dims]
    return _gathered_at(call, dims, (*others, "diagonal"))


@register_rule_function(aten.tril.default, aten.triu.default)
def _triangle_rule(call: OpCall) -> BoundRule:
    """Return the rule of tril and triu, which gathers the last two dims, whose positions are compared."""
    return _gathered_at(call, [call.ndim() - 2, call.ndim() - 1])


def unfold_rule(call: OpCall) -> BoundRule:
    """Return the rule of unfold with unknown windows, which gathers the dim.

    `_sliding_rule` starts from it, and lets a dim with known windows be sharded. The dim of the result counts windows,
    and a new last dim has the rows of each window.
    """
    dim = wrap_dim(call.get("dim", call.get("dimension")), call.ndim())
    names = factor_names(call.ndim())
    gathered = [dim] if names else []  # [] for a tensor without dims, which unfold accepts
    return _gathered_at(call, gathered, (*replace_dims(names, [dim], "windows"), "window"))


@register_rule_function(aten.select.int, aten.unbind.int)
def _select_rule(call: OpCall) -> BoundRule:
    """Return the rule of select (x[:, i]) or unbind (all such rows), which gathers the dim that the results lack."""
    names, dim = factor_names(call.ndim()), call.dim()
    return _gathered_at(call, [dim], names[:dim] + names[dim + 1 :])


@register_rule_function(aten.slice.Tensor)
def _slice_rule(call: OpCall) -> BoundRule:
    """Return the rule of a slice: a contiguous piece of its dim; the dim is gathered for a step or an unknown start.

    torch clamps the start of a slice to the dim: x[5:] of 3 rows starts at 3. A symbolic start is known only if it is
    proved that torch does not clamp it. For a gathered dim, `picks` records that the result selects positions of it,
    so that both can belong to one sequence.
    """
    dim = call.dim()
    extent, length = call.shape()[dim], call.result_shapes()[0][dim]
    if not is_same_size(as_size(call["step"]), 1):
        start = None
    elif is_same_size(extent, length):
        start = 0
    else:
        start = _slice_start(call, extent, length)
    return _piece_rule(call, dim, start, length)


def _slice_start(call: OpCall, extent: Size, length: Size) -> Size | None:
    """Return the start of a slice as a non-negative position, or None if it is unknown or torch may clamp it.

    Args:
        call: Call of the slice; its start may be None for the start of the dim, and its end for the end of the dim.
        extent: Size of the dim.
        length: Size of the dim of the result.
    """
    start = 0 if call["start"] is None else _position(call, call["start"], extent)
    if start is None:
        return None
    if isinstance(start, int) and isinstance(extent, int):
        return min(max(start, 0), extent)
    end = extent if call["end"] is None else _position(call, call["end"], extent)
    # A length of exactly end - start, or one that extends to the end, implies that the start was not clamped.
    lengths = [extent - start, *([] if end is None else [end - start])]
    is_exact = is_same_size(start, 0) or any(is_same_size(length, x) for x in lengths)
    return start if is_exact else None


def _position(call: OpCall, position: Any, extent: Size) -> Size | None:
    """Return a position in a dim of the operand, counted from its start; None if a symbolic one may be negative."""
    return position_from_start(as_size(position), extent, call.operands[0].meta["val"])


def _piece_rule(call: OpCall, dim: int, start: Size | None, length: Size) -> BoundRule:
    """Return the rule of one piece of a dim, which is gathered if the start of the piece is unknown (None)."""
    if start is not None:
        return _pieces_rule(call, dim, [(start, length)])
    names = factor_names(call.ndim())
    result = replace_dims(names, [dim], "sliced")
    return replace(_gathered_at(call, [dim], result), picks={result[dim]: names[dim]})


@register_rule_function(aten.narrow.default)
def _narrow_rule(call: OpCall) -> BoundRule:
    """Return the rule of narrow, whose result is one piece."""
    dim = call.dim()
    return _piece_rule(call, dim, _position(call, call["start"], call.shape()[dim]), as_size(call["length"]))


SPLIT_OPS = parse_overloads("""
    chunk split.Tensor split.sizes split_with_sizes tensor_split.indices tensor_split.sections unsafe_chunk
    unsafe_split.Tensor unsafe_split_with_sizes
    hsplit.int hsplit.array vsplit.int vsplit.array dsplit.int dsplit.array
""")


@register_rule_function(*SPLIT_OPS)
def _split_rule(call: OpCall) -> BoundRule:
    """Return the rule of a split or chunk, whose results are consecutive pieces of one dim.

    The pieces of tensor_split by indices may overlap or leave gaps, in which case the dim is gathered.
    """
    dim = _dim_argument(call, call.ndim())
    lengths = [shape[dim] for shape in call.result_shapes()]
    if "indices" in call.args and not is_same_size(sum(lengths), call.shape()[dim]):
        return _gathered_at(call, [dim], replace_dims(factor_names(call.ndim()), [dim], "piece"))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return _pieces_rule(call, dim, list(zip(starts, lengths, strict=True)))
