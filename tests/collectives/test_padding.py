"""Values of padded rows: the nearest valid row for every frame, and the declaration of each operator."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.base.frames import has_remote_edges, is_padded, local_row_count, row_of_position
from sp_compile.lowering.base.library import COMPOSITES, PADDED
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.sharding.rule import RULES, TRANSFERS

sp = torch.ops.sp
NAN = float("nan")


def frames(most: int) -> list[list[int]]:
    """Return every window of every sequence of up to `most` positions, contiguous and zigzag."""
    return [
        [1, size, start, length, folds]
        for size in range(1, most + 1)
        for start in range(size)
        for length in range(1, size - start + 1)
        for folds in (1, 2)
    ]


def nearest(x: Tensor, frame: Sequence[int], n: int, dim: int = 0) -> Callable[[int], Tensor]:
    """Return a function from a rank to its rows of the full window, computed position by position."""
    _, size, start, length, folds = frame
    rows = -(-size // (folds * n))

    def held(rank: int) -> Tensor:
        positions = list(range(rank * rows, (rank + 1) * rows))
        if folds == 2:
            other = 2 * n - 1 - rank
            positions += range(other * rows, (other + 1) * rows)
        return x.index_select(dim, torch.tensor([min(max(p - start, 0), length - 1) for p in positions]))

    return held


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [3, 2, 1, 4])
def test_every_frame(n: int) -> None:
    """Padded rows may contain NaN, and some ranks have no valid row."""
    for frame in frames(7):
        length = frame[3]
        x = torch.randn(length, 2, dtype=torch.float64)
        wanted = nearest(x, frame, n)

        def run(rank: int, x: Tensor = x, frame: list[int] = frame) -> tuple[Tensor, Tensor]:
            shard = sp.shard(x, 0, frame, n, SIMULATED_GROUP)
            return shard, sp.window(sp.mask(shard, 0, frame, NAN, n, SIMULATED_GROUP), 0, frame, n, SIMULATED_GROUP)

        for rank, (shard, restored) in enumerate(run_ranks(n, run)):
            assert torch.equal(shard, wanted(rank)), (frame, rank)
            assert torch.equal(restored, wanted(rank)), (frame, rank)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("n", "size", "start", "length"), [(2, 5, 1, 3), (3, 7, 0, 6), (4, 5, 0, 1), (4, 9, 2, 2)])
def test_outer_and_inner_factors_and_dtypes(n: int, size: int, start: int, length: int, dtype: torch.dtype) -> None:
    """A dim of (outer, positions, inner), as batch and sequence make one."""
    outer, inner = 2, 3
    x = torch.randint(0, 2, (4, outer * length * inner)).to(dtype)
    frame = [outer, size, start, length]
    held = nearest(x.unflatten(1, (outer, length, inner)), [1, size, start, length, 1], n, 2)

    def run(rank: int) -> Tensor:
        shard = sp.shard(x, 1, frame, n, SIMULATED_GROUP)
        return sp.window(sp.mask(shard, 1, frame, 1, n, SIMULATED_GROUP), 1, frame, n, SIMULATED_GROUP)

    for rank, found in enumerate(run_ranks(n, run)):
        assert torch.equal(found, held(rank).flatten(1, 3))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_cotangents_of_padding_are_dropped_by_selection(n: int) -> None:
    """A NaN cotangent of a padded row is not multiplied by zero, but never read."""
    for frame in frames(4):
        x = torch.ones(frame[3], dtype=torch.float64)

        def run(rank: int, x: Tensor = x, frame: list[int] = frame) -> Tensor:
            shard = sp.shard(x, 0, frame, n, SIMULATED_GROUP).requires_grad_()
            poison = sp.mask(torch.ones_like(shard), 0, frame, NAN, n, SIMULATED_GROUP)
            (grad,) = torch.autograd.grad(sp.window(shard, 0, frame, n, SIMULATED_GROUP), shard, poison)
            return grad.sum()

        assert sum(g.item() for g in run_ranks(n, run)) == frame[3]


def test_positions_and_remote_edges() -> None:
    """`row_of_position` and `has_remote_edges`, against a table of positions per rank."""
    for n, frame in itertools.product((1, 2, 3, 4), frames(6)):
        _, _, start, length, folds = frame
        total = n * local_row_count(frame, n)
        held = nearest(torch.arange(total), [1, total, 0, total, folds], n)
        owner = {int(p): (rank, row) for rank in range(n) for row, p in enumerate(held(rank))}
        assert {p: row_of_position(p, frame, n) for p in owner} == owner
        last = start + length - 1
        before = any(owner[p][0] != owner[start][0] for p in range(start))
        after = any(owner[p][0] != owner[last][0] for p in range(last + 1, total))
        assert has_remote_edges(frame, n) == (before, after), (frame, n)
        assert is_padded(frame, n) == (start > 0 or length < total)


# What operators declare.

W, B = torch.randn(4, 4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
IMAGE_WEIGHT = torch.randn(4, 4, 3, 3, dtype=torch.float64)
S = 5


def _rows(*, dim: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [4, 4, 4]
    shape[dim] = S
    return torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)


def _along(op: Any, x: Tensor, dim: int, *args: Any, grown: int = 0, stride: int = 1, **kwargs: Any) -> Any:
    """Return (x, dim, op on the full value, op on shards, frame of the result) of a window op."""
    size = S + max(grown, 0)
    frame, result = [1, size, 0, S], [1, size // stride, 0, (S + grown) // stride]
    return (
        x,
        dim,
        lambda x: op(x, *args, **kwargs),
        lambda x, n: op(x, *args, frame, result, n, SIMULATED_GROUP, **kwargs),
        frame,
        result,
    )


def _scan(op: Any, x: Tensor, *args: Any) -> Any:
    frame = [1, S, 0, S]
    return x, 1, lambda x: op(x, *args), lambda x, n: op(x, *args, frame, "gather", n, SIMULATED_GROUP), frame, frame


def _roll(by: int) -> Any:
    frame = [1, S, 0, S]
    return (
        _rows(),
        1,
        lambda x: sp.roll(x, 1, by),
        lambda x, n: sp.roll(x, 1, by, frame, n, SIMULATED_GROUP),
        frame,
        frame,
    )


def _matrix_scan(x: Tensor, dim: int, *rest: Any) -> Tensor:
    """Scan x (B, S, D) along S, with matrices (1, 1)."""
    matrices = x.transpose(1, 2)[..., None, None]
    return sp.affine_scan(matrices, matrices, None, dim + 1, *rest)[..., 0, 0].transpose(1, 2)


def _attention(x: Tensor, *rest: Any) -> Tensor:
    """Linear attention of x (B, S, D) with itself, in one head."""
    y = x.unsqueeze(2)
    beta, starts = x[..., :1].sigmoid(), x[..., 0] > 1
    return sp.linear_attention(y, y / 4, y, -y.abs(), beta, None, None, starts, None, None, None, 1.0, "", *rest)[
        :, :, 0
    ]


CASES: dict[str, Callable[[], Any]] = {
    **{
        f"scan {op}{' exclusive' * exclusive}{' reverse' * reverse}": (
            lambda op=op, exclusive=exclusive, reverse=reverse: _scan(
                sp.scan, _rows(), None, 1, op, exclusive, reverse, None, None
            )
        )
        for op in ("sum", "prod", "max", "min", "logsumexp")
        for exclusive in (False, True)
        for reverse in (False, True)
    },
    "scan of bools": lambda: _scan(sp.scan, _rows(dtype=torch.bool), None, 1, "sum", False, False, None, None),
    "extremes": lambda: _scan(sp.extremes, _rows(), 1, "max", False),
    "extremes reverse": lambda: _scan(sp.extremes, _rows(), 1, "min", True),
    "linear_scan": lambda: _scan(lambda x, *rest: sp.linear_scan(x, x, None, *rest), _rows(), 1, False, None),
    "affine_scan": lambda: _scan(_matrix_scan, _rows(), 1, False, None, False),
    "linear_attention": lambda: _scan(_attention, _rows()),
    "shift": lambda: _along(sp.shift, _rows(), 1, 1, 1, -1, 7.0),
    "shift back": lambda: _along(sp.shift, _rows(), 1, 1, -1, 1, 7.0),
    "shift shorter": lambda: _along(sp.shift, _rows(), 1, 1, -1, 0, 0.0, grown=-1),
    "shift longer": lambda: _along(sp.shift, _rows(), 1, 1, 2, 0, NAN, grown=2),
    "conv_along": lambda: _along(sp.conv_along, _rows(dim=2), 2, W, B, 2, 2, 0, [1], [0], [1], 1),
    "conv_along of images": lambda: _along(
        sp.conv_along, _rows(dim=2), 2, IMAGE_WEIGHT, B, 2, 2, 0, [1, 1], [1, 1], [1, 1], 1
    ),
    "avg_pool1d": lambda: _along(sp.avg_pool1d, _rows(dim=2), 2, 1, 1, 3, 1),
    "max_pool1d": lambda: _along(sp.max_pool1d, _rows(dim=2), 2, 1, 1, float("-inf"), 3, 1, 1),
    "unfold": lambda: _along(sp.unfold, _rows(), 1, 1, 2, 0, 0.0, 3, 1),
    "roll": lambda: _roll(1),
    "roll back": lambda: _roll(-2),
}


@pytest.mark.parametrize("case", CASES)
def test_results_hold_the_nearest_row_and_read_no_padding(case: str) -> None:
    """Operands whose padded rows are poisoned, NaN or 99, give the same results as those that repeat a row."""
    for n in (2, 3, 4):
        torch.manual_seed(n)
        x, dim, whole, on_shards, frame, result = CASES[case]()
        poison = NAN if x.is_floating_point() else 1 if x.dtype is torch.bool else 99

        def run(rank: int, made: Any = (x, dim, on_shards, frame, poison), n: int = n) -> list[Tensor]:
            x, dim, on_shards, frame, poison = made
            shard = sp.shard(x, dim, frame, n, SIMULATED_GROUP)
            found = on_shards(sp.mask(shard, dim, frame, poison, n, SIMULATED_GROUP), n)
            return [found] if isinstance(found, Tensor) else list(found)

        right = whole(x)
        right = [right] if isinstance(right, Tensor) else list(right)
        for rank, results in enumerate(run_ranks(n, run)):
            for found, expected in zip(results, right, strict=True):
                rows = nearest(expected, [*result, 1], n, dim)(rank)
                torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_all_operators_that_give_shards_declare_their_padding() -> None:
    """`PADDED` contains exactly the operators with sharded results."""
    gathers = {
        "all_gather",
        "all_reduce",
        "broadcast",
        "broadcast_grad",
        "extreme",
        "linear_attention_state",
        "unshard",
    }
    given = {op for op in (*RULES, *TRANSFERS) if getattr(op, "namespace", "") == "sp"}
    names = {op.__name__.split(".")[0] for op in given}
    declared = {op.__name__.split(".")[0] for op in PADDED} - {"toy_attention"}  # of another test
    names -= {"toy_attention"}
    assert names - gathers <= declared
    assert declared - names == {"mask", "shard", "window"}  # of local graphs: they have no rule
    assert set(PADDED) <= COMPOSITES
    assert set(PADDED.values()) == {"nearest", "finite", "as given"}
    tested = {case.split()[0] for case in CASES} | {"window"}
    exchanges = {"all_to_all", "reduce_scatter", "shard"}  # test_exchanges_hold_the_nearest_row, test_every_frame
    assert {op.__name__.split(".")[0] for op, padded in PADDED.items() if padded == "nearest"} == tested | exchanges


@pytest.mark.parametrize("n", [2, 3, 4])
def test_exchanges_hold_the_nearest_row(n: int) -> None:
    """A reduce-scatter and an all-to-all of heads and rows do not read padded operands."""
    for frame in frames(5):
        heads = [1, 4, 0, 4]
        x = torch.randn(frame[3], 4, dtype=torch.float64)
        wanted = nearest(x, frame, n)

        def run(rank: int, x: Tensor = x, frame: list[int] = frame, heads: list[int] = heads) -> tuple[Tensor, Tensor]:
            part = x if rank == 0 else torch.zeros_like(x)
            by_head = sp.mask(sp.shard(x, 1, heads, n, SIMULATED_GROUP), 1, heads, NAN, n, SIMULATED_GROUP)
            (moved,) = sp.all_to_all([by_head], 0, frame, 1, heads, n, SIMULATED_GROUP)
            return sp.reduce_scatter(part, 0, frame, n, SIMULATED_GROUP), moved

        for rank, (scattered, moved) in enumerate(run_ranks(n, run)):
            assert torch.equal(scattered, wanted(rank)), frame
            assert torch.equal(moved, wanted(rank)), frame


ATTENTION: dict[str, Callable[[int], tuple[Any, Sequence[Any]]]] = {
    "ring": lambda n: (sp.ring_attention, (n, "travel")),
    "ring scattered": lambda n: (sp.ring_attention, (n, "scatter")),
    "hybrid": lambda n: (sp.hybrid_attention, (2 if n % 2 == 0 else 1, "travel")),
    "gathered": lambda n: (sp.gathered_attention, ()),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ATTENTION)
def test_attention_reads_no_padding(way: str, causal: bool, balance: bool) -> None:
    """Padded rows of queries, keys and values are NaN or infinite, as a slice may leave them: valid rows and gradients are right."""
    for n, length in itertools.product((2, 3, 4), (1, 5, 6)):
        length = 2 * n - 1 if balance else length  # of an even number of rows on each rank
        op, more = ATTENTION[way](n)
        poison = NAN if length % 2 else float("inf")
        frame = [1, length, 0, length]
        x = torch.randn(3, 1, 4, length, 4, dtype=torch.float64)
        args = [None, [], [], [], [], "k <= q" * causal, None, 0.0, None, "", [], [], None, False]

        def run(
            rank: int,
            x: Tensor = x,
            n: int = n,
            frame: list[int] = frame,
            poison: float = poison,
            call: Any = (op, (*args, frame, frame, n, SIMULATED_GROUP, balance, *more)),
        ) -> tuple[Tensor, list[Tensor]]:
            shards = [sp.shard(one, 2, frame, n, SIMULATED_GROUP).requires_grad_() for one in x]
            attend, rest = call
            out = attend(*(sp.mask(one, 2, frame, poison, n, SIMULATED_GROUP) for one in shards), *rest)
            valid = sp.mask(out, 2, frame, 0.0, n, SIMULATED_GROUP)
            grads = torch.autograd.grad(valid.square().sum(), shards)
            assert all(one.isfinite().all() for one in (valid, *grads))
            return tuple(sp.unshard(one.detach(), 2, frame, n, SIMULATED_GROUP) for one in (out, *grads))

        whole = [one.clone().requires_grad_() for one in x]
        right = F.scaled_dot_product_attention(*whole, is_causal=causal)
        wanted = right.detach(), *torch.autograd.grad(right.square().sum(), whole)
        for found in run_ranks(n, run):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_rows_that_are_as_given_follow_from_the_same_row() -> None:
    """Operators with `padded="as given"` compute other rows independently of one row."""
    ids = torch.tensor([2, 0, 1, 2, 0])
    x, w = torch.randn(5, 8, dtype=torch.float64), torch.randn(3, 8, 8, dtype=torch.float64)

    def product(x: Tensor, ids: Tensor) -> Tensor:
        keys, order = sp.sort_rows(ids, True, False)
        rows = sp.to_sorted(x.bfloat16(), order)
        return sp.from_sorted(sp.grouped_mm(rows, w.bfloat16(), keys, "aten::_grouped_mm"), order)

    def attended(x: Tensor, ids: Tensor) -> Tensor:
        keys = w[None, :1]
        return sp.masked_attention(x[None, None], keys, keys.sin(), [], [], [], "", 0.0, None, False)[0, 0]

    for function in (product, attended):
        right = function(x, ids)
        for row in range(5):
            other, others = x.clone(), ids.clone()
            other[row], others[row] = NAN, (ids[row] + 1) % 3
            found = function(other, others)
            assert torch.equal(found.isnan().any(-1), torch.arange(5) == row)
            rest = torch.arange(5) != row
            torch.testing.assert_close(found[rest], right[rest], rtol=1e-12, atol=1e-12)
