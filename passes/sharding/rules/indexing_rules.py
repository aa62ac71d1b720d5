"""Rules of reads and writes at indices: indexed dims are gathered, the dims of the index pass."""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.graph.sizes import Size, is_same_size
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function, rule

from ._build import align_names, bind_rule, factor_names, normalize_dims, replace_dims, wrap_dim

aten = torch.ops.aten

rule([aten.bucketize.Scalar, aten.searchsorted.Scalar], "k -> ", whole="k")
rule(aten.bucketize.Tensor, "..., k -> ...", whole="k")
rule(aten.isin.Tensor_Scalar, "... -> ...")


@register_rule_function(aten.histc.default)
def _histc_rule(call: OpCall) -> BoundRule | None:
    """Return a sum over the ranks' counts, if the bins do not depend on the values.

    Padding is a value after the last bin, which is not counted.
    """
    bounds = call["min"], call["max"]
    if call.ndim() != 1 or bounds[0] == bounds[1]:
        return None
    return bind_rule(call, "k -> bins", sum="k", pad=(0, bounds[1] + 1))


@register_rule_function(aten.searchsorted.Tensor)
def _searchsorted_rule(call: OpCall) -> BoundRule | None:
    """Return the rule for bounds of each row, or one row of bounds for values of any shape."""
    if len(call.operands) != 2:
        return None
    return bind_rule(call, "k, ... -> ..." if call.ndim(0) == 1 else "... k, ... v -> ... v", whole="k")


@register_rule_function(aten.isin.Tensor_Tensor)
def _isin_rule(call: OpCall) -> BoundRule | None:
    dims, tested = factor_names(call.ndim()), factor_names(call.ndim(1), "tested")
    return BoundRule((dims, tested), (dims,), dict.fromkeys(tested, "whole"))


@register_rule_function(aten.index.Tensor)
def _index_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of x[i, :, j], which gathers the indexed dims of x.

    A boolean index has a result of unknown size, and no rule.
    """
    at = _indexed_dims(call)
    if at is None:
        return None
    shapes = [call.shape(i) for i in range(1, len(call.operands))]
    dims = factor_names(call.ndim())
    picked, drawn = _index_dims(shapes)
    picks = {picked[0]: dims[at[0]]} if len(at) == len(picked) == 1 else {}
    return BoundRule(
        (dims, *drawn), (_insert_index_dims(dims, at, picked),), {dims[d]: "whole" for d in at}, picks=picks
    )


def _insert_index_dims(dims: Dims, at: list[int], picked: Dims) -> Dims:
    """Insert the index dims at the position of the indices, or first if a slice separates them."""
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    kept = tuple(f for d, f in enumerate(dims) if d not in at)
    return (*kept[:start], *picked, *kept[start:])


def _indexed_dims(call: OpCall) -> list[int] | None:
    """Return the dims that tensors index, or None if there are none or one of them is a mask."""
    indices = call["indices"]
    at = [d for d, index in enumerate(indices) if index is not None]
    masks = any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in at)
    return None if masks or not at else at


def _index_dims(shapes: list[tuple[Size, ...]]) -> tuple[Dims, tuple[Dims, ...]]:
    """Return the names of the indices' broadcast dims, and of the dims of each index."""
    ndim = max(len(s) for s in shapes)
    full: list[Size] = [1] * ndim
    for shape in shapes:
        for d, s in enumerate(shape, ndim - len(shape)):
            full[d] = s if full[d] == 1 else full[d]
    picked = factor_names(ndim, "index")
    return picked, tuple(align_names(s, full, picked) for s in shapes)


