"""Reads and writes at indices: what an index runs over is needed whole, the shape of the index passes on."""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.graph.sizes import Size, same
from sp_compile.passes.sharding.rule import Dims, Factors, rule, rule_of

from ._build import aligned, bind, dims_of, names, replaced, wrap

aten = torch.ops.aten

rule([aten.bucketize.Scalar, aten.searchsorted.Scalar], "k -> ", whole="k")
rule(aten.bucketize.Tensor, "..., k -> ...", whole="k")
rule(aten.isin.Tensor_Scalar, "... -> ...")


@rule_of(aten.histc.default)
def _histc(call: Call) -> Factors | None:
    """Counts of the ranks add up where the bins do not depend on the values. Behind the last bin nothing counts."""
    bounds = call["min"], call["max"]
    if call.ndim() != 1 or bounds[0] == bounds[1]:
        return None
    return bind(call, "k -> bins", sum="k", pad=(0, bounds[1] + 1))


@rule_of(aten.searchsorted.Tensor)
def _searchsorted(call: Call) -> Factors | None:
    """A single row of bounds serves values of any shape."""
    if len(call.operands) != 2:
        return None
    return bind(call, "k, ... -> ..." if call.ndim(0) == 1 else "... k, ... v -> ... v", whole="k")


@rule_of(aten.isin.Tensor_Tensor)
def _isin(call: Call) -> Factors | None:
    dims, tested = names(call.ndim()), names(call.ndim(1), "tested")
    return Factors((dims, tested), (dims,), dict.fromkeys(tested, "whole"))


@rule_of(aten.index.Tensor)
def _index(call: Call) -> Factors | None:
    """x[i, :, j]: x's indexed dims are whole. A boolean index has a result of unknown size, and no rule."""
    at = _indexed(call)
    if at is None:
        return None
    shapes = [call.shape(i) for i in range(1, len(call.operands))]
    dims = names(call.ndim())
    picked, drawn = _index_dims(shapes)
    picks = {picked[0]: dims[at[0]]} if len(at) == len(picked) == 1 else {}
    return Factors((dims, *drawn), (_instead(dims, at, picked),), {dims[d]: "whole" for d in at}, picks=picks)


def _instead(dims: Dims, at: list[int], picked: Dims) -> Dims:
    """The dims with those of the indices where the indices stood, or first if a slice parts them."""
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    kept = tuple(f for d, f in enumerate(dims) if d not in at)
    return (*kept[:start], *picked, *kept[start:])


def _indexed(call: Call) -> list[int] | None:
    """The dims that tensors index; None if one of them is a mask or there is none."""
    indices = call["indices"]
    at = [d for d, index in enumerate(indices) if index is not None]
    masks = any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in at)
    return None if masks or not at else at


def _index_dims(shapes: list[tuple[Size, ...]]) -> tuple[Dims, tuple[Dims, ...]]:
    """The names of the indices' broadcast dims, and of the dims of each index."""
    ndim = max(len(s) for s in shapes)
    full: list[Size] = [1] * ndim
    for shape in shapes:
        for d, s in enumerate(shape, ndim - len(shape)):
            full[d] = s if full[d] == 1 else full[d]
    picked = names(ndim, "index")
    return picked, tuple(aligned(s, full, picked) for s in shapes)


