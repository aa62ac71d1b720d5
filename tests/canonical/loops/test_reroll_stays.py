"""Loops over time that are no scans stay as they are, and looking for scans takes linear time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show
from support.models import BATCH, check, floats
from support.variants.loops import WIDTH, Loop, moving_average, rolled
from torch import Tensor

from sp_compile.passes.canonical.loops.lists import StackWrittenRows
from sp_compile.passes.canonical.loops.reroll import RerollLoops
from sp_compile.passes.canonical.normalize_ops import NormalizeOps

# Loops that stay.


def steps_of(step: Callable[[Tensor, Tensor, int], Tensor]) -> Loop:
    def loop(x: Tensor, y: Tensor) -> Tensor:
        h, out = y, []
        for t in range(x.shape[1]):
            h = step(h, x[:, t], t)
            out.append(h)
        return torch.stack(out, 1)

    return loop


def coupled(x: Tensor, y: Tensor) -> Tensor:
    h, g, out = y, y, []
    for t in range(x.shape[1]):
        h, g = h * x[:, t] + g, g * 0.5 + h
        out.append(h)
    return torch.stack(out, 1)


def without_a_state(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x[:, t].exp() @ y.mT for t in range(x.shape[1])], 1)


def in_grad_modes(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in range(x.shape[1]):
        with torch.no_grad():
            scale = x[:, t].exp()
        h = h * scale + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def read_of_a_later_step(x: Tensor, y: Tensor) -> Tensor:
    """Scale the second input of later steps by the state of the first one."""
    h, out, z = y, [], x
    for t in range(x.shape[1]):
        h = h * x[:, t] + z[:, t]
        if t == 0:
            z = z * h[:, None]
        out.append(h)
    return torch.stack(out, 1)


STAY: dict[str, Loop] = {
    "tanh": steps_of(lambda h, x, t: torch.tanh(h + x)),
    "a square": steps_of(lambda h, x, t: h * h + x),
    "a product of two": steps_of(lambda h, x, t: h * (h + x)),
    "steps that differ": steps_of(lambda h, x, t: h * x + x if t % 2 else h + x),
    "powers of the step": steps_of(lambda h, x, t: h * 0.5**t + x),
    "a cast": steps_of(lambda h, x, t: (h * x + x).float().double()),
    "a detached state": steps_of(lambda h, x, t: h.detach() * x + x),
    "a norm of the state": steps_of(lambda h, x, t: h * h.norm() + x),
    "random numbers": steps_of(lambda h, x, t: h * 0.5 + F.dropout(x, 0.0)),
    "two states": coupled,
    "no state": without_a_state,
    "grad modes": in_grad_modes,
    "a later read": read_of_a_later_step,
}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", STAY)
def test_unmatched_loops(name: str) -> None:
    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    gm = captured(STAY[name], *args)
    NormalizeOps()(gm)
    before = show(gm)
    StackWrittenRows()(gm)
    RerollLoops()(gm)
    assert show(gm) == before
    check(STAY[name], *(x.requires_grad_() for x in args), sp=2, seq_dims={"x": 1})


def test_a_step_that_is_read_before_the_loop_ends() -> None:
    def early(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, out, loss = y, [], x.sum()
        for t in range(x.shape[1]):
            h = h * x[:, t] + x[:, t]
            loss = loss + h.square().sum() if t == 2 else loss
            out.append(h)
        return torch.stack(out, 1), loss

    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    torch.testing.assert_close(rolled(early, args)(*args), early(*args))


@pytest.mark.slow
def test_time_is_linear_in_the_nodes() -> None:
    """Nodes that are looked at, of a loop and of one that stays."""
    for fn in (moving_average, lambda x: STAY["tanh"](x, x[:, 0])):
        looked = []
        for steps in (20, 80):
            gm = captured(fn, floats(BATCH, steps, WIDTH))
            NormalizeOps()(gm)
            before = 4 * len(gm.graph.nodes)
            reroll = RerollLoops()
            reroll(gm)
            looked.append(before - reroll.budget)
        assert looked[1] <= 4.5 * looked[0]


def is_replaced(loop: Loop, args: tuple[Tensor, ...]) -> bool:
    gm = captured(loop, *args)
    NormalizeOps()(gm)
    return bool(RerollLoops()(gm).modified)


@pytest.mark.parametrize("number", [0.0, torch.inf])
def test_a_factor_that_is_infinite_stays(number: float) -> None:
    """(h + x) * inf is not inf * h + inf * x, which is NaN for terms of different signs."""
    step = steps_of(lambda h, x, t: (h + x) / number if number == 0 else (h + x) * number)
    args = floats(BATCH, 5, WIDTH) - 0.5, floats(BATCH, WIDTH, seed=3) - 0.5
    assert not is_replaced(step, args)


def test_dims_of_values_without_dims_stay() -> None:
    def loop(x: Tensor, y: Tensor) -> Tensor:
        h, out = y, []
        for t in range(x.shape[0]):
            h = h * x[t].softmax(0) + (x[t] * h).sum(0) * 2
            out.append(h)
        return torch.stack(out)

    assert not is_replaced(loop, (floats(6), floats(1, seed=3)[0]))


def test_a_state_of_bools_stays() -> None:
    args = floats(BATCH, 5, WIDTH) > 0.5, floats(BATCH, WIDTH, seed=3) > 0.9
    assert not is_replaced(steps_of(lambda h, x, t: h + x), args)


def test_a_first_state_of_another_shape_stays_if_its_batch_is_added() -> None:
    """The first state, (1, WIDTH), is not the sum of BATCH equal rows."""
    args = floats(BATCH, 5, WIDTH), floats(1, WIDTH, seed=3)
    step = steps_of(lambda h, x, t: h.sum(0, keepdim=True) * 0.1 + x)
    assert not is_replaced(step, args)
    check(step, *(x.requires_grad_() for x in args), sp=2, seq_dims={"x": 1})


def lstm(x: Tensor, y: Tensor) -> Tensor:
    h = c = y
    out, w = [], floats(4 * WIDTH, 2 * WIDTH, seed=7) - 0.5
    for t in range(x.shape[1]):
        i, f, g, o = F.linear(torch.cat([x[:, t], h], 1), w).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out, 1)


def sorted_state(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in range(x.shape[1]):
        values, _ = h.sort(1)
        h = values * 0.5 + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("loop", [lstm, sorted_state])
def test_a_step_with_an_op_of_several_results_stays(loop: Loop) -> None:
    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    assert not is_replaced(loop, args)
    check(loop, *(x.requires_grad_() for x in args), sp=2, seq_dims={"x": 1})
