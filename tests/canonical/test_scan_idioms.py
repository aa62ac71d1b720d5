"""Common forms around an inclusive scan, and their canonical scan with equal values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import captured, show
from torch import Tensor

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.edit import erase_dead

sp = torch.ops.sp
INFINITY = float("inf")


def flip(x: Tensor) -> Tensor:
    return x.flip(1)


def row(x: Tensor, value: float = 0.0) -> Tensor:
    return torch.full_like(x[:, :1], value)


def reversed_sum(x: Tensor) -> Tensor:
    return flip(flip(x).cumsum(1))


def with_total(x: Tensor) -> Tensor:
    sums = x.cumsum(1)
    return sums[:, -1:] - sums


def used_twice(x: Tensor) -> Tensor:
    sums = x.cumsum(1)
    return sums * (sums - x)


EXCLUSIVE = "sum, True"
REVERSED = "sum, False, True"
BOTH = "sum, True, True"
IDIOMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cumsum - x": (lambda x: x.cumsum(1) - x, EXCLUSIVE),
    "pad, slice": (lambda x: F.pad(x.cumsum(1), (0, 0, 1, 0))[:, :-1], EXCLUSIVE),
    "slice, pad": (lambda x: F.pad(x.cumsum(1)[:, :-1], (0, 0, 1, 0)), EXCLUSIVE),
    "pad by -1": (lambda x: F.pad(x.cumsum(1), (0, 0, 1, -1)), EXCLUSIVE),
    "cat": (lambda x: torch.cat([torch.zeros(2, 1, 3), x.cumsum(1)[:, :-1]], 1), EXCLUSIVE),
    "cat of a narrow": (lambda x: torch.cat([row(x), x.cumsum(1).narrow(1, 0, x.shape[1] - 1)], 1), EXCLUSIVE),
    "cat of a split": (lambda x: torch.cat([row(x), x.cumsum(1).split([x.shape[1] - 1, 1], 1)[0]], 1), EXCLUSIVE),
    "hstack": (lambda x: torch.hstack([row(x), x.cumsum(1)[:, :-1]]), EXCLUSIVE),
    "shift by a split": (lambda x: torch.cat([row(x), x.split([x.shape[1] - 1, 1], 1)[0]], 1).cumsum(1), EXCLUSIVE),
    "cat like": (lambda x: torch.cat([row(x), x.cumsum(1)[:, :-1]], 1), EXCLUSIVE),
    "cat of new zeros": (lambda x: torch.cat([x.new_zeros(2, 1, 3), x.cumsum(1)[:, :-1]], 1), EXCLUSIVE),
    "cat first": (lambda x: torch.cat([row(x), x[:, :-1]], 1).cumsum(1), EXCLUSIVE),
    "pad first": (lambda x: F.pad(x, (0, 0, 1, -1)).cumsum(1), EXCLUSIVE),
    "product": (lambda x: torch.cat([row(x, 1.0), x.cumprod(1)[:, :-1]], 1), "prod, True"),
    "logsumexp": (lambda x: F.pad(x.logcumsumexp(1), (0, 0, 1, -1), value=-INFINITY), "logsumexp, True"),
    "flips": (reversed_sum, REVERSED),
    "flips around the difference": (lambda x: flip(flip(x).cumsum(1) - flip(x)), BOTH),
    "flips in the difference": (lambda x: reversed_sum(x) - x, BOTH),
    "shifted back": (lambda x: F.pad(reversed_sum(x), (0, 0, -1, 1)), BOTH),
    "cat at the end": (lambda x: torch.cat([reversed_sum(x)[:, 1:], row(x)], 1), BOTH),
    "total - cumsum": (lambda x: x.sum(1, keepdim=True) - x.cumsum(1), BOTH),
    "total - cumsum + x": (lambda x: x.sum(1, keepdim=True) - x.cumsum(1) + x, REVERSED),
    "x + (total - cumsum)": (lambda x: x + (x.sum(1).unsqueeze(1) - x.cumsum(1)), REVERSED),
    "x - cumsum + total": (lambda x: x - x.cumsum(1) + x.sum(1, True), REVERSED),
    "last - cumsum": (with_total, BOTH),
    "exclusive + x": (lambda x: (x.cumsum(1) - x) + x, ""),
    "dtype": (lambda x: x.cumsum(1, dtype=torch.float64) - x, "sum, True, False, float64"),
    "a fill that is not neutral": (lambda x: F.pad(x.cumsum(1), (0, 0, 1, -1), value=1.0), "-"),
    "another dim": (lambda x: F.pad(x.cumsum(2), (0, 0, 1, -1)), "-"),
    "by two": (lambda x: F.pad(x.cumsum(1), (0, 0, 2, -2)), "-"),
    "another operand": (lambda x: x.cumsum(1) - x * 2, "-"),
    "alpha": (lambda x: torch.sub(x.cumsum(1), x, alpha=2), "-"),
    "one flip": (lambda x: flip(x.cumsum(1)), "-"),
    "another flip": (lambda x: x.flip(2).cumsum(1).flip(2), "-"),
    "total of another dim": (lambda x: x.sum(2, keepdim=True) - x.cumsum(1), "-"),
    "a cumsum that is used": (used_twice, "-"),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str) -> None:
    idiom, scan = IDIOMS[name]
    x = torch.randn(2, 6, 3)
    gm = captured(idiom, x)
    erase_dead(gm.graph)  # as Dynamo does
    Canonicalize()(gm)
    calls = [line.split(" = ")[1] for line in show(gm).split("\n") if " = sp." in line or " = aten." in line]
    if scan == "-":
        assert not any(call.startswith("sp.scan") for call in calls)
    elif scan:
        assert calls == [f"sp.scan(x, None, 1, {scan})"]
    torch.testing.assert_close(gm(x), idiom(x))
    assert gm(x).dtype == idiom(x).dtype


def test_integers() -> None:
    """The mask to subtract may be cast before; next to an inclusive sum, no row has to move."""
    x = torch.randint(0, 9, (2, 6, 3))

    def both(x: Tensor) -> Tensor:
        mask = x > 4
        sums = mask.cumsum(1)
        return sums * F.pad(sums, (0, 0, 1, -1))

    for function, scans in ((both, 0), (lambda x: (x > 4).cumsum(1) - x, 0), (lambda x: x.cumsum(1) - x, 1)):
        gm = captured(function, x)
        Canonicalize()(gm)
        assert len(gm.graph.find_nodes(op="call_function", target=sp.scan.default)) == scans
        assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default)
        assert torch.equal(gm(x), function(x))


def test_masks_that_are_cast() -> None:
    def positions(x: Tensor) -> Tensor:
        mask = x > 4
        return mask.cumsum(1) - mask.long()

    x = torch.randint(0, 9, (2, 6, 3))
    gm = captured(positions, x)
    Canonicalize()(gm)
    assert gm.graph.find_nodes(op="call_function", target=sp.scan.default)
    assert torch.equal(gm(x), positions(x))


def test_an_operand_that_is_rounded_is_subtracted() -> None:
    x = torch.tensor([[[3001], [5], [7]]])
    for function in (lambda x: x.cumsum(1, dtype=torch.float32) - x.half(), lambda x: x.cumsum(1) - x.float()):
        gm = captured(function, x)
        Canonicalize()(gm)
        assert not gm.graph.find_nodes(op="call_function", target=sp.scan.default)
        assert torch.equal(gm(x), function(x))


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cumsum": lambda y, x: y.cumsum(1),
    "- x": lambda y, x: y - x,
    "+ x": lambda y, x: y + x,
    "flip": lambda y, x: flip(y),
    "shift": lambda y, x: F.pad(y, (0, 0, 1, -1)),
    "shift back": lambda y, x: F.pad(y, (0, 0, -1, 1)),
    "total": lambda y, x: x.sum(1, keepdim=True) - y,
    "last": lambda y, x: y[:, -1:] - y,
    "again": lambda y, x: y,
}


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6))
def test_any_combination_keeps_its_value(steps: list[str]) -> None:
    """With integers, so that nothing but a wrong rewrite makes a difference."""

    def program(x: Tensor) -> Tensor:
        y = x
        for step in steps:
            y = STEPS[step](y, x if step != "again" else y)
        return y

    x = torch.randint(-9, 9, (2, 5, 2))
    gm = captured(lambda x: program(x) + 0, x)
    Canonicalize()(gm)
    assert torch.equal(gm(x), program(x))
