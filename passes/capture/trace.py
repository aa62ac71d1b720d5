"""Trace a Dynamo graph on fake inputs to pre-dispatch ATen with composite ops.

The graph runs node by node under make_fx(pre_dispatch=True), which records the ops that the nodes call before autograd
runs. Region ops (nodes that run sub-graphs, their bodies) with their own backward (tensor hooks, autograd.Function)
would lose it there, and values under vmap would become constants: these are handled here. Every other region op (cond,
scan, flex_attention, ...) records itself. A functorch region is the nodes of a torch.func transform (vmap, grad, jvp)
from the start of its outermost level to the end. The proxy of a tensor is its node in the graph that is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.traceback import get_current_meta, preserve_node_meta

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import CaptureError, SpError, node_line
from sp_compile.lowering.scaled_linear import trace_scaled_linear
from sp_compile.lowering.torch_compat import FakeTensorMode, active_tracer, make_fx, pytree
from sp_compile.passes.graph.edit import INHERITED_META, REGION_META
from sp_compile.passes.graph.modes import disable_autocast

from .regions import inline_regions
from .tensor_subclasses import call_with_subclass, find_subclass, reads_cast_weight

# Functions of packages that compute the values of a torch.autograd.Function which Dynamo does not trace.
PACKAGE_FUNCTIONS = {("torchao", "matmul_with_hp_or_float8_args"): trace_scaled_linear}  # (package, class)


def trace(gm: GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode) -> GraphModule:
    """Record the ops that `gm` calls on fake inputs, as a graph that may still mutate values.

    Args:
        gm: Dynamo graph.
        fakes: Fake tensors of `fake_mode`, SymInts or Python scalars, one per placeholder of `gm`.
        fake_mode: Mode of the fake tensors.

    Returns:
        A graph with the placeholders of `gm`, in order and with the same names.

    Raises:
        SpError: If the program cannot be recorded, with the node and the user's source line.
    """
    flat = inline_regions(gm)  # without sub-graphs for checkpoints and grad modes
    with torch_compat.preserve_thread_state(), fake_mode, torch_compat.enable_python_dispatcher(), preserve_node_meta():
        # tracing_mode="real" uses the inputs as they are, which are fake already.
        traced = make_fx(_TracingInterpreter(flat, fake_mode).run, pre_dispatch=True, tracing_mode="real")(*fakes)
    for new, old in zip(traced.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True):
        torch_compat.rename_node(new, old.name)
        new.target = new.name
    return traced


class _TracingInterpreter(Interpreter):
    """Interpreter of a Dynamo graph under an active pre-dispatch trace."""

    def __init__(self, gm: GraphModule, fake_mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # `run_node` adds the user's line to errors instead
        self.fake_mode = fake_mode
        self.functorch = _functorch_regions(gm.graph)  # nodes of each functorch region, by its first node
        self.done: set[Node] = set()  # nodes of functorch regions that have run
        self.autocasts: dict[Node, torch.autocast] = {}  # open autocast regions, by the node that enters them
        self.state_nodes: dict[Any, Node] = {}  # result of a call that changes Python state -> its node in the trace

    def run_node(self, n: Node) -> Any:
        """Run a node, or the functorch region that starts with it; errors become CaptureError with its line.

        A functorch region is the nodes of a torch.func transform (vmap, grad, jvp). They run together when its first
        node is reached: `inline_functorch` sets their values and adds them to `done`.
        """
        if n in self.done:
            return self.env.get(n)
        try:
            if n in self.functorch:
                return self.inline_functorch(self.functorch[n], n)
            # Under no_grad, the trace would let later nodes read detached operands, see `run_without_grad`.
            return super().run_node(n) if torch.is_grad_enabled() else self.run_without_grad(n)
        except SpError:
            raise
        except Exception as error:
            raise CaptureError(
                "SP211",
                f"{n.name}: {getattr(n.target, '__name__', n.target)} could not be captured at {node_line(n)}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}.",
            ) from error

    def run_without_grad(self, n: Node) -> Any:
        """Run a node whose mode is no_grad, such that it does not detach its operands.

        If an op returns its operand unchanged (`h.to(h.dtype)`), the trace associates the operand with this node, so
        that later nodes would read the node's result, which has no gradient. Therefore restore the proxies (the nodes
        in the trace) of unmodified operands.
        """
        operands = [x for x in pytree.tree_leaves(self.fetch_args_kwargs_from_env(n)) if isinstance(x, torch.Tensor)]
        versions = torch_compat.tensor_versions(operands)  # an array; a write changes the version
        proxies = [torch_compat.proxy_of(x) for x in operands]
        result = super().run_node(n)
        unmodified = torch_compat.tensor_versions(operands) == versions  # for each operand
        for x, proxy, is_unmodified in zip(operands, proxies, unmodified):
            if proxy is not None and is_unmodified:
                torch_compat.set_proxy(x, proxy)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, for the trace to record its ops.

        State changes, autograd functions and hooks are not ATen ops, so they are recorded as nodes here.
        """
        if target in (torch_compat.enter_autocast, torch_compat.exit_autocast):
            return self.change_autocast(target, args, kwargs)
        if target in torch_compat.PYTHON_STATE_CALLS:
            return self.run_state_call(target, args, kwargs)
        if target is torch_compat.get_data:  # x.data
            return args[0].detach()
        function = torch_compat.untraced_function(target)
        subclass = find_subclass(args, kwargs)
        if subclass is not None and (function is None or not reads_cast_weight(subclass, args)):
            return call_with_subclass(target, args, kwargs, subclass)
        if target is torch_compat.autograd_function_apply:
            return self.trace_autograd_function(target, args, kwargs)
        if target is torch_compat.register_hook_op:
            return self.register_hook(target, args, kwargs)
        if function is not None:
            return self.call_untraced_function(function, target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method, for the trace to record its ops."""
        subclass = find_subclass(args, kwargs)
        if subclass is not None:
            return call_with_subclass(target, args, kwargs, subclass)
        return super().call_method(target, args, kwargs)

    def call_untraced_function(
        self, function: type[torch.autograd.Function], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an autograd Function with the decorator `allow_in_graph`, whose backward Dynamo has not traced.

        Functions of `PACKAGE_FUNCTIONS` are replaced. Others run only without gradients: the trace would differentiate
        the ops of their forward instead of calling their backward.

        Raises:
            CaptureError: The call is differentiated, and no function replaces it.
        """
        package = function.__module__.partition(".")[0]
        replacement = PACKAGE_FUNCTIONS.get((package, function.__name__))
        if replacement is not None:
            return replacement(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise CaptureError(
                "SP211",
                f"{function.__name__} could not be captured: torch.compiler.allow_in_graph hides its backward.",
                "Remove the decorator allow_in_graph from the autograd Function, so that its backward is traced.",
            )
        return super().call_function(target, args, kwargs)

    def change_autocast(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call that enters or exits autocast, and change the mode of the trace, which torch only records.

        Values then have the dtypes and storages of the run. The trace records the ops without their casts. `trace`
        restores the mode after an error.
        """
        node = super().call_function(target, args, kwargs)
        with torch_compat.suspend_trace(self.fake_mode):  # entering the mode is no node of the trace
            if target is torch_compat.enter_autocast:
                self.autocasts[node] = torch.autocast(*args, **kwargs)
                self.autocasts[node].__enter__()
                torch.set_autocast_cache_enabled(False)
            else:
                self.autocasts.pop(args[0]).__exit__(None, None, None)
        return node

    def run_state_call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that changes Python state, such as the attention backend, and record it as a node.

        It affects later nodes of this trace, and must affect them when the graph runs, too.
        """
        result = target(*args, **kwargs)

        def to_node(x: Any) -> Any:
            """Return the node that has returned a state object; other values, also unhashable ones, unchanged."""
            return self.state_nodes.get(x, x) if getattr(x, "__hash__", None) else x

        node_args = pytree.tree_map(to_node, tuple(args))
        node = active_tracer().create_node("call_function", target, node_args, dict(kwargs))
        node.meta["val"] = None  # no tensor; later calls that read the result find its node by `state_nodes`
        if result is not None:
            self.state_nodes[result] = node
        return result

    def trace_autograd_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace forward and backward of an autograd function, record the call as one node, and return its value.

        The backward has the gradients of all results as inputs, followed by the values that the forward saves.
        """
        forward, backward, *operands = args
        # Tags of a checkpoint around the call, which also apply to the ops of the forward.
        tags = {k: v for k, v in get_current_meta().items() if k in REGION_META}
        with torch_compat.suspend_trace(self.fake_mode):  # the ops inside are no nodes of the outer trace
            out = target(*args, **kwargs)
            leaves = _make_leaves(operands)
            lowered_forward = trace(forward, leaves, self.fake_mode)
            with torch.no_grad():  # run the forward for the shapes of the backward's inputs
                result, saved = Interpreter(forward).run(*leaves)
                results = result if isinstance(result, tuple | list) else (result,)
                grads = [torch.empty_like(t) if isinstance(t, torch.Tensor) else None for t in results]
                devices = [t.device.type for t in grads if t is not None]
                # The backward runs outside of the autocast region of the call.
                with disable_autocast(devices[0]) if devices else nullcontext():
                    lowered_backward = trace(backward, [*grads, *_make_leaves(saved)], self.fake_mode)
        for node in lowered_forward.graph.nodes:
            if node.op == "call_function":
                node.meta.update(tags)
        return _record_node(target, args, kwargs, {forward: lowered_forward, backward: lowered_backward}, out)

    def register_hook(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the body of a tensor hook, record the call as one node, and return the hooked tensor.

        The body has the gradient as an input, followed by the closed-over values of the hook.
        """
        tensor, body, *closed_over = args
        with torch_compat.suspend_trace(self.fake_mode):
            with torch.no_grad(), disable_autocast(tensor.device.type):
                lowered = trace(body, [torch.empty_like(tensor), *_make_leaves(closed_over)], self.fake_mode)
            out = tensor.view_as(tensor)  # a new tensor, so that the hooked value has a node of its own
        result = _record_node(target, args, kwargs, {body: lowered}, out)
        _hook_every_use(tensor, result)
        return result

    def inline_functorch(self, nodes: list[Node], first: Node) -> Any:
        """Record a functorch region as plain ATen ops, without transforms, and replay it in the outer trace.

        The replay is differentiable; the recording runs on detached inputs, with grad mode enabled because
        torch.func.grad needs it. A no_grad inside of the region is recorded, too, because it applies to outer
        differentiation.

        Args:
            nodes: Nodes of the region, in order.
            first: The first of them.

        Returns:
            The value of the first node, None if it is read only inside. Sets the values of all nodes that are read
            outside of the region, in `env`.
        """
        inside = set(nodes)
        inputs = dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside)
        outputs = [n for n in nodes if not inside.issuperset(n.users)]  # those that later nodes read
        values = {x: self.env[x] for x in inputs}
        # Inputs that become arguments of the recorded graph; it contains the others as constants.
        variables = [x for x, v in values.items() if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat)]

        def region(*args: Any) -> tuple[Any, ...]:
            """Run the nodes of the region on other values of its variables."""
            interpreter = Interpreter(self.module, garbage_collect_values=False)
            interpreter.env = {**values, **dict(zip(variables, args, strict=True))}
            for n in nodes:
                interpreter.env[n] = interpreter.run_node(n)
                if n.target is torch_compat.set_grad_enabled:  # no op, so that make_fx itself does not record it
                    active_tracer().create_node("call_function", n.target, n.args, n.kwargs)
            return tuple(interpreter.env[n] for n in outputs)

        # Record the region.
        arguments = [values[x] for x in variables]
        with torch_compat.suspend_trace(self.fake_mode), torch.enable_grad():
            detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
            plain = make_fx(region, tracing_mode="real")(*detached)
        plain.graph.eliminate_dead_code()
        needs_gradient = any(isinstance(x, torch.Tensor) and x.requires_grad for x in values.values())
        for n in plain.graph.nodes:
            if needs_gradient and n.op == "call_function" and not torch_compat.has_derivative(n.target):
                raise CaptureError(
                    "SP214",
                    f"{n.target} at {node_line(first)} has no derivative inside a transform of torch.func (vmap, grad, "
                    "jvp).",
                )
            n.meta = {key: first.meta[key] for key in INHERITED_META if key in first.meta}
        # Replay it. The recording contains the casts of autocast, also where the region has disabled it.
        devices = dict.fromkeys(n.args[0] for n in nodes if n.target is torch_compat.enter_autocast)
        no_autocast = (None, False, None)  # dtype, enabled, cache_enabled
        entered = [self.change_autocast(torch_compat.enter_autocast, (d, *no_autocast), {}) for d in devices]
        results = Interpreter(plain).run(*arguments)
        for node in reversed(entered):
            self.change_autocast(torch_compat.exit_autocast, (node,), {})
        self.env.update(zip(outputs, results, strict=True))
        self.done |= inside
        return self.env.get(first)


def _record_node(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bodies: dict[GraphModule, GraphModule], out: Any
) -> Any:
    """Record one node target(*args) in the running trace, and return `out`, which later nodes then read from it.

    Args:
        target: The region op.
        args: Its arguments, among them the original bodies.
        kwargs: Its keyword arguments.
        bodies: Traced body that the node reads in place of each original body.
        out: Value of the node.
    """
    tracer = active_tracer()

    def to_proxy(x: Any) -> Any:
        """Return the proxy of a value or of a traced body; other values unchanged."""
        if isinstance(x, GraphModule):
            name = tracer.get_fresh_qualname("region_body")
            tracer.root.register_module(name, bodies[x])
            return tracer.create_proxy("get_attr", name, (), {})
        is_traced_value = isinstance(x, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
        return tracer.unwrap_proxy(x) if is_traced_value else x

    new_args, new_kwargs = pytree.tree_map(to_proxy, (tuple(args), dict(kwargs)))
    proxy = tracer.create_proxy("call_function", target, new_args, new_kwargs)
    return torch_compat.track_tensor_tree(out, proxy, constant=None, tracer=tracer)


def _hook_every_use(tensor: Any, hooked: Any) -> None:
    """Make all users of a tensor in the trace read its hooked value, the result of the hook's node.

    A hook receives the full gradient of its tensor, including that of uses before its registration. Therefore the
    hook's node is moved directly after the tensor; this also moves it out of a no-grad region, in which it would not
    run. A hook that is the first use of its tensor, with gradients enabled, is already in the right place.

    Args:
        tensor: The tensor with the hook.
        hooked: Result of the hook's node.

    Raises:
        CaptureError: If the hook reads values that are computed after the tensor, which earlier uses cannot wait for.
    """
    proxies = [active_tracer().unwrap_proxy(x) for x in (tensor, hooked)]
    if not all(isinstance(proxy, torch.fx.Proxy) for proxy in proxies):  # a constant of the trace
        return
    source, hook = (proxy.node for proxy in proxies)
    if len(source.users) == 1 and torch.is_grad_enabled():  # the hook is the first use
        return
    inputs = hook.all_input_nodes
    late = [node for node in inputs if node.op not in ("get_attr", "placeholder") and source < node]
    if late:
        raise CaptureError(
            "SP218",
            f"The hook registered at {node_line(hook)} reads {late[0].name}, which is computed after the first use of "
            f"the tensor whose gradient the hook changes.",
        )
    # Move the hook and its body directly after the tensor, or after all placeholders if the tensor is one.
    place = source if source.op != "placeholder" else [*source.graph.find_nodes(op="placeholder")][-1]
    place.append(hook)
    for body in (node for node in inputs if node.op == "get_attr"):
        hook.prepend(body)
    source.replace_all_uses_with(hook, delete_user_cb=lambda user: user is not hook)


def _make_leaves(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with each tensor, also in nested containers, detached: a leaf of the autograd graph.

    The trace of a body on them does not contain the ops that computed them. They require gradients as before.
    """
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), list(args))


def _functorch_regions(graph: Graph) -> dict[Node, list[Node]]:
    """Return the nodes of each functorch region of a Dynamo graph, by its first node.

    In Dynamo's graphs a call that increments the nesting starts such a region, and one that decrements it ends it. The
    call lazy_load_decompositions, which precedes a vmap and computes nothing, is a region of its own.
    """
    regions: dict[Node, list[Node]] = {}
    region: list[Node] = []
    depth = 0
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
        if name.endswith("increment_nesting") or name == "_enter_dual_level":
            if depth == 0:
                region = regions[n] = []
            depth += 1
        if depth:
            region.append(n)
        if name.endswith("decrement_nesting") or name == "_exit_dual_level":
            depth -= 1
        if name == "lazy_load_decompositions" and depth == 0:
            regions[n] = [n]
    return regions
