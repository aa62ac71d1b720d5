"""Access the arguments of an ATen call by name and its tensors by their global shapes.

For a node linear(x, w), `OpCall(node)["weight"]` is w, `.operands` is [x, w] and `.shape("weight")` is w's shape.
Global shapes are those of the full tensors in the captured graph, the global view, which `node.meta["val"]` contains.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node, map_arg

from sp_compile.lowering.torch_compat import OpOverload, pytree, schema_of

from .sizes import Size, as_sizes

WAIT_OP = torch.ops._c10d_functional.wait_tensor.default


def is_tensor(node: Any) -> bool:
    """Return True if this is a node whose value is a single tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def collect_nodes(args: Any) -> list[Node]:
    """Return the nodes in nested arguments, without duplicates, in order."""
    unique_nodes: dict[Node, None] = {}
    map_arg(args, unique_nodes.setdefault)
    return list(unique_nodes)


def node_tensors(node: Node) -> list[torch.Tensor]:
    """Return the tensors in the value of a node."""
    value = node.meta.get("val")
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def node_shape(node: Node) -> tuple[Size, ...]:
    """Return the shape of a tensor node."""
    return as_sizes(node.meta["val"].shape)


def node_packet(node: Node) -> Any:
    """Return the target of a call without its overload, such as aten.add for aten.add.Tensor; None for other nodes."""
    return getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None


def is_same_argument(a: Any, b: Any) -> bool:
    """Return True if two arguments are equal, with constants of equal types: 1, 1.0 and True differ, and 0.0 and -0.0.

    They may contain nodes, and are nested equally then.
    """
    return bool(a == b) and repr(a) == repr(b)


def op_name(node: Node) -> str:
    """Return the name of the op that a node calls, without its overload, such as "aten::mm"; "" for other nodes."""
    return str(schema_of(node.target).name) if isinstance(node.target, OpOverload) else ""


def graph_tangents(graph: Graph) -> list[Node]:
    """Return the tangents of an AOTAutograd joint graph, from which its backward starts; [] for others."""
    return [n for n in graph.find_nodes(op="placeholder") if is_tangent(n)]


def is_tangent(node: Node) -> bool:
    """Return True if the node is a tangent of a joint graph: an input for the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def read_results(node: Node) -> dict[int, Node]:
    """Map the index of each result that is read from a multi-output node to its getitem node."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def result_number(getitem: Node) -> int:
    """Return the index of a getitem's result among the tensor results of its operand.

    Rules and plans have one entry for each tensor result. An op returns None for results that are not requested; these
    are not counted. A negative index is unchanged, so that it counts from the last entry.
    """
    source, index = getitem.args
    values_before = list(source.meta["val"] if isinstance(source, Node) else ())[:index]
    return sum(isinstance(v, torch.Tensor) for v in values_before) if index >= 0 else index


def parse_overloads(text: str) -> list[Any]:
    """Parse a list of aten overloads: "sum.dim_IntList", or "sum" for the default overload."""
    names = (name.partition(".") for name in text.split())
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in names]


class _Parameter(NamedTuple):
    """Parameter of an op's schema."""

    name: str  # name in the schema
    kwarg_only: bool  # True if it is passed by keyword only
    has_default: bool  # True if it may be omitted
    default: Any  # its default; None without one


@cache
def _op_signature(target: Any) -> tuple[_Parameter, ...]:
    """Return the parameters of an op; cached, because reading a schema converts from C++ each time."""
    return tuple(
        _Parameter(a.name, a.kwarg_only, a.has_default_value(), a.default_value if a.has_default_value() else None)
        for a in schema_of(target).arguments
    )


def wrap_dim(dim: Any, ndim: int) -> int:
    """Return a dim argument, which may be negative, as a non-negative dim of a value with `ndim` dims."""
    return int(dim) % max(ndim, 1)


class OpCall:
    """One ATen call: arguments by schema name, tensor operands in schema order, global shapes."""

    def __init__(self, node: Node) -> None:
        """Read the arguments of a node that calls an op overload, with the defaults of its schema."""
        self.node = node
        self.args: dict[str, Any] = {}
        for i, parameter in enumerate(_op_signature(node.target)):
            if i < len(node.args) and not parameter.kwarg_only:
                self.args[parameter.name] = node.args[i]
            elif parameter.name in node.kwargs:
                self.args[parameter.name] = node.kwargs[parameter.name]
            elif parameter.has_default:
                self.args[parameter.name] = parameter.default
        nodes: list[Node] = []
        map_arg(tuple(self.args.values()), nodes.append)
        self.operands = [node for node in nodes if is_tensor(node)]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument `name`, or `default` if the schema of the op has no such argument."""
        return self.args.get(name, default)

    def shape(self, operand: int | str = 0) -> tuple[Size, ...]:
        """Return the global shape of an operand, selected by operand index or schema name."""
        return node_shape(self.operands[operand] if isinstance(operand, int) else self.args[operand])

    def ndim(self, operand: int | str = 0) -> int:
        """Return the number of dims of an operand, selected as in `shape`."""
        return len(self.shape(operand))

    def dim(self, name: str = "dim", operand: int = 0) -> int:
        """Return the argument `name`, a dim of the operand, as a non-negative number; 0 for a scalar operand."""
        return wrap_dim(self.args[name], self.ndim(operand))

    def results(self) -> tuple[torch.Tensor, ...]:
        """Return the results of the call as fake tensors in the global view."""
        return tuple(node_tensors(self.node))

    def with_operands(self, operands: Sequence[Any], **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of the call with its tensor operands and the arguments in `changed` replaced.

        They contain the arguments that the node passes and those in `changed`, but no further defaults. A pass assigns
        them to the node, or passes them to a copy of it.

        Args:
            operands: New tensor operands, in the order of `operands`.
            changed: New values of other arguments, by name.
        """
        new_operands = iter(operands)
        values = pytree.tree_map(lambda leaf: next(new_operands) if is_tensor(leaf) else leaf, self.args) | changed
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = True  # until the first argument that is not passed, or is passed by keyword only
        for i, (name, kwarg_only, _, _) in enumerate(_op_signature(self.node.target)):
            is_passed = (i < len(self.node.args) and not kwarg_only) or name in self.node.kwargs or name in changed
            positional = positional and is_passed and not kwarg_only
            if is_passed and positional:
                args.append(values[name])
            elif is_passed:
                kwargs[name] = values[name]
        return tuple(args), kwargs

    def result_shapes(self) -> tuple[tuple[Size, ...], ...]:
        """Return the global shapes of `results`."""
        return tuple(as_sizes(v.shape) for v in self.results())
