"""The sp:: collectives on simulated ranks: values, adjoints, and that they communicate at all."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import local_row_count
from sp_compile.lowering.comm.communicator import from_sendable, to_sendable
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
CONTIGUOUS = [[1, 8, 0, 8], [1, 7, 0, 7], [1, 3, 0, 3], [1, 7, 2, 4], [2, 7, 1, 5], [3, 8, 0, 8], [2, 1, 0, 1]]
FRAMES = [*CONTIGUOUS, *([*frame, 2] for frame in CONTIGUOUS)]
DIM, INNER = 1, 2

each_frame = pytest.mark.parametrize("frame", FRAMES, ids=str)
each_n = pytest.mark.parametrize("n", [1, 2, 3, 4])


def random_value(frame: Sequence[int], seed: int = 0) -> Tensor:
    """Return a random float64 value whose dim 1 the frame describes, with an inner factor of 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, frame[0] * frame[3] * INNER, 3, generator=generator, dtype=torch.float64)


def shard_of(x: Tensor, dim: int, frame: Sequence[int], n: int, rank: int, edge: bool = True) -> Tensor:
    """Return the shard of `x` on `rank`, computed position by position."""
    outer, size, start, length, *folds = frame
    s = local_row_count((1, size, 0, size, *folds), n)
    factors = x.unflatten(dim, (outer, length, -1))
    rows = []
    positions = list(range(rank * s, (rank + 1) * s))
    if folds:  # chunks rank and 2n - 1 - rank
        positions = [c * s // 2 + i for c in (rank, 2 * n - 1 - rank) for i in range(s // 2)]
    for position in positions:
        row = factors.select(dim + 1, min(max(position - start, 0), length - 1))
        inside = start <= position < start + length
        rows.append(row if inside or edge else torch.zeros_like(row))
    return torch.stack(rows, dim + 1).flatten(dim, dim + 2)


def pairing(kind: str, gs: Sequence[Tensor], xs: Sequence[Tensor]) -> float:
    """<g, x> over the ranks: an invariant pair is the same on all and counts once."""
    products = [float((g * x).sum()) for g, x in zip(gs, xs, strict=True)]
    if kind == "each":
        return math.fsum(products)
    assert products == pytest.approx([products[0]] * len(products), rel=1e-12)
    return products[0]


def check_adjoint(
    fn: Callable[[Tensor], Tensor], kinds: tuple[str, str], xs: Sequence[Tensor], gs: Sequence[Tensor]
) -> list[Tensor]:
    """<A* g, x> = <g, A x> on simulated ranks; the results of ``fn``."""

    def live(rank: int) -> tuple[Tensor, Tensor]:
        x = xs[rank].clone().requires_grad_()
        y = fn(x)
        return y.detach(), torch.autograd.grad(y, x, gs[rank])[0]

    ys, grads = zip(*run_ranks(len(xs), live), strict=True)
    assert pairing(kinds[0], grads, xs) == pytest.approx(pairing(kinds[1], gs, ys), rel=1e-12)
    return list(ys)


def shards(x: Tensor, dim: int, frame: Sequence[int], n: int, edge: bool = True) -> list[Tensor]:
    return [shard_of(x, dim, frame, n, rank, edge) for rank in range(n)]


@each_n
@each_frame
def test_shard(frame: list[int], n: int) -> None:
    x = random_value(frame)
    cotangents = shards(random_value(frame, 1), DIM, frame, n, edge=False)
    ys = check_adjoint(lambda x: sp.shard(x, DIM, frame, n, SIMULATED_GROUP), ("once", "each"), [x] * n, cotangents)
    torch.testing.assert_close(ys, shards(x, DIM, frame, n), rtol=0, atol=0)


@each_n
@each_frame
def test_unshard(frame: list[int], n: int) -> None:
    x, g = random_value(frame), random_value(frame, 1)
    xs = shards(x, DIM, frame, n)
    ys = check_adjoint(lambda x: sp.unshard(x, DIM, frame, n, SIMULATED_GROUP), ("each", "once"), xs, [g] * n)
    torch.testing.assert_close(ys, [x] * n, rtol=0, atol=0)


@each_n
@each_frame
def test_all_gather(frame: list[int], n: int) -> None:
    x = random_value(frame)
    xs, gs = shards(x, DIM, frame, n), [random_value(frame, 1 + r) for r in range(n)]
    ys = check_adjoint(lambda x: sp.all_gather(x, -2, frame, n, SIMULATED_GROUP), ("each", "each"), xs, gs)
    torch.testing.assert_close(ys, [x] * n, rtol=0, atol=0)


@each_n
@each_frame
def test_mask(frame: list[int], n: int) -> None:
    x = random_value(frame)
    xs, gs = shards(x, DIM, frame, n), shards(random_value(frame, 1), DIM, frame, n)
    ys = check_adjoint(lambda x: sp.mask(x, DIM, frame, 0, n, SIMULATED_GROUP), ("each", "each"), xs, gs)
    torch.testing.assert_close(ys, shards(x, DIM, frame, n, edge=False), rtol=0, atol=0)
    filled = run_ranks(n, lambda r: sp.mask(xs[r], DIM, frame, -math.inf, n, SIMULATED_GROUP))
    outside = [shard == 0 for shard in shards(torch.ones_like(x), DIM, frame, n, edge=False)]
    assert all(torch.equal(y == -math.inf, o) for y, o in zip(filled, outside, strict=True))


@each_n
def test_sums(n: int) -> None:
    xs = [random_value([1, 4, 0, 4], r) for r in range(n)]
    gs = [random_value([1, 4, 0, 4], 10 + r) for r in range(n)]
    ys = check_adjoint(lambda x: sp.all_reduce(x, n, SIMULATED_GROUP), ("each", "once"), xs, gs[:1] * n)
    torch.testing.assert_close(ys, [sum(xs)] * n)
    reduce = lambda x: sp.reduce_grad([x], "reduce", n, SIMULATED_GROUP)[0]  # noqa: E731
    check_adjoint(reduce, ("once", "each"), xs[:1] * n, gs)
    ys = check_adjoint(lambda x: sp.broadcast(x, SIMULATED_GROUP), ("once", "once"), xs[:1] * n, gs[:1] * n)
    assert torch.equal(run_ranks(n, lambda r: sp.broadcast(xs[r] > 0, SIMULATED_GROUP))[-1], xs[0] > 0)


@each_n
def test_partial_grads_have_the_right_mean(n: int) -> None:
    def live(rank: int) -> Tensor:
        x = torch.ones(2, requires_grad=True)
        (sp.reduce_grad([x], "partial", n, SIMULATED_GROUP)[0] * (rank + 1)).sum().backward()
        return x.grad

    torch.testing.assert_close(sum(run_ranks(n, live)), n * torch.full((2,), n * (n + 1) / 2))


def test_reduce_grad_sends_one_message_a_dtype_and_skips_unused() -> None:
    def live(rank: int) -> list[Tensor | None]:
        kinds = [torch.float32, torch.float64, torch.float32, torch.float32]
        xs = [torch.ones(2, 2, dtype=dtype, requires_grad=True) for dtype in kinds]
        ys = sp.reduce_grad(xs, "reduce", 2, SIMULATED_GROUP)
        loss = sum((y.T * (rank + i)).sum() for i, y in enumerate(ys[:3], 1))
        return list(torch.autograd.grad(loss, xs, allow_unused=True))

    for grads in run_ranks(2, live):
        assert [g if g is None else float(g.mean()) for g in grads] == [3.0, 5.0, 7.0, None]


ROUTES = [
    # scatter frame, gather frame, as for (batch, sequence, heads, head size) with 2 rows a head unit
    ([1, 4, 0, 4], [1, 8, 0, 8]),
    ([1, 3, 0, 3], [1, 7, 0, 7]),
    ([1, 2, 0, 2], [1, 3, 0, 3]),
    ([1, 6, 1, 4], [1, 7, 2, 4]),
]


@each_n
@pytest.mark.parametrize(("heads", "sequence"), ROUTES, ids=str)
@pytest.mark.parametrize("dims", [(2, 1), (1, 2), (0, -1)], ids=str)
def test_all_to_all(heads: list[int], sequence: list[int], dims: tuple[int, int], n: int) -> None:
    scatter, gather = (d % 3 for d in dims)

    def value(seed: int) -> Tensor:
        shape = [5, 5, 5]
        shape[scatter], shape[gather] = heads[3] * INNER, sequence[3]
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    x, g = value(0), value(1)
    xs, gs = shards(x, gather, sequence, n), shards(g, scatter, heads, n, edge=False)
    exchange = lambda x: sp.all_to_all([x], scatter, heads, gather, sequence, n, SIMULATED_GROUP)[0]  # noqa: E731
    valid = shards(x, gather, sequence, n, edge=False)
    ys = check_adjoint(exchange, ("each", "each"), valid, gs)
    torch.testing.assert_close(ys, shards(x, scatter, heads, n), rtol=0, atol=0)
    torch.testing.assert_close(run_ranks(n, lambda r: exchange(xs[r])), ys, rtol=0, atol=0)


def test_all_to_all_of_many_is_a_view_of_one_message_a_kind() -> None:
    def live(rank: int) -> list[Tensor]:
        q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 4, 4)
        ids = torch.arange(24).view(2, 3, 4)
        return sp.all_to_all([q, k, ids, k.double()], 2, [1, 2, 0, 2], 1, [1, 6, 0, 6], 2, SIMULATED_GROUP)

    for q, k, ids, double in run_ranks(2, live):
        assert [list(y.shape) for y in (q, k, ids)] == [[2, 6, 4, 4], [2, 6, 2, 4], [2, 6, 2]]
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert ids.dtype == torch.int64
        assert torch.equal(double, k.double())


