"""Sharded values on simulated ranks: reads, moves, and gradients."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from sp_compile import SpError
from sp_compile.lowering.collectives.shard_storage import Layout, Origin, RowPermutation
from sp_compile.lowering.collectives.shard_views import make_view
from sp_compile.lowering.collectives.sharded import Sharded, from_local, to_local, write
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.torch_compat import FakeTensorMode

LENGTH = 7
X = torch.randn(2, LENGTH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
ORDER = torch.tensor([3, 0, 5, 1, 6, 2, 4])
CHUNKS = torch.stack([ORDER, torch.ones_like(ORDER)])
LAYOUTS = [Layout(1, n, SIMULATED_GROUP, (0, 1, 2), folds) for n in (1, 2, 3) for folds in (1, 2)]
LAYOUTS += [
    Layout(1, n, SIMULATED_GROUP, (0, 1, 2), 0, balanced=RowPermutation(ORDER, ORDER.argsort(), CHUNKS)) for n in (2, 3)
]


def made(x: Tensor, layout: Layout) -> Tensor:
    """Return this rank's rows of sin(2 x) as a graph returns them."""
    rows = layout.local_rows(x)
    return from_local((rows * 2).sin(), layout, x.shape[layout.dim])


def on_ranks(layout: Layout, run: Callable[[Layout], object]) -> list[object]:
    return run_ranks(layout.n, lambda _: run(layout))


def next_graph(y: Tensor, layout: Layout) -> Tensor:
    return from_local((to_local(y, layout) * W).cos(), layout, y.shape[layout.dim])


WAYS: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "read": lambda y, then: y.pow(2).mean(),
    "twice": lambda y, then: (y * y).sum() + y.exp().sum(),
    "taken": lambda y, then: then(y).sum(),
    "taken and read": lambda y, then: then(y).sum() + y.pow(2).mean(),
    "read and taken": lambda y, then: y.pow(2).mean() + then(y).sum(),
    "taken twice": lambda y, then: (then(y) * then(y)).sum(),
    "a residual": lambda y, then: (y + then(y)).sum(),
    "a residual taken": lambda y, then: then(y + then(y)).sum(),
    "through a view": lambda y, then: then(y.view_as(y)).sum() + then(y.clone()).mean(),
    "a cast": lambda y, then: then(y.float().double()).sum(),
    "full": lambda y, then: (y.full() if isinstance(y, Sharded) else y).exp().mean() + then(y).sum(),
    "changed in place": lambda y, then: then(y.mul(2).add_(1)).sum(),
    "rows changed in place": lambda y, then: then(_with_rows(y)).sum(),
    "written by a graph": lambda y, then: _written(y.clone(), then, lambda y: y.sin().mean()),
    "written by a graph, taken": lambda y, then: _written(y.clone(), then, lambda y: then(y).mean()),
    "read, and written by a graph": lambda y, then: _written(y.clone(), then, lambda y: y.sin().mean(), reads=True),
}


def _written(
    y: Tensor, then: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor], reads: bool = False
) -> Tensor:
    """Use a value before and after a graph writes to it; an alias has the new value, too."""
    before = (y * 3).sum() if reads else then(y).sum()
    alias, version, new = y.detach(), y._version, then(y)
    if isinstance(y, Sharded):
        write(y, new)
        assert reads or not alias.is_gathered
    else:
        y.copy_(new)
    assert y._version > version
    return before + use(y) + (use(alias) * y).sum()


def _with_rows(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 1:3] = 0.5
    y[:, -1].mul_(3)
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_gradients_equal_a_single_device(layout: Layout, way: str) -> None:
    def one_device() -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        loss = WAYS[way]((x * 2).sin(), lambda y: (y * W).cos())
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    def rank(layout: Layout) -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        loss = WAYS[way](made(x, layout), lambda y: next_graph(y, layout) if isinstance(y, Sharded) else (y * W).cos())
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    right = one_device()
    tolerance = 1e-6 if way == "a cast" else 1e-12
    for found in on_ranks(layout, rank):
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


