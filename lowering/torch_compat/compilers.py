"""Compile graphs with torch.compile's backends and added passes, and C++ by Inductor's cache."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import linecache
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

JointTransform = Callable[[torch.fx.GraphModule], None]


class PartitionTransform(Protocol):
    """Pass that changes a forward and its backward in place."""

    @property
    def key(self) -> str:
        """Return the key in caches of compiled code, equal for passes of equal effect."""
        ...

    def run_training(self, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, results: int) -> None:
        """Change a forward and its backward. The first `results` outputs of the forward are the caller's."""
        ...

    def run_inference(self, forward: torch.fx.GraphModule) -> None:
        """Change a forward without a backward."""
        ...


JOINT_COMPILERS = ("inductor", "aot_eager")  # compilers that run passes on joint graphs


def memory_budget(budget: float | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context that limits the share of activations that AOTAutograd's partitioner saves.

    The partitioner selects recomputed ops by FLOPs. The context includes the package's operators, as by default only
    ATen ops have a cost.

    Args:
        budget: Share from 0 to 1. None keeps torch's setting.
    """
    import torch._functorch.config as functorch_config

    ours = {} if budget is None else {"activation_memory_budget": budget}
    return functorch_config.patch(is_non_builtin_to_include=True, **ours)


def get_compiler(name: str | Callable[..., Any], patches: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return a torch.compile backend as a function of (graph, example inputs).

    Args:
        name: Name of the backend, or the backend.
        patches: Changes of Inductor's settings.
    """
    if name == "inductor":
        return partial(compile_with_inductor, patches=patches)
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def nested_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiler for independent graphs inside a compilation, isolated from its context.

    The graphs have fake inputs and no gradients.
    """

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph in the fake mode of its inputs."""
        # torch 2.15 would otherwise use the mode of the outer compilation, whose guards would contain their symbols.
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        with tracing(TracingContext(mode)), torch.no_grad():
            return compiler(gm, list(inputs))

    return run


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile with Inductor, without its padding of strides on GPUs.

    Torch 2.11 may select two layouts for a tensor that is viewed before it is read, such as heads in groups of ranks.
    It then reads rows of odd length with padded strides that were written with other strides. The results are silently
    wrong, seen on an H100 with 1,023 rows per rank. 2.13 is consistent there. The cost is small: rows are as wide as
    the model.

    Args:
        gm: The graph.
        inputs: Example inputs.
        patches: Changes of Inductor's settings while it compiles.
        **options: Other arguments of compile_fx.
    """
    from torch._inductor.compile_fx import compile_fx

    run: Callable[..., Any] = compile_fx(
        gm, list(inputs), config_patches={"comprehensive_padding": False, **(patches or {})}, **options
    )
    return run


def inductor_mode_options() -> dict[str, dict[str, Any]]:
    """Return Inductor's settings for each `mode=` of torch.compile, by name."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def current_partition() -> str:
    """Return the graph that AOTAutograd compiles in any thread.

    Returns:
        "joint", "forward", "backward", "inference", or "" if it compiles nothing.
    """
    from torch._functorch._aot_autograd import logging_utils

    found = getattr(logging_utils, "graph_being_compiled", [])
    return str(found[0]).partition("_")[2] if found else ""


# Comment of Inductor above a line.
SOURCES_MARK = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\]")


KERNEL_PATTERN = re.compile(r"\s*(?:cpp|triton_\w+?)_fused_(\w+)_\d+(?:\.run)?\(")  # call of a kernel of Inductor


class CodeLine(NamedTuple):
    """Line of compiled code."""

    sources: list[str]  # source nodes, by names in AOTAutograd's input graph
    trace: str = ""  # stack trace of the line's node, or ""
    kernel: str = ""  # ops in the name of an Inductor kernel without a comment; sources are of the next such line


def compiled_lines(error: BaseException) -> Iterator[CodeLine]:
    """Yield the line of each frame of compiled code in an error's traceback, outermost first.

    In Inductor's code the comment above a line names its sources. In an uncompiled graph the line belongs to one node.
    """
    step = error.__traceback__
    while step is not None:
        frame, number = step.tb_frame, step.tb_lineno
        file, owner = frame.f_code.co_filename, frame.f_locals.get("self")
        if isinstance(owner, torch.fx.GraphModule) and frame.f_code.co_name == "forward":
            yield _line_of_node(owner, linecache.getline(file, number).strip().partition(" = ")[0])
        elif found := SOURCES_MARK.match(linecache.getline(file, number - 1)):
            yield CodeLine(found[1].split(", "))
        elif kernel := KERNEL_PATTERN.match(linecache.getline(file, number)):
            after = (SOURCES_MARK.match(line) for line in linecache.getlines(file)[number:])
            yield CodeLine(next((one[1].split(", ") for one in after if one), []), kernel=kernel[1])
        step = step.tb_next


