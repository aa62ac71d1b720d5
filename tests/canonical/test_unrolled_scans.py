"""Trees of torch.associative_scan become scans; scans in rounds of another kind stay, and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from support.golden import captured, show
from support.models import BATCH, check, floats
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan, generic_associative_scan
from torch.fx import GraphModule

from sp_compile.passes.canonical.scan_forms.unrolled_scans import RewriteUnrolledScans
from sp_compile.passes.report import Report

WIDTH = 3
LENGTHS = [2, 3, 4, 7, 8, 13]
Combine = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]
Scan = Callable[[Combine, tuple[Tensor, ...]], tuple[Tensor, ...]]


def tree(combine: Combine, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what torch.associative_scan(combine_mode="generic") computes along dim 0."""
    count = len(xs)
    return tuple(generic_associative_scan(lambda *rows: combine(rows[:count], rows[count:]), xs))


def doubling(combine: Combine, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Hillis and Steele: 1, 2, 4, ... rows back."""
    step = 1
    while step < xs[0].shape[0]:
        new = combine(tuple(x[:-step] for x in xs), tuple(x[step:] for x in xs))
        xs = tuple(torch.cat([x[:step], y]) for x, y in zip(xs, new))
        step *= 2
    return xs


def padded(*fills: float, joins: bool = True) -> Scan:
    """Hillis and Steele with rows of the neutral element where there are no neighbors."""

    def moved(x: Tensor, step: int, fill: float) -> Tensor:
        if joins:
            return torch.cat([torch.full_like(x[:step], fill), x[:-step]])
        return torch.nn.functional.pad(x[:-step], (0, 0) * (x.ndim - 1) + (step, 0), value=fill)

    def scan(combine: Combine, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        step = 1
        while step < xs[0].shape[0]:
            xs = combine(tuple(moved(x, step, fill) for x, fill in zip(xs, fills)), xs)
            step *= 2
        return xs

    return scan


def recurrence(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (a, b), (c, d) = left, right
    return a * c, c * b + d


COMBINES: dict[str, Combine] = {
    "sum": lambda x, y: (x[0] + y[0],),
    "prod": lambda x, y: (x[0] * y[0],),
    "logsumexp": lambda x, y: (torch.logaddexp(x[0], y[0]),),
    "recurrence": recurrence,
    "recurrence, other way round": lambda x, y: (y[0] * x[0], y[1] + x[1] * y[0]),
}
ROUNDS: dict[str, Scan] = {"doubling": doubling, "padded": padded(1, 0), "padded by pad": padded(1, 0, joins=False)}


def scanned(scan: Scan, combine: Combine) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the states only; the product of a recurrence's factors is unused."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        leaves = (x, y) if len(combine((x, y), (x, y))) == 2 else (x,)
        return scan(combine, tuple(v.movedim(1, 0) for v in leaves))[-1].movedim(0, 1)

    return model


def inputs(length: int) -> tuple[Tensor, Tensor]:
    return floats(BATCH, length, WIDTH), floats(BATCH, length, WIDTH, seed=3)


def rolled(model: Callable[..., object], length: int) -> GraphModule:
    gm = captured(model, *inputs(length))
    gm.graph.eliminate_dead_code()  # the products that a recurrence's last round makes for no one
    assert RewriteUnrolledScans()(gm).modified
    gm.graph.lint()
    gm.recompile()
    return gm


def gradients(model: Callable[..., Tensor], length: int) -> list[Tensor | None]:
    leaves = [x.requires_grad_() for x in inputs(length)]
    out = model(*leaves)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)]


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("combine", COMBINES)
def test_trees(combine: str, length: int) -> None:
    model = scanned(tree, COMBINES[combine])
    gm = rolled(model, length)
    torch.testing.assert_close(gradients(gm, length), gradients(model, length), rtol=1e-12, atol=1e-12)
    assert len([n for n in gm.graph.nodes if n.op == "call_function"]) <= 4


def test_golden() -> None:
    assert_expected_inline(
        show(rolled(scanned(tree, recurrence), 13)),
        """\
x: [2, 13, 3] = placeholder
y: [2, 13, 3] = placeholder
linear_scan_default: [2, 13, 3] = sp.linear_scan(x, y, None, 1)
movedim_int: [13, 2, 3] = aten.movedim.int(linear_scan_default, 1, 0)
movedim_2: [2, 13, 3] = aten.movedim.int(movedim_int, 0, 1)
return (movedim_2,)""",
    )


def test_both_results() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(tree(recurrence, (x.movedim(1, 0), y.movedim(1, 0))))

    torch.testing.assert_close(gradients(rolled(model, 5), 5), gradients(model, 5), rtol=1e-12, atol=1e-12)


def token_shift(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x[:, 1:] * x[:, :-1]], 1)


def mixed(x: Tensor, y: Tensor) -> Tensor:
    """A tree whose outermost level adds and whose inner levels multiply."""

    def combine(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (left[0] + right[0] if left[0].shape[0] >= 3 else left[0] * right[0],)

    return scanned(tree, combine)(x, y)


STAY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a difference": scanned(tree, lambda x, y: (y[0] - x[0],)),
    "a maximum": scanned(tree, lambda x, y: (torch.maximum(x[0], y[0]),)),
    "a round alone": lambda x, y: torch.cat([x[:, :2], x[:, 2:] + x[:, :-2]], 1),
    "a row and its neighbor": token_shift,
    "rounds of a sum": scanned(doubling, COMBINES["sum"]),
    "levels of two functions": mixed,
    "rows that are not neutral": scanned(padded(1), COMBINES["sum"]),
    "products with zeros": scanned(padded(0), COMBINES["prod"]),
    "a round too few": lambda x, y: (lambda z: z + torch.nn.functional.pad(z[:, :-2], (0, 0, 2, 0)))(
        x + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
    ),
    "a scaled sum": scanned(doubling, lambda x, y: (x[0] + 0.5 * y[0],)),
    "a weighted sum": scanned(doubling, lambda x, y: (torch.add(x[0], y[0], alpha=2),)),
}


@pytest.mark.parametrize("name", STAY)
def test_unmatched_scans(name: str) -> None:
    gm = captured(STAY[name], *inputs(8))
    gm.graph.eliminate_dead_code()
    before = show(gm)
    assert not RewriteUnrolledScans()(gm).modified
    assert show(gm) == before


def numeric(scan: Scan, length: int, **options: Any) -> Report:
    run = scanned(scan, recurrence)
    leaves = [floats(BATCH, length, WIDTH, seed=seed).requires_grad_() for seed in (0, 3)]
    return check(lambda x, y: run(x, y).sum(), *leaves, sp=3, **options)


def symbolic(scan: Scan, length: int, **options: Any) -> Report:
    run = scanned(scan, recurrence)
    leaves = [floats(BATCH, length, WIDTH, seed=seed).requires_grad_() for seed in (0, 3)]
    for x in leaves:
        torch._dynamo.maybe_mark_dynamic(x, 1)
    return check(lambda x, y: run(x, y).sum(), *leaves, sp=3, **options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("length", [3, 7, 10])
def test_a_tree_alone_at_a_length_that_is_a_symbol(length: int) -> None:
    """No other operation shows a sequence: the length is specialized."""
    report = symbolic(tree, length)
    assert not report.fallbacks, report
    assert report.count("linear_scan") == 1


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("length", [3, 7, 10])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_rounds_are_right(rounds: str, length: int) -> None:
    for run in (numeric, symbolic):
        assert run(ROUNDS[rounds], length, seq_dims={"x": 1, "y": 1}).count("linear_scan") == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 12])
def test_associative_scan_on_ranks(length: int) -> None:
    """torch unrolls combine_mode="generic" under torch.compile."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return associative_scan(recurrence, (x.sigmoid(), y.sin()), dim=1, combine_mode="generic")[1]

    report = check(model, *(x.requires_grad_() for x in inputs(length)), sp=3)
    assert not report.fallbacks, report
    assert report.count("linear_scan") == 1
