"""Unpublished forms of an exchange of two dims: other views, other calls of the collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.variants.exchange_variants import ExchangeForm, swap, swap_functional
from torch import Tensor


def swap_autograd(x: Tensor, n: int, group: Any) -> Tensor:
    shares = [x.shape[0] // n] * n
    return funcol.all_to_all_single_autograd(x, shares, shares, group)


def swap_shares(x: Tensor, n: int, group: Any) -> Tensor:
    received, shares = x.new_empty(x.shape), [x.shape[0] // n] * n
    dist.all_to_all_single(received, x, shares, shares, group=group)
    return received


def by_einsum(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    sent = torch.einsum("bsnhd -> nbshd", x.view(b, s, n, heads // n, d)).contiguous()
    return torch.einsum("nbshd->bnshd", swap(sent, group)).reshape(b, n * s, heads // n, d)


def flat_blocks(x: Tensor, n: int, group: Any) -> Tensor:
    sent = x.unflatten(2, (n, -1)).movedim(2, 0).flatten(0, 1).contiguous()
    received = swap_autograd(sent, n, group).unflatten(0, (n, x.shape[0]))
    return received.movedim(0, 1).flatten(1, 2)


def side_by_side(x: Tensor, n: int, group: Any) -> Tensor:
    received = funcol.all_to_all_single(torch.cat(x.chunk(n, 2), 0), None, None, group)
    return torch.cat(received.chunk(n, 0), 1)


def five_dims(x: Tensor, n: int, group: Any) -> Tensor:
    b, t, s, heads, d = x.shape
    sent = x.reshape(b, t, s, n, heads // n, d).permute(3, 0, 1, 2, 4, 5).contiguous()
    return swap_shares(sent, n, group).permute(1, 0, 2, 3, 4, 5).reshape(b, n * t, s, heads // n, d)


def packed_qkv(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, three, heads, d = x.shape
    sent = x.reshape(b, s, three, n, heads // n, d).permute(3, 1, 0, 2, 4, 5).contiguous()
    return swap(sent, group).reshape(n * s, b, three, heads // n, d).transpose(0, 1)


def of_a_transposed(x: Tensor, n: int, group: Any) -> Tensor:
    x = x.transpose(1, 2)
    b, s, heads, d = x.shape
    sent = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    received = swap_functional(sent, n, group)
    return received.permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d).transpose(1, 2)


def by_slices(x: Tensor, n: int, group: Any) -> Tensor:
    h = x.shape[2] // n
    sent = torch.stack([x[:, :, rank * h : (rank + 1) * h] for rank in range(n)])
    received = swap_functional(sent, n, group)
    return torch.cat([received[rank] for rank in range(n)], 1)


def by_narrow(x: Tensor, n: int, group: Any) -> Tensor:
    h = x.shape[2] // n
    sent = torch.stack([x.narrow(2, rank * h, h) for rank in range(n)])
    return torch.cat(list(swap_functional(sent, n, group)), 1)


def by_hsplit(x: Tensor, n: int, group: Any) -> Tensor:
    return swap_autograd(torch.vstack(torch.hsplit(x, n)), n, group)


def by_hstack(x: Tensor, n: int, group: Any) -> Tensor:
    return torch.hstack(torch.vsplit(swap(x.contiguous(), group), n))


def one_dim(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    sent = x.view(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).reshape(-1)
    received = swap(sent, group).view(n, b, s, heads // n, d)
    return received.permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def transposed_matrix(x: Tensor, n: int, group: Any) -> Tensor:
    received = swap_functional(x.T.contiguous(), n, group).view(n, -1, x.shape[0])
    return received.permute(0, 2, 1).reshape(n * x.shape[0], -1)


MORE = {
    "einsum": ExchangeForm(by_einsum, (2, 3, 8, 5), 2, 1),
    "flat blocks": ExchangeForm(flat_blocks, (2, 3, 8, 5), 2, 1),
    "side by side": ExchangeForm(side_by_side, (2, 3, 8, 5), 2, 1),
    "five dims": ExchangeForm(five_dims, (2, 3, 2, 8, 5), 3, 1),
    "packed qkv": ExchangeForm(packed_qkv, (2, 3, 3, 8, 5), 3, 1),
    "of a transposed": ExchangeForm(of_a_transposed, (2, 8, 3, 5), 1, 2),
    "by slices": ExchangeForm(by_slices, (2, 3, 8, 5), 2, 1),
    "by narrow": ExchangeForm(by_narrow, (2, 3, 8, 5), 2, 1),
    "hsplit": ExchangeForm(by_hsplit, (3, 8), 1, 0),
    "hstack": ExchangeForm(by_hstack, (8, 3), 0, 1),
    "one dim": ExchangeForm(one_dim, (2, 3, 8, 5), 2, 1),
    "transposed matrix": ExchangeForm(transposed_matrix, (3, 8), 1, 0),
}
