"""Rules of reads and writes at indices: indexed dims are gathered, the dims of the index pass.

A rule names the dims of the operands and results of a call. A dim with the same name in an operand and a result passes:
both may be sharded along it. A dim of kind "replicate" is gathered before the call. A dim named "" has size 1 or
broadcasts. `picks` records that a dim of the result selects positions of a dim of the operand, so that passes recognize
both as the same sequence. A rule function returns the rule of a call, or None: the call then runs on gathered operands.
"""

from __future__ import annotations

import math

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads, wrap_dim
from sp_compile.passes.graph.sizes import Size, is_same_size
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function, rule

from ._build import align_names, bind_rule, factor_names, normalize_dims, replace_dims

aten = torch.ops.aten

rule([aten.bucketize.Scalar, aten.searchsorted.Scalar], "k -> ", replicate="k")
rule(aten.bucketize.Tensor, "..., k -> ...", replicate="k")
rule(aten.isin.Tensor_Scalar, "... -> ...")


@register_rule_function(aten.histc.default)
def _histc_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of histc: each rank counts its values, and the counts are added (kind "sum").

    `pad` fills the padded rows of a shard with a value after the last bin, which is not counted. The result is None for
    values of several dims, for equal bounds (torch then uses the minimum and maximum of all values), for an upper bound
    that is not known, and for one after which the dtype has no value, such as 255 in uint8.
    """
    low, high = call["min"], call["max"]
    if call.ndim() != 1 or low == high or not isinstance(high, int | float):
        return None
    # For large floats, high + 1 would be rounded to high, which the last bin counts: from 2**24 on in float32.
    # `pad` is (index of the operand, value).
    dtype = call.operands[0].meta["val"].dtype
    if dtype.is_floating_point:
        beyond, largest = 2 * max(high, 1), torch.finfo(dtype).max
    else:
        beyond, largest = math.floor(high) + 1, torch.iinfo(dtype).max
    if beyond > largest:
        return None
    return bind_rule(call, "k -> bins", sum="k", pad=(0, beyond))


@register_rule_function(aten.searchsorted.Tensor)
def _searchsorted_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of searchsorted, which gathers the bounds and passes the dims of the values.

    Bounds are rows, one for each row of values, or one vector for values of any shape. None with a third operand
    (sorter).
    """
    if len(call.operands) != 2:
        return None
    text = "k, ... -> ..." if call.ndim(0) == 1 else "... k, ... v -> ... v"
    return bind_rule(call, text, replicate="k")


def has_sparse_gradient(call: OpCall) -> bool:
    """Return True if the gradient of the table that the op reads is a sparse tensor, which ranks cannot add.

    Examples are embedding(.., sparse=True) and gather(.., sparse_grad=True).
    """
    return bool(call.get("sparse") or call.get("sparse_grad"))


@register_rule_function(aten.isin.Tensor_Tensor)
def _isin_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of isin, which gathers the set of values in which each element is looked up."""
    dims, value_set = factor_names(call.ndim()), factor_names(call.ndim(1), "tested")
    return BoundRule((dims, value_set), (dims,), dict.fromkeys(value_set, "replicate"))


@register_rule_function(aten.index.Tensor)
def _index_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of x[i, :, j], which gathers the indexed dims of x; the dims of the indices pass.

    None for a boolean index, whose result has an unknown size. If one vector indexes one dim, `picks` records that the
    dim of the result selects positions of that dim, so that both can belong to one sequence.
    """
    indexed = _indexed_dims(call)
    if indexed is None:
        return None
    names = factor_names(call.ndim())
    new_names, index_names = _index_dims([call.shape(i) for i in range(1, len(call.operands))])
    result = _insert_index_dims(names, indexed, new_names)
    picks = {new_names[0]: names[indexed[0]]} if len(indexed) == len(new_names) == 1 else {}
    return BoundRule((names, *index_names), (result,), {names[d]: "replicate" for d in indexed}, picks=picks)


def _insert_index_dims(names: Dims, indexed: list[int], new_names: Dims) -> Dims:
    """Return the names of the dims of x[indices], with those of the indices in place of the indexed dims.

    For x[:, i] with the dims (d0, d1, d2) and a matrix i, they are (d0, index0, index1, d2). For x[i, :, j], in which a
    slice separates the indexed dims, torch puts the dims of the indices first.

    Args:
        names: Names of the dims of x.
        indexed: Indexed dims of x.
        new_names: Names of the broadcast dims of the indices.
    """
    is_contiguous = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if is_contiguous else 0
    other_names = tuple(f for d, f in enumerate(names) if d not in indexed)
    return (*other_names[:start], *new_names, *other_names[start:])


def _indexed_dims(call: OpCall) -> list[int] | None:
    """Return the dims that integer tensors index, or None if there are none or an index is a mask."""
    indices = call["indices"]
    indexed = [d for d, index in enumerate(indices) if index is not None]
    has_mask = any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in indexed)
    return None if has_mask or not indexed else indexed