def _line_of_node(gm: torch.fx.GraphModule, name: str) -> CodeLine:
    """Return the line that computes a node of an uncompiled graph."""
    nodes = [node for node in gm.graph.nodes if node.name == name]
    traces = [node.meta.get("stack_trace") or "" for node in nodes]
    sources = [source.name for node in nodes for source in node.meta.get("from_node", [])[:1]]
    return CodeLine([name, *sources], "".join(traces))


_late_backwards: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
_entered_backwards = contextlib.ExitStack()


def wrap_late_backward(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Compile the backward of the current graph inside `around()`, if torch compiles it lazily."""
    from torch._dynamo.callback import callback_handler
    from torch._guards import CompileContext

    _late_backwards[str(CompileContext.current_compile_id())] = context
    if _start_late_backward not in callback_handler.start_callbacks:  # a reset of Dynamo removes callbacks
        callback_handler.register_start_callback(_start_late_backward)
        callback_handler.register_end_callback(_finish_late_backward)


@torch.compiler.disable  # torch has a lock here, and Dynamo would trace a call from a backward in eager code
def _start_late_backward(event: Any) -> None:
    if event.callback_trigger.name == "LAZY_BACKWARD" and event.compile_id in _late_backwards:
        _entered_backwards.enter_context(_late_backwards.pop(event.compile_id)())


@torch.compiler.disable
def _finish_late_backward(event: Any) -> None:
    _entered_backwards.close()


def count_cache_hits() -> int:
    """Return the number of graphs that this process has loaded from Inductor's and AOTAutograd's caches."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def on_recompile_limit(warn: Callable[[str], object]) -> None:
    """Report torch's warning that Dynamo reached its recompile limit and falls back to eager. There is no hook."""

    def notice_partition(record: logging.LogRecord) -> bool:
        """Report the message of a recompile limit; let every record pass."""
        if "hit config." in str(record.msg):
            warn(record.getMessage().partition("To log all")[0].strip())
        return True

    logging.getLogger("torch._dynamo.convert_frame").addFilter(notice_partition)


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_cpp(source: str, flags: Sequence[str]) -> Any:
    """Return the shared library of C++ source, from Inductor's cache on disk if it contains it.

    Of processes that compile the same source, the first one compiles and the others wait.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, extra_flags=tuple(flags))


def joint_compiler(
    name: str | Callable[..., Any],
    transform: JointTransform,
    key: str | None,
    patches: Mapping[str, Any] | None = None,
    halves: PartitionTransform | None = None,
) -> Callable[..., Any]:
    """Return a compiler that changes AOTAutograd's graph in place before it is partitioned.

    Args:
        name: A compiler of `JOINT_COMPILERS`.
        transform: Changes the joint graph, or the forward of an inference.
        key: Key of `transform` in caches of compiled code. None disables caching, as required if it communicates with
            other ranks: a rank with a cache hit would not respond.
        patches: Changes of Inductor's settings.
        halves: Changes forward and backward after the partition. The compiler keeps the resulting order of nodes.

    Raises:
        NotImplementedError: The compiler has no passes on joint graphs.
    """
    if name == "inductor":
        return _joint_inductor(transform, key, patches, halves)
    if name != "aot_eager":
        raise NotImplementedError(f"compiler={name!r}: passes on AOTAutograd's joint graph are not supported")
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Transform the joint graph, partition it, and transform the forward and the backward."""
        transform(gm)
        found = min_cut_rematerialization_partition(gm, inputs, **options)
        if halves is not None:
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
        return found

    def infer(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        """Transform an inference graph and return it."""
        transform(gm)
        if halves is not None:
            halves.run_inference(gm)
        return boxed_nop(gm, inputs)

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def _joint_inductor(
    transform: JointTransform, key: str | None, patches: Mapping[str, Any] | None, halves: PartitionTransform | None
) -> Callable[..., Any]:
    """Return Inductor with one more pass on joint graphs, after the user's own, and one on partitions.

    2.11 and 2.12 accept one pass, 2.13 and newer also a list: the additional pass calls the user's.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ordering = ("reorder_for_peak_memory", "reorder_for_locality")
    in_order, after = ({}, "") if halves is None else (dict.fromkeys(ordering, False), halves.key)

    class CustomPass(CustomGraphPass):
        """Pass on the joint graph that runs the user's passes first."""

        def __init__(self, earlier: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
            self.earlier = earlier

        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in self.earlier:
                one(graph)
            transform(graph.owning_module)
            if halves is not None and current_partition() == "inference":
                halves.run_inference(graph.owning_module)

        def uuid(self) -> tuple[Any, ...] | None:
            """Return the keys of all passes, or None, which disables caching, if one has no key."""
            keys = (*(one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.earlier), key, after)
            return None if None in keys else keys

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph with Inductor and these passes."""
        user_pass = config.joint_custom_pre_pass
        earlier = user_pass if isinstance(user_pass, list | tuple) else [] if user_pass is None else [user_pass]
        cut = {} if halves is None else {"custom_partitioner_fn": _make_partitioner(halves)}
        with config.patch(joint_custom_pre_pass=CustomPass(earlier), **cut):
            return compile_with_inductor(gm, inputs, {**in_order, **(patches or {})}, **options)

    return run


def _make_partitioner(halves: PartitionTransform) -> Any:
    """Return a partitioner for Inductor: torch's, or the user's own, followed by `halves`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """Partitioner that transforms the forward and the backward after the partition."""

        user_pass = config.custom_partitioner_fn

        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[object], **options: Any) -> Any:
            found = (self.user_pass or min_cut_rematerialization_partition)(gm, inputs, **options)
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
            return found

        def uuid(self) -> tuple[Any, ...] | None:
            """Return the cache key, or None if a part has none."""
            keys = (self.user_pass.uuid() if self.user_pass is not None else "", halves.key)
            return None if None in keys else keys

        def __reduce__(self) -> tuple[Any, ...]:
            return tuple, (self.uuid(),)  # caches use only the key

    return Partitioner()


def partition_joint_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    transform: JointTransform | None,
    for_inductor: bool,
    halves: PartitionTransform | None = None,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None]:
    """Return the forward and the backward of a graph, as AOTAutograd creates them, not compiled.

    Args:
        gm: The graph.
        inputs: Example inputs.
        transform: Changes the joint graph in place before the partition.
        for_inductor: True for Inductor's decompositions and passes on joint graphs, on which saved values depend.
        halves: Changes forward and backward after the partition.

    Returns:
        The two graphs; the backward of an inference is None.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[Any] = []

    def partition(joint: torch.fx.GraphModule, values: Any, **options: Any) -> Any:
        """Transform the joint graph and partition it."""
        if transform is not None:
            transform(joint)
        if for_inductor:
            joint = _apply_inductor_passes(joint, values)
        found[:] = min_cut_rematerialization_partition(joint, values, **options)
        if halves is not None:
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
        return tuple(found)

    def infer(forward: torch.fx.GraphModule, values: Any) -> Any:
        """Transform an inference graph, which has no backward."""
        if transform is not None:
            transform(forward)
        if halves is not None:
            halves.run_inference(forward)
        if for_inductor:
            forward = _apply_inductor_passes(forward, values)
        found[:] = forward, None
        return boxed_nop(forward, values)

    aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=inductor_decompositions() if for_inductor else None,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return found[0], found[1]


def _apply_inductor_passes(gm: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Run Inductor's passes on a joint or inference graph. 2.12 and older change it in place.

    Inputs on the meta device represent those of another device. Constant folding is off for them, as it would treat all
    values as constants.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes as changed

    device = next((x.device for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)), None)
    stands_in = device is not None and device.type == "meta"
    takes = "input_device" in inspect.signature(changed).parameters and not stands_in
    with config.patch(joint_graph_constant_folding=config.joint_graph_constant_folding and not stands_in):
        found = changed(gm, **({"input_device": device} if takes else {}))
    return gm if found is None else found


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions of ATen ops."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def find_backward_nodes(
    outputs: Sequence[Any], some: Collection[int], context: Callable[[], AbstractContextManager[Any]]
) -> list[tuple[Any, frozenset[int]]]:
    """Return AOTAutograd's autograd nodes of outputs, and run their backwards in `around()`.

    The context covers the compiled backward, which torch 2.13 stores where no hook reaches it, and the unpacking of
    saved tensors.

    Args:
        outputs: Outputs of a compiled function.
        some: Indices of selected outputs.
        context: Returns the context of the backwards.

    Returns:
        Each node once, with the indices of its results that are, or compute, the selected outputs.
    """
    found: dict[int, tuple[Any, set[int]]] = {}
    for i, x in enumerate(outputs):
        for node, number in _backward_of_result(x) if isinstance(x, torch.Tensor) else ():
            _, numbers = found.setdefault(id(node), (node, set()))
            numbers |= {number} if i in some else set()
    for node, _ in found.values():
        forward: Any = getattr(type(node), "_forward_cls", None)
        if forward is not None:
            run = forward.backward
            forward.backward = staticmethod(_InContext(run.run if isinstance(run, _InContext) else run, context))
    return [(node, frozenset(numbers)) for node, numbers in found.values()]


def _backward_of_result(x: torch.Tensor) -> Iterator[tuple[Any, int]]:
    """Yield AOTAutograd's autograd node of a result and its output index.

    For several views of one value this is the value, from which the views are created after the program has run.
    """
    node, number, views = x.grad_fn, x.output_nr, 0
    while node is not None and views < 8:  # inputs have longer chains of nodes, from earlier ops
        if type(node).__name__ == "CompiledFunctionBackward":
            yield node, number
            return
        if len(node.next_functions) != 1:
            return
        ((node, number),), views = node.next_functions, views + 1


class _InContext:
    """Function that runs inside a context."""

    def __init__(self, run: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.run, self.around = run, around

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        with self.around():
            return self.run(*args)