@rule_of(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Factors | None:
    """Only the dims that no index names pass."""
    at = _indexed(call)
    if at is None:
        return _masked_put(call)
    dims = names(call.ndim())
    shapes = [call.shape(i) for i in range(1, len(call.operands) - 1)]
    drawn = tuple(names(len(s), f"index{i}_") for i, s in enumerate(shapes))
    target = _instead(dims, at, names(max(len(s) for s in shapes), "put"))
    extent = dict(zip(dims, call.shape(), strict=True))
    shape = call.shape(len(call.operands) - 1)
    values = aligned(shape, [extent.get(f, 0) for f in target], target)
    whole = {f for group in drawn for f in group} | {f for f in values if f.startswith("put")} | {dims[d] for d in at}
    return Factors((dims, *drawn, values), (dims,), dict.fromkeys(sorted(whole), "whole"))


def _masked_put(call: Call) -> Factors | None:
    """x[mask] = value: pointwise, as long as one value serves every position of the mask."""
    dims, values = names(call.ndim()), call.shape("values")
    if len(call.operands) != 3 or call["indices"][0] is not call.operands[1]:
        return None
    mask = dims[: call.ndim(1)]
    rest = dims[len(mask) :]
    if len(values) > len(rest) and not all(same(s, 1) for s in values[: len(values) - len(rest)]):
        return None
    target, extents = ("", *rest), (0, *call.shape()[len(mask) :])
    return Factors((dims, mask, aligned(values, extents, target)), (dims,))


@rule_of(aten.select_scatter.default, aten.slice_scatter.default)
def _dim_scatter(call: Call) -> Factors:
    """x with a part of one dim written from a source that has the other dims alike."""
    dims, at = names(call.ndim("self")), wrap(call["dim"], call.ndim("self"))
    written = (f"source{at}",) if call.ndim("src") == len(dims) else ()
    source = (*dims[:at], *written, *dims[at + 1 :])
    return Factors((dims, source), (dims,), dict.fromkeys((dims[at], *written), "whole"))


@rule_of(aten.index_select.default)
def _index_select(call: Call) -> Factors:
    dims, at = names(call.ndim()), call.dim()
    index = ("index",) * call.ndim("index")
    result = (*dims[:at], *(index or ("",)), *dims[at + 1 :]) if dims else ()
    picks = {"index": dims[at]} if dims and index else {}
    return Factors((dims, index), (result,), dict.fromkeys(dims[at : at + 1] or index, "whole"), picks=picks)


@rule_of(aten.index_add.default, aten.index_copy.default)
def _index_write(call: Call) -> Factors | None:
    """x with rows written at an index; the other dims are those of the source."""
    dims, at = names(call.ndim()), call.dim()
    if not dims or call.ndim("source") != len(dims):
        return None
    index, source = ("index",) * call.ndim("index"), (*dims[:at], "index", *dims[at + 1 :])
    return Factors((dims, index, source), (dims,), {dims[at]: "whole", "index": "whole"})


@rule_of(aten.index_fill.int_Scalar)
def _index_fill(call: Call) -> Factors:
    dims, at = names(call.ndim()), dims_of(call["dim"], call.ndim()) if call.ndim() else ()
    index = names(call.ndim("index"), "index")
    return Factors((dims, index), (dims,), {f: "whole" for f in (*(dims[d] for d in at), *index)})


@rule_of(aten.gather.default)
def _gather(call: Call) -> Factors | None:
    """Dims beside `dim` are matched by position from 0 on, so only those of equal size pass."""
    if not call.ndim("self") or call.ndim("self") != call.ndim("index"):
        return None
    index, at = names(call.ndim("index")), call.dim()
    pairs = enumerate(zip(call.shape("self"), call.shape("index"), strict=True))
    apart = [d for d, (a, b) in pairs if not same(a, b) and d != at]
    x = replaced(index, [at, *apart], "x")
    return Factors((x, index), (index,), {f: "whole" for f in (x[at], *(g[d] for g in (x, index) for d in apart))})


@rule_of(*overloads("scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_reduce.two"))
def _scatter(call: Call) -> Factors:
    """As gather: `dim` is whole, and of the other dims those pass that x, index and source have in equal size."""
    dims = names(call.ndim("self"))
    at = wrap(call["dim"], len(dims))
    shapes = [call.shape(i) for i in range(len(call.operands))]
    alike = [all(len(s) == len(dims) and same(s[d], shapes[0][d]) for s in shapes) for d in range(len(dims))]
    shared = {d for d in range(len(dims)) if alike[d] and d != at}
    rest = tuple(
        tuple(dims[d] if d in shared else f"operand{i}_{d}" for d in range(len(s))) for i, s in enumerate(shapes[1:])
    )
    kinds = {f: "whole" for group in (dims, *rest) for d, f in enumerate(group) if d not in shared}
    return Factors((dims, *rest), (dims,), kinds)


@rule_of(aten.take_along_dim.default)
def _take_along_dim(call: Call) -> Factors | None:
    """As gather, but the other dims broadcast."""
    result = call.result_shapes()[0]
    if call["dim"] is None or call.ndim("self") != call.ndim("indices"):
        return None
    dims = names(len(result))
    at = wrap(call["dim"], len(dims))
    x = aligned(call.shape("self"), [s if d != at else 1 for d, s in enumerate(result)], replaced(dims, [at], "x"))
    return Factors((x, aligned(call.shape("indices"), result, dims)), (dims,), {f"x{at}": "whole"})


@rule_of(aten.embedding.default)
def _embedding(call: Call) -> Factors | None:
    """scale_grad_by_freq counts each index over the whole batch, which no rank sees alone."""
    return bind(call, "v d, ... -> ... d", whole="v ..." if call["scale_grad_by_freq"] else "v")


@rule_of(aten.one_hot.default)
def _one_hot(call: Call) -> Factors | None:
    """Without a number of classes each rank would take its own largest index. Of integers, but as wide as logits."""
    return None if call["num_classes"] == -1 else bind(call, "... -> ... v", begins=True)
