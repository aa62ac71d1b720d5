"""torch.associative_scan in a graph: the scan that it is, or a tree; gradients of a loop, in linear memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.golden import captured, show
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.lowering.torch_compat import associative_scan_op
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.canonical.scan_forms.associative_scan import ExpandAssociativeScans, RewriteAssociativeScans

Leaves = Sequence[Tensor]
Combine = Callable[..., list[Tensor]]


def scan(combine: Combine, leaves: Leaves, dim: int = 0, reverse: bool = False) -> list[Tensor]:
    """Scan along dim 0, forwards, like the operator of torch.associative_scan."""
    rows = [x.movedim(dim, 0) for x in leaves]
    if reverse:
        rows = [x.flip([0]) for x in rows]
    out = associative_scan_op(combine, rows, ())
    if reverse:
        out = [x.flip([0]) for x in out]
    return [x.movedim(0, dim) for x in out]


def loop(combine: Combine, leaves: Leaves, dim: int = 0, reverse: bool = False) -> list[Tensor]:
    """The definition."""
    steps = list(zip(*(x.unbind(dim) for x in leaves), strict=True))
    steps = steps[::-1] if reverse else steps
    states = [steps[0]]
    for step in steps[1:]:
        states.append(combine(*states[-1], *step))
    states = states[::-1] if reverse else states
    return [torch.stack(rows, dim) for rows in zip(*states, strict=True)]


def linear(a, b, c, d):
    return [a * c, c * b + d]


def rotation(a, b, c, d):
    return [a * c - b * d, a * d + b * c]


KNOWN: dict[str, tuple[Combine, int, list[str]]] = {
    "sum": (lambda a, b: [a + b], 1, ["sp.scan(x, None, 1, sum)"]),
    "product": (lambda a, b: [b * a], 1, ["sp.scan(x, None, 1, prod)"]),
    "maximum": (lambda a, b: [torch.maximum(a, b)], 1, ["sp.scan(x, None, 1, max)"]),
    "minimum": (lambda a, b: [torch.minimum(b, a)], 1, ["sp.scan(x, None, 1, min)"]),
    "log-sum-exp": (lambda a, b: [torch.logaddexp(a, b)], 1, ["sp.scan(x, None, 1, logsumexp)"]),
    "each its own": (
        lambda a, b, c, d: [a + c, torch.maximum(d, b)],
        2,
        ["sp.scan(x, None, 1, sum)", "sp.scan(y, None, 1, max)"],
    ),
    "recurrence": (linear, 2, ["sp.scan(x, None, 1, prod)", "sp.linear_scan(x, y, None, 1)"]),
    "recurrence, otherwise": (
        lambda b, a, d, c: [torch.addcmul(d, b, c), c * a],
        2,
        ["sp.linear_scan(y, x, None, 1)", "sp.scan(y, None, 1, prod)"],
    ),
}
UNKNOWN: dict[str, tuple[Combine, int]] = {
    "rotation": (rotation, 2),
    "a scaled sum": (lambda a, b: [a + b - 0.25], 1),
    "the left one": (lambda a, b: [a + 0 * b], 1),
}


def inputs(count: int, length: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.rand(3, length, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def graph(combine: Combine, count: int, reverse: bool = False, length: int = 7) -> torch.fx.GraphModule:
    if count == 1:
        return captured(lambda x: scan(combine, [x], 1, reverse), *inputs(1, length))
    return captured(lambda x, y: scan(combine, [x, y], 1, reverse), *inputs(2, length))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_known_functions(name: str, reverse: bool) -> None:
    """Neither a transposition nor a flip is left before the scan: it takes any dim, and both directions."""
    combine, count, expected = KNOWN[name]
    gm = graph(combine, count, reverse)
    Canonicalize()(gm)
    calls = [line.split(" = ")[1] for line in show(gm).split("\n") if " = sp." in line]
    backwards = [c.replace(")", ", False, True)") if "sp.scan" in c else c.replace(")", ", True)") for c in expected]
    assert calls == (backwards if reverse else expected)
    assert "flip" not in show(gm)
    for found, wanted in zip(gm(*inputs(count)), loop(combine, inputs(count), 1, reverse), strict=True):
        torch.testing.assert_close(found, wanted)


def rewrite_scans(gm: Any) -> None:
    """Replace every associative_scan of the graph by the equal scan op or by a tree."""
    for one in (RewriteAssociativeScans, ExpandAssociativeScans):
        one()(gm)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_functions_become_a_tree(name: str, length: int) -> None:
    combine, count = UNKNOWN[name]
    gm = graph(combine, count, length=length)
    rewrite_scans(gm)
    assert not gm.graph.find_nodes(op="call_function", target=associative_scan_op)
    assert "sp." not in show(gm)
    compare(gm, combine, count, length)


def test_captured_values() -> None:
    def combine(a: Tensor, b: Tensor, zero: Tensor) -> list[Tensor]:
        """Add numbers that are relative to `zero`."""
        return [a + b - zero]

    x, zero = inputs(1)[0].movedim(1, 0), torch.rand(2, dtype=torch.float64)
    gm = captured(lambda x, y: associative_scan_op(combine, [x], (y,)), x, zero)
    rewrite_scans(gm)
    torch.testing.assert_close(gm(x, zero)[0], (x - zero).cumsum(0) + zero)


def test_a_detached_operand_is_no_sum() -> None:
    gm = graph(lambda a, b: [a.detach() + b], 1)
    RewriteAssociativeScans()(gm)
    assert gm.graph.find_nodes(op="call_function", target=associative_scan_op)


@pytest.mark.parametrize("name", KNOWN)
def test_gradients(name: str) -> None:
    combine, count, _ = KNOWN[name]
    gm = graph(combine, count)
    rewrite_scans(gm)
    compare(gm, combine, count, 7)


def compare(gm: Any, combine: Combine, count: int, length: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(count, length)]
    results = [gm(*leaves), loop(combine, leaves, 1)]
    losses = [sum((out * (i + 1)).sin().sum() for i, out in enumerate(outs)) for outs in results]
    found, wanted = (torch.autograd.grad(loss, leaves) for loss in losses)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(found, wanted)


def saved_bytes(gm: Any, length: int) -> int:
    """Return bytes of all storages that autograd saves for the backward."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = [x.requires_grad_() for x in inputs(2, length)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = gm(*leaves)
    sum(x.sum() for x in out).backward()
    return sum(kept.values())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("combine", [linear, rotation])