def test_refusals() -> None:
    x, frame = torch.ones(4, 4), [1, 4, 0, 4]
    with pytest.raises(SpError, match=r"SP507: sp::reduce_grad: .*how='reduce'"):
        sp.reduce_grad([x], "sum", 2, SIMULATED_GROUP)
    with pytest.raises(SpError, match="SP542: sp::all_to_all: "):
        sp.all_to_all([x], 1, frame, -1, frame, 2, SIMULATED_GROUP)
    with pytest.raises(SpError, match=r"SP507: .*outer"):
        sp.all_to_all([x], 0, [2, 2, 0, 2], 1, frame, 2, SIMULATED_GROUP)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_shapes_need_no_process_group(dynamic: bool) -> None:
    n, group = 64, "any name"
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC, DimDynamic.STATIC]
    x = mode.from_tensor(torch.ones(197, 128), symbolic_context=StatelessSymbolicContext(kinds))
    with mode, enable_python_dispatcher():
        x.requires_grad_()
        frame, columns = [1, x.shape[0], 0, x.shape[0]], [1, 64, 0, 64]
        (h,) = sp.reduce_grad([sp.shard(x, 0, frame, n, group)], "reduce", n, group)
        (y,) = sp.all_to_all([h], 1, columns, 0, frame, n, group)
        z = sp.broadcast(sp.all_gather(sp.mask(h, 0, frame, 0, n, group), 0, frame, n, group), group)
        loss = sp.all_reduce(y.sum(), n, group) + (sp.unshard(h, 0, frame, n, group) * z).sum()
        loss.backward()
    assert [tuple(map(int, t.shape)) for t in (h, y, z, x.grad)] == [(4, 128), (197, 2), (197, 128), (197, 128)]


