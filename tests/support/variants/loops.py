"""Loops over time, as models write them, that become scans."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.golden import captured
from support.models import BATCH, floats
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.passes.canonical.loops.lists import StackWrittenRows
from sp_compile.passes.canonical.loops.reroll import RerollLoops
from sp_compile.passes.canonical.normalize_ops import NormalizeOps

WIDTH, KEYS = 3, 4
Loop = Callable[..., object]


def mamba(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Run the loop of transformers: decays and inputs (B, I, S, N), and C (B, S, N)."""
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


def masked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and terms that are masks, integers or numbers; y is the first state."""
    h, n, out, numbers = y, torch.zeros_like(y).long(), [], []
    large, small, counts = x > 0.6, x > 0.3, torch.arange(1, x.shape[1] + 1)
    for t in range(x.shape[1]):
        h = torch.where(large[:, t], 0.9 * h, 0.3 * h) * large[:, t] + h * small[:, t]
        h = h / counts[t] + x[:, t]
        n = n + large[:, t] + small[:, t]
        out.append(h)
        numbers.append(n)
    return torch.stack(out, 1), torch.stack(numbers, 1)


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
    "masked": (masked, (ROWS, STATE)),
    "mixed with the row before": (mixed_with_the_row_before, (ROWS,)),
    "written": (written, (ROWS, STATE)),
    "written and read": (written_and_read, (ROWS,)),
}


def inputs(name: str, steps: int = 6) -> tuple[Tensor, ...]:
    shapes = (tuple(s * steps // S if s < 0 else s for s in shape) for shape in LOOPS[name][1])
    return tuple(floats(*shape, seed=i) for i, shape in enumerate(shapes))


def rolled(fn: Loop, args: tuple[Tensor, ...]) -> GraphModule:
    gm = captured(fn, *args)
    NormalizeOps()(gm)
    written = StackWrittenRows()(gm).modified
    assert RerollLoops()(gm).modified or written
    gm.graph.lint()
    gm.recompile()
    return gm
