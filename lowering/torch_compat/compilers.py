"""Compile graphs with torch.compile's backends and added passes, and C++ by Inductor's cache.

AOTAutograd traces a graph to a joint graph of forward and backward, a partitioner splits it into the two partitions,
and a compiler (Inductor) compiles each. A graph without gradients is an inference graph: one forward, no partitions.
This module inserts a `JointTransform` before the partitioner and a `PartitionTransform` after it. It also finds the
source nodes of a line of compiled code: the nodes of AOTAutograd's input graph that the line computes.
"""

import contextlib
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .shared_compiles import compile_in_one_process, trace_in_one_process

JointTransform = Callable[[torch.fx.GraphModule], None]  # changes a joint graph, or an inference graph, in place


class PartitionTransform(Protocol):
    """Pass that changes the partitions of a joint graph, a forward and its backward, in place."""

    @property
    def key(self) -> str:
        """Return the part of the keys of caches of compiled code that represents this pass.

        It is equal for passes with equal effect, so that cached code can replace compilation with this pass.
        """

    def run_training(self, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, results: int) -> None:
        """Change a forward and its backward in place, before they are compiled.

        The first `results` outputs of the forward are returned to the caller; the others are saved for the backward.
        """

    def run_inference(self, forward: torch.fx.GraphModule) -> None:
        """Change an inference graph in place, before it is compiled."""


JOINT_COMPILERS = ("inductor", "aot_eager")  # compilers that run passes on joint graphs


