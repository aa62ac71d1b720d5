"""Translate score_mods of flex_attention, and expressions, to score functions of `lowering/masks/score.py`.

    score + table[h, k - q + 12]            add(s, index(table0, [head0, add(sub(k, q), 12)])), and the table
    score + slopes[h] * (k - q)             add(s, mul(head0, sub(k, q))), and the slopes
    (h % 2 == 0) | (q - k < 4), a mask      where(.., s, -inf)

Values that depend on neither a pair nor its score are computed once, outside the function. The index of a head is read
from a vector of heads, so that ranks with a share of the heads get the right ones. Unchanged, with a note: functions of
more than one pair, except lookups by all dims of a tensor; random numbers; Python floats that may change between calls,
except captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.base.dtypes import MIN_FILL, accumulation_dtype
from sp_compile.lowering.masks.score import register_score
from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_packet, node_shape
from sp_compile.passes.graph.edit import GraphEditor, interpret_graph
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.sharding.matchers import carries_gradient, constant_value

from .elements import NotSymbolic

aten = torch.ops.aten
SCORE = sympy.Symbol("s", real=True)
"""The scaled score in an expression."""
_ELEMENT_OPS = {
    aten.full_like.default, aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.detach.default,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.masked_fill.Tensor,
    *(getattr(aten.where, kind) for kind in ("self", "Scalar", "ScalarSelf", "ScalarOther")),
    *(getattr(op, kind) for op in (aten.__and__, aten.__or__, aten.__xor__) for kind in ("Tensor", "Scalar")),
}  # fmt: skip
_HEAD: Any = object()  # the index of the query head, which is read from a vector
_COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}
_ARITHMETIC = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.pow, aten.tanh, aten.exp, aten.abs, aten.to,
    aten._to_copy, aten.full,
}  # fmt: skip
_EXPRESSION_OPS: dict[Any, Any] = {
    sympy.Add: aten.add.Tensor,
    sympy.Mul: aten.mul.Tensor,
    sympy.Pow: aten.pow.Tensor_Scalar,
    sympy.tanh: aten.tanh.default,
    sympy.exp: aten.exp.default,
    sympy.Abs: aten.abs.default,
}


def head_symbol(index: int) -> sympy.Symbol:
    """Return the value of a vector at the query head, in an expression."""
    return sympy.Symbol(f"head{index}", real=True)


def register_expression(expr: sympy.Expr) -> str:
    """Register an expression over `SCORE`, `head_symbol` and the indices of query and key; return its name.

    Raises:
        NotSymbolic: The expression has another function than sums, products, powers, tanh, exp and Abs.
    """
    graph = Graph()
    inputs = {x: graph.placeholder(str(x)) for x in sorted(expr.free_symbols | {SCORE}, key=str)}
    heads = [x for x in inputs if not x.is_integer and x != SCORE]

    def write(e: sympy.Expr) -> Any:
        """Return a number, or the node of an expression."""
        if e.is_number:
            return int(e) if e.is_Integer else float(e)
        if e.is_Symbol:
            return inputs[e]
        op = _EXPRESSION_OPS.get(e.func)
        if op is None or (e.is_Pow and not e.exp.is_number):
            raise NotSymbolic(f"no score function has {e.func}")
        args = []
        for x in sorted(e.args, key=lambda x: bool(x.is_number)):  # a number cannot be the first operand
            args.append(write(x))
            if isinstance(args[-1], Node) and not e.is_integer and (x.is_integer or x in heads):
                args[-1] = graph.call_function(aten.type_as.default, (args[-1], inputs[SCORE]))
        first, *others = args
        if not others:
            return graph.call_function(op, (first,))
        return reduce(lambda a, b: graph.call_function(op, (a, b)), others, first)

    graph.output(write(expr))
    return register_score(graph)


@dataclass(frozen=True)
class ScoreOperands:
    """Score function and the values of the outer graph that it reads (`lowering/masks/score.py`)."""

    name: str  # name of the score function, "" for none
    heads: Sequence[Node] = ()  # per-head vectors
    tables: Sequence[Node] = ()  # lookup tables


def write_score(
    body: GraphModule, reads: Sequence[Any], masks: Sequence[GraphModule], mask_reads: Sequence[Any],
    editor: GraphEditor, like: Node, is_fill: Callable[[Node], bool] | None = None,
) -> ScoreOperands:  # fmt: skip
    """Register the score function of a score_mod and of conditions.

    Args:
        body: The score_mod, a function of the score, b, h, q, k and captured values.
        reads: The captured values of `body`.
        masks: Conditions, functions of b, h, q, k and captured values; the score is -inf where one fails.
        mask_reads: The captured values of the conditions.
        editor: The editor of the outer graph, at the insertion point of values that do not depend on a pair.
        like: The attention, for metadata of new nodes.
        is_fill: Function that returns True if a value of the outer graph may contain fills; None if fills are exact.

    Returns:
        The score function, and the vectors and tables that it reads.

    Raises:
        NotSymbolic: A function has no score function.
    """
    writer = _ScoreWriter(editor, like)
    try:
        found = writer.inline(body, [writer.element("s"), *writer.indices, *reads])
        for mask in masks:
            allowed = writer.inline(mask, [*writer.indices, *mask_reads])
            found = writer.line(aten.where.ScalarOther, [allowed, found, -torch.inf], {})
    except NotSymbolic:
        editor.drop(*writer.made)
        raise
    if found is writer.element("s"):
        return ScoreOperands("")
    writer.graph.output(found)
    fills = (
        is_fill is not None
        and any(node_packet(n) not in _ARITHMETIC for n in writer.graph.nodes if n.op == "call_function")
        and (_adds_fills(writer.graph) or any(map(is_fill, [*writer.heads, *writer.tables])))
    )
    return ScoreOperands(register_score(writer.graph, fills), writer.heads, writer.tables)


@dataclass(frozen=True)
class _TableElement:
    """Element of a tensor of the outer graph."""

    table: Node  # the tensor
    indices: tuple[Any, ...]  # one index per dim, None for open dims


class _ScoreWriter:
    """Writer of a score function; values are its nodes, numbers, outer nodes and their elements."""

    def __init__(self, editor: GraphEditor, like: Node) -> None:
        self.editor, self.like, self.graph = editor, like, Graph()
        self.lines: dict[str, Node] = {}
        self.made: list[Node] = []
        self.heads: list[Node] = []
        self.tables: list[Node] = []
        self.numbers: Node | None = None
        self.indices = [self.element("b"), _HEAD, self.element("q"), self.element("k")]

    def element(self, name: str) -> Node:
        """Return an input of the score function."""
        return self._write(name, lambda: self.graph.placeholder(name))

    def line(self, op: Any, args: list[Any], kwargs: dict[str, Any]) -> Node:
        """Append a call on elements and return its value."""
        return self._write(f"{op}{args}{kwargs}", lambda: self.graph.call_function(op, (*args,), kwargs))

    def _write(self, key: str, make: Callable[[], Node]) -> Node:
        if key not in self.lines:
            self.lines[key] = make()
        return self.lines[key]

    def inline(self, body: GraphModule, operands: Sequence[Any]) -> Any:
        """Inline a body and return its value. Raises NotSymbolic."""
        return self._value(interpret_graph(body, operands, self._write_computed))

    def _write_computed(self, node: Node, env: Mapping[Node, Any]) -> Any:
        held = constant_value(node)
        if held is not None:
            return self._constant(held, node.meta["val"].dtype)
        if node.op == "get_attr":
            raise NotSymbolic(f"it creates a tensor, {node.name}")
        given = [env[x] for x in node.all_input_nodes]
        if given and all(map(self._is_outer, given)):
            if node.target is aten.item.default:  # of a Python float that may change between calls
                return self._cast_number(given[0])
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            return self._outer_op(node.target, args, kwargs)
        if node.target in (aten.index.Tensor, aten.select.int):
            return self._write_lookup(node, env)
        if not _is_element_op(node.target) or node.meta["val"].ndim:
            raise NotSymbolic(f"it calls {node.target}, which is not elementwise over pairs")
        args, kwargs = (self._write_arguments(x, env) for x in (list(node.args), dict(node.kwargs)))
        # A size that other calls may change was a number when the body was traced, and is a tensor here.
        sized = any(isinstance(x, Node) and x.op == "placeholder" and x.name.startswith("table") for x in args)
        kwargs = {k: v for k, v in kwargs.items() if v is not None and k != "pin_memory"}
        return self.line(node.target.overloadpacket if sized else node.target, args, kwargs)

    def _is_outer(self, x: Any) -> bool:
        return isinstance(x, Node) and x.graph is not self.graph

    def _constant(self, value: Any, dtype: torch.dtype) -> Node:
        return self.line(aten.full.default, [[], value], {"dtype": dtype})

    def _cast_number(self, x: Node) -> Node:
        """Return a float of the outer graph in the dtype of scores, as which a Python float would be promoted."""
        cast = self.editor.cast(x, accumulation_dtype(self.like.args[0].meta["val"].dtype), self.like)
        self.made += [cast] if cast is not x else []
        return cast

    def _write_arguments(self, x: Any, env: Mapping[Node, Any]) -> Any:
        if isinstance(x, dict):
            return {k: self._write_arguments(v, env) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [self._write_arguments(y, env) for y in x]
        return self._value(env[x] if isinstance(x, Node) else x)

    def _value(self, found: Any) -> Any:
        """Return a value as an argument of a call. Raises NotSymbolic."""
        if found is _HEAD:
            return self._head_number()
        if isinstance(found, _TableElement):
            if None in found.indices:
                raise NotSymbolic(f"it indexes only some dims of {found.table.name}")
            if self._is_head_vector(found):
                return self._head(found.table)
            return self.line(aten.index.Tensor, [self._table(found.table), [*map(self._value, found.indices)]], {})
        if self._is_outer(found):
            if is_tensor(found) and found.meta["val"].ndim:
                raise NotSymbolic(f"it reads {found.name} without an index")
            return self._table(found)
        if not isinstance(found, Node | bool | int | float | torch.dtype | None):
            raise NotSymbolic(f"it has the operand {found!r}")
        return found

    def _write_lookup(self, node: Node, env: Mapping[Node, Any]) -> _TableElement:
        call = OpCall(node)
        of = env[call.operands[0]]
        if self._is_outer(of):
            of = _TableElement(of, (None,) * len(node_shape(of)))
        if not isinstance(of, _TableElement):
            raise NotSymbolic(f"it indexes {call.operands[0].name}, which it computes for each pair")
        open_dims = [d for d, index in enumerate(of.indices) if index is None]
        if node.target is aten.select.int:
            given: list[Any] = [None] * call.dim() + [self._constant(call["index"], torch.int64)]
        else:
            given = [None if x is None else env[x] for x in call["indices"]]
        indices = list(of.indices)
        for dim, index in zip(open_dims, given):
            indices[dim] = index
        return _TableElement(of.table, tuple(indices))

    def _is_head_vector(self, x: _TableElement) -> bool:
        """Return True if each rank may read the vector's values of its heads only."""
        return (
            x.indices == (_HEAD,)
            and is_same_size(node_shape(x.table)[0], node_shape(self.like.args[0])[1])
            and not carries_gradient(x.table)
        )

    def _head(self, x: Node) -> Node:
        if x not in self.heads:
            self.heads.append(x)
        return self.element(f"head{self.heads.index(x)}")

    def _table(self, x: Node) -> Node:
        if not is_tensor(x):
            value = x.meta["val"]
            if not isinstance(value, int | torch.SymInt):
                raise NotSymbolic(f"it reads {x.name}, a number that may change between calls")
            kind = {"dtype": torch.int64, "device": self.like.args[0].meta["val"].device}
            x = self._outer_op(aten.full.default, ([], self.editor.sizes(as_size(value))), kind)
        if x not in self.tables:
            self.tables.append(x)
        return self.element(f"table{self.tables.index(x)}")

    def _head_number(self) -> Node:
        """Return the index of the query head."""
        if self.numbers is None:
            q = self.like.args[0]
            kind = {"dtype": torch.int64, "device": q.meta["val"].device}
            self.numbers = self._outer_op(aten.arange.default, (self.editor.sizes(node_shape(q)[1]),), kind)
        return self._head(self.numbers)

    def _outer_op(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Emit an op in the outer graph."""
        self.made.append(self.editor.compute(target, args, self.like, kwargs))
        return self.made[-1]


def _is_element_op(op: Any) -> bool:
    """Return True if a score function may call the op."""
    if not isinstance(op, OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return op in _ELEMENT_OPS or (torch.Tag.pointwise in op.tags and not draws and not schema_of(op).is_mutable)


def _adds_fills(graph: Graph) -> bool:
    """Return True if constants of the graph may be fills, except constants in indices or conditions."""
    wanted = {graph.output_node().args[0]}
    for node in reversed(graph.nodes):
        packet = node_packet(node)
        if node not in wanted or packet in _COMPARISONS:
            continue
        args = [*node.args, *node.kwargs.values()]
        given = args[:1] if packet is aten.index else args[1:] if packet is aten.where else args
        if any(isinstance(x, int | float) and MIN_FILL <= abs(x) < float("inf") for x in given):
            return True
        wanted |= {x for x in given if isinstance(x, Node)}
    return False


def split_conditions(body: GraphModule) -> list[GraphModule]:
    """Split a boolean body into the bodies of conditions whose conjunction it is."""
    found: list[GraphModule] = []
    waiting = [body.graph.output_node().args[0]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node.target in _AND_OPS and node.meta["val"].dtype == torch.bool:
            waiting += reversed(node.args)
            continue
        graph = torch.fx.Graph()
        env: dict[Node, Node] = {}
        result = graph.graph_copy(body.graph, env)
        graph.output(env[node] if isinstance(node, Node) else result)
        for fresh in reversed(list(graph.nodes)):
            if fresh.op in ("call_function", "get_attr") and not fresh.users:
                graph.erase_node(fresh)
        found.append(GraphModule(body, graph))
    return found


_AND_OPS = {aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
