"""Loops over time that tracing unrolled become scans, equal to eager in value and gradient, on ranks too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.golden import show
from support.models import BATCH, check, floats, seeded
from support.variants.loops import LOOPS, WIDTH, Loop, inputs, rolled
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sp_compile


def values_and_gradients(fn: Loop, args: tuple[Tensor, ...]) -> list[Tensor | None]:
    leaves = [x.clone().requires_grad_() for x in args]
    values = [v for v in tree_leaves(fn(*leaves)) if isinstance(v, Tensor)]
    wanted = [v for v in values if v.requires_grad]
    total = sum((v.sin().sum() for v in wanted), torch.zeros(()))
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if wanted else []
    return [*values, *grads]


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("name", LOOPS)
def test_equal_to_the_loop(name: str) -> None:
    fn, args = LOOPS[name][0], inputs(name)
    expected = values_and_gradients(fn, args)
    torch.testing.assert_close(values_and_gradients(rolled(fn, args), args), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("name", LOOPS)
def test_no_node_of_a_single_step_remains(name: str) -> None:
    """The graph is as large for any number of steps."""
    few, many = (show(rolled(LOOPS[name][0], inputs(name, steps))).count("\n") for steps in (5, 11))
    assert few == many


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("name", LOOPS)
def test_on_ranks(name: str) -> None:
    """Only scans, shifts by a row, and single rows are exchanged."""
    fn = LOOPS[name][0]

    def model(x: Tensor, *others: Tensor) -> object:
        return fn(*(v.sin() if v.ndim > 2 else v for v in (x, *others)))  # sequences are computed, and so sharded

    args = [x.requires_grad_() for x in inputs(name)]
    report = check(model, *args, sp=3, seq_dims={"x": 2 if args[0].ndim == 4 else 1})
    assert not report.fallbacks or name == "in blocks", report  # which a sequence is not cut into on shards


class Gated(nn.Module):
    """A gated recurrence with a linear layer in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            forget, what = self.gates(x[:, t]).chunk(2, -1)
            h = forget.sigmoid() * h + what
            out.append(h)
        return torch.stack(out, 1)


class Checkpointed(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class WithoutGradients(Gated):
    """A loop without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return y * self.gates(x)[..., :WIDTH]


class Autocast(Gated):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("model", [Gated, Checkpointed, WithoutGradients])
def test_regions(model: type[Gated]) -> None:
    """A number of texts that may change, and regions that the loop is in."""
    x = floats(4, 10, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    report = check(seeded(model), x, sp=3)
    assert report.count("linear_scan") == 1
    assert not report.fallbacks


def test_autocast() -> None:
    """Products of the loop are in bfloat16, as on a single device; their sums are rounded less often."""
    report = sp_compile.verify(seeded(Autocast).float(), floats(4, 10, WIDTH).float(), sp=2)
    assert report.worst < 0.03
    assert report.count("linear_scan") == 1


def decay(x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.999 * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def select_decay(x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.where(x[:, t, :1] > 1, 0.9 * h, 0.999 * h) + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def rotate_states(x: Tensor) -> Tensor:
    p, q, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        p, q = 0.99 * p - 0.01 * q + x[:, t], 0.01 * p + 0.99 * q
        out.append(p + q)
    return torch.stack(out, 1)


def mix_states(x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    weight = torch.eye(x.shape[-1], dtype=x.dtype) * 0.5
    for t in range(x.shape[1]):
        h = 0.99 * (h @ weight) + 0.49 * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("loop", [decay, select_decay, rotate_states, mix_states])
def test_numbers_are_not_rounded_to_16_bits(loop: Loop) -> None:
    """The factor 0.999 is 1 in bfloat16; an op of one step reads it in float32."""
    x = torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    graph = rolled(loop, (x,))
    assert {n.target for n in graph.graph.nodes} & {torch.ops.sp.linear_scan.default, torch.ops.sp.affine_scan.default}
    found, wanted = graph(x), loop(x.double())
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < 4e-3 * wanted.norm()


@pytest.mark.parametrize("steps", [6, 5])
def test_channels_of_a_step_are_not_those_of_all_steps(steps: int) -> None:
    """Dim 1 of a step is its channels, and that of all steps may be the steps."""

    def loop(x: Tensor, y: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = h * 0.9 + x[:, t]
            out.append(F.prelu(h, y))
        return torch.stack(out, 1)

    args = floats(BATCH, steps, 6) - 0.5, floats(6, seed=3)
    torch.testing.assert_close(rolled(loop, args)(*args), loop(*args))


def test_a_diagonal_of_each_step() -> None:
    def loop(x: Tensor, y: Tensor) -> Tensor:
        h, out = y, []
        for t in range(x.shape[1]):
            h = h * 0.9 + x[:, t]
            out.append(torch.diag_embed(h))
        return torch.stack(out, 1)

    args = floats(4, 4, 4), floats(4, 4, seed=3)
    torch.testing.assert_close(rolled(loop, args)(*args), loop(*args))


def test_a_write_before_the_first_row_is_to_the_first_row() -> None:
    def loop(x: Tensor, y: Tensor) -> Tensor:
        steps, h, out = x.shape[1], y, torch.zeros_like(x)
        for t in range(steps):
            h = h * 0.9 + x[:, t]
            out = torch.slice_scatter(out, h[:, None], 1, t - steps - 3 * (t == 0), t + 1)
        return out

    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    torch.testing.assert_close(rolled(loop, args)(*args), loop(*args))


@pytest.mark.parametrize("dim", [0, -1])
def test_gradients_of_writes_of_a_step(dim: int) -> None:
    """Each row that a step writes is written once, although torch.func.vmap writes it several times."""

    def loop(x: Tensor, y: Tensor) -> Tensor:
        h = y
        for t in range(x.shape[1]):
            written = torch.zeros_like(y).select_scatter(x[:, t].select(dim, 1), dim, 0)
            written = written.slice_scatter(x[:, t, :1], -1, 1, 2)
            h = h * x[:, t] + torch.select_scatter(written, y.select(dim, 0), dim, 1)
        return h

    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    expected = values_and_gradients(loop, args)
    torch.testing.assert_close(values_and_gradients(rolled(loop, args), args), expected)


def test_an_op_that_checks_its_operands() -> None:
    """torch.linalg.inv calls an op without a result; the loop stays."""

    def loop(x: Tensor, y: Tensor) -> Tensor:
        h = y
        for t in range(x.shape[1]):
            h = h * x[:, t] + torch.linalg.inv(x[:, t, None] * x[:, t, :, None] + torch.eye(WIDTH))[:, 0]
        return h

    check(loop, floats(BATCH, 5, WIDTH).requires_grad_(), floats(BATCH, WIDTH), sp=2, seq_dims={"x": 1})


def test_a_state_that_all_steps_multiply_by_one_matrix() -> None:
    def loop(x: Tensor, y: Tensor) -> Tensor:
        h, total = y, torch.zeros_like(y)
        for t in range(x.shape[1]):
            h = h @ y.mT @ y
            total = total + x[:, t] * h
        return total

    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    check(loop, args[0].requires_grad_(), args[1], sp=2, seq_dims={"x": 1})