@register_rule_function(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put_rule(call: OpCall) -> BoundRule | None:
    """Return a rule that passes the dims without an index."""
    at = _indexed_dims(call)
    if at is None:
        return _masked_put_rule(call)
    dims = factor_names(call.ndim())
    shapes = [call.shape(i) for i in range(1, len(call.operands) - 1)]
    drawn = tuple(factor_names(len(s), f"index{i}_") for i, s in enumerate(shapes))
    target = _insert_index_dims(dims, at, factor_names(max(len(s) for s in shapes), "put"))
    extent = dict(zip(dims, call.shape(), strict=True))
    shape = call.shape(len(call.operands) - 1)
    values = align_names(shape, [extent.get(f, 0) for f in target], target)
    whole = {f for group in drawn for f in group} | {f for f in values if f.startswith("put")} | {dims[d] for d in at}
    return BoundRule((dims, *drawn, values), (dims,), dict.fromkeys(sorted(whole), "whole"))


def _masked_put_rule(call: OpCall) -> BoundRule | None:
    """Return the pointwise rule of x[mask] = value if one value is written to all positions of the mask."""
    dims, values = factor_names(call.ndim()), call.shape("values")
    if len(call.operands) != 3 or call["indices"][0] is not call.operands[1]:
        return None
    mask = dims[: call.ndim(1)]
    rest = dims[len(mask) :]
    if len(values) > len(rest) and not all(is_same_size(s, 1) for s in values[: len(values) - len(rest)]):
        return None
    target, extents = ("", *rest), (0, *call.shape()[len(mask) :])
    return BoundRule((dims, mask, align_names(values, extents, target)), (dims,))


@register_rule_function(aten.select_scatter.default, aten.slice_scatter.default)
def _dim_scatter_rule(call: OpCall) -> BoundRule:
    """Return the rule of writing a part of one dim of x from a source with equal other dims."""
    dims, at = factor_names(call.ndim("self")), wrap_dim(call["dim"], call.ndim("self"))
    written = (f"source{at}",) if call.ndim("src") == len(dims) else ()
    source = (*dims[:at], *written, *dims[at + 1 :])
    return BoundRule((dims, source), (dims,), dict.fromkeys((dims[at], *written), "whole"))


@register_rule_function(aten.index_select.default)
def _index_select_rule(call: OpCall) -> BoundRule:
    dims, at = factor_names(call.ndim()), call.dim()
    index = ("index",) * call.ndim("index")
    result = (*dims[:at], *(index or ("",)), *dims[at + 1 :]) if dims else ()
    picks = {"index": dims[at]} if dims and index else {}
    return BoundRule((dims, index), (result,), dict.fromkeys(dims[at : at + 1] or index, "whole"), picks=picks)


@register_rule_function(aten.index_add.default, aten.index_copy.default)
def _index_write_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of writing rows of x at an index; the other dims are those of the source."""
    dims, at = factor_names(call.ndim()), call.dim()
    if not dims or call.ndim("source") != len(dims):
        return None
    index, source = ("index",) * call.ndim("index"), (*dims[:at], "index", *dims[at + 1 :])
    return BoundRule((dims, index, source), (dims,), {dims[at]: "whole", "index": "whole"})


@register_rule_function(aten.index_fill.int_Scalar)
def _index_fill_rule(call: OpCall) -> BoundRule:
    dims, at = factor_names(call.ndim()), normalize_dims(call["dim"], call.ndim()) if call.ndim() else ()
    index = factor_names(call.ndim("index"), "index")
    return BoundRule((dims, index), (dims,), {f: "whole" for f in (*(dims[d] for d in at), *index)})


@register_rule_function(aten.gather.default)
def _gather_rule(call: OpCall) -> BoundRule | None:
    """Return a rule that passes the dims other than `dim` that x and index have in equal size.

    These dims are matched by position from 0 on.
    """
    if not call.ndim("self") or call.ndim("self") != call.ndim("index"):
        return None
    index, at = factor_names(call.ndim("index")), call.dim()
    pairs = enumerate(zip(call.shape("self"), call.shape("index"), strict=True))
    separate = [d for d, (a, b) in pairs if not is_same_size(a, b) and d != at]
    x = replace_dims(index, [at, *separate], "x")
    return BoundRule((x, index), (index,), {f: "whole" for f in (x[at], *(g[d] for g in (x, index) for d in separate))})


@register_rule_function(
    *parse_overloads("scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_reduce.two")
)
def _scatter_rule(call: OpCall) -> BoundRule:
    """Return a rule that passes the dims other than `dim` that x, index and source have in equal size."""
    dims = factor_names(call.ndim("self"))
    at = wrap_dim(call["dim"], len(dims))
    shapes = [call.shape(i) for i in range(len(call.operands))]
    same = [all(len(s) == len(dims) and is_same_size(s[d], shapes[0][d]) for s in shapes) for d in range(len(dims))]
    shared = {d for d in range(len(dims)) if same[d] and d != at}
    rest = tuple(
        tuple(dims[d] if d in shared else f"operand{i}_{d}" for d in range(len(s))) for i, s in enumerate(shapes[1:])
    )
    kinds = {f: "whole" for group in (dims, *rest) for d, f in enumerate(group) if d not in shared}
    return BoundRule((dims, *rest), (dims,), kinds)


@register_rule_function(aten.take_along_dim.default)
def _take_along_dim_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of gather with broadcasting of the other dims."""
    result = call.result_shapes()[0]
    if call["dim"] is None or call.ndim("self") != call.ndim("indices"):
        return None
    dims = factor_names(len(result))
    at = wrap_dim(call["dim"], len(dims))
    x = align_names(
        call.shape("self"), [s if d != at else 1 for d, s in enumerate(result)], replace_dims(dims, [at], "x")
    )
    return BoundRule((x, align_names(call.shape("indices"), result, dims)), (dims,), {f"x{at}": "whole"})


@register_rule_function(aten.embedding.default)
def _embedding_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an embedding; scale_grad_by_freq counts indices over the global batch, so it gathers."""
    return bind_rule(call, "v d, ... -> ... d", whole="v ..." if call["scale_grad_by_freq"] else "v")


@register_rule_function(aten.one_hot.default)
def _one_hot_rule(call: OpCall) -> BoundRule | None:
    """Return the rule if the number of classes is known; otherwise each rank would use its own largest index.

    The input has integers, but the result is as wide as logits.
    """
    return None if call["num_classes"] == -1 else bind_rule(call, "... -> ... v", starts_sequence=True)
