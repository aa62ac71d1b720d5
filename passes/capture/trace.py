"""Trace a Dynamo graph on fake inputs to pre-dispatch ATen with composite ops.

The graph runs node by node under make_fx(pre_dispatch=True). Region ops with their own backward (tensor hooks,
autograd.Function) would lose it there, and values under vmap would become constants: these are handled here. Every
other region op (cond, scan, flex_attention, ...) records itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.traceback import get_current_meta, preserve_node_meta

from sp_compile.lowering.base.errors import CaptureError, SpError, node_line
from sp_compile.lowering.torch_compat import (
    PYTHON_STATE_CALLS,
    FakeTensorMode,
    active_tracer,
    autograd_function_apply,
    enable_python_dispatcher,
    get_data,
    has_derivative,
    make_fx,
    preserve_thread_state,
    proxy_of,
    pytree,
    register_hook_op,
    rename_node,
    set_grad_enabled,
    set_proxy,
    suspend_trace,
    tensor_versions,
    track_tensor_tree,
)
from sp_compile.passes.graph.edit import INHERITED_META

from .regions import inline_regions

_SYMBOL_NAME = (torch.SymInt, torch.SymFloat, torch.SymBool)


def trace(gm: GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode) -> GraphModule:
    """Record `gm` on fake inputs; the result is not functional.

    Args:
        gm: Dynamo graph.
        fakes: Fake tensors of `fake_mode`, SymInts or Python scalars, one per placeholder of `gm`.
        fake_mode: Mode of the fake tensors.

    Returns:
        A graph with the placeholders of `gm`, in order and with the same names.

    Raises:
        SpError: If the program cannot be recorded, with the node and the user's source line.
    """
    flat = inline_regions(gm)
    with preserve_thread_state(), fake_mode, enable_python_dispatcher(), preserve_node_meta():
        traced = make_fx(_TracingInterpreter(flat, fake_mode).run, pre_dispatch=True, tracing_mode="real")(*fakes)
    for new, old in zip(traced.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True):
        rename_node(new, old.name)
        new.target = new.name
    return traced


class _TracingInterpreter(Interpreter):
    """Interpreter of a Dynamo graph under an active pre-dispatch trace."""

    def __init__(self, gm: GraphModule, fake_mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.fake_mode = fake_mode
        self.functorch = _functorch_regions(gm.graph)
        self.done: set[Node] = set()
        self.state_nodes: dict[Any, Node] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node; raise CaptureError with its source line if it fails."""
        if n in self.done:
            return self.env.get(n)
        try:
            if n in self.functorch:
                return self.inline_functorch(self.functorch[n], n)
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
        """Keep the gradient of operands that an op returns unchanged (`h.to(h.dtype)`), by restoring their proxies."""
        operands = [x for x in pytree.tree_leaves(self.fetch_args_kwargs_from_env(n)) if isinstance(x, torch.Tensor)]
        before, names = tensor_versions(operands), [proxy_of(x) for x in operands]
        result = super().run_node(n)
        for x, name, unwritten in zip(operands, names, tensor_versions(operands) == before):
            if name is not None and unwritten:
                set_proxy(x, name)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; record state changes, autograd functions and hooks as nodes."""
        if target in PYTHON_STATE_CALLS:
            return self.python_state(target, args, kwargs)
        if target is get_data:
            return args[0].detach()
        if target is autograd_function_apply:
            return self.autograd_function(target, args, kwargs)
        if target is register_hook_op:
            return self.register_hook(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def python_state(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call for its effect on later nodes, and record it."""
        result = target(*args, **kwargs)

        def recorded(x: Any) -> Any:
            """Return the node of a state object; other values unchanged."""
            return self.state_nodes.get(x, x) if getattr(x, "__hash__", None) else x

        leaves = pytree.tree_map(recorded, tuple(args))
        node = active_tracer().create_node("call_function", target, leaves, dict(kwargs))
        node.meta["val"] = None
        if result is not None:
            self.state_nodes[result] = node
        return result

    def autograd_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the forward and the backward of an autograd function, and record it as one node."""
        forward, backward, *operands = args
        tags = {k: v for k, v in get_current_meta().items() if k in ("recompute", "ac_graph_id", "custom")}
        with suspend_trace(self.fake_mode):
            out = target(*args, **kwargs)
            leaves = _make_leaves(operands)
            lowered_forward = trace(forward, leaves, self.fake_mode)
            with torch.no_grad():
                result, saved = Interpreter(forward).run(*leaves)
                results = result if isinstance(result, tuple | list) else (result,)
                grads = [torch.empty_like(t) if isinstance(t, torch.Tensor) else None for t in results]
                lowered_backward = trace(backward, [*grads, *_make_leaves(saved)], self.fake_mode)
        for node in lowered_forward.graph.nodes:
            if node.op == "call_function":
                node.meta.update(tags)
        return _record_node(target, args, kwargs, {forward: lowered_forward, backward: lowered_backward}, out)

    def register_hook(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the body of a tensor hook, and record it as one node."""
        tensor, body, *free = args
        with suspend_trace(self.fake_mode):
            with torch.no_grad():
                lowered = trace(body, [torch.empty_like(tensor), *_make_leaves(free)], self.fake_mode)
            out = tensor.view_as(tensor)
        result = _record_node(target, args, kwargs, {body: lowered}, out)
        _hook_every_use(tensor, result)
        return result

    def inline_functorch(self, nodes: list[Node], first: Node) -> Any:
        """Record a vmap or grad region as ATen below functorch, and replay it in the outer trace.

        The replay is differentiable; the recording runs on detached inputs, with grad mode enabled because
        torch.func.grad needs it. A no_grad inside of the region is recorded, too, because it applies to outer
        differentiation.
        """
        inside = set(nodes)
        ins = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
        outs = [n for n in nodes if any(u not in inside for u in n.users)]
        values = {i: self.env[i] for i in ins}
        free = [i for i, v in values.items() if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat)]

        def region(*args: Any) -> tuple[Any, ...]:
            """Run the nodes of a region on other values of its free variables."""
            sub = Interpreter(self.module, garbage_collect_values=False)
            sub.env = {**values, **dict(zip(free, args, strict=True))}
            for n in nodes:
                sub.env[n] = sub.run_node(n)
                if n.target is set_grad_enabled:
                    active_tracer().create_node("call_function", n.target, n.args, n.kwargs)
            return tuple(sub.env[o] for o in outs)

        with suspend_trace(self.fake_mode), torch.enable_grad():
            detached = [v.detach() if isinstance(v := values[i], torch.Tensor) else v for i in free]
            plain = make_fx(region, tracing_mode="real")(*detached)
        plain.graph.eliminate_dead_code()
        lost = next((n for n in plain.graph.nodes if n.op == "call_function" and not has_derivative(n.target)), None)
        if lost is not None and any(isinstance(x, torch.Tensor) and x.requires_grad for x in values.values()):
            raise CaptureError(
                "SP214",
                f"{lost.target} at {node_line(first)} has no derivative inside a transform of torch.func (vmap, grad, "
                "jvp).",
            )
        keep = {k: first.meta[k] for k in INHERITED_META if k in first.meta}
        for n in plain.graph.nodes:
            n.meta = dict(keep)
        results = Interpreter(plain).run(*[values[i] for i in free])
        self.env.update(zip(outs, results, strict=True))
        self.done |= inside
        return self.env.get(first)


