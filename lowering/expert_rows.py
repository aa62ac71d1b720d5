"""Sort rows by key for grouped products of experts, locally on each rank.

    keys, order = sort_rows(ids)                    ids (R,): group, such as expert, of each row
    y = grouped_mm(to_sorted(x, order), w, keys)    row by row: x[r] @ w[ids[r]]
    from_sorted(y, order)                           original order

Values between the first and the last call depend on all rows by their order; the last result does not. The pass in
``passes/canonical/expert_loops.py`` proves that no other value leaves, so that all of them may be sharded along R.
"""

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite


@composite("sort_rows(Tensor ids, bool stable, bool descending) -> (Tensor keys, Tensor order)", padded="as given")
def sort_rows(ids: Tensor, stable: bool, descending: bool) -> tuple[Tensor, Tensor]:
    """Sort the rows by their ids, such as the expert of each row, as torch.sort does.

    Shapes: ids (R,) -> keys = ids[order] (R,) and order (R,), int64. Bytes: none.
    """
    return torch.sort(ids, stable=stable, descending=descending)


@composite("to_sorted(Tensor x, Tensor order) -> Tensor", padded="as given")
def to_sorted(x: Tensor, order: Tensor) -> Tensor:
    """Return x[order]. Shapes: x (R, ...), order (R,) -> (R, ...). Bytes: none."""
    return x[order]


@composite("from_sorted(Tensor x, Tensor order) -> Tensor", padded="as given")
def from_sorted(x: Tensor, order: Tensor) -> Tensor:
    """Invert ``to_sorted``. Shapes: x (R, ...), order (R,) -> (R, ...). Bytes: none."""
    places = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, places)  # inverse[order[i]] = i
    return x[inverse]


@composite("grouped_mm(Tensor x, Tensor w, Tensor keys, str op) -> Tensor", padded="as given")
def grouped_mm(x: Tensor, w: Tensor, keys: Tensor, op: str) -> Tensor:
    """Multiply each row of x by the matrix of its group: x[r] @ w[keys[r]].

    Shapes: x (R, I), w (E, I, O), keys (R,) -> (R, O). Bytes: none.

    Args:
        x: (R, I), any dtype that `op` supports.
        w: (E, I, O), dtype of x.
        keys: (R,), the group of each row: integers, ascending and not negative. The results of rows with a key of E or
            more are undefined.
        op: Qualified name of a grouped product of (x, w, end of each group), such as "aten::_grouped_mm".
    """
    groups = torch.arange(w.shape[0], dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, groups, right=True, out_int32=True)
    namespace, name = op.split("::")
    return getattr(getattr(torch.ops, namespace), name)(x, w, ends)
