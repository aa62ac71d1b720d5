"""Describe the values that are in memory at a moment of a running graph, for the liveness model (`liveness.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import PARAMETERS_LINE, TANGENTS_LINE, node_line, stack_trace
from sp_compile.lowering.torch_compat import size_hint, storage_of
from sp_compile.passes.graph.call import is_tangent, node_tensors

from .fused_kernels import StorageKey
from .kinds import CAT, FROM_HOST

MAX_WALK_STEPS = 8  # maximum steps from a node without a line to one that has one


@dataclass(frozen=True)
class LiveValue:
    """Value in memory at a moment."""

    name: str  # name of its node
    where: str  # user's line
    nbytes: int  # bytes of its storage
    origin: str = "value"  # or "saved", "result" ("gradient" in a backward), "workspace" or "reuse" (retained buffer)
    is_shard: bool = False  # True for a saved value that is a rank's shard


@dataclass(frozen=True)
class WalkMoment:
    """Kernel as it runs, and the bytes of all live values."""

    name: str  # name of its node
    where: str  # user's line
    nbytes: int  # live bytes, with the workspace of the kernel
    results: int = 0  # part of these that the graph returns
    idle: int = 0  # part of these in buffers that Inductor retains for reuse
    product: bool = False  # True for a matrix product or an attention
    layer: str = ""  # path of the layer
    traffic: int = 0  # bytes read and written, except by products
    flops: int = 0  # FLOPs of products, without attention
    attends: bool = False  # True for attention


def nbytes_of(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage."""
    return size_hint(value.untyped_storage().nbytes())


def storage_bytes(nodes: Iterable[Node]) -> dict[StorageKey, int]:
    """Return the bytes of each storage of the values of nodes."""
    return {storage_of(x): nbytes_of(x) for node in nodes for x in node_tensors(node)}


def is_on_host(node: Node) -> bool:
    """Return True for an input that is in host memory: its only users copy it to the device."""
    return bool(node.users) and all(user.target is FROM_HOST for user in node.users)


def nearest_line(node: Node) -> str:
    """Return the user's line of a node, or else of the nearest of its first operands that has one.

    The search ends at a tangent (the gradient of an output) and at a cat of the gradients of parameters: these have no
    line, and the result is a text that names them.
    """
    for _ in range(MAX_WALK_STEPS):
        if is_tangent(node):
            return TANGENTS_LINE
        if stack_trace(node) or not node.all_input_nodes:
            break
        if node.target is CAT:
            return PARAMETERS_LINE  # the gradients of several parameters, concatenated for one all-reduce
        node = node.all_input_nodes[0]
    return node_line(node)
