"""``sp::pack`` and ``sp::pack_by_owner``: several tensors in one buffer that is about to be sent.

A compiler that sees the same exchange of the same values twice makes it once, and keeps what arrived: the whole of K
and V on every rank. Packing for a backward that sends again therefore waits for the cotangent, in an operator that
stays opaque. So does packing whose order depends on the rank, because it is read when the program runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.communicator import current
from sp_compile.lowering.library import LIBRARY

_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define("pack(Tensor[] xs, int dim, Tensor after) -> Tensor", tags=_TAGS)
LIBRARY.define("pack_by_owner(Tensor[] parts, int stride, str group) -> Tensor", tags=_TAGS)


def pack(xs: list[Tensor], dim: int, after: Tensor) -> Tensor:
    """The tensors side by side along ``dim``, once ``after`` exists. Bytes: none. Not differentiable."""
    return torch.cat(xs, dim)


def pack_by_owner(parts: list[Tensor], stride: int, group: str) -> Tensor:
    """Gradients dk_0, dv_0, dk_1, dv_1, ... of the keys that started i steps back on a ring of every stride-th rank.

    Shapes: n times (B, H, s, D) and (B, H, s, E) -> (n, B, H, s, D + E), entry j those of the ring's rank j.
    """
    n = len(parts) // 2
    rank = current().rank(group) // stride % n
    packed = parts[0].new_empty((n, *parts[0].shape[:3], parts[0].shape[3] + parts[1].shape[3]))
    for step in range(n):
        torch.cat(parts[2 * step : 2 * step + 2], 3, out=packed[(rank - step) % n])
    return packed


LIBRARY.impl("pack", pack, "CompositeExplicitAutograd")
LIBRARY.impl("pack_by_owner", pack_by_owner, "CompositeExplicitAutograd")


@torch.library.register_fake("sp::pack", lib=LIBRARY)
def _(xs: list[Tensor], dim: int, after: Tensor) -> Tensor:
    return torch.cat(xs, dim)


@torch.library.register_fake("sp::pack_by_owner", lib=LIBRARY)
def _(parts: list[Tensor], stride: int, group: str) -> Tensor:
    first, second = parts[:2]
    return first.new_empty((len(parts) // 2, *first.shape[:3], first.shape[3] + second.shape[3]))
