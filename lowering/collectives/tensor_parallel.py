"""sp::reduce_pair: the reductions of a tensor-parallel program, with the gradient that its author wrote for them.

Over other ranks than those that share the sequence, and of every element by itself, so that shards pass.

A tensor-parallel program's own way of sharing out rows: each rank takes its block, and blocks are put together.

In the view of the program a block is a small value of each rank's own. Propagation sees that a block of a sharded value
is what the rank holds already, and blocks put together are a sharded value: then neither costs anything.

``sp::shared``: gradients that ranks have to be given alike, for a backward on shards takes each row of one copy.

Where the ranks' copies differ the sum of the rows would be nobody's gradient, so that is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.errors import SpError
from sp_compile.lowering.communicator import current
from sp_compile.lowering.frames import own_positions
from sp_compile.lowering.library import LinearMap, composite, opaque

from .checksums import PIECE, total

c10d = torch.ops._c10d_functional


def _reduced(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    for reduction in first:
        op, group = reduction.split(" ", 1)
        x = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), op, group))
    return x.view_as(x)


def _reduced_back(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    return _reduced(x, then, first)


@composite("reduce_pair(Tensor x, str[] forward, str[] backward) -> Tensor")
def reduce_pair(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    """All-reduces of x, one behind the other, each "op group"; backward: those of the cotangent.

    Megatron's f is ([], ["sum g"]) and its g (["sum g"], []). Shapes: any -> same. Bytes: those of the all-reduces.
    Source: _c10d_functional.all_reduce.
    """
    return LinearMap.apply(x, _reduced, _reduced_back, list(forward), list(backward))


@composite("own_rows(Tensor x, int dim, int n, str group) -> Tensor")
def own_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """This rank's block of a value that every rank has whole.

    Shapes: dim of n * s -> s. Bytes: none. Source: index_select at the rank's positions.
    """
    length = x.shape[dim]
    return x.index_select(dim, own_positions((1, length, 0, length), n, group, x.device))


@composite("all_rows(Tensor x, int dim, int n, str group) -> Tensor")
def all_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """Every rank's block, in the order of the ranks.

    Shapes: dim of s -> n * s. Bytes: (n - 1) * bytes(x). Source: all_gather_into_tensor, then a view.
    """
    return current().all_gather(x.movedim(dim, 0), n, group).movedim(0, dim)


@opaque(
    "shared(Tensor[] xs, str[] names, int n, str group) -> Tensor[]",
    lambda xs, *_: [torch.empty_like(x) for x in xs],
    replays=False,
)
def shared(xs: list[Tensor], names: list[str], n: int, group: str) -> list[Tensor]:
    """Copies of gradients of shared results, once the ranks have found theirs equal. names: of the results.

    Shapes: any -> same. Bytes: 8 (n - 1) a tensor; more only for tensors whose bits differ. Backward: none.
    Raises SpError on every rank of the group if they differ by more than rounding, as kernels that add in any order
    leave it. Ranks of other groups are not told: one that waits for this rank in an exchange of its own backward, as
    data-parallel neighbours do, waits until that group's timeout.
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
            "every rank, or sum the gradient over the group before it comes here, or compile with "
            "sequence_parallel_linear='never', which leaves gradients as autograd has them"
        )
    return [x.clone() for x in xs]


def _rounded(x: Tensor, n: int, group: str) -> bool:
    """Are the ranks' copies the same but for the last bits of each row? Every rank gets the same answer."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    off, long = zip(*(_lengths(part, n, group) for part in rows.split(max(1, PIECE // rows.shape[1]))))
    apart, own = torch.cat(off), torch.cat(long)
    eps = torch.finfo(x.dtype).eps * (64 if x.element_size() >= 4 else 1)  # sums are of 32 bits, and rounded once
    allowed = eps * (own + own.max() / 16)  # of a row that sums to nothing only the noise is left
    return bool((apart <= allowed).all() and own.isfinite().all())


def _lengths(rows: Tensor, n: int, group: str) -> tuple[Tensor, Tensor]:
    """Of each row: how far the ranks' copies are from the first one, and the longest of them."""
    copies = current().all_gather(rows.contiguous(), n, group).view(n, *rows.shape)
    copies = copies.to(torch.complex128 if rows.is_complex() else torch.float64)
    return (copies - copies[0]).norm(dim=-1).amax(0), copies.norm(dim=-1).amax(0)
