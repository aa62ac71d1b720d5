"""Inline checkpoint, nested-compile, no_grad and autocast region ops.

    tag_activation_checkpoint(body, x), body: sin(cos(x))   ->   cos(x), sin(...), both with meta["ac_graph_id"]

A region op is a node `op(..., body, *operands)` that runs a sub-graph, the body, on the operands. The body is copied
into the outer graph, so that shardings can propagate through it. The effect of the op is preserved in other forms:
checkpointing as `meta["recompute"]` and `meta["ac_graph_id"]`, which AOTAutograd's partitioner reads; grad mode and
autocast as enter and exit nodes. Inference mode is converted to a grad mode. In the end, gradient flow out of no-grad
regions is made explicit by detaches (`detach_no_grad_regions`).
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import CaptureError, node_line
from sp_compile.lowering.torch_compat import (
    enter_inference_mode,
    exit_inference_mode,
    register_hook_op,
    set_grad_enabled,
)
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.edit import GraphEditor, erase_dead
from sp_compile.passes.graph.modes import no_grad_nodes
from sp_compile.passes.sharding.matchers import may_carry_gradient

log = logging.getLogger(__name__)

# Ids must increase: the partitioner saves values that a region passes to a region with a larger id.
_region_ids = itertools.count()

# Region op -> index of its body among the arguments; the operands follow the body, or the name of the region.
_BODY_INDEX = {
    torch_compat.tag_activation_checkpoint: 0,
    torch_compat.wrap_activation_checkpoint: 0,
    torch_compat.wrap: 0,
    torch_compat.invoke_subgraph: 0,
    torch_compat.wrap_with_set_grad_enabled: 1,
    torch_compat.wrap_with_autocast: 4,
}
# Region ops of checkpoints.
_REGION_CHECKPOINTS = (torch_compat.tag_activation_checkpoint, torch_compat.wrap_activation_checkpoint)


def inline_regions(gm: GraphModule) -> GraphModule:
    """Return a copy of `gm` in which region ops are replaced by the nodes of their sub-graphs.

    These are the ops of checkpoints, nested compilation, no_grad and autocast, see `_BODY_INDEX`. The copy shares the
    parameters and submodules of `gm`.
    """
    inliner = _RegionInliner(gm, Graph())
    results = inliner.inline_graph(gm, path="", copies={}, tags={})  # the root, outside of any checkpoint
    output = inliner.graph.output(results)
    output.meta = dict(gm.graph.output_node().meta)
    torch_compat.keep_calling_convention(inliner.graph, gm.graph)
    erase_dead(inliner.graph, ("get_attr",))  # reads of the sub-graphs, which no op runs any more
    flat = GraphModule(gm, inliner.graph)
    flat.meta.update(gm.meta)
    return flat


def detach_no_grad_regions(graph: Graph) -> None:
    """Insert a detach after each value that leaves a no-grad region, and remove hooks that never run.

    The gradient of a node then does not depend on its position. A hook on a value without gradient never runs: the
    value was a view of a leaf, or was overwritten in place. A no-grad region is the nodes between
    `set_grad_enabled(False)` and the next `set_grad_enabled(True)`.
    """
    no_grad, editor = no_grad_nodes(graph), GraphEditor().edit(graph)
    for node in [n for n in graph.nodes if n in no_grad and n.op == "call_function" and is_tensor(n)]:
        users_with_grad = [user for user in node.users if user not in no_grad or user.op == "output"]
        if users_with_grad and may_carry_gradient(node):
            with graph.inserting_after(node):
                detached = editor.emit(torch.ops.aten.detach.default, (node,), node.meta["val"], node)
            for user in users_with_grad:
                user.replace_input_with(node, detached)
    hooks = graph.find_nodes(op="call_function", target=register_hook_op) if register_hook_op else ()
    for hook in hooks:  # the node hook(tensor, ...) returns its tensor
        if hook in no_grad or not may_carry_gradient(hook.args[0]):
            hook.replace_all_uses_with(hook.args[0])
            graph.erase_node(hook)


@dataclass
class _RegionInliner:
    """Copy of a graph and of the bodies of its region ops into one new graph.

    A region op is a node that runs a sub-graph, its body, on its operands. The arguments of the methods are those of
    `inline_graph`.
    """

    root: GraphModule  # graph whose regions are inlined
    graph: Graph  # new graph
    # Grad mode at the current node; the outer elements are restored at the end of a region.
    grad_modes: list[bool] = field(default_factory=lambda: [torch.is_grad_enabled()])

    def inline_graph(self, gm: GraphModule, path: str, copies: dict[Node, Any], tags: dict[str, Any]) -> Any:
        """Copy the nodes of `gm` except the placeholders in `copies`, and return its results as new nodes.

        Args:
            gm: The root, or the body of a region op.
            path: Attribute path from the root to `gm`; "" for the root.
            copies: New node of each node of `gm`; for a region op, the results of its body. For a body, it contains the
                placeholders at first. Extended.
            tags: Metadata for the new nodes: that of the outermost checkpoint around them, else empty.
        """
        for node in gm.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], copies.__getitem__)
            if node in copies:
                continue
            if node.op == "call_function" and node.target in _BODY_INDEX:
                copies[node] = self.inline_region(gm, path, node, copies, tags)
            elif node.op == "call_function" and node.target in (enter_inference_mode, exit_inference_mode):
                copies[node] = self.convert_inference_mode(node)
            elif node.target is operator.getitem and isinstance(copies.get(node.args[0]), tuple | list):
                copies[node] = copies[node.args[0]][node.args[1]]  # a result of a region
            else:
                copies[node] = self.copy(node, path, copies, tags)
        raise AssertionError("a graph without an output node")

    def copy(self, node: Node, path: str, copies: dict[Node, Any], tags: dict[str, Any]) -> Node:
        """Return a copy of a node that is not inlined; its attribute is looked up from the root, and it gets the tags.

        Arguments as in `inline_graph`.
        """
        new = self.graph.node_copy(node, copies.__getitem__)
        if node.op in ("get_attr", "call_module") and path:
            new.target = f"{path}.{node.target}"
        if node.op == "placeholder":
            torch_compat.keep_source(new, node)
        if node.target is set_grad_enabled:
            self.grad_modes[-1] = bool(node.args[0])
        if tags and node.op in ("call_function", "call_method"):
            # Both may have a dict "custom", of which the entries of the region take precedence.
            custom = {**new.meta.get("custom", {}), **tags.get("custom", {})}
            new.meta.update(tags, custom=custom)
        return new

    def convert_inference_mode(self, node: Node) -> Node:
        """Emit a change of the grad mode in place of entering or exiting inference mode."""
        if node.target is enter_inference_mode:
            self.grad_modes.append(not node.args[0])  # (True,): inference mode, without gradients
        else:
            self.grad_modes.pop()
        return self.emit_state_change(set_grad_enabled, (self.grad_modes[-1],))

    def inline_region(
        self, gm: GraphModule, path: str, node: Node, copies: dict[Node, Any], tags: dict[str, Any]
    ) -> Any:
        """Copy the body of the region op `node` between its enter and exit nodes, and return its results.

        Other arguments as in `inline_graph`.
        """
        index = _BODY_INDEX[node.target]
        attribute = node.args[index]
        if not isinstance(attribute, Node) or attribute.op != "get_attr":
            raise CaptureError(
                "SP216",
                f"{node.name}: expected a sub-graph as the body of {node.target} at {node_line(node)}, got "
                f"{attribute}.",
            )
        body = gm.get_submodule(attribute.target)
        has_name = node.target is torch_compat.invoke_subgraph  # invoke_subgraph(body, name, *operands)
        first_operand = index + (2 if has_name else 1)
        operands = map_arg(node.args[first_operand:], copies.__getitem__)
        placeholders = body.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(operands):
            raise CaptureError(
                "SP217",
                f"{node.name}: {node.target} at {node_line(node)}: expected {len(placeholders)} positional arguments "
                f"(the inputs of its body), got {len(operands)}.",
            )
        # Without gradients nothing is saved, and torch does not support random ops in a checkpoint of an inference.
        if node.target in _REGION_CHECKPOINTS and self.grad_modes[-1]:
            tags = tags or _new_region_tags(node, body)
        body_path = f"{path}.{attribute.target}" if path else attribute.target
        with self.emit_region_state(node):
            return self.inline_graph(body, body_path, dict(zip(placeholders, operands, strict=True)), tags)

    @contextmanager
    def emit_region_state(self, node: Node) -> Iterator[None]:
        """Emit the enter node of a region op before the nodes of the block, and the exit node after them.

        Only region ops of grad mode and autocast have such nodes.
        """
        if node.target is torch_compat.wrap_with_set_grad_enabled:
            self.emit_state_change(set_grad_enabled, (node.args[0],))
            self.grad_modes.append(bool(node.args[0]))
            yield
            self.grad_modes.pop()
            self.emit_state_change(set_grad_enabled, (self.grad_modes[-1],))
        elif node.target is torch_compat.wrap_with_autocast:
            options = tuple(node.args[:4])  # device, dtype, enabled, cache_enabled
            token = self.emit_state_change(torch_compat.enter_autocast, options)
            yield
            self.emit_state_change(torch_compat.exit_autocast, (token,))
        else:
            yield

    def emit_state_change(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        """Emit a call that changes the grad mode or autocast of later nodes; its value is None."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = None
        return node


def _new_region_tags(node: Node, body: GraphModule) -> dict[str, Any]:
    """Return the metadata by which AOTAutograd's partitioner recomputes the nodes of a new checkpointed region.

    Warn if the `context_fn` of the checkpoint is not one of selective checkpointing, which has a policy by op.
    """
    context_fn = body.meta.get("_checkpoint_context_fn")
    policy = None if context_fn is None else torch_compat.policy_of(context_fn)
    if context_fn is not None and policy is None:
        log.warning(
            "%s: context_fn was not created by create_selective_checkpoint_contexts and is ignored: the region is "
            "recomputed completely, with equal results",
            node_line(node),
        )
    return torch_compat.recompute_tags(next(_region_ids), policy)
