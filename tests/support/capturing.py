"""Run a model through capture and aot_eager; collect all values that a training step computes and changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from sp_compile.backend import lower
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.rank_program import compile_local
from sp_compile.runtime.session import CompileSession


def lowered(gm: GraphModule, inputs: list[Any], n: int, **options: Any) -> GraphModule:
    """Return the graph of one of n simulated ranks for Dynamo's graph."""
    session = CompileSession(gm, inputs, options, measures=False)
    session.ranks = Ranks(n, SIMULATED_GROUP)
    return lower(UserProgram(gm, tuple(inputs)), options, session).graph


def simulating(n: int, graphs: list[GraphModule], **options: Any) -> Callable[..., Any]:
    """Return a backend that runs each graph on n simulated ranks, appends it to `graphs`, and returns rank 0's results."""

    def backend(gm: GraphModule, given: list[Any]) -> Callable[..., Any]:
        local = lowered(gm, given, n, **options)
        graphs.append(local)
        return lambda *args: run_ranks(n, lambda rank: local(*args))[0]

    return backend


def compile_halves(model: nn.Module, args: Sequence[Any], n: int, **options: Any) -> None:
    """Compile forward and backward of one of n simulated ranks, and run none of them."""

    def compiled(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        given = {"cost": {}, "compiler": "aot_eager", **options}
        session = CompileSession(gm, inputs, given, measures=False)
        session.split, session.ranks = True, Ranks(n, SIMULATED_GROUP)
        compile_local(lower(UserProgram(gm, tuple(inputs)), given, session))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=compiled)(*args)


class Backend:
    """A backend that compiles captured graphs with aot_eager and records them."""

    def __init__(self, compile_graph: Callable[..., Any] = aot_eager) -> None:
        self.compile_graph = compile_graph
        self.graphs: list[GraphModule] = []

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Any:
        captured = capture(gm, example_inputs)
        holes, captured_holes = (g.graph.find_nodes(op="placeholder") for g in (gm, captured))
        assert [n.name for n in holes] == [n.name for n in captured_holes]
        assert all("val" in n.meta for n in captured.graph.nodes)
        self.graphs.append(captured)
        return self.compile_graph(captured, example_inputs)


def step(run: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Run a training step; return every tensor that it returns or changes."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    outputs = [t for t in tree_leaves(run(x)) if isinstance(t, torch.Tensor)]
    outputs[0].backward()
    return [*outputs, x, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(actual: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    torch.testing.assert_close(
        [t for t in actual if t is not None], [t for t in expected if t is not None], rtol=1e-6, atol=1e-6
    )
    assert [t is None for t in actual] == [t is None for t in expected]


def compile_function(f: Callable[..., Any]) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(f, backend=backend, fullgraph=True), backend
