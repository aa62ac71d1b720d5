"""Checksums of tensors, piece by piece: some MiB of scratch, whatever the size of the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PIECE = 1 << 19  # elements; their bits, positions and products are 12 MiB of int64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(a: Any) -> str:
    """A checksum of a tensor's bits and of their order; "" for anything else, for no elements and for no dims."""
    if not isinstance(a, torch.Tensor) or a.numel() == 0 or a.ndim == 0:
        return ""
    return str(total(a).item())


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of an element's bits times its position, from 1: () int64 on x's device, modulo 2**64.

    Integer arithmetic, so exact whatever the order of summing.
    """
    x = x.detach()
    plain = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    out = torch.zeros((), dtype=torch.int64, device=x.device)
    done = 1
    for piece in pieces(plain):
        bits = piece.resolve_neg().view(_BITS[piece.element_size()]).long()
        out += (bits * torch.arange(done, done + bits.numel(), device=x.device)).sum()
        done += bits.numel()
    return out


def is_one_number(x: torch.Tensor) -> bool:
    """Does the tensor hold one number throughout? Not without elements."""
    if x.numel() == 0:
        return False
    first = _comparable(x.detach()[(0,) * x.ndim])
    return all(bool((_comparable(piece) == first).all()) for piece in pieces(x.detach()))


def _comparable(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in order, at most PIECE at a time, as 1-D tensors; views as far as the memory allows."""
    if x.numel() <= PIECE:
        yield x.reshape(-1)
    elif x.is_contiguous():
        yield from x.view(-1).split(PIECE)
    else:
        rows = max(1, PIECE // (x.numel() // x.shape[0]))
        for part in x.split(rows) if x.shape[0] > 1 else [x[0]]:
            yield from pieces(part)
