"""Exchanges of two dims in published forms, one function each.

All take (x, n, group); EXCHANGES has their dims and shapes of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

Ways = Callable[[Tensor, int, Any], Tensor]


def swap(x: Tensor, group: Any) -> Tensor:
    """torch.distributed's call, which fills a buffer."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def swap_functional(x: Tensor, n: int, group: Any) -> Tensor:
    shares = [x.shape[0] // n] * n
    return funcol.wait_tensor(funcol.all_to_all_single(x, shares, shares, group))


# DeepSpeed's single_all_to_all: (b, s, h, d) with batch_dim_idx 0, (s, b, h, d) with 1; scatter_idx 2 before attention.


def deepspeed_heads(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    return swap(x, group).permute(1, 0, 2, 3, 4).contiguous().reshape(b, n * s, heads // n, d)


def deepspeed_rows(x: Tensor, n: int, group: Any) -> Tensor:
    b, rows, h, d = x.shape
    x = x.reshape(b, n, rows // n, h, d).permute(1, 0, 2, 3, 4).contiguous()
    return swap(x, group).permute(1, 2, 0, 3, 4).contiguous().reshape(b, rows // n, n * h, d).contiguous()


def deepspeed_rows_first_heads(x: Tensor, n: int, group: Any) -> Tensor:
    s, b, heads, d = x.shape
    x = x.reshape(s, b, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    return swap(x, group).reshape(n * s, b, heads // n, d)


def deepspeed_rows_first_rows(x: Tensor, n: int, group: Any) -> Tensor:
    rows, b, h, d = x.shape
    received = swap(x.reshape(n, rows // n, b, h, d).contiguous(), group)
    return received.permute(1, 2, 0, 3, 4).contiguous().reshape(rows // n, b, n * h, d)


# all_to_all_4D of long-context-attention, as xDiT and vLLM-Omni have it.


def four_d_heads(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).transpose(0, 2).contiguous()
    rows_first = swap(x, group).reshape(n * s, b, heads // n, d)
    return rows_first.transpose(0, 1).contiguous().reshape(b, n * s, heads // n, d)


def four_d_rows(x: Tensor, n: int, group: Any) -> Tensor:
    b, rows, h, d = x.shape
    x = x.reshape(b, n, rows // n, h, d).transpose(0, 3).transpose(0, 1).contiguous().reshape(n, h, rows // n, b, d)
    heads_first = swap(x, group).reshape(n * h, rows // n, b, d)
    return heads_first.transpose(0, 2).contiguous().reshape(b, rows // n, n * h, d)


# AutoSP's operator, of (b, heads, rows, d).


def auto_sp_heads(x: Tensor, n: int, group: Any) -> Tensor:
    b, heads, s, d = x.shape
    x = x.reshape(b, n, heads // n, s, d).permute(1, 0, 2, 3, 4).contiguous()
    return swap(x, group).permute(1, 2, 0, 3, 4).contiguous().reshape(b, heads // n, n * s, d)


def auto_sp_rows(x: Tensor, n: int, group: Any) -> Tensor:
    b, h, rows, d = x.shape
    x = x.reshape(b, h, n, rows // n, d).permute(2, 0, 1, 3, 4).contiguous()
    return swap(x, group).permute(1, 0, 2, 3, 4).contiguous().reshape(b, n * h, rows // n, d)


# dist_view_swap of the GPT-lite blog, of (H, B, T, E): pieces are cut, sent side by side, and put together again.


def view_swap(x: Tensor, old: int, new: int, n: int, group: Any) -> Tensor:
    shape = list(x.shape)
    shape[new] //= n
    sent = torch.cat([x.chunk(n, dim=new)[rank].contiguous() for rank in range(n)])
    received = torch.zeros_like(sent)
    dist.all_to_all_single(output=received, input=sent, group=group)
    return torch.cat([received.chunk(n)[rank].view(shape) for rank in range(n)], dim=old)


# Others.


def stacked(x: Tensor, n: int, group: Any) -> Tensor:
    sent = torch.stack(x.tensor_split(n, 2))
    return torch.cat(swap_functional(sent, n, group).unbind(0), 1)


def by_index(x: Tensor, n: int, group: Any) -> Tensor:
    sent = torch.stack([part.contiguous() for part in x.split(x.shape[1] // n, 1)], 0)
    received = swap_functional(sent, n, group)
    return torch.cat([received[rank] for rank in range(n)], dim=-2)


def dims_first(x: Tensor, n: int, group: Any) -> Tensor:
    """Permute to the scatter dim, the gather dim, then the others, of any sizes."""
    b, s, heads, d = x.shape
    sent = x.permute(2, 1, 0, 3).contiguous().reshape(n, heads // n * s * b * d)
    received = swap_functional(sent, n, group).reshape(n, heads // n, s, b, d)
    return received.transpose(0, 1).reshape(heads // n, n * s, b, d).permute(2, 1, 0, 3)


def matrix_columns(x: Tensor, n: int, group: Any) -> Tensor:
    rows, columns = x.shape
    received = swap(x.view(rows, n, columns // n).transpose(0, 1).contiguous(), group)
    return received.view(n * rows, columns // n)


def matrix_rows(x: Tensor, n: int, group: Any) -> Tensor:
    rows, columns = x.shape
    received = swap_functional(x, n, group).view(n, rows // n, columns)
    return received.movedim(0, 1).flatten(1)


def flat_heads(x: Tensor, n: int, group: Any) -> Tensor:
    """Split heads and ranks in one step; split heads again after the exchange."""
    b, s, width = x.shape
    received = swap(x.unflatten(2, (n, width // n)).movedim(2, 0).contiguous(), group)
    return received.movedim(0, 1).reshape(b, n * s, width // n // 5, 5)


class ExchangeForm(NamedTuple):
    """A form of an exchange of two dims, for n = 4."""

    fn: Ways
    shape: tuple[int, ...]  # of x
    scatter: int
    gather: int
    result: tuple[int, ...] | None = None  # shape of the result, if not the canonical one


EXCHANGES = {
    "DeepSpeed, heads": ExchangeForm(deepspeed_heads, (2, 3, 8, 5), 2, 1),
    "DeepSpeed, rows": ExchangeForm(deepspeed_rows, (2, 8, 3, 5), 1, 2),
    "DeepSpeed, rows first, heads": ExchangeForm(deepspeed_rows_first_heads, (3, 2, 8, 5), 2, 0),
    "DeepSpeed, rows first, rows": ExchangeForm(deepspeed_rows_first_rows, (8, 2, 3, 5), 0, 2),
    "4D, heads": ExchangeForm(four_d_heads, (2, 3, 8, 5), 2, 1),
    "4D, heads, one sequence": ExchangeForm(four_d_heads, (1, 3, 4, 5), 2, 1),
    "4D, rows": ExchangeForm(four_d_rows, (2, 8, 3, 5), 1, 2),
    "AutoSP, heads": ExchangeForm(auto_sp_heads, (2, 8, 3, 5), 1, 2),
    "AutoSP, rows": ExchangeForm(auto_sp_rows, (2, 3, 8, 5), 2, 1),
    "blog, heads": ExchangeForm(lambda x, n, g: view_swap(x, 2, 0, n, g), (8, 2, 3, 5), 0, 2),
    "blog, rows": ExchangeForm(lambda x, n, g: view_swap(x, 0, 2, n, g), (3, 2, 8, 5), 2, 0),
    "stack": ExchangeForm(stacked, (2, 3, 8, 5), 2, 1),
    "by index": ExchangeForm(by_index, (2, 8, 3, 5), 1, 2),
    "dims first": ExchangeForm(dims_first, (2, 3, 8, 5), 2, 1),
    "matrix, columns": ExchangeForm(matrix_columns, (3, 8), 1, 0),
    "matrix, rows": ExchangeForm(matrix_rows, (8, 3), 0, 1),
    "flat heads": ExchangeForm(flat_heads, (2, 3, 40), 2, 1, (2, 12, 2, 5)),
}


# Similar programs that are no exchange of two dims.


def ways(before: tuple[int, ...], after: tuple[int, ...]) -> Ways:
    """`deepspeed_heads` with other permutes."""

    def fn(x: Tensor, n: int, group: Any) -> Tensor:
        b, s, heads, d = x.shape
        x = x.reshape(b, s, n, heads // n, d).permute(before).contiguous()
        return swap_functional(x, n, group).permute(after).contiguous().reshape(b, n * s, heads // n, d)

    return fn


def every_nth_head(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, heads // n, n, d).permute(3, 0, 1, 2, 4).contiguous()
    return swap_functional(x, n, group).permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def uneven(x: Tensor, n: int, group: Any) -> Tensor:
    sent = x.movedim(2, 0).contiguous()
    sizes = [3, 1, 2, 2]
    return funcol.wait_tensor(funcol.all_to_all_single(sent, sizes, sizes, group)).movedim(0, 2)


def packed_used_twice(x: Tensor, n: int, group: Any) -> tuple[Tensor, Tensor]:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    return x.sin(), swap_functional(x, n, group).permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def received_used_twice(x: Tensor, n: int, group: Any) -> tuple[Tensor, Tensor]:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    received = swap_functional(x, n, group)
    return received.sin(), received.permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def work_between(x: Tensor, n: int, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    received = swap_functional(x.roll(1, 0), n, group)
    return received.cumsum(0).permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def two_groups(x: Tensor, n: int, group: Any, other: Any) -> Tensor:
    b, s, heads, d = x.shape
    x = x.reshape(b, s, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
    received = swap_functional(swap_functional(x, n, group), n, other)
    return received.permute(1, 0, 2, 3, 4).reshape(b, n * s, heads // n, d)


def blocks_only(x: Tensor, n: int, group: Any) -> Tensor:
    """Nothing is permuted: torch's own exchange is all there is."""
    return swap_functional(x.contiguous(), n, group)


NEAR_MISSES: dict[str, tuple[Ways, tuple[int, ...]]] = {
    "rows before the batch": (ways((2, 1, 0, 3, 4), (1, 0, 2, 3, 4)), (2, 3, 8, 5)),
    "rows before the batch, one sequence": (ways((2, 1, 0, 3, 4), (1, 0, 2, 3, 4)), (1, 3, 8, 5)),
    "ranks after the rows": (ways((2, 0, 1, 3, 4), (1, 2, 0, 3, 4)), (2, 3, 8, 5)),
    "ranks after the rows, one sequence": (ways((2, 0, 1, 3, 4), (1, 2, 0, 3, 4)), (1, 3, 8, 5)),
    "no permute after the exchange": (ways((2, 0, 1, 3, 4), (0, 1, 2, 3, 4)), (2, 3, 8, 5)),
    "other dims swapped": (ways((2, 0, 1, 3, 4), (1, 0, 2, 4, 3)), (2, 3, 8, 2)),
    "every n-th head": (every_nth_head, (2, 3, 8, 5)),
    "uneven": (uneven, (2, 3, 8, 5)),
    "the packed is used": (packed_used_twice, (2, 3, 8, 5)),
    "the received is used": (received_used_twice, (2, 3, 8, 5)),
    "work between": (work_between, (2, 3, 8, 5)),
    "nothing permuted": (blocks_only, (8, 5)),
}
