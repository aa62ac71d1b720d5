"""Handwritten tensor-parallel programs, their joint graphs, and their results on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx import GraphModule

from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.tensor_parallel.varying import find_reductions, find_wait

GROUP = "tp"
WIDTH, HIDDEN, HEADS = 12, 24, 12


def all_reduce(x: Tensor, group: str = GROUP) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


class Copy(torch.autograd.Function):
    """Megatron's f: into column-parallel linears."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad)


class Reduce(torch.autograd.Function):
    """Megatron's g: out of row-parallel linears."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


Weights = dict[str, Tensor]
COLUMNS, ROWS = ("q", "k", "v", "up", "up_bias"), ("o", "down")


def weights(layers: int) -> list[Weights]:
    """Return the full weights of a stack of layers, float64."""
    shapes = {
        "norm1": (WIDTH,), "norm2": (WIDTH,), "bias2": (WIDTH,), "q": (WIDTH, HIDDEN), "k": (WIDTH, HIDDEN),
        "v": (WIDTH, HIDDEN), "o": (HIDDEN, WIDTH), "up": (WIDTH, HIDDEN), "up_bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH), "down_bias": (WIDTH,),
    }  # fmt: skip
    return [
        {name: torch.randn(shape, dtype=torch.float64) / 3 for name, shape in shapes.items()} for _ in range(layers)
    ]


def cut(full: Sequence[Weights], rank: int, n: int) -> list[Weights]:
    """Return one rank's part: columns or rows of cut weights, and the replicated ones."""

    def part(name: str, w: Tensor) -> Tensor:
        if name in COLUMNS:
            return w.chunk(n, -1)[rank]
        return w.chunk(n, 0)[rank] if name in ROWS else w

    return [{name: part(name, w).clone().requires_grad_() for name, w in layer.items()} for layer in full]


def decoder(x: Tensor, layers: Sequence[Weights], n: int = 1) -> Tensor:
    """Pre-norm attention and MLP with residuals, on 1/n of the heads and of the hidden features."""
    f, g = (Copy.apply, Reduce.apply) if n > 1 else (torch.clone, torch.clone)
    for w in layers:
        h = f(F.rms_norm(x, (WIDTH,), w["norm1"]))
        q, k, v = ((h @ w[name]).unflatten(-1, (HEADS // n, -1)).transpose(1, 2) for name in "qkv")
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + g(a @ w["o"])
        h = f(F.layer_norm(x, (WIDTH,), w["norm2"], w["bias2"]))
        x = x + g(F.gelu(h @ w["up"] + w["up_bias"]) @ w["down"]) + w["down_bias"]
    return x


class _Stop(Exception):
    pass


def joint_graph(f: Callable[..., Any], *args: Any) -> GraphModule:
    """Return the graph that AOTAutograd passes to its partitioner."""
    found = []

    def partition(gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(gm)
        raise _Stop  # nothing runs: the group does not exist

    with suppress(_Stop):
        aot_function(f, make_boxed_func, make_boxed_func, partition_fn=partition)(*args)
    gm = found[0]
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    gm.recompile()
    return gm


def simulate_reductions(gm: GraphModule, n: int, group: str = GROUP) -> GraphModule:
    """Replace all_reduces by those of simulated ranks."""
    editor = GraphEditor().edit(gm.graph)
    for node in find_reductions(gm, group):
        editor.replace_call(find_wait(node), torch.ops.sp.all_reduce.default, (node.args[0], n, group), node)
    gm.recompile()
    return gm


def on_ranks(gm: GraphModule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the results of every simulated rank for its inputs."""
    with torch.no_grad():
        return run_ranks(len(inputs), lambda rank: [t.clone() for t in gm(*inputs[rank]) if t is not None])
