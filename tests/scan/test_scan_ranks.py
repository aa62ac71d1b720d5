"""Public scans of shards on real ranks: eager, compiled, and exchanged bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ranks as in_rank
from support.recording import Recorder
from support.scans.scan_shards import DIM, OPS, Case, Recurrence, cut, every, expected, finite, joined
from torch import Tensor
from torch._C._distributed_c10d import _unregister_process_group

import sp_compile
from sp_compile.lowering.comm import routes

LAYOUTS = ["contiguous", "zigzag"]


def call(case: Case, x: Tensor, ids: Tensor | None, **how: Any) -> Tensor:
    """The public function."""
    options = {"reverse": case.reverse, "layout": case.layout, "exchange": case.exchange, **how}
    if case.size % dist.get_world_size(in_rank.group()) or case.layout == "zigzag":
        options["length"] = case.size
    options["group"] = in_rank.group()
    if ids is not None:
        fn = sp_compile.segmented_scan
        return fn(x, ids, DIM, case.op, exclusive=case.exclusive, **options)
    return (sp_compile.exclusive_scan if case.exclusive else sp_compile.inclusive_scan)(x, DIM, case.op, **options)


def rows_of(case: Case, fn: Callable[..., Tensor] = call) -> list[Tensor]:
    """This rank's rows of the result and of the gradient of x."""
    group, ids = in_rank.group(), case.ids()
    at = dist.get_rank(), dist.get_world_size(group)
    x = cut(case, case.operand(), *at).requires_grad_()
    ids = ids if ids is None else cut(case, ids, *at, DIM if case.wide else 0)
    y = fn(case, x, ids)
    grad = cut(case, case.cotangent(), *at, fill=0.0)
    return [y.detach(), torch.autograd.grad(finite(y), x, grad)[0]]


def _rows_of_all(cases: list[Case]) -> list[list[Tensor]]:
    return [rows_of(case) for case in cases]


def close(case: Case, shards: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for i, whole in enumerate(wanted):
        found = joined(case, [own[i] for own in shards])
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(ranks, op: str, n: int) -> None:
    cases = [
        case
        for layout in LAYOUTS
        for runs in ((), (1, 2, 1, 3), (9, 1, 30))
        for case in every(Case(op, runs=runs, layout=layout))
    ]
    cases += every(Case(op, runs=(3, 4), wide=True, exchange="steps"))
    found = ranks.run(n, _rows_of_all, cases)
    for i, case in enumerate(cases):
        close(case, [rows[i] for rows in found], expected(case))


def _recurrences(cases: list[Recurrence]) -> list[list[Tensor]]:
    group, out = in_rank.group(), []
    n, rank = dist.get_world_size(group), dist.get_rank()
    for case in cases:
        a, b, *first = case.operands()
        leaves = [x.clone().requires_grad_() for x in (cut(case, a, rank, n), cut(case, b, rank, n), *first)]
        options = {"layout": case.layout, "exchange": case.exchange, "length": case.size}
        given = {"initial": leaves[2] if first else None, "reverse": case.reverse, "group": group}
        h = sp_compile.linear_scan(*leaves[:2], DIM, **given, **options)
        grads = torch.autograd.grad(h, leaves, cut(case, case.cotangent(), rank, n, fill=0.0))
        out.append([h.detach(), *grads])
    return out


def _fused_recurrences(cases: list[Recurrence]) -> list[list[Tensor]]:
    """With both gradients by one operator, as on a GPU."""
    with mock.patch("sp_compile.lowering.scan.scan_autograd._can_fuse_gradients", return_value=True):
        return _recurrences(cases)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("run", [_recurrences, _fused_recurrences])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_recurrences(ranks, n: int, run: Callable[..., Any]) -> None:
    cases = [
        Recurrence(reverse=reverse, layout=layout, exchange=exchange, initial=initial)
        for reverse in (False, True)
        for initial in (False, True)
        for layout, exchange in (("contiguous", "gather"), ("contiguous", "steps"), ("zigzag", "auto"))
    ]
    found = ranks.run(n, run, cases)
    for i, case in enumerate(cases):
        wanted = case.expected()
        close(case, [rows[i] for rows in found], wanted[:3])
        for rows in found if case.initial else ():
            torch.testing.assert_close(rows[i][3], wanted[3], rtol=1e-9, atol=1e-9)


# Compiled.


CASES = {
    "sum": Case("sum"),
    "exclusive sum of segments": Case("sum", exclusive=True, runs=(4, 1, 7), reverse=True),
    "prod, zigzag": Case("prod", layout="zigzag"),
    "max of segments": Case("max", runs=(4, 1, 7), wide=True),
    "prod of segments": Case("prod", exclusive=True, reverse=True, runs=(4, 1, 7), wide=True, layout="zigzag"),
    "logsumexp in steps": Case("logsumexp", exchange="steps", reverse=True),
}


COMPILED_OFTEN = ("sum", "exclusive sum of segments")


def _extended(case: Case, x: Tensor, ids: Tensor | None) -> Tensor:
    return call(case, x * 2, ids).sin()


def _compiled(cases: list[Case], **how: Any) -> list[float]:
    """Largest difference between compiled and eager."""
    fn = torch.compile(_extended, fullgraph=True, **how)
    worst = []
    for case in cases:
        pairs = zip(rows_of(case, fn), rows_of(case, _extended), strict=True)
        worst.append(max((finite(a) - finite(b)).abs().max().item() for a, b in pairs))
    return worst


def _inductor(case: Case) -> list[float]:
    return _compiled([case], backend="inductor")


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "name",
    [*COMPILED_OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in COMPILED_OFTEN)],
)
def test_inductor(ranks, name: str) -> None:
    for worst in ranks.run(2, _inductor, CASES[name]):
        assert max(worst) < 1e-9