def _record_node(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bodies: dict[GraphModule, GraphModule], out: Any
) -> Any:
    """Record one node target(*args) with lowered bodies and the value `out`."""
    tracer = active_tracer()

    def proxied(x: Any) -> Any:
        """Return the proxy of a value, or of a traced body."""
        if isinstance(x, GraphModule):
            name = tracer.get_fresh_qualname("region_body")
            tracer.root.register_module(name, bodies[x])
            return tracer.create_proxy("get_attr", name, (), {})
        return tracer.unwrap_proxy(x) if isinstance(x, (torch.Tensor, *_SYMBOL_NAME)) else x

    new_args, new_kwargs = pytree.tree_map(proxied, (tuple(args), dict(kwargs)))
    proxy = tracer.create_proxy("call_function", target, new_args, new_kwargs)
    return track_tensor_tree(out, proxy, constant=None, tracer=tracer)


def _hook_every_use(tensor: Any, hooked: Any) -> None:
    """Replace all uses of a tensor by its hooked value.

    A hook receives the full gradient of its tensor, including uses before its registration, and under no_grad, too.

    Raises:
        CaptureError: If the hook reads values that are computed after the tensor, which earlier uses cannot wait for.
    """
    proxies = [active_tracer().unwrap_proxy(x) for x in (tensor, hooked)]
    if not all(isinstance(proxy, torch.fx.Proxy) for proxy in proxies):
        return
    source, hook = (proxy.node for proxy in proxies)
    if len(source.users) == 1 and torch.is_grad_enabled():
        return
    bodies = [node for node in hook.all_input_nodes if node.op == "get_attr"]
    free = [node for node in hook.all_input_nodes if node is not source and node.op not in ("get_attr", "placeholder")]
    late = [node for node in free if source < node]
    if late:
        raise CaptureError(
            "SP218",
            f"The hook registered at {node_line(hook)} reads {late[0].name}, which is computed after the first use of "
            f"the tensor whose gradient the hook changes.",
        )
    inputs = list(source.graph.find_nodes(op="placeholder"))
    (source if source.op != "placeholder" else inputs[-1]).append(hook)
    for body in bodies:
        hook.prepend(body)
    source.replace_all_uses_with(hook, delete_user_cb=lambda user: user is not hook)


def _make_leaves(args: Sequence[Any]) -> list[Any]:
    """Return new autograd leaves with the same metadata, to trace a body separately."""

    def leaf(x: Any) -> Any:
        """Return a tensor as a leaf; other values unchanged."""
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return [pytree.tree_map(leaf, a) for a in args]


def _functorch_regions(graph: Graph) -> dict[Node, list[Node]]:
    """Map the first node of each outermost vmap, grad or jvp nesting to all its nodes."""
    regions: dict[Node, list[Node]] = {}
    current: list[Node] = []
    depth = 0
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
        if name.endswith("increment_nesting") or name == "_enter_dual_level":
            if depth == 0:
                current = regions[n] = []
            depth += 1
        if depth:
            current.append(n)
        if name.endswith("decrement_nesting") or name == "_exit_dual_level":
            depth -= 1
        if name == "lazy_load_decompositions" and depth == 0:
            regions[n] = [n]
    return regions
