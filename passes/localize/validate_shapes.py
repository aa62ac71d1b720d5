"""Prove that every node of a local graph has the shape of its placement.

The proof holds for all values of the symbols. The pass runs the nodes on shards with fake tensors, and compares the
local size times the number of shards with the global size, as expressions. It also checks that all targets are op
overloads or built-in operators, that no exchange is read before its wait, and the padded rows (`fill_padding.py`). It
adds no traffic. Errors name the node, the user's line, the shape, and the expected shape. The origin of a local node is
the node of the global graph that it was created from.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
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
    is_guaranteed,
    namespace_of,
)
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_pending_exchange
from sp_compile.passes.graph.call import OpCall, is_tensor, node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_size
from sp_compile.passes.sharding.placement import Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rules.expert_rules import SORTED_ROWS

from .fill_padding import PaddingProof

sp = torch.ops.sp
# modules of the Python functions that a program may call in addition to ops
PYTHON_FUNCTIONS = "_operator math torch torch._C torch.amp.autocast_mode torch.nn.attention torch.sym".split()


class ValidateShapes(Pass):
    """Pass that validates a local graph, after Localize."""

    requires = frozenset({"local", "local ops"})
    provides = frozenset({"validated"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Validate the graph and set its values to local ones; return 0, as no node changes."""
        assert context.input_placements is not None  # the plan of the global graph, stored by `Localize`
        validate(gm, context.input_placements, context.ranks.n)
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
    values = [value for node in local.graph.nodes for value in node_tensors(node)]
    mode = detect_fake_mode(values)
    sorted_rows: set[Node] = set()  # nodes with rows that each rank has sorted by a key
    padding = PaddingProof(plan, n)
    # Symbolic sizes require the Python dispatcher, which is slow. Without a fake mode, no_grad takes its place.
    is_symbolic = any(isinstance(size, torch.SymInt) for value in values for size in value.shape)
    dispatcher = enable_python_dispatcher() if is_symbolic else nullcontext()
    with mode or torch.no_grad(), dispatcher, torch.no_grad():
        for node in local.graph.nodes:
            if node.op == "call_function":
                _check_target(node)
                _check_wait(node)
                _check_sorted(node, sorted_rows)
                _infer_local(node, plan)
                _check_shape(node, plan, n, mode)
            padding.check(node)


def _check_target(node: Node) -> None:
    """Raise SpError if the call's target is neither an op overload nor a function of the modules PYTHON_FUNCTIONS."""
    is_op = isinstance(node.target, (OpOverload, HigherOrderOperator))
    if not is_op and getattr(node.target, "__module__", "") not in PYTHON_FUNCTIONS:
        raise SpError("SP921", f"{describe_node(node)} is neither an op overload nor a built-in operator of Python.")


def _check_wait(node: Node) -> None:
    """Raise SpError if an sp:: op reads the result of a collective that no wait_tensor has completed.

    The operands called `after`, such as those of `sp::attend`, only order the op after the start of an exchange.
    """
    if namespace_of(node.target) != sp.name:
        return
    ordered_after = OpCall(node).get("after") or ()
    for source in node.all_input_nodes:
        if is_pending_exchange(source) and source not in ordered_after:
            raise SpError(
                "SP922", f"{describe_node(node)} reads the result of {describe_node(source)} before wait_tensor."
            )


def _check_sorted(node: Node, sorted_rows: set[Node]) -> None:
    """Raise SpError if an op that reads rows by their position has an operand whose rows each rank has sorted by a key.

    Tokens sorted by expert are an example: token-wise ops may read them in any order, but sp:: ops such as attention
    compute with positions. `sp::from_sorted` restores the order.

    Args:
        node: Node to check.
        sorted_rows: Nodes before it that contain sorted rows; the node is added if it does, too.
    """
    is_sort = node.target in (sp.sort_rows.default, sp.to_sorted.default)
    if not is_sort and sorted_rows.isdisjoint(node.all_input_nodes):
        return
    if node.target is not sp.from_sorted.default:
        sorted_rows.add(node)
    if namespace_of(node.target) == sp.name and node.target not in SORTED_ROWS:
        cause = "needs its rows in the order of the sequence, but each rank has sorted its own rows by a key"
        raise SpError("SP309", f"{describe_node(node)} {cause}.")


def _infer_local(node: Node, plan: PlacementPlan) -> None:
    """Set `meta["val"]` to the node's local value, by running the op on the local values of its operands.

    A replicated node keeps its global value, which is equal.

    Raises:
        SpError: If the op fails on local operands.
    """
    origin = node_info(node).origin
    # An sp:: op may exchange rows, and a getitem may read a result of such an op.
    may_exchange = namespace_of(node.target) == sp.name or node.target is operator.getitem
    if origin is not None and origin not in plan.wants and not may_exchange:
        return  # replicated
    if not isinstance(node.target, OpOverload) and "val" in node.meta and origin is None:
        return  # arithmetic on sizes, which `Localize` emitted with its value
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    try:
        node.meta["val"] = node.target(*args, **kwargs)
    except Exception as e:
        shapes = [list(x.meta["val"].shape) for x in node.all_input_nodes if is_tensor(x)]
        cause = f"{describe_node(node)} fails on local operands of shapes {shapes}: {str(e).rstrip('.')}."
        raise SpError("SP925", cause) from e


def _check_shape(node: Node, plan: PlacementPlan, n: int, mode: Any) -> None:
    """Raise SpError if a local result does not have the shape that its placement implies.

    Args:
        node: Node of the local graph.
        plan: Plan of the global graph.
        n: Number of ranks.
        mode: Fake mode of the values, whose guards relate the symbols; None without one.
    """
    origin = node_info(node).origin
    if origin is None:
        return
    results = zip(plan.placements.get(origin, ()), node_tensors(node), node_tensors(origin))
    for placement, local_value, global_value in results:
        expected, actual = local_shape(placement, global_value, n), as_sizes(local_value.shape)
        # Sizes must be equal for all values of their symbols that the guards of the program admit.
        is_equal = [is_same_size(a, b) or is_guaranteed(mode, sympy.Eq(a, b)) for a, b in zip(expected, actual)]
        if len(expected) != len(actual) or not all(is_equal):
            raise SpError(
                "SP926",
                f"{describe_node(node)}: expected the local shape {list(expected)} of the global shape "
                f"{list(as_sizes(global_value.shape))}, placed {placement} over {n} ranks, got {list(actual)}.",
            )


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
