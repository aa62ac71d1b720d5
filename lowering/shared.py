"""``sp::shared``: gradients that ranks have to be given alike, for a backward on shards takes each row of one copy.

Where the ranks' copies differ the sum of the rows would be nobody's gradient, so that is an error on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checksums import pieces, total
from ..errors import SpError
from .communicator import current
from .library import opaque


def _copies(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


@opaque("shared(Tensor[] xs, str[] names, int n, str group) -> Tensor[]", _copies, waits=True)
def shared(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    """Copies of gradients of shared results, once the ranks have found theirs equal. names: of the results.

    Shapes: any -> same. Bytes: 8 (n - 1) a tensor; more only for tensors whose bits differ. Backward: none.
    Raises SpError on every rank if they differ by more than rounding, as kernels that add in any order leave it.
    Source: one all_gather of checksums.
    """
    sums = torch.stack([total(x) for x in xs])
    everyone = current().all_gather(sums, n, group).view(n, len(xs)).tolist()
    differ = [i for i in range(len(xs)) if len({row[i] for row in everyone}) > 1]
    wrong = [names[i] for i in differ if not _rounded(xs[i], n, group)]
    if wrong:
        raise SpError(
            f"the ranks of this tensor-parallel group share the result {', '.join(dict.fromkeys(wrong))}, but were "
            "given different gradients of it, which a backward on shards cannot add up. Compute its loss alike on "
            "every rank, or sum the gradient over the group before it comes here"
        )
    return [x.clone() for x in xs]


def _rounded(x: Tensor, n: int, group: str) -> bool:
    """Are the ranks' copies the same but for the last bits? Every rank gets the same answer."""
    off, largest = 0.0, 0.0
    for piece in pieces(x):
        rows = current().all_gather(piece.contiguous(), n, group).view(n, -1)
        rows = rows.to(torch.complex128 if x.is_complex() else torch.float64)
        off = max(off, (rows - rows[0]).abs().nan_to_num(torch.inf).max().item())
        largest = max(largest, rows.abs().nan_to_num(torch.inf).max().item())
    eps = torch.finfo(x.dtype).eps
    return off <= (64 if x.element_size() >= 4 else 2) * eps * largest < torch.inf