PARTS = {
    "tokens of a batch": ((2 * LENGTH, 3), {"dim": 0, "outer": 2}),
    "heads of tokens": ((2, LENGTH * 3), {"dim": 1, "inner": 3}),
    "heads of tokens of a batch": ((2 * LENGTH * 3,), {"dim": 0, "outer": 2, "inner": 3}),
    "a window": ((2, LENGTH, 3), {"dim": 1, "before": 1, "after": 2}),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("folds", [1, 2])
def test_the_sequence_is_a_part_of_a_dim(part: str, folds: int) -> None:
    """A sharded factor of a dim with a batch or heads, or a window: reads, results, sums and gradients."""
    shape, where = PARTS[part]
    layout = Layout(n=3, group=SIMULATED_GROUP, order=tuple(range(len(shape))), folds=folds, **where)

    def loss_of(x: Tensor, start: Callable[..., Tensor], then: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        y = start(x, layout)
        loss = (then(y, layout) + y).pow(2).sum() + y.detach().clone().mean()
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    def rank(layout: Layout) -> tuple[Tensor, Tensor]:
        x = X.reshape(shape).clone().requires_grad_()
        y = made(x, layout)
        assert isinstance(y, Sharded)
        assert y.shape == x.shape
        return loss_of(x, made, lambda y, layout: from_local(to_local(y, layout).cos(), layout, y.shape[layout.dim]))

    one = X.reshape(shape).clone().requires_grad_()
    right = loss_of(one, lambda x, _: (x * 2).sin(), lambda y, _: y.cos())
    for found in on_ranks(layout, rank):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def _for_inference(y: Tensor) -> Tensor:
    with torch.inference_mode():
        assert not y.detach().is_inference()
        return y.detach().clone()


MOVES: dict[str, Callable[[Tensor], object]] = {
    "detach": lambda y: y.detach(),
    "alias": lambda y: torch.ops.aten.alias(y),
    "requires_grad_": lambda y: y.detach().requires_grad_(),
    "data": lambda y: y.data,
    "view_as": lambda y: y.view_as(y),
    "view with -1": lambda y: y.view(-1, *y.shape[1:]),
    "clone": lambda y: y.clone(),
    "cast": lambda y: y.to(torch.bfloat16),
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "containers": lambda y: {"a": [y]}["a"][0],
    "zeros_like": lambda y: torch.zeros_like(y) is not None and y,
    "repr": lambda y: repr(y) and y,
    "shape": lambda y: (y.shape, y.stride(), y.is_contiguous(), y.numel(), y.device) and y,
    "a sum of two": lambda y: y + y.detach(),
    "what torch calls its layout": lambda y: y.layout is torch.strided and y,
    "in inference mode": _for_inference,
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_do_not_gather(move: str) -> None:
    def rank(layout: Layout) -> None:
        y = made(X, layout)
        moved = MOVES[move](y)
        assert isinstance(moved, Sharded)
        assert not moved.is_gathered
        assert not y.is_gathered

    on_ranks(LAYOUTS[2], rank)


READS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda y: y.sum(),
    "item": lambda y: y[0, 0, 0].item(),
    "numpy": lambda y: y.numpy().sum(),
    "tolist": lambda y: y.tolist(),
    "pickle": lambda y: pickle.dumps(y),
    "index": lambda y: y[:, 2],
    "matmul": lambda y: y @ W,
    "view": lambda y: y.view(-1, 3),
    "full": lambda y: y.full(),
    "data_ptr": lambda y: y.data_ptr(),
    "storage": lambda y: list(y.storage()),
    "its bytes": lambda y: y.untyped_storage().tolist(),
    "dlpack": lambda y: torch.from_dlpack(y),
    "shared memory": lambda y: y.share_memory_().sum(),
    "a comparison": lambda y: torch.testing.assert_close(y, y.clone()),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gathers_the_value_and_its_aliases(read: str) -> None:
    def rank(layout: Layout) -> None:
        y = made(X, layout)
        other = y.detach()
        found, right = READS[read](y), READS[read]((X * 2).sin()) if read != "full" else (X * 2).sin()
        assert y.is_gathered
        assert other.is_gathered
        if isinstance(found, Tensor):
            assert type(found) is Tensor
            torch.testing.assert_close(found, right)
        elif read == "pickle":
            torch.testing.assert_close(pickle.loads(found), (X * 2).sin())
        elif read != "data_ptr":
            assert found == right

    on_ranks(LAYOUTS[4], rank)


def test_data_that_is_assigned() -> None:
    """It is that of one name, not of its aliases; and has no other shape."""

    def rank(layout: Layout) -> None:
        y = made(X, layout)
        other = y.detach()
        y.data = X
        torch.testing.assert_close(y.full(), X)
        y.data = made(X + 1, layout)
        assert not y.is_gathered
        torch.testing.assert_close(y.data.full(), (X * 2 + 2).sin())
        torch.testing.assert_close(other.full(), (X * 2).sin())
        with pytest.raises(SpError, match=r"SP322: .*\(1, 7, 3\) torch.float64"):
            y.data = X[:1]

    on_ranks(LAYOUTS[2], rank)


RESHAPES: dict[str, Callable[[Tensor], object]] = {
    "t": lambda x: x.t_(),
    "transpose": lambda x: x.transpose_(0, 1),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "resize": lambda x: x.resize_(2, 3),
    "set": lambda x: x.set_(torch.zeros(2, dtype=x.dtype)),
    "as_strided": lambda x: x.as_strided_((2, 3), (3, 1)),
}


@pytest.mark.parametrize("way", RESHAPES)
def test_in_place_ops_cannot_change_the_shape(way: str) -> None:
    """Aliases share the storage, but not the shape; `detach_` and a plain operand are allowed."""

    def rank(layout: Layout) -> None:
        y = from_local(layout.local_rows(X[0]), layout, LENGTH)
        with pytest.raises(SpError, match=f"SP324: .*{way}_"):
            RESHAPES[way](y.detach())
        torch.testing.assert_close(y.detach_().squeeze_().transpose_(1, 1).full(), X[0])
        torch.testing.assert_close(torch.empty(0, dtype=X.dtype).resize_as_(y).copy_(y), X[0])

    on_ranks(Layout(0, 2, SIMULATED_GROUP, (0, 1)), rank)


def test_copies_and_sums_of_views_have_the_nearest_rows_in_padding() -> None:
    """Rows of the base before and after a view would be NaN in the padding of the next graph."""
    base = X.index_fill(1, torch.tensor([0, LENGTH - 1]), torch.nan)
    ways: list[Callable[[Tensor], Tensor]] = [lambda v: v, lambda v: v.clone(), lambda v: v.float(), lambda v: v + v]

    def rank(layout: Layout) -> None:
        y = from_local(layout.local_rows(base), layout, LENGTH)
        for way in ways:
            view = way(make_view(y, [lambda x: x[:, 1:-1]]))
            assert isinstance(view, Sharded)
            assert not view.is_gathered
            assert to_local(view, view.sharding).isfinite().all()

    for layout in LAYOUTS:
        if layout.n > 1 and layout.is_plain and layout.balanced is None:
            on_ranks(layout, rank)


def test_it_is_gathered_once() -> None:
    """Each rank is notified once."""
    notified: list[str] = []

    def rank(layout: Layout) -> None:
        y = from_local(layout.local_rows(X), layout, LENGTH, Origin("the states", notified.append))
        whole = [y.full(), y.detach().full(), y.mul(1)]
        assert whole[0].data_ptr() == whole[1].data_ptr() == y.data_ptr()

    on_ranks(LAYOUTS[2], rank)
    assert len(notified) == 2
    assert all(re.match(rf"the states .*float64 .*\b{LENGTH}\b", text) for text in notified)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_its_rows_are_read_during_tracing(layout: Layout) -> None:
    """AOTAutograd reads the base of a view."""

    def rank(layout: Layout) -> None:
        y, right = made(X, layout), made(X, layout).local
        assert y.sum().isfinite()
        with FakeTensorMode():
            rows = y.local
        assert y.is_gathered
        torch.testing.assert_close(rows, right)

    on_ranks(layout, rank)


def test_a_frozen_copy_is_a_leaf() -> None:
    """The gradient of `x.detach().requires_grad_()` between two graphs."""

    def rank(layout: Layout) -> Tensor:
        y = made(X, layout).detach().requires_grad_()
        next_graph(y, layout).sum().backward()
        assert isinstance(y.grad, Sharded)
        return y.grad.full()

    leaf = (X * 2).sin().requires_grad_()
    (leaf * W).cos().sum().backward()
    for layout in LAYOUTS:
        for found in on_ranks(layout, rank):
            torch.testing.assert_close(found, leaf.grad)


def test_record_stream_does_not_gather() -> None:
    """FSDP records results on its streams; that reads no value, so nothing is gathered. A CPU has no streams."""

    def rank(layout: Layout) -> bool:
        y = made(X, layout)
        with suppress(NotImplementedError):
            torch.ops.aten.record_stream(y, torch.Stream(device="cpu"))
        return not y.is_gathered

    assert all(all(on_ranks(layout, rank)) for layout in LAYOUTS)


def test_the_full_tensor_has_single_device_strides() -> None:
    """For a result that is transposed on a single device, `view` works or fails as it does there."""

    def rank(_: int) -> None:
        layout = Layout(1, 2, SIMULATED_GROUP, (1, 0, 2))
        y = from_local(layout.local_rows(X), layout, LENGTH)
        right = X.transpose(0, 1).contiguous().transpose(0, 1)
        assert y.stride() == y.full().stride() == right.stride()
        torch.testing.assert_close(y.transpose(0, 1).view(-1, 3), right.transpose(0, 1).view(-1, 3))

    run_ranks(2, rank)
