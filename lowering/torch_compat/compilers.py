"""What compiles a graph: torch.compile's backends, a place for passes in them, and C++ through Inductor's cache."""

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
    """Changes a forward and its backward in place; so many of the forward's results are its caller's.

    alone: the same for a forward without one. key: the same for what does the same.
    """

    @property
    def key(self) -> str: ...

    def run_training(self, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, results: int) -> None: ...

    def run_inference(self, forward: torch.fx.GraphModule) -> None: ...


JOINT_COMPILERS = ("inductor", "aot_eager")


def memory_budget(budget: float | None) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's partitioner keeps at most this share of the activations; None leaves that to its own setting.

    What it computes again it chooses by FLOPs, of our operators too: by default it takes what is not ATen for free.
    """
    import torch._functorch.config as functorch_config

    ours = {} if budget is None else {"activation_memory_budget": budget}
    return functorch_config.patch(is_non_builtin_to_include=True, **ours)


def get_compiler(name: str | Callable[..., Any], patches: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A torch.compile backend as a function of (graph, example inputs). patches: of Inductor's settings."""
    if name == "inductor":
        return partial(compile_with_inductor, patches=patches)
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def nested_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler for a graph of its own inside a compilation, which is to learn nothing of it.

    Of fake tensors; without gradients.
    """

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Theirs: torch 2.15 detects that of the compilation around it, whose guards would then have their symbols.
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        with tracing(TracingContext(mode)), torch.no_grad():
            return compiler(gm, list(inputs))

    return run


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Inductor, without its padding of strides on GPUs. patches: of its settings, while it compiles.

    Torch 2.11 may lay out a tensor that is viewed before it is read (heads in groups of ranks, say) in two ways, and
    read rows of odd length by padded strides that were written by others: wrong numbers and no word of it, seen on an
    H100 with 1,023 rows a rank. 2.13 agrees with itself there. What is lost is little: rows are as wide as the model.
    """
    from torch._inductor.compile_fx import compile_fx

    run: Callable[..., Any] = compile_fx(
        gm, list(inputs), config_patches={"comprehensive_padding": False, **(patches or {})}, **options
    )
    return run


def inductor_mode_options() -> dict[str, dict[str, Any]]:
    """Inductor's settings for each `mode=` of torch.compile, by name."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def current_partition() -> str:
    """What AOTAutograd is compiling just now, in any thread: "joint", "forward", "backward", "inference", or ""."""
    from torch._functorch._aot_autograd import logging_utils

    found = getattr(logging_utils, "graph_being_compiled", [])
    return str(found[0]).partition("_")[2] if found else ""


SOURCES_MARK = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\]")


KERNEL_PATTERN = re.compile(r"\s*(?:cpp|triton_\w+?)_fused_(\w+)_\d+(?:\.run)?\(")


class CodeLine(NamedTuple):
    """A line of compiled code. sources: its source nodes, by names in the graph that AOTAutograd was given. trace: the
    stack trace of its own node, "" if there is none. kernel: the ops of a kernel of Inductor's, as its name has them,
    if no comment names its sources; `sources` are then those of the line after it that has such a comment.
    """

    sources: list[str]
    trace: str = ""
    kernel: str = ""


def compiled_lines(error: BaseException) -> Iterator[CodeLine]:
    """The line of each frame of compiled code that the error has come through, outermost first.

    Of code of Inductor's the comment above a line has its sources, of a graph that runs as it is the line's node.
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
    """A line that computes a node."""
    nodes = [node for node in gm.graph.nodes if node.name == name]
    traces = [node.meta.get("stack_trace") or "" for node in nodes]
    sources = [source.name for node in nodes for source in node.meta.get("from_node", [])[:1]]
    return CodeLine([name, *sources], "".join(traces))


_late_backwards: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
_entered_backwards = contextlib.ExitStack()


