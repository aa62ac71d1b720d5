"""Functions of rows that are singular somewhere, on lengths that ranks do not divide: exact, forward and backward.

No padded row may be where such a function fails unless a valid row is: its derivative there would be 0 * inf in the
gradients of weights, and an index there out of range.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.parity import sp as compiled
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile

D = 8


def norm(x: Tensor) -> Tensor:
    return x.norm(p=2, dim=-1, keepdim=True)


def gap(x: Tensor) -> Tensor:
    """Return the distance to the running maximum: 0 at each new maximum, and never negative."""
    return x.cummax(1).values - x


def before(x: Tensor) -> Tensor:
    """The row before each one, of the first the first."""
    return torch.cat([x[:, :1], x[:, :-1]], 1)


def slots(x: Tensor, most: int = 20) -> Tensor:
    """Return the index of each element among those of its sign in its row, from 0, as in Switch and GShard."""
    chosen = F.one_hot((x[..., 0] > 0).long(), 2)
    place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
    return F.one_hot(place, most).to(x.dtype)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "x / norm": lambda x: x / norm(x),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1, eps=0.0)[..., None] + x,
    "log of a norm": lambda x: x * norm(x).log(),
    "log of a variance": lambda x: x + x.var(-1, keepdim=True).log(),
    "root of a square": lambda x: x.square().sum(-1, keepdim=True).sqrt() * x,
    "rsqrt": lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
    "layer_norm without eps": lambda x: F.layer_norm(x, (D,), eps=0.0),
    "power of -1/2": lambda x: x.abs().pow(-0.5).clamp(max=50) + x,
    "atan2": lambda x: torch.atan2(x, x.flip(-1)),
    "acos": lambda x: (x / norm(x) * 0.99).acos(),
    "logit": lambda x: (x.softmax(-1) / x.softmax(-1).sum(-1, keepdim=True) * 0.999).logit(),
    "xlogy": lambda x: torch.xlogy(x.square(), x.square()),
    "1 / gap": lambda x: 1 / (gap(x) + 1e-3),
    "root of gap": lambda x: (gap(x) + 1e-6).sqrt(),
    "log of sums": lambda x: x.exp().cumsum(1).log(),
    "log of sums before": lambda x: (x.exp().cumsum(1) - x.exp() + 0.1).log() + x,
    "reverse sums": lambda x: x / x.exp().flip(1).cumsum(1).flip(1),
    "logcumsumexp": lambda x: 1 / (x.logcumsumexp(1) - x + 0.1),
    "over counts": lambda x: x.cumsum(1) / (x > 0).to(x.dtype).cumsum(1).clamp(min=1) / norm(x),
    "difference": lambda x: x / (norm(x - before(x)) + 0.01),
    "shorter windows": lambda x: (x[:, 1:] / norm(x[:, 1:] - x[:, :-1])).sum(1, keepdim=True) + x,
    "log of a shorter window": lambda x: norm(x[:, :-1]).log().sum(1, keepdim=True) + x,
    "convolution": lambda x: (lambda y: y / norm(y))(
        F.conv1d(x.mT, torch.ones(D, 1, 3, dtype=x.dtype), padding=1, groups=D).mT
    ),
    "roll": lambda x: (lambda y: x / norm(y) + y / norm(x))(x.roll(1, 1)),
    "slots": lambda x: slots(x) @ torch.ones(20, D, dtype=x.dtype).cumsum(0) + x,
    "table of counts": lambda x: (
        F.embedding((x[..., 0] > -9).long().cumsum(1) - 1, torch.eye(20, D, dtype=x.dtype)) + x
    ),
    "table of a difference": lambda x: (
        torch.arange(4.0, dtype=x.dtype)[
            (lambda i: i - torch.cat([i[:, :1] * 0, i[:, :-1]], 1))((x[..., 0] > -9).long().cumsum(1))
        ][..., None]
        + x
    ),
    "searchsorted": lambda x: (
        torch.arange(9.0, dtype=x.dtype)[
            torch.searchsorted(torch.arange(-3.5, 4, dtype=x.dtype), x.detach().contiguous())
        ]
        + x
    ),
    "division of integers": lambda x: (100 // (x[..., 0] > -9).long().cumsum(1))[..., None] + x,
    "linear recurrence": lambda x: x / _recurrence(x).abs().clamp(min=1e-6),
}


def _recurrence(x: Tensor) -> Tensor:
    state, states = torch.ones_like(x[:, 0]), []
    for row in x.unbind(1):
        state = state * row.sigmoid() + row.square()
        states.append(state)
    return torch.stack(states, 1)


class Model(nn.Module):
    """Attention, a function of its rows, and a loss; weights before and after it."""

    def __init__(self, rows: str, mixes: str = "attention") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.mixes = rows, mixes
        self.inner, self.outer = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        if self.mixes == "attention":
            q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        else:
            y = (q + k).cumsum(1) * v
        return self.outer(ROWS[self.rows](y)).sin().mean()


@dataclass(frozen=True)
class Case:
    rows: str
    n: int
    length: int
    attention: str

    def __str__(self) -> str:
        return f"{self.rows}-{self.attention}-P{self.n}-S{self.length}"


WAYS = ("ring", "ulysses", "gather", "hybrid", "scan")
CASES = [
    Case(rows, n, length, WAYS[(i + n + length) % len(WAYS)])
    for i, rows in enumerate(ROWS)
    for n in (2, 3, 4)
    for length in range(1, 18)
    if length % n
]
"""Each function, every number of ranks, every length up to 17 that it does not divide; the ways take turns."""


def right(case: Case) -> None:
    x = torch.randn(2, case.length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(case.length))
    mixes = "scan" if case.attention == "scan" else "attention"
    attention = {} if mixes == "scan" else {"attention": case.attention}
    if (case.attention == "hybrid" and case.n != 4) or (case.attention == "ulysses" and case.n == 3):
        attention = {"attention": "auto"}  # there are 4 heads
    report = sp_compile.verify(Model(case.rows, mixes).double(), x, sp=case.n, **attention)
    assert report.worst < 1e-9


@pytest.mark.sampled(every=351)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_simulated_ranks(case: Case) -> None:
    right(case)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("rows", ["x / norm", "slots", "1 / gap", "shorter windows"])
def test_on_more_ranks_than_rows(rows: str) -> None:
    """A rank with only padded rows gets their nearest valid row from another rank."""
    right(Case(rows, 4, 2, "ring"))
    right(Case(rows, 4, 5, "ring"))


def _trained(rows: str, length: int, compiler: str | None) -> float:
    x = torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    one, many = Model(rows).double(), Model(rows).double()
    wanted = torch.autograd.grad(one(x), tuple(one.parameters()))
    options = {"mesh": mesh()}
    run = torch.compile(many, backend="sp", options=options) if compiler is None else compiled(many, **options)
    found = torch.autograd.grad(run(x), tuple(many.parameters()))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("compiler", ["aot_eager", None], ids=["aot_eager", "default options"])
@pytest.mark.parametrize(
    ("rows", "n", "length"),
    [
        ("x / norm", 3, 7),
        pytest.param("slots", 2, 5, marks=pytest.mark.slow),
        pytest.param("1 / gap", 4, 9, marks=pytest.mark.slow),
    ],
)
def test_on_real_ranks(ranks: Ranks, rows: str, n: int, length: int, compiler: str | None) -> None:
    assert max(ranks.run(n, _trained, rows, length, compiler)) < 1e-9


def test_draws_are_repeated_where_something_notices() -> None:
    """A padded row would else have a draw of its own: a row that dropout leaves nothing of has no direction."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(self.inner(x).cumsum(1), 0.5, True)
            return (y / norm(y)).sum() if self.training else y.sum()

    def restored(model: nn.Module, length: int) -> int:
        local = sp_compile.parallelize(torch.export.export(model, (torch.randn(1, length, D),)), sp=2)
        return [n.target for n in local.graph.nodes].count(torch.ops.sp.window.default)

    assert restored(Dropped().train(), 7) == 1
    assert restored(Dropped().train(), 8) == 0
    assert restored(Dropped().eval(), 7) == 0