def _any_length(case: Case, backend: str) -> list[float]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        return _compiled([replace(case, size=size) for size in (24, 36, 48)], backend=backend, dynamic=True)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("name", CASES)
def test_one_graph_of_any_length(ranks, name: str) -> None:
    for worst in ranks.run(3, _any_length, CASES[name], "aot_eager"):
        assert max(worst) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_program_of_any_length(ranks, name: str) -> None:
    for worst in ranks.run(2, _any_length, CASES[name], "inductor", timeout=400.0):
        assert max(worst) < 1e-9


KINDS = {
    **{op: Case(op) for op in OPS},
    "exclusive max": Case("max", exclusive=True),
    "segments": Case("sum", runs=(4, 1, 7)),
    "segments that differ between columns": Case("prod", runs=(4, 1, 7), wide=True),
    "zigzag": Case("logsumexp", layout="zigzag"),
    "in steps": Case("sum", exchange="steps"),
}


def _recorded(case: Case) -> tuple[list[str], list[str], list[str], int]:
    """Collectives forward and backward, the graphs' text, and the elements that the forward keeps for the backward."""
    recorder, group = Recorder(), in_rank.group()
    compiled = torch.compile(_extended, backend=recorder, fullgraph=True)
    n = dist.get_world_size(group)
    rows_of(replace(case, size=12 * n), compiled)
    forward, backward = (
        [str(node.target).split(".")[1] for node in recorder.collectives(name)] for name in ("forward", "backward")
    )
    outputs = recorder.graphs["forward"].graph.find_nodes(op="output")[0].args[0]
    kept = sum(node.meta["val"].numel() for node in outputs[1:])
    return forward, backward, recorder.text(), kept


@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("name", KINDS)
def test_the_compiler_sees_one_collective_each_way(ranks, name: str) -> None:
    """The graph saves shards, not gathered values, and is equal on all ranks."""
    found = ranks.run(4, _recorded, KINDS[name])
    ways = [["all_to_all_single"] * 2] * 2 if name == "in steps" else [["all_gather_into_tensor"]] * 2
    shard, carries = 2 * 12 * 3, 4 * 2 * 2 * 3
    for forward, backward, text, kept in found:
        assert [forward, backward] == ways
        assert text == found[0][2]
        assert kept <= 3 * shard + carries


def _linear(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    return sp_compile.linear_scan(a.sigmoid(), b, 0, initial=first, group=in_rank.group())


def _recorded_recurrence() -> tuple[int, int]:
    recorder = Recorder()
    leaves = [torch.randn(6, 3), torch.randn(6, 3), torch.randn(3)]
    compiled = torch.compile(_linear, backend=recorder, fullgraph=True)
    compiled(*(x.requires_grad_() for x in leaves)).sum().backward()
    return len(recorder.collectives("forward")), len(recorder.collectives("backward"))


def test_the_compiler_sees_one_collective_of_a_recurrence(ranks) -> None:
    assert ranks.run(2, _recorded_recurrence) == [(1, 1)] * 2


def _from_the_cache() -> list[float]:
    case = KINDS["in steps"]
    first = _compiled([case], backend="inductor")
    torch._dynamo.reset()
    for name in list(routes._routes):  # as in a process that has not traced the program
        _unregister_process_group(name)
    routes._routes.clear()
    return first + _compiled([case], backend="inductor")


@pytest.mark.slow
def test_a_program_from_the_cache_knows_its_routes(ranks) -> None:
    for worst in ranks.run(3, _from_the_cache):
        assert max(worst) < 1e-9


def _with_indices() -> tuple[Tensor, Tensor]:
    x = torch.tensor([3.0, 5.0, 5.0, 1.0, 5.0, 9.0, 2.0, 9.0])
    own = x[dist.get_rank() * 2 : dist.get_rank() * 2 + 2]
    return sp_compile.inclusive_scan(own, 0, "max", indices=True, group=in_rank.mesh())


def test_positions_of_extremes(ranks) -> None:
    values, places = (torch.cat(shards) for shards in zip(*ranks.run(4, _with_indices)))
    assert values.tolist() == [3, 5, 5, 5, 5, 9, 9, 9]
    assert places.tolist() == [0, 1, 2, 2, 4, 5, 5, 7]
