"""Loops over time that tracing unrolled become scans, equal to eager in value and gradient, on ranks too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from golden import captured, show
from models import BATCH, check, floats, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.passes.reroll import Reroll
from sp_compile.passes.spellings import respell

WIDTH, KEYS = 3, 4
Loop = Callable[..., object]


def mamba(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The spelling of transformers: decays and inputs (B, I, S, N), and C (B, S, N)."""
    h, out = torch.zeros(x.shape[0], x.shape[1], x.shape[3], dtype=x.dtype), []
    for t in range(x.shape[2]):
        h = x[:, :, t] * h + y[:, :, t]
        out.append(torch.matmul(h.to(x.dtype), z[:, t, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(out, dim=-1), h


def gated(x: Tensor, y: Tensor) -> Tensor:
    h, out = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype), []
    for t in range(x.shape[1]):
        z = torch.sigmoid(x[:, t] @ y)
        h = z * h + (1 - z) * x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def gates_of_one_product(x: Tensor, y: Tensor) -> Tensor:
    h, out = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype), []
    for row in x.unbind(1):
        forget, take, what = F.linear(row, y).chunk(3, -1)
        h = torch.addcmul(take.sigmoid() * what.tanh(), forget.sigmoid(), h)
        out.append(F.layer_norm(h, [WIDTH]).softmax(-1))
    return torch.stack(out, 1)


def linear_attention(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v; the state is a matrix."""
    state, out = torch.zeros(x.shape[0], x.shape[2], z.shape[2], dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = x[:, t, :, None].sigmoid() * state + y[:, t, :, None] * z[:, t, None, :]
        out.append((x[:, t, None] @ state).squeeze(1))
    return torch.stack(out, 1), state


def linear_attention_by_einsum(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    state, out = torch.zeros(x.shape[0], x.shape[2], z.shape[2], dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * 0.9 + torch.einsum("bk,bv->bkv", y[:, t], z[:, t])
        out.append(torch.einsum("bk,bkv->bv", x[:, t], state))
    return torch.stack(out, 1)


def moving_average(x: Tensor) -> Tensor:
    h = x[:, 0]
    out = [h]
    for t in range(1, x.shape[1]):
        h = 0.9 * h + 0.1 * x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def lerped(x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.lerp(h, x[:, t], 0.1)
        out.append(h)
    return torch.stack(out, 1)


def towards(x: Tensor, y: Tensor) -> Tensor:
    """h + w * (x - h), from a state of fewer dims."""
    h, out = y[0], []
    for t in range(x.shape[1]):
        h = h + x[:, t].sigmoid() * (x[:, t] - h)
        out.append(h)
    return torch.stack(out, 1)


def min_gru(x: Tensor, y: Tensor) -> Tensor:
    """The first step has no state."""
    h, out = None, []
    for row, gate in zip(x.unbind(1), y.unbind(1)):
        z = torch.sigmoid(gate)
        h = z * row if h is None else (1 - z) * h + z * row
        out.append(h.unsqueeze(1))
    return torch.cat(out, 1)


def counts(x: Tensor) -> tuple[Tensor, Tensor]:
    h, out = torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64), []
    for t in range(x.shape[1]):
        h = h + (x[:, t] > 0.5)
        out.append(h)
    return torch.stack(out, 1), h


def running_sum(x: Tensor, y: Tensor) -> Tensor:
    h, out = y[:, None], []
    for t in range(x.shape[1]):
        h = h + x[:, t : t + 1]
        out.append(h)
    return torch.cat(out, 1)


def running_product(x: Tensor) -> Tensor:
    h, out = 1.0, []
    for t in range(x.shape[1]):
        h = h * x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def backwards(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in reversed(range(x.shape[1])):
        h = h * x[:, t] + x[:, t] ** 2
        out.append(h)
    return torch.stack(out[::-1], 1)


def backwards_flipped(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in reversed(range(x.shape[1])):
        h = h + x[:, t] ** 2
        out.append(h)
    return torch.stack(out, 1).flip(1)


def state_before(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in range(x.shape[1]):
        out.append(h * x[:, t])
        h = h * x[:, t] + x[:, t]
    return torch.stack(out, 1)


def two_layers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h, g, out = y, y, []
    for t in range(x.shape[1]):
        h = h * x[:, t].sigmoid() + x[:, t]
        g = g * h.sigmoid() + h.tanh()
        out.append(g)
    return torch.stack(out, 1), h


def two_lists(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, out, more = y[:BATCH], [], []
    for t in range(x.shape[1]):
        h = h * x[:, t] + x[:, t]
        out.append(h)
        more.append((h @ y).tanh())
    return torch.stack(out, 1), torch.stack(more, 1), out[2]


def reset(x: Tensor, y: Tensor) -> Tensor:
    h, out = y, []
    for t in range(x.shape[1]):
        h = torch.where(x[:, t] > 0.6, 0.0, h) * 0.5 + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def mixed_with_the_row_before(x: Tensor) -> Tensor:
    """RWKV's token shift, inside the loop."""
    before = h = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        mixed, before = 0.3 * x[:, t] + 0.7 * before, x[:, t]
        h = h * 0.9 + mixed
        out.append(h)
    return torch.stack(out, 1)


def written(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape[1], *y.shape, dtype=x.dtype)
    h = y
    for t in range(x.shape[1]):
        h = h / (1 + x[:, t]) - x[:, t]
        out[t] = h
    return out


def written_and_read(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(1, x.shape[1]):
        out[:, t] = 0.5 * out[:, t - 1] + x[:, t - 1]
    return out


def in_blocks(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Lightning attention: (B, H, 2 * S, E) in blocks of two rows; the first reads a state of zeros."""
    lower, out = torch.ones(2, 2, dtype=x.dtype).tril(), []
    state = x.new_zeros(*x.shape[:2], x.shape[3], z.shape[3])
    for t in range(0, x.shape[2], 2):
        q, k, v = (part[:, :, t : t + 2] for part in (x, y, z))
        inside = (q @ k.transpose(-1, -2) * lower) @ v
        out.append(q @ state + inside)
        state = state * 0.5 + k.transpose(-1, -2) @ v
    return torch.cat(out, dim=2)


S = -1  # the number of steps, in the shapes below
ROWS, STATE = (BATCH, S, WIDTH), (BATCH, WIDTH)
LOOPS: dict[str, tuple[Loop, tuple[tuple[int, ...], ...]]] = {
    "mamba": (mamba, ((BATCH, 3, S, 5), (BATCH, 3, S, 5), (BATCH, S, 5))),
    "gated": (gated, (ROWS, (WIDTH, WIDTH))),
    "gates of one product": (gates_of_one_product, (ROWS, (3 * WIDTH, WIDTH))),
    "linear attention": (linear_attention, ((BATCH, S, KEYS), (BATCH, S, KEYS), ROWS)),
    "linear attention by einsum": (linear_attention_by_einsum, ((BATCH, S, KEYS), (BATCH, S, KEYS), ROWS)),
    "in blocks": (in_blocks, ((BATCH, 2, 2 * S, WIDTH),) * 3),
    "moving average": (moving_average, (ROWS,)),
    "lerped": (lerped, (ROWS,)),
    "towards": (towards, (ROWS, STATE)),
    "min GRU": (min_gru, (ROWS, ROWS)),
    "counts": (counts, (ROWS,)),
    "running sum": (running_sum, (ROWS, STATE)),
    "running product": (running_product, (ROWS,)),
    "backwards": (backwards, (ROWS, STATE)),
    "backwards, flipped": (backwards_flipped, (ROWS, STATE)),
    "state before": (state_before, (ROWS, STATE)),
    "two layers": (two_layers, (ROWS, STATE)),
    "two lists": (two_lists, (ROWS, (WIDTH, WIDTH))),
    "reset": (reset, (ROWS, STATE)),
    "mixed with the row before": (mixed_with_the_row_before, (ROWS,)),
    "written": (written, (ROWS, STATE)),
    "written and read": (written_and_read, (ROWS,)),
}


def inputs(name: str, steps: int = 6) -> tuple[Tensor, ...]:
    shapes = (tuple(s * steps // S if s < 0 else s for s in shape) for shape in LOOPS[name][1])
    return tuple(floats(*shape, seed=i) for i, shape in enumerate(shapes))


def values_and_gradients(fn: Loop, args: tuple[Tensor, ...]) -> list[Tensor | None]:
    leaves = [x.clone().requires_grad_() for x in args]
    values = [v for v in tree_leaves(fn(*leaves)) if isinstance(v, Tensor)]
    wanted = [v for v in values if v.requires_grad]
    total = sum((v.sin().sum() for v in wanted), torch.zeros(()))
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if wanted else []
    return [*values, *grads]


def rolled(fn: Loop, args: tuple[Tensor, ...]) -> GraphModule:
    gm = captured(fn, *args)
    respell(gm)
    assert Reroll(gm).run()
    gm.graph.lint()
    gm.recompile()
    return gm


@pytest.mark.parametrize("name", LOOPS)
def test_equal_to_the_loop(name: str) -> None:
    fn, args = LOOPS[name][0], inputs(name)
    expected = values_and_gradients(fn, args)
    torch.testing.assert_close(values_and_gradients(rolled(fn, args), args), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOOPS)
def test_no_node_of_a_single_step_remains(name: str) -> None:
    """The graph is as large for any number of steps."""
    few, many = (show(rolled(LOOPS[name][0], inputs(name, steps))).count("\n") for steps in (5, 11))
    assert few == many


@pytest.mark.parametrize("name", LOOPS)
def test_on_ranks(name: str) -> None:
    """What crosses ranks is scans, shifts by a row, and single rows."""
    fn = LOOPS[name][0]

    def model(x: Tensor, *others: Tensor) -> object:
        return fn(
            *(v.sin() if v.ndim > 2 else v for v in (x, *others))
        )  # sequences are computed, and so sharded

    args = [x.requires_grad_() for x in inputs(name)]
    report = check(model, *args, sp=3, seq_dims={"x": 2 if args[0].ndim == 4 else 1})
    assert not report.fallbacks or name == "in blocks", report  # which a sequence is not cut into on shards


def test_golden() -> None:
    assert_expected_inline(
        show(rolled(*(LOOPS["mamba"][0], inputs("mamba")))),
        """\
x: [2, 3, 6, 5] = placeholder
y: [2, 3, 6, 5] = placeholder
z: [2, 6, 5] = placeholder
linear_scan_default: [2, 3, 6, 5] = sp.linear_scan(x, y, None, 2, False)
unsqueeze_default: [2, 6, 5, 1] = aten.unsqueeze(z, 3)
permute_default: [2, 6, 3, 5] = aten.permute(linear_scan_default, [0, 2, 1, 3])
matmul_default: [2, 6, 3, 1] = aten.matmul(permute_default, unsqueeze_default)
select_int: [2, 6, 3] = aten.select.int(matmul_default, 3, 0)
permute_default_1: [2, 3, 6] = aten.permute(select_int, [0, 2, 1])
select_int_1: [2, 3, 5] = aten.select.int(linear_scan_default, 2, 5)
return (permute_default_1, select_int_1)""",
    )


def test_golden_of_a_matrix_state() -> None:
    name = "linear attention by einsum"
    assert_expected_inline(
        show(rolled(LOOPS[name][0], inputs(name))),
        """\
x: [2, 6, 4] = placeholder
y: [2, 6, 4] = placeholder
z: [2, 6, 3] = placeholder
einsum_default: [2, 6, 4, 3] = aten.einsum(bak,bav->bakv, [y, z])
full_default: [2, 6, 4, 3] = aten.full([2, 6, 4, 3], 0.9, dtype=float64, device=cpu)
linear_scan_default: [2, 6, 4, 3] = sp.linear_scan(full_default, einsum_default, None, 1, False)
einsum_default_1: [2, 6, 3] = aten.einsum(bak,bakv->bav, [x, linear_scan_default])
return (einsum_default_1,)""",
    )


def test_golden_of_gates() -> None:
    name = "gates of one product"
    assert_expected_inline(
        show(rolled(LOOPS[name][0], inputs(name))),
        """\
x: [2, 6, 3] = placeholder
y: [9, 3] = placeholder
linear_default: [2, 6, 9] = aten.linear(x, y)
chunk_default:  = aten.chunk(linear_default, 3, 2)
getitem_24: [2, 6, 3] = getitem(chunk_default, 0)
getitem_25: [2, 6, 3] = getitem(chunk_default, 1)
getitem_26: [2, 6, 3] = getitem(chunk_default, 2)
sigmoid_default: [2, 6, 3] = aten.sigmoid(getitem_25)
tanh_default: [2, 6, 3] = aten.tanh(getitem_26)
mul_tensor: [2, 6, 3] = aten.mul.Tensor(sigmoid_default, tanh_default)
sigmoid_default_1: [2, 6, 3] = aten.sigmoid(getitem_24)
linear_scan_default: [2, 6, 3] = sp.linear_scan(sigmoid_default_1, mul_tensor, None, 1, False)
layer_norm_default: [2, 6, 3] = aten.layer_norm(linear_scan_default, [3], None, None, 1e-05, False)
softmax_int: [2, 6, 3] = aten.softmax.int(layer_norm_default, 2)
return (softmax_int,)""",
    )


def test_golden_of_a_first_step() -> None:
    assert_expected_inline(
        show(rolled(LOOPS["min GRU"][0], inputs("min GRU"))),
        """\
x: [2, 6, 3] = placeholder
y: [2, 6, 3] = placeholder
select_int: [2, 3] = aten.select.int(x, 1, 0)
select_int_1: [2, 3] = aten.select.int(y, 1, 0)
sigmoid: [2, 3] = aten.sigmoid(select_int_1)
mul: [2, 3] = aten.mul.Tensor(sigmoid, select_int)
slice_tensor: [2, 5, 3] = aten.slice.Tensor(y, 1, 1, 6)
sigmoid_default: [2, 5, 3] = aten.sigmoid(slice_tensor)
rsub_scalar: [2, 5, 3] = aten.rsub.Scalar(sigmoid_default, 1)
slice_tensor_1: [2, 5, 3] = aten.slice.Tensor(x, 1, 1, 6)
mul_tensor: [2, 5, 3] = aten.mul.Tensor(sigmoid_default, slice_tensor_1)
linear_scan_default: [2, 5, 3] = sp.linear_scan(rsub_scalar, mul_tensor, mul, 1, False)
unsqueeze_default: [2, 1, 3] = aten.unsqueeze(mul, 1)
cat_default: [2, 6, 3] = aten.cat([unsqueeze_default, linear_scan_default], 1)
return (cat_default,)""",
    )


def test_golden_of_a_loop_in_reverse() -> None:
    assert_expected_inline(
        show(rolled(LOOPS["backwards"][0], inputs("backwards"))),
        """\
x: [2, 6, 3] = placeholder
y: [2, 3] = placeholder
pow_tensor_scalar: [2, 6, 3] = aten.pow.Tensor_Scalar(x, 2)
linear_scan_default: [2, 6, 3] = sp.linear_scan(x, pow_tensor_scalar, y, 1, True)
return (linear_scan_default,)""",
    )


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
    """Of the loop."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return y * self.gates(x)[..., :WIDTH]


class Autocast(Gated):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("model", [Gated, Checkpointed, WithoutGradients])
def test_regions(model: type[Gated]) -> None:
    """A number of texts that may change, and regions that the loop is in."""
    x = floats(4, 10, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    report = check(seeded(model), x, sp=3)
    assert report.count("linear_scan") == 1
    assert not report.fallbacks


def test_autocast() -> None:
    """The loop's products are in bfloat16, as those of one device are; their sums are rounded less often."""
    report = sp_compile.verify(seeded(Autocast).float(), floats(4, 10, WIDTH).float(), sp=2)
    assert report.worst < 0.03
    assert report.count("linear_scan") == 1


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
    """The second input of the loop is made from what the first step computes."""
    h, out, z = y, [], x
    for t in range(x.shape[1]):
        h = h * x[:, t] + z[:, t]
        if t == 0:
            z = z * h[:, None]
        out.append(h)
    return torch.stack(out, 1)


STAY: dict[str, Loop] = {
    "tanh": steps_of(lambda h, x, t: torch.tanh(h + x)),
    "a matrix times the state": steps_of(lambda h, x, t: h @ x.mT @ x),
    "a square": steps_of(lambda h, x, t: h * h + x),
    "a product of two": steps_of(lambda h, x, t: h * (h + x)),
    "steps that differ": steps_of(lambda h, x, t: h * x + x if t % 2 else h + x),
    "powers of the step": steps_of(lambda h, x, t: h * 0.5**t + x),
    "a cast": steps_of(lambda h, x, t: (h * x + x).float().double()),
    "a detached state": steps_of(lambda h, x, t: h.detach() * x + x),
    "a norm of the state": steps_of(lambda h, x, t: h * h.norm() + x),
    "random numbers": steps_of(lambda h, x, t: h * 0.5 + F.dropout(x, 0.0)),
    "a state of the batch": steps_of(lambda h, x, t: h.flip(0) * 0.5 + x),
    "two states": coupled,
    "no state": without_a_state,
    "grad modes": in_grad_modes,
    "a later read": read_of_a_later_step,
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    args = floats(BATCH, 5, WIDTH), floats(BATCH, WIDTH, seed=3)
    gm = captured(STAY[name], *args)
    respell(gm)
    before = show(gm)
    Reroll(gm).run()
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


def test_time_is_linear_in_the_nodes() -> None:
    """Nodes that are looked at, of a loop and of one that stays."""
    for fn in (moving_average, lambda x: STAY["tanh"](x, x[:, 0])):
        looked = []
        for steps in (20, 80):
            gm = captured(fn, floats(BATCH, steps, WIDTH))
            respell(gm)
            reroll = Reroll(gm)
            before = reroll.budget
            reroll.run()
            looked.append(before - reroll.budget)
        assert looked[1] <= 4.5 * looked[0]