def test_memory_is_linear(combine: Combine) -> None:
    sizes = []
    for length in (64, 128, 256):
        gm = graph(combine, 2, length=length)
        rewrite_scans(gm)
        sizes.append(saved_bytes(gm, length))
    assert sizes[2] < 2.2 * sizes[1] < 2.2 * 2.2 * sizes[0]


class Model(nn.Module):
    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.combine, self.weight = combine, nn.Parameter(torch.eye(2, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = [z @ self.weight for z in (x, y)]
        return sum(out.sin().sum() for out in scan(self.combine, rows, 1))


def test_shards() -> None:
    """A recurrence exchanges carries; torch's own gradients of leaves that mix are wrong, so a loop's are expected."""
    model, leaves = Model(linear), inputs(2)
    local = sp_compile.parallelize(torch.export.export(model, tuple(leaves)), sp=3, fallback="error")
    report = local.meta["sp_report"]
    assert (report.count("scan"), report.count("linear_scan")) == (1, 1)
    alone = sum(out.sin().sum() for out in loop(linear, [z @ model.weight for z in leaves], 1))
    (wanted,) = torch.autograd.grad(alone, model.weight)

    def one_rank(rank: int) -> tuple[Tensor, Tensor]:
        loss = local(*leaves)
        return loss.detach(), torch.autograd.grad(loss, local.weight)[0]

    for loss, grad in run_ranks(3, one_rank):
        torch.testing.assert_close(loss, alone.detach())
        torch.testing.assert_close(grad, wanted)


def test_shards_of_other_functions_are_gathered() -> None:
    model, leaves = Model(rotation), inputs(2)
    program = torch.export.export(model, tuple(leaves))
    named = {"seq_dims": {"x": 1, "y": 1}}
    local = sp_compile.parallelize(program, sp=3, **named)
    assert local.meta["sp_report"].fallbacks
    for loss in run_ranks(3, lambda rank: local(*leaves).detach()):
        torch.testing.assert_close(loss, model(*leaves).detach())
    with pytest.raises(SpError, match=r"SP305.*associative_scan"):
        sp_compile.parallelize(program, sp=3, fallback="error", **named)