def wrap_late_backward(around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have the backward of the graph that is compiled now compiled inside `around()`, if torch leaves it for later."""
    from torch._dynamo.callback import callback_handler
    from torch._guards import CompileContext

    _late_backwards[str(CompileContext.current_compile_id())] = around
    if _start_late_backward not in callback_handler.start_callbacks:  # a reset of Dynamo forgets them
        callback_handler.register_start_callback(_start_late_backward)
        callback_handler.register_end_callback(_finish_late_backward)


@torch.compiler.disable  # torch holds a lock here, and eager code that goes backward is looked at by Dynamo
def _start_late_backward(told: Any) -> None:
    if told.callback_trigger.name == "LAZY_BACKWARD" and told.compile_id in _late_backwards:
        _entered_backwards.enter_context(_late_backwards.pop(told.compile_id)())


@torch.compiler.disable
def _finish_late_backward(told: Any) -> None:
    _entered_backwards.close()


def count_cache_hits() -> int:
    """How many graphs this process has found in Inductor's and AOTAutograd's caches so far."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def on_recompile_limit(tell: Callable[[str], object]) -> None:
    """Call `tell` with torch's words when Dynamo gives up compiling a function, which then runs eagerly.

    Dynamo has no hook for that, but it warns.
    """

    def notice_partition(record: logging.LogRecord) -> bool:
        if "hit config." in str(record.msg):
            tell(record.getMessage().partition("To log all")[0].strip())
        return True

    logging.getLogger("torch._dynamo.convert_frame").addFilter(notice_partition)


def has_cpp_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_cpp(source: str, flags: Sequence[str]) -> Any:
    """Return the shared library of C++ source, from Inductor's cache on disk if it is there.

    Of processes that need the same one, the first compiles and the others wait.
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
    """As `get_compiler`, with the graph that AOTAutograd makes changed in place by `transform` before it is
    partitioned.

    Forward and backward in one graph; of an inference, the forward. halves: what is done to the two when they are cut
    apart; they are run in the order that it leaves. key: what both will do, for caches of compiled code; None if they
    ask other ranks, since one that found its code in a cache would not answer them. Of backends, only JOINT_COMPILERS
    have a place for it.
    """
    if name == "inductor":
        return _joint_inductor(transform, key, patches, halves)
    if name != "aot_eager":
        raise NotImplementedError(f"compiler={name!r}: no place for passes on AOTAutograd's joint graph")
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        transform(gm)
        found = min_cut_rematerialization_partition(gm, inputs, **options)
        if halves is not None:
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
        return found

    def infer(gm: torch.fx.GraphModule, inputs: Any) -> Any:
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
    """Inductor with one more pass on the joint graph, after those of the user's own, and one on its halves.

    2.11 and 2.12 take one pass there, 2.13 and newer a list, too: ours calls theirs.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ordering = ("reorder_for_peak_memory", "reorder_for_locality")
    in_order, after = ({}, "") if halves is None else (dict.fromkeys(ordering, False), halves.key)

    class CustomPass(CustomGraphPass):
        def __init__(self, earlier: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
            self.earlier = earlier

        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in self.earlier:
                one(graph)
            transform(graph.owning_module)
            if halves is not None and current_partition() == "inference":
                halves.run_inference(graph.owning_module)

        def uuid(self) -> tuple[Any, ...] | None:
            """None if one of them has none, so that no cache keeps what they did."""
            keys = (*(one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.earlier), key, after)
            return None if None in keys else keys

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        theirs = config.joint_custom_pre_pass
        earlier = theirs if isinstance(theirs, list | tuple) else [] if theirs is None else [theirs]
        cut = {} if halves is None else {"custom_partitioner_fn": _make_partitioner(halves)}
        with config.patch(joint_custom_pre_pass=CustomPass(earlier), **cut):
            return compile_with_inductor(gm, inputs, {**in_order, **(patches or {})}, **options)

    return run


def _make_partitioner(halves: PartitionTransform) -> Any:
    """For Inductor: torch's, or the user's own, and then `halves`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        theirs = config.custom_partitioner_fn

        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[object], **options: Any) -> Any:
            found = (self.theirs or min_cut_rematerialization_partition)(gm, inputs, **options)
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
            return found

        def uuid(self) -> tuple[Any, ...] | None:
            keys = (self.theirs.uuid() if self.theirs is not None else "", halves.key)
            return None if None in keys else keys

        def __reduce__(self) -> tuple[Any, ...]:
            return tuple, (self.uuid(),)  # caches ask for it, and for no more

    return Partitioner()


def partition_joint_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    transform: JointTransform | None,
    for_inductor: bool,
    halves: PartitionTransform | None = None,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None]:
    """The forward and the backward that AOTAutograd makes of a graph, not compiled; an inference has no backward.

    transform: changes the joint graph in place before it is cut. halves: the two, then.
    for_inductor: in the ops that Inductor wants, and changed as it changes a graph before it is cut: what is kept for
    the backward depends on that.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[Any] = []

    def partition(joint: torch.fx.GraphModule, values: Any, **options: Any) -> Any:
        if transform is not None:
            transform(joint)
        if for_inductor:
            joint = _apply_inductor_passes(joint, values)
        found[:] = min_cut_rematerialization_partition(joint, values, **options)
        if halves is not None:
            halves.run_training(found[0], found[1], options["num_fwd_outputs"])
        return tuple(found)

    def infer(forward: torch.fx.GraphModule, values: Any) -> Any:
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
    """A joint graph, or an inference, behind Inductor's passes over it; 2.12 and older give nothing back.

    Of values on the meta device, which stand for those on another one, it would take all for constants.
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
    """What Inductor wants of the ATen ops that it is given."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def find_backward_nodes(
    outputs: Sequence[Any], some: Collection[int], around: Callable[[], AbstractContextManager[Any]]
) -> list[tuple[Any, frozenset[int]]]:
    """The autograd nodes of AOTAutograd that made these results, once each; what they run, they run inside `around()`.
    With each: which of its results are, or make, the outputs of the numbers `some`.

    That is more than the compiled backward, which torch 2.13 keeps where nobody reaches it: also the look at what
    autograd has saved.
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
            forward.backward = staticmethod(_InContext(run.run if isinstance(run, _InContext) else run, around))
    return [(node, frozenset(numbers)) for node, numbers in found.values()]


def _backward_of_result(x: torch.Tensor) -> Iterator[tuple[Any, int]]:
    """The autograd node of AOTAutograd of which this is a result, and the number of that.

    Of several views of one value that is the value, from which the views are made when the program has run.
    """
    node, number, views = x.grad_fn, x.output_nr, 0
    while node is not None and views < 8:  # of an input there are more nodes, of what was done before
        if type(node).__name__ == "CompiledFunctionBackward":
            yield node, number
            return
        if len(node.next_functions) != 1:
            return
        ((node, number),), views = node.next_functions, views + 1


class _InContext:
    """A function, run inside a context."""

    def __init__(self, run: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.run, self.around = run, around

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        with self.around():
            return self.run(*args)