def memory_budget(budget: float | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which AOTAutograd's partitioner saves at most this share of the activations.

    The partitioner recomputes the others, cheap ones (in FLOPs) first. By default it has costs of ATen ops only; in the
    context it also counts the package's own operators, whose recomputation would seem free.

    Args:
        budget: Share of the bytes of all activations, from 0 to 1. None keeps torch's setting.
    """
    import torch._functorch.config as functorch_config

    settings = {} if budget is None else {"activation_memory_budget": budget}
    return functorch_config.patch(is_non_builtin_to_include=True, **settings)


def is_inductor_error(error: BaseException) -> bool:
    """Return True for an error of a class that Inductor defines."""
    from torch._inductor import exc

    classes = [value for value in vars(exc).values() if isinstance(value, type) and issubclass(value, Exception)]
    return isinstance(error, tuple(cls for cls in classes if cls.__module__ == exc.__name__))  # not imported ones


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
    """Return the compiler for independent graphs, such as tile bodies, inside a running compilation.

    torch's context of the outer compilation is not active while the returned compiler runs. The graphs have fake inputs
    and no gradients.
    """

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph in a new tracing context, with the fake mode of its inputs."""
        # torch 2.15 would otherwise use the mode of the outer compilation, whose guards would contain their symbols.
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        with tracing(TracingContext(mode)), torch.no_grad():
            return compiler(gm, list(inputs))

    return run


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile with Inductor, in one process of a host for equal graphs, and without padding of strides on GPUs.

    Torch 2.11 may select two layouts for a tensor that is viewed before it is read, such as heads in groups of ranks.
    It then reads rows of odd length with padded strides that were written with other strides. The results are silently
    wrong, seen on an H100 with 1,023 rows per rank. 2.13 is consistent there. Padding has little use here: activations
    are as wide as the model, and most widths are aligned.

    Args:
        gm: The graph.
        inputs: Example inputs.
        patches: Changes of Inductor's settings while it compiles.
        **options: Other arguments of compile_fx.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    mask_tail_stores()
    settings = {"comprehensive_padding": False, **(patches or {})}
    inner = {"inner_compile": compile_in_one_process(compile_fx_inner)}
    with trace_in_one_process():
        return compile_fx(gm, list(inputs), config_patches=settings, **{**inner, **options})


def mask_tail_stores() -> None:
    """Make the reductions that Inductor compiles for CPUs in this process store only elements of their result.

    Inductor vectorizes an outer loop over elements, and the last vector may have fewer of them. If another loop is
    between it and a vectorized loop of the reduction, torch 2.13 still stores the whole vector: it overwrites elements
    of the next row, or the heap after the result (pytorch#196681). Torch 2.11 does so for other nested reductions, too
    (pytorch#181618). Inductor can select the store by the range of the outer loop, and here it always does. A torch
    whose method has other parameters is not changed.

    Returns:
        None.
    """
    from torch._inductor.codegen.cpp import CppKernelProxy

    aggregate = getattr(CppKernelProxy, "aggregate_reduction_buffers", None)
    if aggregate is None or hasattr(aggregate, "__wrapped__"):  # by an earlier call
        return
    if [*inspect.signature(aggregate).parameters] != ["self", "inner_loop_reduction_outer_not", "outer_loop"]:
        return

    @wraps(aggregate)
    def select_by_range(kernel: Any, is_by_range: bool, outer: Any) -> None:
        """Run Inductor's method; `outer` is the vectorized outer loop, None for a kernel without vectors."""
        if outer is not None and not outer.is_reduction:
            loops = kernel.loop_nest.loops
            inner = loops[[loop.var for loop in loops].index(outer.var) + 1 :]
            is_by_range = is_by_range or any(loop.is_reduction for loop in inner)
        aggregate(kernel, is_by_range, outer)

    CppKernelProxy.aggregate_reduction_buffers = select_by_range


def inductor_mode_options() -> dict[str, dict[str, Any]]:
    """Return Inductor's settings for each `mode=` of torch.compile, by name."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def current_graph_kind() -> str:
    """Return the kind of graph that AOTAutograd compiles now, for the progress line and `CustomPass`.

    The progress line is shown by a second thread while the main thread compiles. The result is right in both, since
    torch's list of the graphs that are being compiled is a global of the process.

    Returns:
        "joint", "forward", "backward", "inference", or "" if it compiles nothing.
    """
    from torch._functorch._aot_autograd import logging_utils

    graph_names = getattr(logging_utils, "graph_being_compiled", [])  # such as ["0_forward"]
    return str(graph_names[0]).partition("_")[2] if graph_names else ""


# Comment of Inductor above a line of its code: the source nodes of the line.
SOURCES_MARK = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\]")
# Call of a kernel of Inductor; the group is the names of its ops.
KERNEL_PATTERN = re.compile(r"\s*(?:cpp|triton_\w+?)_fused_(\w+)_\d+(?:\.run)?\(")


class CodeLine(NamedTuple):
    """Line of compiled code that an error passed through, with the nodes that it computes."""

    sources: list[str]  # names of the source nodes
    trace: str = ""  # user's stack trace of the line's node; "" for Inductor's code, which has none
    kernel: str = ""  # ops in the name of an Inductor kernel without a comment; sources are of the next such line


def compiled_lines(error: BaseException) -> Iterator[CodeLine]:
    """Yield the line of each frame of compiled code in an error's traceback, outermost first.

    Used to name the user's line in errors at run time. In Inductor's code the comment above a line names its source
    nodes. In a graph that runs uncompiled (aot_eager) the line belongs to one node.
    """
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        file, owner = frame.f_code.co_filename, frame.f_locals.get("self")
        line, line_above = linecache.getline(file, line_number), linecache.getline(file, line_number - 1)
        comment, kernel = SOURCES_MARK.match(line_above), KERNEL_PATTERN.match(line)
        if isinstance(owner, torch.fx.GraphModule) and frame.f_code.co_name == "forward":
            # In "add = torch.ops.aten.add.Tensor(x, y)" the assigned variable has the name of the node.
            yield _line_of_node(owner, line.strip().partition(" = ")[0])
        elif comment is not None:
            yield CodeLine(comment[1].split(", "))
        elif kernel is not None:  # a call of a kernel without a comment above: take the first comment below it, if any
            later_comments = filter(None, map(SOURCES_MARK.match, linecache.getlines(file)[line_number:]))
            next_comment = next(later_comments, None)
            yield CodeLine(next_comment[1].split(", ") if next_comment else [], kernel=kernel[1])


def _line_of_node(gm: torch.fx.GraphModule, name: str) -> CodeLine:
    """Return the code line that computes the node `name` in the forward of an uncompiled graph.

    Its sources are the node, and the node of AOTAutograd's input graph that it was traced from.
    """
    nodes = [node for node in gm.graph.nodes if node.name == name]
    traces = [node.meta.get("stack_trace") or "" for node in nodes]
    sources = [source.name for node in nodes for source in node.meta.get("from_node", [])[:1]]
    return CodeLine([name, *sources], "".join(traces))


def count_cache_hits() -> int:
    """Return the number of graphs that this process has loaded from torch's caches, for the progress line.

    These are Inductor's and AOTAutograd's caches. The count increases from the start of the process.
    """
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def has_cpp_compiler() -> bool:
    """Return True if Inductor finds a C++ compiler, so that `compile_cpp` can compile the CPU kernels."""
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
    partition_transform: PartitionTransform | None = None,
) -> Callable[..., Any]:
    """Return a torch.compile backend that runs `transform` and `partition_transform` on its graphs.

    Args:
        name: A compiler of `JOINT_COMPILERS`.
        transform: Changes the joint graph, or the inference graph, in place before it is partitioned.
        key: Key of `transform` in caches of compiled code. None disables AOTAutograd's cache, as required if it
            communicates with other ranks: a rank with a cache hit would not respond. Inductor's cache, whose keys
            contain the graph after `transform`, remains.
        patches: Changes of Inductor's settings.
        partition_transform: Changes forward and backward after the partition. The compiler keeps the resulting order of
            nodes.
    """
    if name == "inductor":
        return _joint_inductor(transform, key, patches, partition_transform)
    assert name == "aot_eager", f"compiler={name!r}: passes on AOTAutograd's joint graph are not supported"
    return _uncompiled_backend(transform, partition_transform, for_inductor=False, on_partition=lambda *graphs: None)


def _joint_inductor(
    transform: JointTransform,
    key: str | None,
    patches: Mapping[str, Any] | None,
    partition_transform: PartitionTransform | None,
) -> Callable[..., Any]:
    """Return Inductor as a backend with one more pass on joint graphs, and one on partitions.

    They run after the passes in the user's Inductor settings. 2.11 and 2.12 accept one pass on joint graphs, 2.13 and
    newer also a list: therefore one `CustomPass` replaces the user's passes and calls them.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    settings, partition_key = dict(patches or {}), ""
    if partition_transform is not None:  # keep its order of nodes
        settings = {"reorder_for_peak_memory": False, "reorder_for_locality": False, **settings}
        partition_key = partition_transform.key

    class CustomPass(CustomGraphPass):
        """Pass on the joint or inference graph: the user's passes, then `transform`."""

        def __init__(self, user_passes: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
            self.user_passes = user_passes

        def __call__(self, graph: torch.fx.Graph) -> None:
            """Run all passes in place; on an inference graph also `partition_transform`, as it has no partitioner."""
            for user_pass in self.user_passes:
                user_pass(graph)
            transform(graph.owning_module)
            if partition_transform is not None and current_graph_kind() == "inference":
                partition_transform.run_inference(graph.owning_module)

        def uuid(self) -> tuple[Any, ...] | None:
            """Return the keys of all passes, or None, which disables caching, if one of the user's has no key."""
            user_keys = [x.uuid() if isinstance(x, CustomGraphPass) else None for x in self.user_passes]
            return None if None in user_keys else (*user_keys, key or "", partition_key)

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph with Inductor and these passes."""
        user_passes = config.joint_custom_pre_pass or []
        if not isinstance(user_passes, list | tuple):
            user_passes = [user_passes]
        passes = {"joint_custom_pre_pass": CustomPass(user_passes)}
        if partition_transform is not None:
            passes["custom_partitioner_fn"] = _make_partitioner(partition_transform)
        skipping = {} if key is not None else {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
        with config.patch(passes), functorch_config.patch(skipping):
            return compile_with_inductor(gm, inputs, settings, **options)

    return run


def _make_partitioner(partition_transform: PartitionTransform) -> Any:
    """Return a partitioner for Inductor: the user's or else torch's, then `partition_transform`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """Partitioner that transforms the forward and the backward after the partition."""

        user_partitioner = config.custom_partitioner_fn  # of the user's Inductor settings; None for torch's

        def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[object], **options: Any) -> Any:
            """Return the transformed forward and backward of a joint graph."""
            partition = self.user_partitioner or min_cut_rematerialization_partition
            forward, backward = partition(gm, inputs, **options)
            partition_transform.run_training(forward, backward, options["num_fwd_outputs"])
            return forward, backward

        def uuid(self) -> tuple[Any, ...] | None:
            """Return the cache key, or None, which disables caching, if the user's partitioner has none."""
            user_key = self.user_partitioner.uuid() if self.user_partitioner is not None else ""
            keys = (user_key, partition_transform.key)
            return None if None in keys else keys

        def __reduce__(self) -> tuple[Any, ...]:
            return tuple, (self.uuid(),)  # caches pickle the partitioner, to use the bytes in their keys

    return Partitioner()


def partition_joint_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    transform: JointTransform | None,
    for_inductor: bool,
    partition_transform: PartitionTransform | None = None,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None]:
    """Return the forward and backward that AOTAutograd would compile, to estimate time and memory.

    Args:
        gm: The graph.
        inputs: Example inputs.
        transform: Changes the joint graph in place before the partition.
        for_inductor: True for Inductor's decompositions and passes on joint graphs, on which saved values depend.
        partition_transform: Changes forward and backward after the partition.

    Returns:
        The two graphs; the backward of an inference is None.
    """
    graphs: list[Any] = []  # the forward, and the backward or None
    backend = _uncompiled_backend(transform, partition_transform, for_inductor, lambda *pair: graphs.extend(pair))
    backend(gm, inputs)
    return graphs[0], graphs[1]