def test_one_rank_copies_nothing() -> None:
    x, frame = torch.ones(6, 4), [2, 3, 0, 3]
    (y,) = sp.reduce_grad([sp.shard(x, 0, frame, 1, SIMULATED_GROUP)], "reduce", 1, SIMULATED_GROUP)
    y = sp.unshard(
        sp.mask(sp.all_gather(y, 0, frame, 1, SIMULATED_GROUP), 0, frame, 0, 1, SIMULATED_GROUP),
        0,
        frame,
        1,
        SIMULATED_GROUP,
    )
    (y,) = sp.all_to_all([sp.all_reduce(y, 1, SIMULATED_GROUP)], 0, [1, 6, 0, 6], 1, [1, 4, 0, 4], 1, SIMULATED_GROUP)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(y, x)


# Each value of a rank depends on another rank's. A collective that quietly does nothing would pass elsewhere.

FRAME4 = [1, 8, 0, 8]
FORWARD = {
    "unshard": lambda x: sp.unshard(x, 0, FRAME4, 4, SIMULATED_GROUP),
    "all_gather": lambda x: sp.all_gather(x, 0, FRAME4, 4, SIMULATED_GROUP),
    "all_reduce": lambda x: sp.all_reduce(x, 4, SIMULATED_GROUP),
    "broadcast": lambda x: sp.broadcast(x, SIMULATED_GROUP),
    "all_to_all": lambda x: sp.all_to_all([x], 1, FRAME4, 0, FRAME4, 4, SIMULATED_GROUP)[0],
}
BACKWARD = {
    "shard": lambda x: sp.shard(x, 1, FRAME4, 4, SIMULATED_GROUP),
    "all_gather": FORWARD["all_gather"],
    "reduce_grad": lambda x: sp.reduce_grad([x], "reduce", 4, SIMULATED_GROUP)[0],
    "all_to_all": FORWARD["all_to_all"],
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_communicates(name: str) -> None:
    def live(rank: int, of_rank_0: float) -> Tensor:
        return FORWARD[name](torch.full((2, 8), float(rank) if rank else of_rank_0))

    one, other = (run_ranks(4, lambda r, v=v: live(r, v)) for v in (10.0, 20.0))
    assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_communicates(name: str) -> None:
    def live(rank: int, of_rank_0: float) -> Tensor:
        x = torch.ones(2, 8, requires_grad=True)
        (BACKWARD[name](x) * (float(rank) if rank else of_rank_0)).sum().backward()
        return x.grad

    one, other = (run_ranks(4, lambda r, v=v: live(r, v)) for v in (10.0, 20.0))
    assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_rank_reads_its_own_index() -> None:
    read = run_ranks(4, lambda r: sp.rank(SIMULATED_GROUP, torch.device("cpu")))
    assert [int(rank) for rank in read] == [0, 1, 2, 3]


def test_sums_of_int16_are_sent_in_a_dtype_of_every_backend() -> None:
    """Gloo has no int16. The sum wraps around as in int16."""
    x, y = torch.tensor([30000, -30000, 7], dtype=torch.int16), torch.tensor([30000, -30000, -9], dtype=torch.int16)
    sent = [to_sendable(part, summed=True) for part in (x, y)]
    assert sent[0].dtype == torch.int32
    assert from_sendable(sent[0] + sent[1], x).equal(x + y)
    assert from_sendable(to_sendable(x), x).equal(x)  # not summed: as bytes
