"""In-place writes on sharded values, and gradients that depend on the full batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capturing import Backend
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.capture.view_writes import VIEW_OPS


@torch.library.custom_op("sp_tests::add_positions", mutates_args=("x",))
def add_positions(x: torch.Tensor) -> None:
    x.add_(torch.arange(x.shape[1], dtype=x.dtype)[None, :, None])


@add_positions.register_fake
def _(x):
    return None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # of float64, see docs/reference/limits.md

    def forward(self, x):
        x = self.linear(x)
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        self.calls.add_(1)
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        counted = (y * 2).detach().clone()
        before = counted * 1
        add_positions(counted)
        return (y * counted + before * self.average).sum() * self.calls


def test_mutation_of_sharded_values_and_buffers():
    """The custom op gets the full sequence, earlier readers the old value and later readers the new one."""
    for n in (2, 3):
        report = sp_compile.verify(Model().double(), torch.randn(2, 9, 8).double(), sp=n)
        assert report.worst < 1e-12, str(report)
        assert sum("mutated" in name for name, _ in report.errors) == 2
        assert report.fallbacks


class Tables(nn.Module):
    """Embeddings of tokens, of a class and of a bag of words, with options of torch's embeddings."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 8, **options)
        self.classes, self.words = nn.Embedding(3, 8, **options), nn.EmbeddingBag(5, 8, mode="sum", **options)

    def forward(self, ids):
        x = self.table(ids) + self.classes(ids[:, 0] % 3)[:, None] * self.words(ids)[:, None]
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return (F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2) * x).pow(2).sum()


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_gradients_of_embeddings(options):
    """Gradients are divided by counts over all ranks, or are sparse, as on a single device."""
    for n in (2, 3):
        assert sp_compile.verify(Tables(**options).double(), torch.randint(0, 5, (2, 9)), sp=n).worst < 1e-12


class Filled(nn.Module):
    """A buffer of one layout is given values of another, and is then viewed as its own layout allows."""

    def forward(self, x):
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        keys = x.new_empty(q.shape)
        keys.copy_(q)
        scores = q.flatten(0, 1) @ keys.view(-1, *q.shape[2:]).transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, keys).pow(2).sum() + scores.pow(2).mean()


class Streams(nn.Module):
    """Streams of a residual, cast to the dtype of one of them, of which some are changed in place."""

    def forward(self, x):
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        streams = torch.stack([x, x * y]).type_as(y)
        streams[1:] += y
        return streams.pow(2).sum()


def test_a_cast_to_its_own_dtype_is_a_view():
    for n in (2, 3):
        report = sp_compile.verify(Streams(), torch.randn(2, 9, 8).double(), sp=n, fallback="error")
        assert report.worst < 1e-12, str(report)


def test_a_buffer_keeps_its_layout_when_it_is_written():
    for n in (1, 2, 3):
        report = sp_compile.verify(Filled(), torch.randn(2, 9, 8).double(), sp=n)
        assert report.worst < 1e-12, str(report)


class Normed(nn.Module):
    """Rows of the table that are looked up are cut to a length of one, in the table itself."""

    def __init__(self, bag: bool):
        super().__init__()
        torch.manual_seed(0)
        self.bag = bag
        self.table, self.words = (make(5, 8, max_norm=1.0) for make in (nn.Embedding, nn.EmbeddingBag))

    def forward(self, ids):
        x = self.words(ids)[:, None] if self.bag else self.table(ids)
        q = (x + torch.ones(ids.shape, dtype=x.dtype)[..., None]).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).pow(2).sum() * self.table.weight.sum()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("bag", [False, True])
def test_rows_of_a_table_that_are_renormalized(bag):
    ids = torch.randint(0, 5, (2, 9))
    with pytest.raises(sp_compile.SpError, match=r"SP224.*max_norm.*torch.embedding_renorm_"):
        sp_compile.verify(Normed(bag).double(), ids, sp=2, fallback="error")
    report = sp_compile.verify(Normed(bag).double(), ids, sp=2)
    assert report.worst < 1e-12, str(report)
    assert len(report.fallbacks) == 1
    report = sp_compile.verify(Normed(bag).double().requires_grad_(False), ids, sp=2)
    assert report.worst < 1e-12, str(report)
    assert sum("mutated" in name for name, _ in report.errors) == 1


class Statistics(nn.Module):
    """Running statistics of norms are read, written and read again; one norm is over the tokens only."""

    def __init__(self, length):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.tokens = nn.BatchNorm1d(8), nn.BatchNorm1d(length, affine=False)
        self.instance = nn.InstanceNorm1d(length, track_running_stats=True)

    def forward(self, x):
        with torch.no_grad():
            self.norm.running_var.mul_(3)
        before = self.norm.running_mean * 2
        x = self.norm(x.mT).mT * self.tokens.running_mean[:, None].exp()
        after = self.norm.running_mean * 2
        x = self.norm(x.mT).mT
        x = (self.instance(x) + self.tokens(x)) * self.tokens.running_mean[:, None].exp()
        q = (x + before - after).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).pow(2).sum() * self.norm.running_var.sum()


def test_running_statistics_change_when_the_norm_runs():
    """The schema of these ops does not declare the mutation."""
    for n in (2, 3):
        report = sp_compile.verify(Statistics(9).double(), torch.randn(2, 9, 8).double(), sp=n)
        assert report.worst < 1e-12, str(report)
        assert sum("running" in name for name, _ in report.errors) == 6


