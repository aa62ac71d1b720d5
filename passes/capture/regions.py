"""Inline checkpoint, nested-compile, no_grad and autocast region ops.

A region op is a node `op(..., body, *operands)` that runs a sub-graph. Its body is copied into the outer graph, so that
shardings can propagate through it. Its effect is preserved in other forms: checkpointing as `meta["recompute"]` and
`meta["ac_graph_id"]`, which AOTAutograd's partitioner reads; grad mode and autocast as enter and exit nodes. Inference
mode is converted to a grad mode.
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

from sp_compile.lowering.base.errors import CaptureError, node_line
from sp_compile.lowering.torch_compat import (
    enter_autocast,
    enter_inference_mode,
    exit_autocast,
    exit_inference_mode,
    invoke_subgraph,
    keep_calling_convention,
    keep_source,
    policy_of,
    recompute_tags,
    set_grad_enabled,
    tag_activation_checkpoint,
    wrap,
    wrap_activation_checkpoint,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)
from sp_compile.passes.graph.edit import erase_dead

log = logging.getLogger(__name__)

# Ids must increase: the partitioner saves values that a region passes to a region with a larger id.
_region_ids = itertools.count()

# Region op -> position of its body; the operands follow the body, or the name of the region.
_BODY_AT = {
    tag_activation_checkpoint: 0,
    wrap_activation_checkpoint: 0,
    wrap: 0,
    invoke_subgraph: 0,
    wrap_with_set_grad_enabled: 1,
    wrap_with_autocast: 4,
}
_REGION_CHECKPOINTS = (tag_activation_checkpoint, wrap_activation_checkpoint)


def inline_regions(gm: GraphModule) -> GraphModule:
    """Return a copy of `gm` with the same parameters and submodules, without inlinable region ops."""
    copy = _RegionInliner(gm, Graph())
    copy.graph.output(copy.body(gm, "", {}, {})).meta = dict(gm.graph.output_node().meta)
    keep_calling_convention(copy.graph, gm.graph)
    erase_dead(copy.graph, ("get_attr",))
    flat = GraphModule(gm, copy.graph)
    flat.meta.update(gm.meta)
    return flat


@dataclass
class _RegionInliner:
    root: GraphModule
    graph: Graph
    grad: list[bool] = field(default_factory=lambda: [torch.is_grad_enabled()])

    def body(self, gm: GraphModule, path: str, env: dict[Node, Any], tags: dict[str, Any]) -> Any:
        """Copy `gm`, at attribute `path` of the root, with its placeholders bound in `env`, and return its output."""

        def bound(arg: Any) -> Any:
            """Replace the nodes of an argument by their copies."""
            return map_arg(arg, env.__getitem__)

        for node in gm.graph.nodes:
            if node.op == "output":
                return bound(node.args[0])
            if node in env:
                continue
            if node.op == "call_function" and node.target in _BODY_AT:
                env[node] = self.region(gm, path, node, bound, tags)
            elif node.op == "call_function" and node.target in (enter_inference_mode, exit_inference_mode):
                env[node] = self.inference_mode(node)
            elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple | list):
                env[node] = env[node.args[0]][node.args[1]]  # a result of a region
            else:
                env[node] = self.copy(node, path, env, tags)
        raise AssertionError("a graph without an output node")

    def copy(self, node: Node, path: str, env: dict[Node, Any], tags: dict[str, Any]) -> Node:
        """Copy a node of a region, with the targets and metadata of its new graph."""
        new = self.graph.node_copy(node, env.__getitem__)
        if node.op in ("get_attr", "call_module") and path:
            new.target = f"{path}.{node.target}"
        if node.op == "placeholder":
            keep_source(new, node)
        if node.target is set_grad_enabled:
            self.grad[-1] = bool(node.args[0])
        if tags and node.op in ("call_function", "call_method"):
            custom = {**new.meta.get("custom", {}), **tags.get("custom", {})}
            new.meta.update(tags, custom=custom)
        return new

    def inference_mode(self, node: Node) -> Node:
        """Record entering or exiting inference mode as a change of the grad mode."""
        if node.target is enter_inference_mode:
            self.grad.append(not node.args[0])
        else:
            self.grad.pop()
        return self.call(set_grad_enabled, (self.grad[-1],))

    def region(self, gm: GraphModule, path: str, node: Node, bound: Callable[[Any], Any], tags: dict[str, Any]) -> Any:
        """Inline the body of a higher-order operator and return its results."""
        index = _BODY_AT[node.target]
        ref = node.args[index]
        if not isinstance(ref, Node) or ref.op != "get_attr":
            raise CaptureError(
                "SP216", f"{node.name}: the body of {node.target} at {node_line(node)} is not a sub-graph."
            )
        body = gm.get_submodule(ref.target)
        operands = bound(node.args[index + (2 if node.target is invoke_subgraph else 1) :])
        holes = body.graph.find_nodes(op="placeholder")
        if len(holes) != len(operands):
            raise CaptureError(
                "SP217",
                f"{node.name}: {node.target} at {node_line(node)} passes {len(operands)} values to a body of "
                f"{len(holes)} inputs.",
            )
        if (
            node.target in _REGION_CHECKPOINTS and self.grad[-1]
        ):  # else nothing is kept; torch refuses draws in an inference's
            tags = tags or _recompute_tags(node, body)
        inner = f"{path}.{ref.target}" if path else ref.target
        with self.state(node):
            return self.body(body, inner, dict(zip(holes, operands, strict=True)), tags)

    @contextmanager
    def state(self, node: Node) -> Iterator[None]:
        """Record the state change of a region, and its end."""
        if node.target is wrap_with_set_grad_enabled:
            self.call(set_grad_enabled, (node.args[0],))
            self.grad.append(bool(node.args[0]))
            yield
            self.grad.pop()
            self.call(set_grad_enabled, (self.grad[-1],))
        elif node.target is wrap_with_autocast:
            token = self.call(enter_autocast, tuple(node.args[:4]))
            yield
            self.call(exit_autocast, (token,))
        else:
            yield

    def call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        """Emit a call without a value."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = None
        return node


def _recompute_tags(node: Node, body: GraphModule) -> dict[str, Any]:
    context_fn = body.meta.get("_checkpoint_context_fn")
    policy = None if context_fn is None else policy_of(context_fn)
    if context_fn is not None and policy is None:
        log.warning(
            "%s: context_fn was not created by create_selective_checkpoint_contexts and is ignored: the region is "
            "recomputed completely, with equal results",
            node_line(node),
        )
    return recompute_tags(next(_region_ids), policy)