def _uncompiled_backend(
    transform: JointTransform | None,
    partition_transform: PartitionTransform | None,
    for_inductor: bool,
    on_partition: Callable[[torch.fx.GraphModule, torch.fx.GraphModule | None], object],
) -> Callable[..., Any]:
    """Return AOTAutograd as a torch.compile backend that runs transformed graphs uncompiled.

    Args:
        transform: Changes the joint graph, or an inference graph, in place.
        partition_transform: Changes forward and backward after the partition.
        for_inductor: True for Inductor's decompositions and passes on joint graphs.
        on_partition: Called with the final forward and backward, or with an inference graph and None.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: torch.fx.GraphModule, values: Any, **options: Any) -> Any:
        """Transform the joint graph, partition it, and transform the forward and the backward.

        AOTAutograd calls it as `partition_fn`; `values` are the example inputs of the joint graph.
        """
        if transform is not None:
            transform(joint)
        if for_inductor:
            joint = _apply_inductor_passes(joint, values)
        forward, backward = min_cut_rematerialization_partition(joint, values, **options)
        if partition_transform is not None:
            partition_transform.run_training(forward, backward, options["num_fwd_outputs"])
        on_partition(forward, backward)
        return forward, backward

    def infer(forward: torch.fx.GraphModule, values: Any) -> Any:
        """Transform an inference graph, which has no backward, and return a function that runs it uncompiled."""
        if transform is not None:
            transform(forward)
        if partition_transform is not None:
            partition_transform.run_inference(forward)
        if for_inductor:
            forward = _apply_inductor_passes(forward, values)
        on_partition(forward, None)
        return boxed_nop(forward, values)

    return aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=inductor_decompositions() if for_inductor else None,
        keep_inference_input_mutations=True,
    )


def _apply_inductor_passes(gm: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Run Inductor's passes on a joint or inference graph and return the result.

    An estimate for Inductor needs them, as they change which values the partitioner saves. Inputs on the meta device
    represent those of another device. Constant folding is off for them, as it would treat all values as constants.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes as joint_graph_passes

    device = next((x.device for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)), None)
    is_meta = device is not None and device.type == "meta"
    has_device_argument = "input_device" in inspect.signature(joint_graph_passes).parameters  # in newer versions
    device_kwargs = {"input_device": device} if has_device_argument and not is_meta else {}
    with config.patch(joint_graph_constant_folding=config.joint_graph_constant_folding and not is_meta):
        changed = joint_graph_passes(gm, **device_kwargs)  # None in 2.12 and older, which change gm in place
    return gm if changed is None else changed


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions by ATen op, for graphs that are decomposed as Inductor would."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