class First(nn.Module):
    """Hidden values, the first row of which is zero, and the rows after it, which are a view of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x).cumsum(1) * torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return y, y[:, 1:]


class Second(First):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y / norm(y)).cumsum(1).sin().mean()


def _between(length: int) -> float:
    def step(compile: Callable[..., Callable[..., object]]) -> list[Tensor]:
        first, second = First().double(), Second().double()
        x = torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y, rest = compile(first, outputs="lazy", mesh=mesh())(x)
        (compile(second, mesh=mesh())(rest) + y.square().mean()).backward()
        return [first.inner.weight.grad, second.inner.weight.grad]

    found, wanted = step(compiled), step(lambda model, **_: model)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("n", "length"), [(2, 8), (3, 8), (4, 6)])
def test_a_view_in_shards_of_a_longer_value(ranks: Ranks, n: int, length: int) -> None:
    """The row before it is no row of the next program's sequence."""
    assert max(ranks.run(n, _between, length)) < 1e-9


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("length", "n", "sent"), [(8, 3, 0), (7, 3, 0), (5, 4, 1), (2, 4, 1)])
def test_rows_of_other_ranks_are_reported(length: int, n: int, sent: int) -> None:
    """One all_gather of a row of each rank where a rank has no valid row, with its bytes; else none."""
    x = torch.randn(2, length, D, dtype=torch.float64)
    report = sp_compile.verify(Model("x / norm").double(), x, sp=n, attention="ring")
    found = [e for e in report.exchanges if e.op == "window"]
    assert [(e.forward, e.backward) for e in found] == [((n - 1) * 2 * D * 8, 0)] * sent


