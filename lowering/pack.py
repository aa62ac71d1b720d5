"""``sp::pack``: several tensors in one buffer, for a backward that sends again what the forward has sent.

A compiler that sees the same exchange of the same values twice makes it once, and keeps what arrived: the whole of K and
V on every rank. Packing for the backward therefore waits for the cotangent, in an operator that stays opaque.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import LIBRARY

LIBRARY.define("pack(Tensor[] xs, int? dim, Tensor after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def pack(xs: list[Tensor], dim: int | None, after: Tensor) -> Tensor:
    """The tensors side by side along ``dim``, or flattened and one behind the other where it is None.

    ``after`` only orders: the buffer is made once it exists. Bytes: none. Not differentiable.
    """
    return flat(xs) if dim is None else torch.cat(xs, dim)


def flat(xs: list[Tensor]) -> Tensor:
    """The tensors one behind the other, flattened; any strides, copied once where they have one shape."""
    if all(x.shape == xs[0].shape for x in xs):
        return torch.stack(xs).flatten()
    return torch.cat([x.reshape(-1) for x in xs])


LIBRARY.impl("pack", pack, "CompositeExplicitAutograd")


@torch.library.register_fake("sp::pack", lib=LIBRARY)
def _(xs: list[Tensor], dim: int | None, after: Tensor) -> Tensor:
    return pack(xs, dim, after)
