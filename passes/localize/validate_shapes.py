"""Prove that every node of a local graph has the shape of its placement, for all values of the symbols.

Runs the nodes on shards with fake tensors, and compares the local size times the number of shards with the global size,
as expressions. It also checks that all targets are op overloads or built-in operators, that no exchange is read before
its wait, and the padded rows (`fill_padding.py`). The pass adds no traffic. Errors name the node, the user's line,
the shape, and the expected shape.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    detect_fake_mode,
    enable_python_dispatcher,
    follows_from_guards,
    namespace_of,
)
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_pending_exchange
from sp_compile.passes.graph.call import is_tensor, node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_size
from sp_compile.passes.sharding.placement import Placement, PlacementPlan, Shard

from .fill_padding import PaddingProof

sp = torch.ops.sp
PYTHON_FUNCTIONS = (
    "_operator",
    "math",
    "torch",
    "torch._C",
    "torch.amp.autocast_mode",
    "torch.nn.attention",
    "torch.sym",
)
"""Modules of the other functions that a program may call."""
SORTED_OPS = tuple(getattr(sp, name).default for name in ("sort_rows", "to_sorted", "from_sorted", "grouped_mm"))


class ValidateShapes(Pass):
    """Pass that validates a local graph, after Localize."""

    requires = frozenset({"local", "local ops"})
    provides = frozenset({"validated"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        assert job.input_placements is not None
        validate(gm, job.input_placements, job.ranks.n)
        return 0


def validate(local: GraphModule, plan: PlacementPlan, n: int) -> None:
    """Prove the local graph against its plan, and set meta["val"] to local values.

    Args:
        local: The graph of one rank.
        plan: The plan from which the local graph was created.
        n: The number of ranks.

    Raises:
        SpError: A node has another shape than its placement requires, fails on local operands, or reads invalid rows.
    """
    fakes = [node.meta.get("val") for node in local.graph.nodes]
    mode = detect_fake_mode([v for v in fakes if isinstance(v, torch.Tensor)])
    in_order_of_keys: set[Node] = set()
    padding = PaddingProof(plan, n)
    with mode or torch.no_grad(), enable_python_dispatcher(), torch.no_grad():  # required for symbolic sizes
        for node in local.graph.nodes:
            if node.op == "call_function":
                _check_target(node)
                _check_wait(node)
                _check_sorted(node, in_order_of_keys)
                _infer_local(node, plan)
                _check_shape(node, plan, n, mode)
            padding.check(node)


def _check_target(node: Node) -> None:
    target = node.target
    known = isinstance(target, (OpOverload, HigherOrderOperator))
    if not known and getattr(target, "__module__", "") not in PYTHON_FUNCTIONS:
        raise SpError("SP921", f"{describe_node(node)} is neither an op overload nor an operator.")


def _check_wait(node: Node) -> None:
    """Raise SpError if an sp op reads the result of an exchange before its wait."""
    if namespace_of(node.target) != sp.name:
        return
    for source in node.all_input_nodes:
        if is_pending_exchange(source):
            raise SpError("SP922", f"{describe_node(node)} reads {source.name} before wait_tensor.")


def _check_sorted(node: Node, known: set[Node]) -> None:
    """Raise SpError if an op reads rows by position that each rank has sorted.

    known: the nodes that contain such rows; the node is added to them.
    """
    if node.target in (sp.sort_rows.default, sp.to_sorted.default) or any(x in known for x in node.all_input_nodes):
        if node.target is not sp.from_sorted.default:
            known.add(node)
        if namespace_of(node.target) == sp.name and node.target not in SORTED_OPS:
            cause = f"{describe_node(node)} reads by position rows that each rank has sorted by a key."
            raise SpError("SP309", cause)


def _infer_local(node: Node, plan: PlacementPlan) -> None:
    """Infer the node's local value. A replicated node keeps its global value."""
    source = node_info(node).origin
    local = namespace_of(node.target) == sp.name or node.target is operator.getitem
    if source is not None and source not in plan.wants and not local:
        return
    if not isinstance(node.target, OpOverload) and "val" in node.meta and source is None:
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
    try:
        node.meta["val"] = node.target(*args, **kwargs)
    except Exception as e:
        shapes = [list(a.meta["val"].shape) for a in node.all_input_nodes if is_tensor(a)]
        raise SpError("SP925", f"{describe_node(node)} fails on local operands of shapes {shapes}: {e}.") from e


def _check_shape(node: Node, plan: PlacementPlan, n: int, mode: Any) -> None:
    source = node_info(node).origin
    if source is None:
        return
    for placement, here, there in zip(plan.placements.get(source, ()), node_tensors(node), node_tensors(source)):
        expected, found = local_shape(placement, there, n), as_sizes(here.shape)
        if len(expected) != len(found) or not all(_is_equal_size(a, b, mode) for a, b in zip(expected, found)):
            raise SpError(
                "SP926",
                f"{describe_node(node)}: expected the local shape {list(expected)} of the global shape "
                f"{list(as_sizes(there.shape))}, placed {placement} over {n} ranks, got {list(found)}.",
            )


def _is_equal_size(expected: Size, found: Size, mode: Any) -> bool:
    """Return True if the sizes are equal for all values of the symbols that the program's guards admit."""
    return is_same_size(expected, found) or follows_from_guards(mode, sympy.Eq(expected, found))


def local_shape(placement: Placement, value: torch.Tensor, n: int) -> tuple[Size, ...]:
    """Return the local shape of a value on each of `n` ranks.

    Args:
        placement: The placement of the value.
        value: The full tensor, of any dtype.
        n: The number of ranks.

    Returns:
        The shape, with the local number of rows in the sharded dim.
    """
    shape = list(as_sizes(value.shape))
    if isinstance(placement, Shard):
        shape[placement.dim] = placement.local_size(n)
    return tuple(shape)
