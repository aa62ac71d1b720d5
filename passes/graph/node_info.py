"""Metadata of the passes for a node: one frozen `NodeInfo` under one key of `node.meta`.

Copies of a node share the objects in their meta, so the object is frozen: `node_info(node)` reads it, and
`set_node_info(node, is_aside=True)` replaces it. The global view is the captured graph, whose values are full tensors;
a local node belongs to the graph of one rank that `passes/localize` creates from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.base.layers import weight_layer
from sp_compile.lowering.torch_compat import is_module_state

META_KEY = "sp"
IN_CHUNKS = "sp_in_chunks"  # key of meta["custom"], which tracers propagate: the original code runs in chunks of rows
ON_SHARDS = "sp_on_shards"  # key of meta["custom"]: the value is a rank's shard


@dataclass(frozen=True)
class NodeInfo:
    """Metadata of one node; the defaults mean that nothing is known."""

    requires_grad: bool | None = None  # input: its own flag; local node: True if gradients reach it
    constant: bool = False  # True for an attribute that the trace created from a constant tensor
    parameter: bool | None = None  # True for a parameter or module state; None if not determined
    is_buffer: bool = False  # True for module state that is no parameter and requires no gradient
    layer: str = ""  # path of the layer of a parameter or buffer, as "layers.3"; "" outside of layers
    local: Any = None  # shard that is passed under inputs='local'
    scale: int | None = None  # ratio of the global to the local length of such an input
    origin: Node | None = None  # global-view node of a local node
    is_shard: bool = False  # True for a local node of a sharded value
    result: Any = None  # Placement of the result of a user's collective, which overrides its rule
    no_rule: str | None = None  # reason why the node requires gathered operands
    replicated: bool = False  # True if propagation starts no sequence at this gathered value
    starts_sequence: bool = False  # True if a sequence starts here although the node does no work
    is_aside: bool = False  # True if a scan at the node does not make its dim a sequence (`find_sequences.py`)
    # (a, d): the node is (part of) a scan without a rule along dim d of argument a
    scanned: tuple[int, int] | None = None
    joins: bool = False  # True for a part of a concatenation, padded to the length of all parts
    is_apart: bool = False  # True if the rows of its result have another frame than those of its operand
    # Rows of the value that all ranks read, as (start, number) along the sequence
    selected: frozenset[tuple[Any, Any]] = frozenset()
    side: Any = None  # the Shard in which it may start if no sequence reaches it, see `ShardSideRegions`
    grouped: bool = False  # True if canonicalize added the grouped heads, so that expand_heads may revert it
    choice: Any = None  # attention decision, a cost.attention.Candidate
    recomputed: bool = False  # True if the node only repeats work of tiles, or of nodes before them, for other users
    combines: bool = False  # True if each rank adds or scales partial sums that are added to those of other ranks later


BLANK_INFO = NodeInfo()


def node_info(node: Node) -> NodeInfo:
    """Return the metadata of the node, with defaults if no pass has set any."""
    return node.meta.get(META_KEY, BLANK_INFO)


def set_node_info(node: Node, **known: Any) -> None:
    """Replace the node's metadata by a copy with these fields, so that copies of the node do not change."""
    node.meta[META_KEY] = replace(node_info(node), **known)


def mark_inputs(graph: Graph, example_inputs: Sequence[Any]) -> None:
    """Record in the metadata of each placeholder if it is a parameter, of which layer, and if it requires a gradient.

    Args:
        graph: Dynamo's graph, or a captured one.
        example_inputs: Its inputs.
    """
    for node, example in zip(graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(example, torch.Tensor):
            is_parameter = isinstance(example, torch.nn.Parameter)
            is_state = is_parameter or is_module_state(node)
            set_node_info(
                node,
                requires_grad=example.requires_grad,
                parameter=is_state,
                is_buffer=is_state and not is_parameter and not example.requires_grad,
                layer=weight_layer(node) if is_state else "",
            )


def clear_node_info(node: Node) -> None:
    """Remove the metadata of the node, which refers to nodes of graphs that are no longer needed."""
    node.meta.pop(META_KEY, None)


def can_require_grad(x: Node) -> bool:
    """Return True if a value may need a gradient: a float or complex one that is not known to require none."""
    value = x.meta["val"]
    return node_info(x).requires_grad is not False and has_gradient_dtype(value)


def is_weight(node: Node) -> bool:
    """Return True for a parameter, buffer or constant of the module: an attribute of the graph or one of its inputs.

    Args:
        node: A node.
    """
    return node.op == "get_attr" or bool(node_info(node).parameter)


def mark_shards(graph: Graph) -> None:
    """Set meta["custom"][ON_SHARDS] at the values of a rank's graph that are shards, for traces of the graph.

    Nodes that localization adds, such as slices and fills of padding, are shards if one of their operands is.
    """
    for node in graph.nodes:
        info = node_info(node)
        is_added = node.op == "call_function" and info.origin is None
        is_slice = node.target is torch.ops.sp.shard.default
        if info.is_shard or is_slice or (is_added and any(is_on_shards(x) for x in node.all_input_nodes)):
            node.meta["custom"] = {**node.meta.get("custom", {}), ON_SHARDS: True}


def is_on_shards(node: Node) -> bool:
    """Return True if `mark_shards` has marked the node, or that of whose op it is a part."""
    return bool(node.meta.get("custom", {}).get(ON_SHARDS))


def is_in_chunks(node: Node) -> bool:
    """Return True if the node is of code that processes rows in chunks itself, such as a fused loss of a package.

    Such code is traced within `annotate({IN_CHUNKS: True})`. Its tiles are chosen by bytes, see `choose_tiles`.
    """
    return bool(node.meta.get("custom", {}).get(IN_CHUNKS))