INTO = {
    "add": lambda x, h: torch.add(x, 1, out=h),
    "sin": lambda x, h: torch.sin(x, out=h),
    "matmul": lambda x, h: torch.matmul(x, torch.ones(8, 8, dtype=x.dtype), out=h),
    "cumsum": lambda x, h: torch.cumsum(x, 1, out=h),
    "clamp": lambda x, h: torch.clamp(x, 0, 1, out=h),
    "into itself": lambda x, h: torch.add(torch.add(x, h, out=h), 1, out=h),
    "into a view": lambda x, h: torch.sum(x, 1, out=h[:, 0]),
    "einsum that is a view": lambda x, h: torch.einsum("bsd->bds", h).add_(x.mT),
}


class Into(nn.Module):
    """Attention next to values that an op writes to its out= argument."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        h = torch.zeros_like(x)
        self.write(x, h)
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2) + h


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("write", INTO.values(), ids=INTO)
def test_values_written_by_an_out_variant_are_gathered(write):
    """A mutating op has no rule, although torch tags its out= variant as pointwise."""
    x = torch.randn(2, 9, 8).double()
    for n in (2, 3):
        report = sp_compile.verify(Into(write), x, sp=n)
        assert report.worst < 1e-12, str(report)


def shared_results(f: Callable[[Tensor], Any], dynamic: bool = False) -> list[int]:
    """Return the numbers of the results that are made as views of a common base."""
    torch._dynamo.reset()
    backend = Backend()
    torch.compile(f, backend=backend, dynamic=dynamic)(torch.arange(24.0).view(4, 6))
    return [view.number for view in backend.graphs[0].meta[VIEW_OPS].views]


OVERLAPPING: dict[str, Callable[[Tensor], Any]] = {
    "rows of an unfold": lambda x: (x * 2).unfold(0, 3, 1)[:2].unbind(),
    "rows of an expand": lambda x: (x * 2).expand(2, 4, 6).split(1),
    "rows of a strided view": lambda x: (x * 2).as_strided((3, 4), (2, 1)).split(2),
    "pieces at positions": lambda x: (x * 2).tensor_split([3, 1]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_results_whose_elements_overlap_share_a_base(name: str) -> None:
    assert shared_results(OVERLAPPING[name])[:2] == [0, 1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_without_common_elements_share_none(dynamic: bool) -> None:
    assert not shared_results(lambda x: (*(x * 2)[:, 1:].t().split(1, 0), *(x * 3).unfold(1, 2, 2).unbind(1)), dynamic)


def fill_pieces(y: Tensor) -> Tensor:
    h = y.t() * 2
    h.split([1, 2], 0)[0].add_(1)
    return h.as_strided((6,), (1,)) * 1


# (y, z) -> results, each with a layout and memory of its own
WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "source that is written later": lambda y, z: (torch.zeros(2, 3).copy_(y), y.mul_(2)),
    "source that is an input": lambda y, z: torch.empty_like(y).copy_(y),
    "source that fills a view": lambda y, z: (lambda h: (h.view(2, 3).copy_(y), h)[1])(torch.empty(6)),
    "source that fills a transposed view": lambda y, z: (lambda h: (h.t().copy_(y), h)[1])(torch.empty(3, 2)),
    "source that is a result": lambda y, z: (lambda h: (torch.empty_like(h).copy_(h), h))(y * 2),
    "copy of a copy": lambda y, z: (lambda h: torch.empty_like(h).copy_(h))(torch.empty_like(y).copy_(y)),
    "strides of a copy": lambda y, z: (y.t() * 2).copy_(z).as_strided((6,), (1,)) * 1,
    "view of a copy": lambda y, z: (y.t() * 2).copy_(z).t().view(-1) * 1,
    "strides of a fill": lambda y, z: (y.t() * 2).fill_(z[0, 0]),
    "strides of a joined split": lambda y, z: fill_pieces(y),
    "conjugate transpose": lambda y, z: (lambda c: (c.mH.add_(1j), torch.view_as_real(c) * 1)[1])(torch.complex(y, y)),
    "draws": lambda y, z: (lambda h: (h[0].bernoulli_(0.5), h[1].bernoulli_(), h[1, :2].bernoulli_(0.9), h)[3])(y * 2),
    "last rows": lambda y, z: (lambda h: (h.narrow(1, -2, 2).add_(1), h)[1])(y * 2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_tensor_keeps_its_memory_and_strides(name: str) -> None:
    """A write to a result changes neither the inputs nor other results."""
    outcomes = []
    torch._dynamo.reset()
    for f in (WRITTEN[name], torch.compile(WRITTEN[name], backend=Backend())):
        torch.manual_seed(0)
        inputs = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2) * 10]
        results = f(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        before = [x.clone() for x in results]
        results[0].add_(1)
        outcomes.append((before, [(x.clone(), x.stride()) for x in results], inputs))
    expected, got = outcomes
    assert str(expected) == str(got)


def swap(a: Tensor, b: Tensor) -> None:
    kept = torch.empty_like(a)
    kept.copy_(a)
    a.copy_(b)
    b.copy_(kept)


def test_inputs_can_be_swapped_by_a_copy() -> None:
    torch._dynamo.reset()
    a, b = torch.zeros(3), torch.ones(3)
    torch.compile(swap, backend=Backend())(a, b)
    torch.testing.assert_close([a, b], [torch.ones(3), torch.zeros(3)])
