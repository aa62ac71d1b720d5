"""``sp::pack`` and ``sp::pack_by_owner``: several tensors in one buffer that is about to be sent.

A compiler that sees the same exchange of the same values twice makes it once, and keeps what arrived: the whole of K
and V on every rank. Packing for a backward that sends again therefore waits for the cotangent, in an operator that
stays opaque. So does packing whose order depends on the rank, because it is read when the program runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.comm.communicator import current_communicator


def _empty_by_owner(parts: list[Tensor], *_: object) -> Tensor:
    return parts[0].new_empty((len(parts), *parts[0].shape))


@opaque("pack(Tensor[] xs, int dim, Tensor after) -> Tensor", lambda xs, dim, after: torch.cat(xs, dim))
def pack(xs: list[Tensor], dim: int, after: Tensor) -> Tensor:
    """The tensors side by side along ``dim``, once ``after`` exists. Bytes: none."""
    return torch.cat(xs, dim)


@opaque("pack_by_owner(Tensor[] parts, int stride, str group) -> Tensor", _empty_by_owner)
def pack_by_owner(parts: list[Tensor], stride: int, group: str) -> Tensor:
    """Gradients of the keys and values that started 0, 1, ... steps back on a ring of every stride-th rank.

    Shapes: n times one shape -> (n, ...) of it, entry j those of the ring's rank j.
    """
    n = len(parts)
    rank = current_communicator().rank(group) // stride % n
    return torch.stack([parts[(rank - owner) % n] for owner in range(n)])
