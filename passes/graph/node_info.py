"""What the passes know of a node, beside its value: one typed record, under one key of its meta.

Copies of a node share what its meta holds, so a record is frozen: `node_info(node)` reads it, `set_node_info(node,
aside=True)`
replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

META_KEY = "sp"


@dataclass(frozen=True)
class NodeInfo:
    """What is known of one node; every field has a default that says nothing.

    requires_grad: of an input, as it was given; of a local node, whether gradients reach it.
    constant: is an attribute a tensor that the trace has written down?
    parameter: is an input a parameter, or state of a module? None: nobody looked.
    local: an input's own value under inputs='local', a shard. scale: how many times longer the whole is.
    origin: the node of the global view that a local node stands for.
    result: where an exchange of the program's own leaves its result (a Placement), whatever its rule says.
    no_rule: why a node runs on whole values only.
    whole: propagation begins no sequence here, of what was gathered. begins: it does, though the node does no work.
    aside: the node names no sequence.
    scanned: (a, d): the node is, or is a part of, a scan along dim d of its argument a that has no rule.
    grouped: canonicalize gave the attention its grouped heads, so expand_heads may undo it.
    choice: how an attention will be split (a cost.attention.Candidate).
    again: does the node only repeat what tiles, or what was cut in front of it, do, for others that read it?
    combines: does each rank add up, or scale, its own sums, which are added to those of the others behind it?
    """

    requires_grad: bool | None = None
    constant: bool = False
    parameter: bool | None = None
    local: Any = None
    scale: int | None = None
    origin: Node | None = None
    result: Any = None
    no_rule: str | None = None
    replicated: bool = False
    starts_sequence: bool = False
    is_aside: bool = False
    scanned: tuple[int, int] | None = None
    grouped: bool = False
    choice: Any = None
    recomputed: bool = False
    combines: bool = False


BLANK_INFO = NodeInfo()


def node_info(node: Node) -> NodeInfo:
    """What is known of the node."""
    return node.meta.get(META_KEY, BLANK_INFO)


def set_node_info(node: Node, **known: Any) -> None:
    """Let the node's record say this, too."""
    node.meta[META_KEY] = replace(node_info(node), **known)


def clear_node_info(node: Node) -> None:
    """Forget all that is known of the node."""
    node.meta.pop(META_KEY, None)
