"""The pass that finds exchanges of two dims, in graphs of torch.export, make_fx and AOTAutograd, by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.golden import notes_of
from support.variants.exchange_variants import (
    EXCHANGES,
    NEAR_MISSES,
    ExchangeForm,
    deepspeed_heads,
    matrix_columns,
    swap_functional,
)
from support.variants.tracing_exchanges import TRACERS, N, count, one_of, traced
from support.variants.unpublished_exchanges import MORE
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compile import SpError, capture_export
from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes

ALL = {**EXCHANGES, **MORE}
Fn = Callable[[Tensor], Any]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_of(N) as ranks:
        yield ranks


def definition(xs: list[Tensor], rank: int, scatter: int, gather: int) -> Tensor:
    return torch.cat([x.chunk(N, scatter)[rank] for x in xs], gather)


def check(form: ExchangeForm, gm: GraphModule) -> None:
    xs = [torch.randn(form.shape) for _ in range(N)]
    for rank, y in enumerate(run_ranks(N, lambda r: gm(xs[r]))):
        y = y[0] if isinstance(y, list | tuple) else y
        true = definition(xs, rank, form.scatter, form.gather)
        assert torch.equal(y, true.reshape(form.result or true.shape))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("tracer", ["export", "make_fx"])
@pytest.mark.parametrize("name", ALL)
def test_form(group: Any, name: str, tracer: str) -> None:
    form = ALL[name]
    gm = TRACERS[tracer](lambda x: form.fn(x, N, group), torch.randn(form.shape))
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    assert count(gm, "sp.all_to_all_permute") == 1
    assert count(gm, "all_to_all_single") + count(gm, "alltoall") == 0
    check(form, gm)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("tracer", ["capture", "strict export"])
@pytest.mark.parametrize("name", MORE)
def test_more_forms(group: Any, name: str, tracer: str) -> None:
    gm = TRACERS[tracer](lambda x: MORE[name].fn(x, N, group), torch.randn(MORE[name].shape))
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    check(MORE[name], gm)


def test_rows_of_any_number_from_export(group: Any) -> None:
    """Outside of Dynamo, whose collectives are functional: shares of symbolic sizes."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return matrix_columns(x, N, group)

    rows = {0: torch.export.Dim("rows", min=2)}
    gm = capture_export(torch.export.export(Model(), (torch.randn(3, 8),), dynamic_shapes=(rows,)))
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    check(ExchangeForm(matrix_columns, (5, 8), 1, 0), gm)


def joint(fn: Fn, x: Tensor) -> GraphModule:
    """Forward and backward in one graph, rewritten and not decomposed, so that simulated ranks can run it."""
    found: list[GraphModule] = []

    def partition(graph: GraphModule, examples: Any, **options: Any) -> Any:
        FuseAllToAllPermutes()(graph)
        found.append(graph)
        return min_cut_rematerialization_partition(graph, examples, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition)
    torch.compile(fn, backend=backend, fullgraph=True)(x)
    return found[0]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("name", ALL)
def test_form_in_joint_graphs(group: Any, name: str) -> None:
    """Also find the backward exchange, where cats and slices are sums of padded pieces."""
    form = ALL[name]
    gm = joint(lambda x: form.fn(x, N, group).sin(), torch.randn(form.shape, requires_grad=True))
    assert count(gm, "sp.all_to_all_permute") == 2
    assert count(gm, "all_to_all_single") == 0
    xs, back = [torch.randn(form.shape) for _ in range(N)], (form.gather, form.scatter)
    ys = [definition(xs, rank, form.scatter, form.gather) for rank in range(N)]
    shape = form.result or ys[0].shape
    tangents = [torch.randn(shape) for _ in range(N)]
    moved = [t.view(y.shape) * y.cos() for t, y in zip(tangents, ys)]
    for rank, (y, grad) in enumerate(run_ranks(N, lambda r: gm(xs[r], tangents[r]))):
        torch.testing.assert_close(y, ys[rank].sin().view(shape))
        torch.testing.assert_close(grad, definition(moved, rank, *back))


