"""Translate score_mods of flex_attention, and expressions, to score functions.

    score + table[h, k - q + 12]            add(s, index(table0, [head0, add(sub(k, q), 12)])), and the table
    score + slopes[h] * (k - q)             add(s, mul(head0, sub(k, q))), and the slopes
    (h % 2 == 0) | (q - k < 4), a mask      where(.., s, -inf)

A score function is a graph of elementwise ops on one pair: its inputs are the score s, the indices b, q and k, the
elements head0, head1, ... of per-head vectors at the pair's head, and tables. The *outer graph* is the user's, which
contains the attention. Values that depend on neither a pair nor its score are computed there, once. A *body* is the
graph of a score_mod or a mask_mod; a *fill* is a large negative finite number in place of -inf. The index of a head is
read from a vector of heads, so that ranks with a share of the heads get the right ones.

Unchanged, with a note: functions of more than one pair, except lookups by all dims of a tensor; random numbers; Python
floats that may change between calls, except captured ones.
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
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.canonical.elementwise_functions import is_pure_pointwise
from sp_compile.passes.graph.call import OpCall, is_tensor, node_packet, node_shape
from sp_compile.passes.graph.edit import GraphEditor, interpret_graph
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.sharding.attention_axes import constant_factors
from sp_compile.passes.sharding.matchers import constant_value, may_carry_gradient

from .elements import NotSymbolic

aten = torch.ops.aten
SCORE = sympy.Symbol("s", real=True)  # the scaled score in an expression
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
    """Return the symbol head0, head1, ... for the element of a per-head vector at the head of the query.

    An expression of a score function reads it; `index` is the number of the vector among those of the function.
    """
    return sympy.Symbol(f"head{index}", real=True)


def register_expression(expr: sympy.Expr) -> str:
    """Register an expression as a score function and return its name.

    A score function changes the score s of one query and one key, as 30*tanh(s/30) does.

    Args:
        expr: An expression of `SCORE`, `head_symbol(0)`, ... and the indices of query and key.

    Raises:
        NotSymbolic: The expression has another function than sums, products, powers, tanh, exp and Abs.
    """
    graph = Graph()
    inputs = {x: graph.placeholder(str(x)) for x in sorted(expr.free_symbols | {SCORE}, key=str)}
    heads = [x for x in inputs if not x.is_integer and x != SCORE]  # the other symbols are indices

    def write(e: sympy.Expr) -> Any:
        """Append the nodes that compute an expression to `graph`, and return its node, or a number for a constant."""
        if e.is_number:
            return int(e) if e.is_Integer else float(e)
        if e.is_Symbol:
            return inputs[e]
        op = _EXPRESSION_OPS.get(e.func)
        if op is None or (e.is_Pow and not e.exp.is_number):
            raise NotSymbolic(f"no score function has {e.func}")
        args = []
        for x in sorted(e.args, key=lambda x: bool(x.is_number)):  # numbers last: the first operand must be a tensor
            arg = write(x)
            # Where an integer or per-head number meets other values, it is cast to the dtype of the score.
            if isinstance(arg, Node) and not e.is_integer and (x.is_integer or x in heads):
                arg = graph.call_function(aten.type_as.default, (arg, inputs[SCORE]))
            args.append(arg)
        if len(args) == 1:
            return graph.call_function(op, (args[0],))
        return reduce(lambda a, b: graph.call_function(op, (a, b)), args)  # sums and products have binary ops

    graph.output(write(expr))
    return register_score(graph)


@dataclass(frozen=True)
class ScoreOperands:
    """Score function and the values of the outer graph that it reads (`lowering/masks/score.py`)."""

    name: str  # name of the score function, "" for none
    heads: Sequence[Node] = ()  # per-head vectors
    tables: Sequence[Node] = ()  # lookup tables


def write_score(
    body: GraphModule, captured: Sequence[Any], masks: Sequence[GraphModule], mask_captured: Sequence[Any],
    editor: GraphEditor, like: Node, is_fill: Callable[[Node], bool] | None = None,
) -> ScoreOperands:  # fmt: skip
    """Register the score function of a score_mod and of conditions.

    A score function computes the score of one pair of query and key. Values that depend on no pair, such as a table,
    are computed in the graph that contains the attention, the outer graph.

    Args:
        body: The score_mod, a function of the score, b, h, q, k and captured values.
        captured: The captured values of `body`.
        masks: Conditions, functions of b, h, q, k and captured values; the score is -inf where one fails.
        mask_captured: The captured values of the conditions.
        editor: The editor of the outer graph, at the insertion point of values that do not depend on a pair.
        like: The attention, for metadata of new nodes.
        is_fill: Function that returns True if a value of the outer graph may contain fills, large negative finite
            numbers; None if fills have the effect of -inf.

    Returns:
        The score function, and the vectors and tables that it reads.

    Raises:
        NotSymbolic: A function has no score function.
    """
    writer = _ScoreWriter(editor, like)
    score = writer.read_input("s")
    try:
        result = writer.inline(body, [score, *writer.indices, *captured])
        for mask in masks:
            allowed = writer.inline(mask, [*writer.indices, *mask_captured])
            result = writer.call(aten.where.ScalarOther, [allowed, result, -torch.inf], {})
    except NotSymbolic:
        editor.drop(*writer.outer_nodes)
        raise
    if result is score:  # the score is unchanged
        return ScoreOperands("")
    writer.graph.output(result)
    # A function may give a fill to some pairs if it selects between values (where, a table), and a value may be one.
    has_fills = False
    if is_fill is not None and not all(_is_arithmetic(n) for n in writer.graph.nodes):
        has_fills = _may_add_fills(writer.graph) or any(map(is_fill, [*writer.heads, *writer.tables]))
    return ScoreOperands(register_score(writer.graph, has_fills), writer.heads, writer.tables)


def _is_arithmetic(node: Node) -> bool:
    """Return True for an input, the output, and an op like a sum or tanh, which does not select between values."""
    return node.op != "call_function" or node_packet(node) in _ARITHMETIC


@dataclass(frozen=True)
class _TableElement:
    """Element of a tensor of the outer graph; a dim without an index yet is *open*."""

    table: Node  # the tensor
    indices: tuple[Any, ...]  # one index per dim, None for open dims


class _ScoreWriter:
    """Writer of a score function.

    Values are nodes of the score function, numbers, nodes of the outer graph and their elements (`_TableElement`). Its
    methods raise NotSymbolic for what a score function cannot express. `like` is the attention in the outer graph.
    """

    def __init__(self, editor: GraphEditor, like: Node) -> None:
        self.editor, self.like, self.graph = editor, like, Graph()
        self.q = like.args[0].meta["val"]  # (B, H, Q, D)
        self.known: dict[str, Node] = {}  # inputs and calls of the score function by their text, each written once
        self.outer_nodes: list[Node] = []  # emitted nodes of the outer graph
        self.heads: list[Node] = []  # per-head vectors that it reads, inputs head0, head1, ...
        self.tables: list[Node] = []  # other tensors that it reads, inputs table0, table1, ...
        self.head_indices: Node | None = None  # the vector 0, 1, ..., H - 1, if it is read
        # the arguments b, h, q and k of a score_mod or mask_mod; h, which `_HEAD` represents, is no input
        self.indices = [self.read_input("b"), _HEAD, self.read_input("q"), self.read_input("k")]

    def read_input(self, name: str) -> Node:
        """Return the input of the score function with this name, which is added if it is new."""
        if name not in self.known:
            self.known[name] = self.graph.placeholder(name)
        return self.known[name]

    def call(self, op: Any, args: list[Any], kwargs: dict[str, Any]) -> Node:
        """Return a call in the score function; equal calls are appended once."""
        key = f"{op}{args}{kwargs}"
        if key not in self.known:
            self.known[key] = self.graph.call_function(op, (*args,), kwargs)
        return self.known[key]

    def inline(self, body: GraphModule, operands: Sequence[Any]) -> Any:
        """Write the ops of a score_mod or mask_mod to the score function, and return its result, a node or number."""
        return self._to_argument(interpret_graph(body, operands, self._inline_node))

    def _inline_node(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Return the value of a node of a score_mod or mask_mod.

        It is a node of the score function or, if it depends on no pair of query and key, a new node of the outer graph
        (the user's graph, which contains the attention). For an index or select, it is a `_TableElement`.

        Args:
            node: The node.
            values: The values of the nodes before it.
        """
        constant = constant_value(node)
        if constant is not None:
            return self._constant(constant, node.meta["val"].dtype)
        if node.op == "get_attr":
            raise NotSymbolic(f"it creates a tensor, {node.name}")
        operands = [values[x] for x in node.all_input_nodes]
        if operands and all(map(self._is_outer, operands)):
            if node.target is aten.item.default:  # a Python float that may change between calls, traced as a tensor
                return self._cast_number(operands[0])
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            return self._emit_outer(node.target, args, kwargs)
        if node.target in (aten.index.Tensor, aten.select.int):
            return self._look_up(node, values)
        # Values of a pair have no dims.
        if not (node.target in _ELEMENT_OPS or is_pure_pointwise(node.target)) or node.meta["val"].ndim:
            raise NotSymbolic(f"it calls {node.target}, which is not elementwise over pairs")
        args, kwargs = pytree.tree_map(
            lambda x: self._to_argument(values[x] if isinstance(x, Node) else x), (list(node.args), dict(node.kwargs))
        )
        # A size that other calls may change was a number when the body was traced, and is a tensor (a table) here, for
        # which the op has another overload.
        has_table = any(isinstance(x, Node) and x.op == "placeholder" and x.name.startswith("table") for x in args)
        # Without options that are None, which is their default, and without pin_memory, which changes no value.
        kwargs = {k: v for k, v in kwargs.items() if v is not None and k != "pin_memory"}
        return self.call(node.target.overloadpacket if has_table else node.target, args, kwargs)

    def _is_outer(self, x: Any) -> bool:
        """Return True for a node of the outer graph, whose value is equal for all pairs."""
        return isinstance(x, Node) and x.graph is not self.graph

    def _constant(self, value: Any, dtype: torch.dtype) -> Node:
        """Return a constant 0-dim tensor of the score function."""
        return self.call(aten.full.default, [[], value], {"dtype": dtype})

    def _cast_number(self, x: Node) -> Node:
        """Return a number tensor of the outer graph in the dtype of scores.

        It takes the place of a Python float, which does not change the dtype of a result.
        """
        cast = self.editor.cast(x, accumulation_dtype(self.q.dtype), self.like)
        if cast is not x:
            self.outer_nodes.append(cast)
        return cast

    def _to_argument(self, value: Any) -> Any:
        """Return a value of `_inline_node` as an argument of a call: a number or a node of the score function.

        Elements and 0-dim values of the outer graph become inputs of the score function.
        """
        if value is _HEAD:
            return self._read_head_index()
        if isinstance(value, _TableElement):
            if None in value.indices:
                raise NotSymbolic(f"it indexes only some dims of {value.table.name}")
            if self._is_head_vector(value):
                return self._read_head_element(value.table)
            table, indices = self._read_table(value.table), [*map(self._to_argument, value.indices)]
            return self.call(aten.index.Tensor, [table, indices], {})
        if self._is_outer(value):
            if is_tensor(value) and value.meta["val"].ndim:
                raise NotSymbolic(f"it reads {value.name} without an index")
            return self._read_table(value)
        if not isinstance(value, Node | bool | int | float | torch.dtype | None):
            raise NotSymbolic(f"it has the operand {value!r}")
        return value

    def _look_up(self, node: Node, values: Mapping[Node, Any]) -> _TableElement:
        """Return the element of a table that an index or select reads.

        table[i][j] is two such nodes. The first one returns the element with indices (i, None): dim 1 is open, without
        an index. The second one, whose dims are the open ones, sets it.

        Args:
            node: The index or select, a node of a score_mod or mask_mod.
            values: The values of the nodes before it.
        """
        call = OpCall(node)
        source = values[call.operands[0]]
        if self._is_outer(source):
            source = _TableElement(source, (None,) * len(node_shape(source)))
        if not isinstance(source, _TableElement):
            raise NotSymbolic(f"it indexes {call.operands[0].name}, which it computes for each pair")
        if node.target is aten.select.int:
            new_indices: list[Any] = [None] * call.dim() + [self._constant(call["index"], torch.int64)]
        else:
            new_indices = [None if x is None else values[x] for x in call["indices"]]
        open_dims = [d for d, index in enumerate(source.indices) if index is None]
        indices = list(source.indices)
        for dim, index in zip(open_dims, new_indices):
            indices[dim] = index
        return _TableElement(source.table, tuple(indices))

    def _is_head_vector(self, x: _TableElement) -> bool:
        """Return True for vector[h], an element of a vector (H,) at the head of the query.

        Such vectors are passed separately from tables, as a rank with a share of the heads needs only its elements. A
        vector with a gradient is a table: only tables get gradients.
        """
        if x.indices != (_HEAD,) or may_carry_gradient(x.table):
            return False
        return is_same_size(node_shape(x.table)[0], as_size(self.q.shape[1]))

    def _read_head_element(self, x: Node) -> Node:
        """Return the input head0, head1, ... of the score function for vector[h] of a per-head vector x."""
        if x not in self.heads:
            self.heads.append(x)
        return self.read_input(f"head{self.heads.index(x)}")

    def _read_table(self, x: Node) -> Node:
        """Return the input table0, table1, ... of the score function for a tensor x of the outer graph.

        A size, which may change between calls, becomes a 0-dim tensor.
        """
        if not is_tensor(x):
            value = x.meta["val"]
            if not isinstance(value, int | torch.SymInt):
                raise NotSymbolic(f"it reads {x.name}, a number that may change between calls")
            options = {"dtype": torch.int64, "device": self.q.device}
            x = self._emit_outer(aten.full.default, ([], self.editor.sizes(as_size(value))), options)
        if x not in self.tables:
            self.tables.append(x)
        return self.read_input(f"table{self.tables.index(x)}")

    def _read_head_index(self) -> Node:
        """Return the input of the score function that is the index h of the query's head.

        It is an element of the vector 0, 1, ..., H - 1, so that a rank with a share of the heads has the right indices.
        """
        if self.head_indices is None:
            options = {"dtype": torch.int64, "device": self.q.device}
            num_heads = self.editor.sizes(as_size(self.q.shape[1]))
            self.head_indices = self._emit_outer(aten.arange.default, (num_heads,), options)
        return self._read_head_element(self.head_indices)

    def _emit_outer(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Emit an op in the outer graph, and record it, so that `write_score` can erase it after an error."""
        self.outer_nodes.append(self.editor.compute(target, args, self.like, kwargs))
        return self.outer_nodes[-1]


def _may_add_fills(graph: Graph) -> bool:
    """Return True if a score function may return a constant that is a fill, a large negative finite number.

    Constants in indices and conditions do not reach the result.
    """
    factors = constant_factors(graph)
    reaches_result = {graph.output_node().args[0]}
    for node in reversed(graph.nodes):  # from the result back to its operands
        packet = node_packet(node)
        if node not in reaches_result or packet in _COMPARISONS:  # a comparison returns no constant
            continue
        args = [*node.args, *node.kwargs.values()]
        if packet is aten.index:
            args = args[:1]  # without the indices
        elif packet is aten.where:
            args = args[1:]  # without the condition
        # The absolute value, as the function may subtract a large positive constant, or multiply by -1.
        is_large = any(isinstance(x, int | float) and MIN_FILL <= abs(x) < float("inf") for x in args)
        if is_large or factors[node] >= MIN_FILL:
            return True
        reaches_result |= {x for x in args if isinstance(x, Node)}
    return False


def split_conditions(body: GraphModule) -> list[GraphModule]:
    """Split the graph of a mask_mod `a & b & ...` into graphs of the conditions a, b, ..., with the same inputs.

    Callers try to express each condition by a predicate.
    """
    conditions: list[GraphModule] = []
    waiting = [body.graph.output_node().args[0]]  # a stack: its last entry is next
    while waiting:
        result = waiting.pop()
        if isinstance(result, Node) and result.target in _AND_OPS and result.meta["val"].dtype == torch.bool:
            waiting += reversed(result.args)
            continue
        # Copy the whole graph, let it return the condition, and erase what the condition does not need, users first.
        graph = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        body_result = graph.graph_copy(body.graph, copies)
        graph.output(copies[result] if isinstance(result, Node) else body_result)  # for a constant, the whole mask
        for node in reversed(list(graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                graph.erase_node(node)
        conditions.append(GraphModule(body, graph))
    return conditions


_AND_OPS = {aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
