"""Every private torch name that the package uses, in one place. All of them: tried on 2.13."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# Registers the meta kernels of torch.ops._c10d_functional, which need no process group.
import torch.distributed._functional_collectives
import torch.nn.attention
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.register_hook import register_hook_op
from torch._higher_order_ops.wrap import (
    tag_activation_checkpoint,
    wrap,
    wrap_activation_checkpoint,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)
from torch._logging import trace_structured
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_metadata_torch_function_mode,
    _temp_remove_pre_dispatch_torch_function_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "PYTHON_STATE_CALLS",
    "CheckpointPolicy",
    "ConstantSource",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "RestartAnalysis",
    "TracingContext",
    "active_tracer",
    "associative_scan_op",
    "autograd_function_apply",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "enter_autocast",
    "exit_autocast",
    "forget_compiled",
    "get_data",
    "has_autocast_kernel",
    "invoke_subgraph",
    "is_functorch_tensor",
    "keep_calling_convention",
    "keep_source",
    "make_fx",
    "process_group",
    "pytree",
    "register_hook_op",
    "reset_functorch",
    "set_grad_enabled",
    "statically_known_true",
    "suspended_trace",
    "tag_activation_checkpoint",
    "trace_structured",
    "track_tensor_tree",
    "unmark_static",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
]

set_grad_enabled = torch._C._set_grad_enabled
get_data = torch._C._autograd._get_data_attr
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor

# Calls that change Python state around attention; Dynamo leaves them in its graph and no dispatcher sees them.
PYTHON_STATE_CALLS = frozenset({torch.nn.attention._backend_from_string, torch.nn.attention._sdpa_kernel})


def symmetric_all_to_all() -> Callable[..., None] | None:
    """torch's all_to_all_nd(input, out, scatter_dim, gather_dim, *, group), which 2.11 to 2.13 do not have."""
    from torch.distributed import _symmetric_memory

    return getattr(_symmetric_memory, "all_to_all_nd", None)


def symmetric_memory(size: int, device: torch.device, group: str) -> tuple[torch.Tensor, Any]:
    """`size` bytes that all ranks of the group can reach, and the handle to the others'; every rank calls it.

    The handle has rank, buffer_ptrs (a list of addresses) and barrier(channel). Not tried: it takes a GPU a rank.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    return memory, _symmetric_memory.rendezvous(memory, group)


def forget_compiled() -> None:
    """Drop what torch.compile has compiled so far in this process."""
    torch._dynamo.reset()


def keep_source(new: Node, old: Node) -> None:
    """Give a copied placeholder Dynamo's account of where its value comes from."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def keep_calling_convention(new: Graph, old: Graph) -> None:
    """Make a new graph take its inputs and return its results in the containers that the old one does."""
    new.set_codegen(old._codegen)


def unmark_static(facts: dict[str, Any]) -> dict[str, Any]:
    """Dynamo's facts about a placeholder, without the promise that its memory is constant."""
    return {name: fact for name, fact in facts.items() if name != "_dynamo_static_input_type"}


def reset_functorch() -> None:
    """Pop the vmap/grad levels that a failed trace has left pushed."""
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)


def has_autocast_kernel(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Does autocast change the dtype that `op` computes in?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), f"Autocast{device_type.upper()}")


def active_tracer() -> Any:
    """The tracer of the pre-dispatch make_fx that is running."""
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY).tracer


