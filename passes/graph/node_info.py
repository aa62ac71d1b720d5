"""Metadata of the passes for a node: one frozen `NodeInfo` under one key of `node.meta`.

Copies of a node share the objects in their meta, so the object is frozen: `node_info(node)` reads it, and
`set_node_info(node, is_aside=True)` replaces it.
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

    requires_grad: bool | None = None  # input: its own flag; local node: True if gradients reach it
    constant: bool = False  # True for an attribute that the trace created from a constant tensor
    parameter: bool | None = None  # True for a parameter or module state; None if not determined
    local: Any = None  # shard that is passed under inputs='local'
    scale: int | None = None  # ratio of the global to the local length of such an input
    origin: Node | None = None  # global-view node of a local node
    result: Any = None  # Placement of the result of a user's collective, which overrides its rule
    no_rule: str | None = None  # reason why the node requires gathered operands
    replicated: bool = False  # True if propagation starts no sequence at this gathered value
    starts_sequence: bool = False  # True if a sequence starts here although the node does no work
    is_aside: bool = False  # True if the node names no sequence
    scanned: tuple[int, int] | None = (
        None  # (a, d): the node is (part of) a scan without a rule along dim d of argument a
    )
    grouped: bool = False  # True if canonicalize added the grouped heads, so that expand_heads may revert it
    choice: Any = None  # attention decision, a cost.attention.Candidate
    recomputed: bool = False  # True if the node only repeats work of tiles, or of nodes before them, for other users
    combines: bool = False  # True if each rank adds or scales partial sums that are added to those of other ranks later


BLANK_INFO = NodeInfo()


def node_info(node: Node) -> NodeInfo:
    """Return the metadata of the node."""
    return node.meta.get(META_KEY, BLANK_INFO)


def set_node_info(node: Node, **known: Any) -> None:
    """Update fields of the node's metadata."""
    node.meta[META_KEY] = replace(node_info(node), **known)


def clear_node_info(node: Node) -> None:
    """Remove the metadata of the node."""
    node.meta.pop(META_KEY, None)
