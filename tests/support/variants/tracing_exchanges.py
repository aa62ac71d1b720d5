"""Graphs with exchanges between four ranks, of which one is here, as several tracers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_compile.passes.capture.capture import capture, capture_export
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes

N = 4


@contextmanager
def one_of(n: int) -> Iterator[Any]:
    """The default group, of n ranks of which there is one: programs with collectives can be traced."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def traced(fn: Callable[..., Any], *inputs: Tensor, tracer: str = "capture") -> GraphModule:
    """The graph as Dynamo has it, or as captured from that."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, examples: list[Tensor]) -> Any:
        graph = capture(gm, examples) if tracer == "capture" else gm
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def exported(fn: Callable[..., Any], x: Tensor, strict: bool = False) -> GraphModule:
    """Return the captured graph of torch.export; Dynamo traces it only if `strict`."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return fn(x)

    return capture_export(torch.export.export(Model(), (x,), strict=strict))


def by_make_fx(fn: Callable[..., Any], x: Tensor) -> GraphModule:
    return capture_export(make_fx(fn, tracing_mode="fake")(x))


TRACERS: dict[str, Callable[..., GraphModule]] = {
    "capture": traced,
    "export": exported,
    "strict export": partial(exported, strict=True),
    "make_fx": by_make_fx,
}


def aot(fn: Callable[..., Any], *inputs: Tensor) -> dict[str, GraphModule]:
    """The forward and the backward graph of a joint one that the pass has rewritten."""
    found: dict[str, GraphModule] = {}

    def partition(joint: GraphModule, examples: Any, **options: Any) -> Any:
        FuseAllToAllPermutes(decomposed=True)(joint)
        found["joint"] = joint
        return min_cut_rematerialization_partition(joint, examples, **options)

    def keep(name: str) -> Any:
        return lambda gm, examples: found.update({name: gm}) or make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=partition)
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return found


def count(gm: GraphModule, text: str) -> int:
    return sum(text in str(n.target) for n in gm.graph.nodes if n.op == "call_function")
