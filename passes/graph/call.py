"""One call of an ATen op, with its arguments by name and its tensors' global shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from sp_compile.lowering.torch_compat import pytree, schema_of

from .sizes import Size, as_sizes

WAIT_OPS = torch.ops._c10d_functional.wait_tensor.default


def is_tensor(node: Any) -> bool:
    """Is it a node whose value is a single tensor?"""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def collect_nodes(args: Any) -> list[Node]:
    """The nodes of a nest of arguments, each once, in order."""
    found: dict[Node, None] = {}
    map_arg(args, lambda n: found.setdefault(n))
    return list(found)


def node_tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    return [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def node_shape(node: Node) -> tuple[Size, ...]:
    """The shape of a tensor's node."""
    return as_sizes(node.meta["val"].shape)


def node_packet(node: Node) -> Any:
    """The op that the node calls, whichever of its overloads; what else it calls as it is; None if it calls nothing."""
    return getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None


def graph_tangents(graph: Graph) -> list[Node]:
    """The gradients of results that a joint graph of AOTAutograd takes; no other graph has any."""
    return [n for n in graph.find_nodes(op="placeholder") if is_tangent(n)]


def is_tangent(node: Node) -> bool:
    """Is it one of these?"""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def read_results(node: Node) -> dict[int, Node]:
    """What is read of a node with several results, by their numbers."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def result_number(getitem: Node) -> int:
    """Which of the tensors that its operand returns a getitem takes; ops return None for what nobody asked for."""
    source, index = getitem.args
    values = source.meta["val"] if isinstance(source, Node) else ()
    return sum(isinstance(v, torch.Tensor) for v in list(values)[:index]) if index >= 0 else index


def parse_overloads(text: str) -> list[Any]:
    """The ops of aten that the text lists: "sum.dim_IntList", or "sum" for the overload that is called default."""
    found = (name.partition(".") for name in text.split())
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in found]


@cache
def _op_signature(target: Any) -> tuple[tuple[str, bool, bool, Any], ...]:
    return tuple(
        (a.name, a.kwarg_only, a.has_default_value(), a.default_value if a.has_default_value() else None)
        for a in schema_of(target).arguments
    )


class OpCall:
    """One call of an ATen op: its arguments by schema name, its tensor operands in schema order, their shapes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.args: dict[str, Any] = {}
        for i, (name, kwarg_only, has_default, default) in enumerate(_op_signature(node.target)):
            if i < len(node.args) and not kwarg_only:
                self.args[name] = node.args[i]
            elif name in node.kwargs:
                self.args[name] = node.kwargs[name]
            elif has_default:
                self.args[name] = default
        leaves = pytree.tree_leaves(list(self.args.values()))
        self.operands: list[Node] = [leaf for leaf in leaves if is_tensor(leaf)]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument `name`, or the default where the op's schema has none of that name."""
        return self.args.get(name, default)

    def shape(self, operand: int | str = 0) -> tuple[Size, ...]:
        """The global shape of an operand, by its number among the operands or by its name in the schema."""
        return node_shape(self.operands[operand] if isinstance(operand, int) else self.args[operand])

    def ndim(self, operand: int | str = 0) -> int:
        """The number of dims of an operand, named as in `shape`."""
        return len(self.shape(operand))

    def dim(self, name: str = "dim", operand: int = 0) -> int:
        """The argument `name` as a non-negative dim of the operand."""
        return int(self.args[name]) % max(self.ndim(operand), 1)

    def results(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the call returns, as fake tensors in the global view."""
        return tuple(node_tensors(self.node))

    def with_operands(self, operands: Sequence[Any], **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the same call with other tensor operands, and other values for some arguments."""
        fresh = iter(operands)

        def swap(value: Any) -> Any:
            return pytree.tree_map(lambda leaf: next(fresh) if is_tensor(leaf) else leaf, value)

        values = {name: swap(value) for name, value in self.args.items()}
        values.update(changed)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = True
        for i, (name, kwarg_only, _, _) in enumerate(_op_signature(self.node.target)):
            given = (i < len(self.node.args) and not kwarg_only) or name in self.node.kwargs or name in changed
            positional = positional and given and not kwarg_only
            if given and positional:
                args.append(values[name])
            elif given:
                kwargs[name] = values[name]
        return tuple(args), kwargs

    def result_shapes(self) -> tuple[tuple[Size, ...], ...]:
        """The global shapes of `results`."""
        return tuple(as_sizes(v.shape) for v in self.results())