@pytest.mark.parametrize("tracer", ["export", "make_fx"])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(group: Any, name: str, tracer: str) -> None:
    fn, shape = NEAR_MISSES[name]
    gm = TRACERS[tracer](lambda x: fn(x, N, group), torch.randn(shape))
    assert not FuseAllToAllPermutes()(gm).modified
    assert count(gm, "all_to_all_single") == 1


# Programs that are not functional.


def there(x: Tensor, group: Any) -> Tensor:
    b, s, heads, d = x.shape
    sent = x.reshape(b, s, N, heads // N, d).permute(2, 0, 1, 3, 4).contiguous()
    return swap_functional(sent, N, group).permute(1, 0, 2, 3, 4).reshape(b, N * s, heads // N, d)


def back(x: Tensor, group: Any) -> Tensor:
    b, rows, h, d = x.shape
    sent = x.reshape(b, N, rows // N, h, d).transpose(0, 1).contiguous()
    return swap_functional(sent, N, group).permute(1, 2, 0, 3, 4).reshape(b, rows // N, N * h, d)


def written_between(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The pack reads x before it is changed."""
    x = x * 1
    b, s, heads, d = x.shape
    sent = x.reshape(b, s, N, heads // N, d).permute(2, 0, 1, 3, 4).contiguous()
    x.add_(1)
    return swap_functional(sent, N, group).permute(1, 0, 2, 3, 4).reshape(b, N * s, heads // N, d), x


def written_after(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Mutate the received values, not the sent ones."""
    x = x * 1
    y = back(there(x, group), group)
    y += 1
    return x * 2, y


def written_before_the_second(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = there(x, group)
    x[:, 0] = 7
    return first, there(x, group)


def expected(fn: Any, xs: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    exchanged = definition(xs, rank, 2, 1)
    if fn is written_between:
        return exchanged, xs[rank] + 1
    if fn is written_after:
        return xs[rank] * 2, xs[rank] + 1
    changed = [torch.cat([torch.full_like(x[:, :1], 7), x[:, 1:]], 1) for x in xs]
    return exchanged, definition(changed, rank, 2, 1)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("fn", [written_between, written_after, written_before_the_second])
def test_nothing_is_read_across_a_write(group: Any, fn: Any, tracer: str) -> None:
    gm = TRACERS[tracer](lambda x: fn(x, group), torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    xs = [torch.randn(2, 3, 8, 5) for _ in range(N)]
    for rank, found in enumerate(run_ranks(N, lambda r: gm(xs[r].clone()))):
        assert all(map(torch.equal, found, expected(fn, xs, rank)))


@pytest.mark.parametrize("tracer", TRACERS)
def test_an_input_that_is_written_back(group: Any, tracer: str) -> None:
    """The result has the values at the time of the exchange."""

    def fn(x: Tensor) -> Tensor:
        y = back(there(x, group), group)
        x.add_(1)
        return y

    gm = TRACERS[tracer](fn, torch.randn(2, 3, 8, 5))
    assert notes_of(FuseAllToAllPermutes(), gm)[-1].label == "cancelled"
    x = torch.randn(2, 3, 8, 5)
    given = x.clone()
    y = gm(given)
    assert torch.equal(y[0] if isinstance(y, list | tuple) else y, x)
    assert torch.equal(given, x + 1)


@pytest.mark.parametrize("decomposed", [False, True])
def test_several_exchanges(group: Any, decomposed: bool) -> None:
    """Packed exchanges, and ops on their results."""

    def fn(x: Tensor) -> Tensor:
        return there(x.sin(), group) + there(x.cos(), group) * there(x.exp(), group)

    gm = TRACERS["make_fx"](fn, torch.randn(2, 3, 8, 5))
    assert notes_of(FuseAllToAllPermutes(decomposed), gm)[-1].label == "packed"
    if decomposed:
        assert count(gm, "all_to_all_single") == 1
        return
    xs = [torch.randn(2, 3, 8, 5) for _ in range(N)]
    for rank, y in enumerate(run_ranks(N, lambda r: gm(xs[r]))):
        sin, cos, exp = (definition([f(x) for x in xs], rank, 2, 1) for f in (torch.sin, torch.cos, torch.exp))
        torch.testing.assert_close(y, sin + cos * exp)


# Graphs that are not captured.


def test_uncaptured_graphs_are_refused(group: Any) -> None:
    """Dynamo graphs with Python functions and methods, and graphs with mutations, are refused."""

    def fn(x: Tensor) -> Tensor:
        return there(x, group)

    def in_place(x: Tensor) -> Tensor:
        return there(x.sin().add_(1), group)

    def collective(x: Tensor) -> Tensor:
        return deepspeed_heads(x, N, group)

    x = torch.randn(2, 3, 8, 5)
    dynamo = traced(fn, x, tracer="dynamo")
    for graph, why in (
        (dynamo, "SP204.*reshape"),
        (make_fx(in_place, tracing_mode="fake")(x), r"SP206.*aten\.add_\.Tensor.*capture_export"),
        (make_fx(collective, tracing_mode="fake")(x), r"SP206.*alltoall_base_\.default.*strict=True"),
    ):
        with pytest.raises(SpError, match=why):
            FuseAllToAllPermutes()(graph)
    with pytest.raises(SpError, match="SP204"):
        capture_export(dynamo)
    with pytest.raises(SpError, match="SP205"):
        capture_export(make_fx(fn)(x))
    with pytest.raises(SpError, match=r"SP204.*\bsin\b"):
        capture_export(torch.fx.symbolic_trace(lambda x: torch.sin(x)))


# Dims that are merged after an exchange.


def test_heads_are_flattened_before_they_return(group: Any) -> None:
    """The projection reads the received buffer; with unmerged heads it needs a copy."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        return back(x, group).flatten(2) @ w

    x, w = torch.randn(2, 8, 3, 5), torch.randn(60, 7)
    gm = traced(step, x, w)
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"]
    (node,) = [n for n in gm.graph.nodes if "all_to_all_permute" in str(n.target)]
    assert (node.meta["val"].shape, node.args[1:3]) == ((2, 2, 60), (1, 2))
    assert next(iter(node.users)).target is torch.ops.aten.matmul.default
    xs = [torch.randn(2, 8, 3, 5) for _ in range(N)]
    for rank, (y,) in enumerate(run_ranks(N, lambda r: gm(xs[r], w))):
        torch.testing.assert_close(y, definition(xs, rank, 1, 2).flatten(2) @ w)


@pytest.mark.parametrize("kind", ["one sequence", "rows merged", "returned"])
def test_heads_that_are_not_flattened_first(group: Any, kind: str) -> None:
    fns = {
        "one sequence": lambda x: back(x, group).flatten(2) * 2,  # sent without a copy, copied on arrival
        "rows merged": lambda x: back(x, group).flatten(0, 1) * 2,
        "returned": lambda x: back(x, group).flatten(2),  # in the layout that it had
    }
    gm = traced(fns[kind], torch.randn(1 if kind == "one sequence" else 2, 8, 3, 5))
    FuseAllToAllPermutes()(gm)
    (node,) = [n for n in gm.graph.nodes if "all_to_all_permute" in str(n.target)]
    assert node.meta["val"].ndim == 4


def test_incomplete_pieces_stay(group: Any) -> None:
    """A gradient of two thirds of the pieces, and one with a repeated piece."""

    def step(x: Tensor) -> Tensor:
        first, _, last = x.split(8, 2)
        return deepspeed_heads(first, N, group) + deepspeed_heads(last + first, N, group)

    gm = joint(step, torch.randn(2, 3, 24, 5, requires_grad=True))
    xs = [torch.randn(2, 3, 24, 5) for _ in range(N)]
    tangents = [torch.randn(2, 12, 2, 5) for _ in range(N)]
    for rank, (y, grad) in enumerate(run_ranks(N, lambda r: gm(xs[r], tangents[r]))):
        sums = [2 * x[:, :, :8] + x[:, :, 16:] for x in xs]
        torch.testing.assert_close(y, definition(sums, rank, 2, 1))
        there = definition(tangents, rank, 1, 2)
        torch.testing.assert_close(grad, torch.cat([2 * there, torch.zeros_like(there), there], 2))