class Tiled(nn.Module):
    """A loss in tiles on the tokens after the first, of a function of logits."""

    def __init__(self, function: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.function = nn.Linear(D, D), nn.Linear(D, 32, bias=False), OF_LOGITS[function]
        self.scale = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.inner(x).cumsum(1))[:, :-1]
        return self.function(z, self.scale).logsumexp(-1).square().mean()


def _centered(z: Tensor) -> Tensor:
    return z - z.mean(-1, keepdim=True)


def _energy(z: Tensor) -> Tensor:
    return _centered(z).square().mean(-1, keepdim=True)


OF_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inverse root": lambda z, w: _centered(z) * _energy(z).pow(-0.5) * w,
    "root": lambda z, w: _centered(z) * (_energy(z).pow(0.5) * w),
    "choice of infinity": lambda z, w: torch.where(z.detach() > z.detach().mean(-1, keepdim=True), z * w, -torch.inf),
    "square": lambda z, w: _centered(z) * _centered(z).pow(2) * w,
    "overflow": lambda z, w: (800 * w * F.normalize(z, dim=-1) - 1600).exp(),
    "overflow of ones": lambda z, w: (800 * w.abs() - 1e9 * (z - 1).square()).exp(),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("function", OF_LOGITS)
@pytest.mark.parametrize(("length", "n"), [(13, 3), pytest.param(12, 2, marks=pytest.mark.slow)])
def test_functions_of_logits_in_tiles(function: str, length: int, n: int) -> None:
    """A tile fills rows that are cut off, where no function of such a row is singular."""
    x = torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = sp_compile.verify(Tiled(function).double(), x, sp=n, tiles=3)
    assert report.worst < 1e-9


class OnSlice(nn.Module):
    """Attention of a slice, followed by a matrix product and a normalization, which is singular."""

    def __init__(self, start: int, end: int | None, direction: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.cut, self.direction = slice(start, end), direction

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.inner(x)[:, self.cut].chunk(3, -1))
        y = self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return (y / norm(y) if self.direction else y).sin().sum()


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("attention", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("direction", [False, True])
@pytest.mark.parametrize(("start", "end", "length"), [(1, None, 8), (0, -1, 7), (2, -2, 9)])
def test_attention_of_a_slice(attention: str, direction: bool, start: int, end: int | None, length: int) -> None:
    """It reads the rows that are left, and its result has finite padded rows."""
    x = torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = sp_compile.verify(OnSlice(start, end, direction).double(), x, sp=2, attention=attention)
    assert report.worst < 1e-9