@contextmanager
def suspended_trace(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Run without recording (no dispatch, pre-dispatch or torch-function modes), still on fake tensors."""
    with (
        _temp_remove_pre_dispatch_torch_function_mode(),
        _temp_remove_metadata_torch_function_mode(),
        _disable_current_modes(),
        fake_mode,
    ):
        yield


@contextmanager
def real_tensors() -> Iterator[None]:
    """Compute for real inside a compilation: no tracing, no fake tensors.

    Nor the Python dispatcher: under it c10d takes the GIL inside a collective, and then waits for a thread of Gloo that
    waits for the GIL.
    """
    with (
        torch._C._DisablePythonDispatcher(),
        _temp_remove_pre_dispatch_torch_function_mode(),
        _temp_remove_metadata_torch_function_mode(),
        _disable_current_modes(),
    ):
        yield


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by this name."""
    return dist.distributed_c10d._resolve_process_group(name)


def flat_mesh(mesh: dist.DeviceMesh, name: str) -> dist.DeviceMesh:
    """The mesh's axes as one, called `name`; creates a group once, so every rank of the mesh must call it."""
    return mesh._flatten(name)


def known_process_group(name: str) -> bool:
    """Can functional collectives find a process group of this name?"""
    try:
        return process_group(name) is not None
    except RuntimeError:
        return False


def process_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """(name, global ranks in the order of the group, backends) of every group that this process is in, oldest first."""
    world = dist.distributed_c10d._world
    return [
        (
            world.pg_names[group],
            tuple(sorted(ranks, key=ranks.__getitem__)),
            str(world.pg_backend_config[group]),
        )
        for group, ranks in world.pg_group_ranks.items()
        if group in world.pg_names
    ]


def default_timeout() -> timedelta | None:
    """After how long a collective of the default group gives up; new_group takes a longer one unless told."""
    group = dist.group.WORLD
    backend = group._get_backend(dist.distributed_c10d._get_pg_default_device(group))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def register_process_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` by this name (tried on 2.13)."""
    torch._C._distributed_c10d._register_process_group(name, group)


def follows(mode: FakeTensorMode | None, fact: Any) -> bool:
    """Does the fact (a sympy relation) follow from guards that the program already has? Adds none."""
    env = mode.shape_env if mode is not None else None
    return env is not None and bool(env._maybe_evaluate_static(fact) == True)  # noqa: E712  (None: not known)


def size_hint(size: torch.SymInt) -> int:
    """The value of a symbolic size in the call that is being compiled; adds no guard."""
    return int(size.node.hint)


def is_fragment(gm: torch.fx.GraphModule) -> bool:
    """Is this Dynamo graph only a piece of a model: before or after a graph break, or a bucket of DDPOptimizer?

    Tried on 2.13.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    ddp = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
    return _called_by_user_code() or (ddp and reason is None)


def _called_by_user_code() -> bool:
    """Was Dynamo entered from a Python frame that it could not compile, inside the function given to torch.compile?

    The stack then holds, inwards: eval_frame's wrapper, that frame, convert_frame, the backend.
    """
    dynamo = Path(torch._dynamo.__file__).parent
    entries, wrappers = str(dynamo / "convert_frame.py"), str(dynamo / "eval_frame.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != entries:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != wrappers:
        if not Path(frame.f_code.co_filename).is_relative_to(dynamo.parent):
            return True
        frame = frame.f_back
    return False


def refuse_eager_fallback() -> None:
    """Past its recompile limit Dynamo runs the model uncompiled, which is another program where inputs are shards."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def memory_budget(budget: float | None) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's partitioner keeps at most this share of the activations (tried on 2.13)."""
    if budget is None:
        return contextlib.nullcontext()
    import torch._functorch.config as functorch_config

    return functorch_config.patch(activation_memory_budget=budget)


def compiler(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """A torch.compile backend as a function of (graph, example inputs)."""
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def is_module_state(node: torch.fx.Node) -> bool:
    """Is the placeholder a parameter or buffer of the module, not an argument of its forward? (tried on 2.13)"""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def argument_name(node: torch.fx.Node) -> str:
    """The user's name of a placeholder: `input_ids` for L['input_ids'] (tried on 2.13)."""
    source = getattr(node, "_dynamo_source", None)
    return str(getattr(source, "local_name", node.name)) if source is not None else node.name


def has_cpp_compiler() -> bool:
    """Does Inductor find a C++ compiler? (tried on 2.13)"""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_cpp(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The shared library of C++ source, from Inductor's cache on disk if it is there (tried on 2.13).

    Of processes that want the same one, the first compiles and the others wait.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, extra_flags=tuple(flags))


JointTransform = Callable[[torch.fx.GraphModule], None]
JOINT_COMPILERS = ("inductor", "aot_eager")


def joint_compiler(
    name: str | Callable[..., Any], transform: JointTransform, key: str | None
) -> Callable[..., Any]:
    """As `compiler`, with the graph that AOTAutograd makes changed in place by `transform` before it is partitioned.

    Forward and backward in one graph; of an inference, the forward. key: what `transform` will do, for caches of
    compiled code; None if it asks other ranks, since one that found its code in a cache would not answer them. Of
    backends, only JOINT_COMPILERS have a place for it (tried on 2.13).
    """
    if name == "inductor":
        return _joint_inductor(transform, key)
    if name != "aot_eager":
        raise NotImplementedError(f"compiler={name!r}: no place for passes on AOTAutograd's joint graph")
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        transform(gm)
        return min_cut_rematerialization_partition(gm, inputs, **options)

    def infer(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        transform(gm)
        return boxed_nop(gm, inputs)

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def _joint_inductor(transform: JointTransform, key: str | None) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            transform(graph.owning_module)

        def uuid(self) -> str | None:
            return key

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        theirs = config.joint_custom_pre_pass
        if theirs is None:
            both: Any = Pass()
        else:
            both = [*(theirs if isinstance(theirs, list | tuple) else [theirs]), Pass()]
        with config.patch(joint_custom_pre_pass=both):
            return compile_fx(gm, list(inputs))

    return run


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor wants of the ATen ops that it is given (tried on 2.13)."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def group_names(mesh: dist.DeviceMesh) -> list[str]:
    """The process group of every axis of a mesh that this rank is in."""
    return [mesh.get_group(i).group_name for i in range(mesh.ndim)]
