"""Inductor's code for one rank of n on an absent GPU, run on fake tensors: `compiled(program, inputs, n, ...)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.cuda.tracing import Trace, Tracer
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compile
from sp_compile.lowering import torch_compat
from sp_compile.passes.joint.joint import JointPasses
from sp_compile.passes.joint.partitioned import PartitionedPasses


@dataclass
class Rank:
    """What one rank runs."""

    forward: Trace = field(default_factory=Trace)
    backward: Trace = field(default_factory=Trace)
    report: str = ""


@dataclass
class _Graph:
    """One of Inductor's: its code, and fake inputs like its own."""

    module: Any
    inputs: Sequence[Any]


class _Kernel:
    """A Triton kernel in a wrapper, which is only noted when it would be launched."""

    tracer: Tracer | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        if _Kernel.tracer is not None:
            _Kernel.tracer.launch()


@contextlib.contextmanager
def group_of(n: int, rank: int = 0) -> Iterator[None]:
    """Initialize a default group of n ranks in which this process is the only member."""
    dist.init_process_group("fake", rank=rank, world_size=n, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiled(
    module: nn.Module, inputs: Callable[[], Sequence[Tensor]], n: int, ulysses: int | None = None, **options: Any
) -> Rank:
    """Return the operations of rank 0 of n in the forward and the backward (none under no_grad).

    Args:
        module: Model to compile.
        inputs: Returns the full fake arguments.
        n: Number of ranks.
        ulysses: Size of that axis of a 2-D mesh whose other axis is "ring".
        options: Options of `backend="sp"`.
    """
    with group_of(n):
        if ulysses is not None:
            options["mesh"] = init_device_mesh("cpu", (n // ulysses, ulysses), mesh_dim_names=("ring", "ulysses"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = torch.export.export(module, tuple(inputs()))
        local = sp_compile.parallelize(program, **options)
        report = str(local.meta["sp_report"])
        given = [node.meta["val"] for node in local.graph.find_nodes(op="placeholder")]
        mode = detect_fake_mode(given)
        wanted = torch.is_grad_enabled()
        args = [like(mode, x, x.requires_grad and wanted) if isinstance(x, Tensor) else x for x in given]
        forward, *backward = _graphs(local, args, mode)
        back = _traced(backward[0], mode, held=False) if backward else Trace()
        return Rank(_traced(forward, mode, held=True), back, report)


def like(mode: FakeTensorMode, x: Tensor, requires_grad: bool = False) -> Tensor:
    """A fake of its own, with the same strides."""
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=requires_grad)


@contextlib.contextmanager
def compiling(mode: FakeTensorMode) -> Iterator[list[Any]]:
    """Inside, Inductor writes its code and compiles no kernel of it; the wrappers so far, as modules."""
    modules: list[Any] = []
    to_module = GraphLowering.compile_to_module

    def lowered(graph: GraphLowering) -> Any:
        modules.append(to_module(graph))
        return modules[-1]

    # Patterns that Inductor learns from examples, which it would run on the device.
    no_examples = [mock.patch(f"torch._inductor.fx_passes.{p}.lazy_init", return_value=None) for p in PATTERNS]
    kernel = mock.patch.object(AsyncCompile, "triton", return_value=_Kernel())
    wrapper = mock.patch.object(GraphLowering, "compile_to_module", lowered)
    with contextlib.ExitStack() as stack:
        for patch in (*no_examples, kernel, wrapper):
            stack.enter_context(patch)
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        yield modules


def _graphs(gm: torch.fx.GraphModule, args: list[Any], mode: FakeTensorMode) -> list[_Graph]:
    """Forward and backward as Inductor compiles them."""
    found: list[_Graph] = []
    with compiling(mode) as modules:

        def inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            out = compile_fx_inner(graph, inputs, **kwargs)
            found.append(_Graph(modules[-1], inputs))
            return out

        torch_compat.joint_compiler("inductor", JointPasses(), None, None, PartitionedPasses())(
            gm, args, inner_compile=inner
        )
    return found


PATTERNS = ("joint_graph", "post_grad")


def on_fake_tensors(module: Any) -> Callable[[list[Any]], Any]:
    """A wrapper's call, for fake tensors."""
    module.empty_strided_cuda = lambda *shape: torch.empty_strided(*shape[:2], dtype=shape[2], device="cuda")
    module.reinterpret_tensor = lambda x, size, stride, at: x.as_strided(size, stride, x.storage_offset() + at)
    module.assert_alignment = module.copy_if_misaligned = lambda x, *_: x
    call: Callable[[list[Any]], Any] = module.call
    return call


@contextlib.contextmanager
def traced_by(tracer: Tracer, mode: FakeTensorMode) -> Iterator[None]:
    """Inside, a wrapper that is called is traced."""
    with mode, tracer, mock.patch.object(_Kernel, "tracer", tracer):
        yield


def _traced(graph: _Graph, mode: FakeTensorMode, held: bool) -> Trace:
    """Run the wrapper once. held: does the caller keep the inputs? Else they are freed where the wrapper frees them."""
    call = on_fake_tensors(graph.module)
    args = [like(mode, x) if isinstance(x, Tensor) else x for x in graph.inputs]
    owner = list(args) if held else []
    tracer = Tracer([] if held else [("given", x) for x in args if isinstance(x, Tensor)])
    with traced_by(tracer, mode):
        call(args)
    owner.clear()
    return tracer.trace