def _index_dims(shapes: list[tuple[Size, ...]]) -> tuple[Dims, tuple[Dims, ...]]:
    """Return names for the indices of x[i, j], which broadcast together.

    For an i of shape (2, 1) and a j of shape (3,), these are ("index0", "index1") and (("index0", ""), ("index1",)).

    Args:
        shapes: Shape of each index.

    Returns:
        The names of the dims of the broadcast shape, and the names of the dims of each index.
    """
    ndim = max(len(shape) for shape in shapes)
    broadcast_shape: list[Size] = [1] * ndim
    for shape in shapes:
        for d, size in enumerate(shape, ndim - len(shape)):
            broadcast_shape[d] = size if broadcast_shape[d] == 1 else broadcast_shape[d]
    names = factor_names(ndim, "index")
    return names, tuple(align_names(shape, broadcast_shape, names) for shape in shapes)


@register_rule_function(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of x[i, :, j] = values, in which the dims of x that are not indexed pass.

    The indexed dims, the dims of the indices, and those dims of the values are gathered.
    """
    indexed = _indexed_dims(call)
    if indexed is None:
        return _masked_put_rule(call)
    names, last = factor_names(call.ndim()), len(call.operands) - 1  # the last operand: the values
    index_ndims = [call.ndim(i) for i in range(1, last)]
    index_names = tuple(factor_names(ndim, f"index{i}_") for i, ndim in enumerate(index_ndims))
    # The values broadcast to the shape of x[indices].
    put_names = factor_names(max(index_ndims), "put")
    target = _insert_index_dims(names, indexed, put_names)
    sizes = dict(zip(names, call.shape(), strict=True))
    target_shape = [sizes.get(f, 0) for f in target]  # 0 for dims of `put_names`: values of size 1 broadcast there
    values = align_names(call.shape(last), target_shape, target)
    gathered = {f for dims in index_names for f in dims} | {f for f in values if f in put_names}
    gathered |= {names[d] for d in indexed}
    return BoundRule((names, *index_names, values), (names,), dict.fromkeys(sorted(gathered), "replicate"))


def _masked_put_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of x[mask] = values, in which all dims pass: each rank writes to its own rows.

    All masked positions must get the same values. The result is None if `values` has one entry for each of them, as a
    rank does not know where its entries begin; also for further indices, or a mask of later dims, as in x[:, mask].
    """
    dims, value_shape = factor_names(call.ndim()), call.shape("values")
    has_one_index = len(call.operands) == 3  # x, the mask and the values
    if not has_one_index or call["indices"][0] is not call.operands[1]:
        return None
    masked, unmasked = dims[: call.ndim(1)], dims[call.ndim(1) :]  # the mask has the first dims of x
    sizes_of_positions = value_shape[: max(len(value_shape) - len(unmasked), 0)]
    if not all(is_same_size(size, 1) for size in sizes_of_positions):
        return None
    # The values broadcast to x[mask], which has one dim, of unknown size (0 here), in place of the masked ones. It is
    # never sharded, so its name is "".
    target, target_shape = ("", *unmasked), (0, *call.shape()[len(masked) :])
    return BoundRule((dims, masked, align_names(value_shape, target_shape, target)), (dims,))


@register_rule_function(aten.select_scatter.default, aten.slice_scatter.default)
def _dim_scatter_rule(call: OpCall) -> BoundRule:
    """Return the rule of select_scatter or slice_scatter, which write a source into a part of one dim of x.

    That dim is gathered in both; the others pass.
    """
    names, dim = factor_names(call.ndim("self")), wrap_dim(call["dim"], call.ndim("self"))
    # The source of slice_scatter has the dim, with another size; that of select_scatter does not have it.
    source_dim = (f"source{dim}",) if call.ndim("src") == len(names) else ()
    source = (*names[:dim], *source_dim, *names[dim + 1 :])
    return BoundRule((names, source), (names,), dict.fromkeys((names[dim], *source_dim), "replicate"))


@register_rule_function(aten.index_select.default)
def _index_select_rule(call: OpCall) -> BoundRule:
    """Return the rule of index_select, which gathers the indexed dim; the dim of the index takes its place.

    Tensors and indices without dims are supported, as in torch. `picks` records that the dim of the result selects
    positions of the indexed dim, so that both can belong to one sequence.
    """
    names, dim = factor_names(call.ndim()), call.dim()
    index = ("index",) * call.ndim("index")  # one dim or none
    result = (*names[:dim], *(index or ("",)), *names[dim + 1 :]) if names else ()
    gathered = names[dim : dim + 1] or index  # the indexed dim; for a tensor without dims, that of the index
    picks = {"index": names[dim]} if names and index else {}
    return BoundRule((names, index), (result,), dict.fromkeys(gathered, "replicate"), picks=picks)


@register_rule_function(aten.index_add.default, aten.index_copy.default)
def _index_write_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of index_add or index_copy, which write the rows of a source to indexed rows of x.

    The rows of x, the index and the rows of the source are gathered; the other dims pass. None if x has no dims, or
    the source has another number of dims.
    """
    names, dim = factor_names(call.ndim()), call.dim()
    if not names or call.ndim("source") != len(names):
        return None
    index, source = ("index",) * call.ndim("index"), (*names[:dim], "index", *names[dim + 1 :])
    return BoundRule((names, index, source), (names,), {names[dim]: "replicate", "index": "replicate"})


@register_rule_function(aten.index_fill.int_Scalar)
def _index_fill_rule(call: OpCall) -> BoundRule:
    """Return the rule of writing one value to the indexed positions of a dim, which is gathered."""
    names, index = factor_names(call.ndim()), factor_names(call.ndim("index"), "index")
    dims = normalize_dims(call["dim"], call.ndim()) if names else ()
    gathered = (*(names[d] for d in dims), *index)
    return BoundRule((names, index), (names,), dict.fromkeys(gathered, "replicate"))


@register_rule_function(aten.gather.default)
def _gather_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of gather, whose result has the dims of the index.

    Along `dim`, x is gathered and the index passes. Other dims pass if x and the index have equal sizes there; where
    the index is smaller, torch reads the first positions of x, and both are gathered. None for different numbers of
    dims, or none, and for a sparse gradient.
    """
    if not call.ndim("self") or call.ndim("self") != call.ndim("index") or has_sparse_gradient(call):
        return None
    index, dim = factor_names(call.ndim("index")), call.dim()
    sizes = zip(call.shape("self"), call.shape("index"), strict=True)
    unequal = [d for d, (x_size, index_size) in enumerate(sizes) if not is_same_size(x_size, index_size) and d != dim]
    x = replace_dims(index, [dim, *unequal], "x")  # along these dims, x has other positions than the index
    gathered = (x[dim], *(names[d] for names in (x, index) for d in unequal))
    return BoundRule((x, index), (index,), dict.fromkeys(gathered, "replicate"))


@register_rule_function(
    *parse_overloads("scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_reduce.two")
)
def _scatter_rule(call: OpCall) -> BoundRule:
    """Return the rule of scatter into x at an index: dims other than `dim` pass if all operands have equal sizes there.

    All other dims of x, the index and the source are gathered.
    """
    names, ndim = factor_names(call.ndim("self")), call.ndim("self")
    shapes = [call.shape(i) for i in range(len(call.operands))]
    shared: set[int] = set()  # dims that pass
    if all(len(shape) == ndim for shape in shapes):
        shared = {d for d in range(ndim) if all(is_same_size(shape[d], shapes[0][d]) for shape in shapes)}
    shared.discard(wrap_dim(call["dim"], ndim))
    others = tuple(  # the index, and the source if it is a tensor
        tuple(names[d] if d in shared else f"operand{i}_{d}" for d in range(len(shape)))
        for i, shape in enumerate(shapes[1:])
    )
    kinds = {f: "replicate" for operand in (names, *others) for d, f in enumerate(operand) if d not in shared}
    return BoundRule((names, *others), (names,), kinds)


@register_rule_function(aten.take_along_dim.default)
def _take_along_dim_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of take_along_dim: along `dim` x is gathered, and the indices pass.

    Other dims of x and the indices broadcast and pass. None without a dim, for which torch flattens x.
    """
    result = call.result_shapes()[0]
    if call["dim"] is None or call.ndim("self") != call.ndim("indices"):
        return None
    names = factor_names(len(result))
    dim = wrap_dim(call["dim"], len(names))
    x_shape = [size if d != dim else 1 for d, size in enumerate(result)]  # 1: along `dim`, x does not broadcast
    x = align_names(call.shape("self"), x_shape, replace_dims(names, [dim], "x"))
    return BoundRule((x, align_names(call.shape("indices"), result, names)), (names,), {f"x{dim}": "replicate"})


@register_rule_function(aten.embedding.default)
def _embedding_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an embedding, which gathers the vocabulary v and passes the dims of the indices.

    The indices are gathered, too, with scale_grad_by_freq, because the gradient counts them over the global batch, and
    with a sparse gradient, which cannot be summed over the ranks.
    """
    gathered = "v ..." if call["scale_grad_by_freq"] or has_sparse_gradient(call) else "v"
    return bind_rule(call, "v d, ... -> ... d", replicate=gathered)


@register_rule_function(aten.one_hot.default)
def _one_hot_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of one_hot, which adds a dim of v classes and passes the others.

    None if the number of classes is not an argument, as each rank would use its own largest index. With
    `starts_sequence`, replicated indices are sharded for the op, because its result is as wide as logits.
    """
    if call["num_classes"] == -1:
        return None
    return bind_rule(call, "... -> ... v", starts_sequence=True)
