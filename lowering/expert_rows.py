"""Rows in the order of their keys, as products of experts want them: each rank sorts the rows that it has.

    keys, order = sort_rows(ids)                    ids (R,): which group, as which expert, each row belongs to
    y = grouped_mm(to_sorted(x, order), w, keys)    row by row: x[r] @ w[ids[r]]
    from_sorted(y, order)                           as the rows were

What lies between the first and the last is in an order that depends on all rows; the last is not. The recogniser
(``passes/canonical/expert_loops.py``) proves that nothing else leaves, so all of it may be sharded along R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite


@composite("sort_rows(Tensor ids, bool stable, bool descending) -> (Tensor keys, Tensor order)", padded="as given")
def sort_rows(ids: Tensor, stable: bool, descending: bool) -> tuple[Tensor, Tensor]:
    """ids (R,) -> ids[order] and the order (R,), int64. Bytes: none."""
    return torch.sort(ids, stable=stable, descending=descending)


@composite("to_sorted(Tensor x, Tensor order) -> Tensor", padded="as given")
def to_sorted(x: Tensor, order: Tensor) -> Tensor:
    """x (R, ...), order (R,) -> x[order]. Bytes: none."""
    return x[order]


@composite("from_sorted(Tensor x, Tensor order) -> Tensor", padded="as given")
def from_sorted(x: Tensor, order: Tensor) -> Tensor:
    """x (R, ...), order (R,) -> what ``to_sorted`` makes x of. Bytes: none."""
    places = torch.arange(order.shape[0], device=order.device)
    return x[torch.empty_like(order).scatter(0, order, places)]


@composite("grouped_mm(Tensor x, Tensor w, Tensor keys, str op) -> Tensor", padded="as given")
def grouped_mm(x: Tensor, w: Tensor, keys: Tensor, op: str) -> Tensor:
    """Each row with the matrix of its group, by a grouped product ``op`` of (x, w, where each group ends).

    Shapes: x (R, I), w (E, I, O), keys (R,), ascending numbers from 0; rows with a key of E or more, behind all
    others, are whatever ``op`` leaves there -> (R, O). op: its qualified name, as "aten::_grouped_mm". Bytes: none.
    """
    groups = torch.arange(w.shape[0], dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, groups, right=True, out_int32=True)
    namespace, name = op.split("::")
    result: Tensor = getattr(getattr(torch.ops, namespace), name)(x, w, ends)
    return result
