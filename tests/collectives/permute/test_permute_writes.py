"""Programs with mutations that the exchange pass does not change, and sums of other than padded pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.variants.exchange_variants import swap, swap_functional
from support.variants.tracing_exchanges import TRACERS, N, by_make_fx, count, one_of
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes
from sp_compile.passes.collectives.permute.tidy_permutes import match_placed

aten = torch.ops.aten
Fn = Callable[..., Any]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_of(N) as ranks:
        yield ranks


def assert_left_alone(gm: GraphModule) -> None:
    code = gm.code
    keys = [set(n.meta) for n in gm.graph.nodes]
    assert not FuseAllToAllPermutes()(gm).modified
    gm.recompile()
    assert gm.code == code
    assert [set(n.meta) for n in gm.graph.nodes] == keys


def packed(x: Tensor) -> Tensor:
    b, s, heads, d = x.shape
    return x.reshape(b, s, N, heads // N, d).permute(2, 0, 1, 3, 4).contiguous()


def unpacked(x: Tensor) -> Tensor:
    n, b, s, h, d = x.shape
    return x.permute(1, 0, 2, 3, 4).reshape(b, n * s, h, d)


def kept_and_written(x: Tensor, group: Any) -> Any:
    """Mutate the received value; its copy does not change."""
    came = swap_functional(packed(x), N, group)
    kept = torch.empty_like(came)
    kept.copy_(came)
    came.mul_(2)
    return unpacked(kept), came


def copy_written(x: Tensor, group: Any) -> Any:
    """Mutate the copy through a view; the received value does not change."""
    came = swap_functional(packed(x), N, group)
    changed = torch.empty_like(came)
    changed.copy_(came)
    changed.view(-1).add_(1)
    return came, unpacked(changed)


def kept_and_cleared(x: Tensor, group: Any) -> Any:
    came = swap_functional(packed(x), N, group)
    kept = torch.zeros_like(came)
    kept.copy_(came)
    came.view(-1).zero_()
    return unpacked(kept)


def seen_before(x: Tensor, group: Any) -> Any:
    """The buffer has a view from before it was filled."""
    sent = packed(x)
    received = torch.empty_like(sent)
    flat = received.view(-1)
    dist.all_to_all_single(received, sent, group=group)
    return unpacked(received), flat * 2


@pytest.mark.parametrize("fn", [kept_and_written, copy_written, seen_before])
def test_a_copy_of_a_result_is_another_tensor(group: Any, fn: Fn) -> None:
    assert_left_alone(by_make_fx(lambda x: fn(x, group), torch.randn(2, 3, 8, 5)))


def only_copy(x: Tensor, group: Any) -> Tensor:
    return unpacked(swap(packed(x), group)).add_(1)


@pytest.mark.parametrize("fn", [only_copy, kept_and_cleared])
def test_the_only_copy_may_be_written(group: Any, fn: Fn) -> None:
    gm = by_make_fx(lambda x: fn(x, group), torch.randn(2, 3, 8, 5))
    assert FuseAllToAllPermutes()(gm).modified
    assert count(gm, "sp.all_to_all_permute") == 1


# A graph in which no exchange is rewritten is as it was.


@pytest.mark.parametrize("tracer", TRACERS)
def test_buffers_stay_where_nothing_is_rewritten(group: Any, tracer: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return swap(x, group) * 2

    assert_left_alone(TRACERS[tracer](fn, torch.randn(8, 3)))


# Sums that look like ones of padded pieces.


def exchange_of(whole: Tensor, group: Any) -> Tensor:
    """One that is rewritten: sums are looked at where exchanges are."""
    return unpacked(swap_functional(packed(whole.reshape(1, 2, 4, 3)), N, group))


def filled_by_index(x: Tensor) -> Tensor:
    other = torch.zeros(4, 3)
    other[0] = 5.0
    return torch.cat([x[:4].sin(), other]) + torch.cat([torch.zeros(4, 3), x[4:].cos()])


def filled_in_place(x: Tensor) -> Tensor:
    other = torch.zeros(4, 3)
    other[0].add_(5.0)
    return torch.cat([x[:4].sin(), other]) + torch.cat([torch.zeros(4, 3), x[4:].cos()])


def filled_before_scatter(x: Tensor) -> Tensor:
    first, last = torch.zeros(8, 3), torch.zeros(8, 3)
    first[4:] = 5.0
    first = aten.slice_scatter(first, x[:4].sin(), 0, 0, 4)
    return first + aten.slice_scatter(last, x[4:].cos(), 0, 4, 8)


def column(x: Tensor) -> Tensor:
    narrow = torch.cat([x[:4, :1], torch.zeros(4, 1)])
    return narrow + torch.cat([torch.zeros(4, 3), x[4:]])


def vector(x: Tensor) -> Tensor:
    row = torch.cat([x[0, :1], torch.zeros(2)])
    return (row + torch.cat([torch.zeros(1, 3), x[:2]])).sum() + x


def empties(x: Tensor) -> Tensor:
    whole = torch.cat([torch.zeros(0), x[:, :1], torch.zeros(8, 2)], 1)
    return whole + torch.cat([torch.zeros(8, 1), x[:, 1:]], 1)


SUMS = [filled_by_index, filled_in_place, filled_before_scatter, column, vector, empties]


@pytest.mark.parametrize("fn", SUMS)
def test_sums_that_are_none_of_padded_pieces(group: Any, fn: Fn) -> None:
    gm = by_make_fx(lambda x: exchange_of(fn(x), group), torch.randn(8, 3))
    adds = count(gm, "aten.add.Tensor")
    assert FuseAllToAllPermutes()(gm).modified
    assert count(gm, "aten.add.Tensor") == adds
    assert count(gm, "sp.all_to_all_permute") == 1


@pytest.mark.parametrize(
    ("start", "end", "first", "length"), [(0, 4, 0, 4), (-8, -4, 0, 4), (-9, 20, 0, 8), (3, 0, 3, 0), (0, 0, 0, 0)]
)
def test_place_of_a_slice(start: int, end: int, first: int, length: int) -> None:
    """Positions are those of Python's slices: from the end, clamped, or of no rows."""
    gm = by_make_fx(lambda x: aten.slice_backward(x[start:end], [8, 3], 0, start, end, 1), torch.randn(8, 3))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
    piece = match_placed(node)
    assert piece is not None
    assert (piece.dim, piece.start, piece.length, piece.keeps_dim) == (0, first, length, True)


@pytest.mark.parametrize("named", [False, True])
def test_padded_pieces(group: Any, named: bool) -> None:
    """Padded pieces without mutations become one cat, with positional or keyword arguments."""

    def fn(x: Tensor) -> Tensor:
        first = aten.slice_backward(x[:4].sin(), [8, 3], 0, 0, 4, 1)
        return exchange_of(first + torch.cat([torch.zeros(4, 3), x[4:].cos()]), group)

    gm = by_make_fx(fn, torch.randn(8, 3))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.slice_backward.default)
    if named:
        names = ("grad_output", "input_sizes", "dim", "start", "end", "step")
        node.args, node.kwargs = (), dict(zip(names, node.args, strict=True))
    FuseAllToAllPermutes()(gm)
    assert count(gm, "aten.add.Tensor") == 0
    assert count(gm, "sp.all_to_all_permute") == 1
