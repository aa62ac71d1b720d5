"""Translate functions of flex_attention to programs of `lowering/masks/score_program.py`.

    score + table[h, k - q + 12]            t0 = aten.sub.Tensor(k, q); .. aten.add.Tensor(s, t2), and the table
    (h % 2 == 0) | (q - k < 4), a mask      .. aten.where.ScalarOther(t3, s, -inf)

Values that depend on neither a pair nor its score are computed once, outside the program. The index of a head is read
from a vector of heads, so that ranks with a share of the heads get the right ones. Unchanged, with a note: functions of
more than one pair, except lookups by all dims of a tensor; random numbers; Python floats that may change between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks import score
from sp_compile.lowering.masks import score_program as program
from sp_compile.lowering.masks.score_program import Name
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import GraphEditor, interpret_graph
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.sharding.matchers import constant_value

from .elements import NotSymbolic

aten = torch.ops.aten


@dataclass(frozen=True)
class ScoreText:
    """Score modification and the values of the outer graph that it reads (`lowering/masks/score.py`)."""

    text: str  # text or program of a score
    heads: Sequence[Node] = ()  # per-head vectors
    tables: Sequence[Node] = ()  # lookup tables


def program_text(
    body: GraphModule, reads: Sequence[Any], masks: Sequence[GraphModule], mask_reads: Sequence[Any],
    editor: GraphEditor, like: Node,
) -> ScoreText:  # fmt: skip
    """Return the program of a score_mod and of conditions, at the editor's insertion point.

    Args:
        body: The score_mod, a function of the score, b, h, q, k and captured values.
        reads: The captured values of `body`.
        masks: Conditions, functions of b, h, q, k and captured values; the score is -inf where one fails.
        mask_reads: The captured values of the conditions.
        editor: The editor of the outer graph.
        like: The attention, for metadata of new nodes.

    Returns:
        The program, and the vectors and tables that it reads.

    Raises:
        NotSymbolic: A function has no program.
    """
    writer = _ProgramWriter(editor, like)
    try:
        found = writer.inline(body, [Name("s"), *writer.indices, *reads])
        for mask in masks:
            allowed = writer.inline(mask, [*writer.indices, *mask_reads])
            found = writer.line(aten.where.ScalarOther, [allowed, found, -torch.inf], {})
        text = writer.result(found)
        score.check_score(text)
    except (NotSymbolic, SpError) as why:
        editor.drop(*writer.emitted)
        raise NotSymbolic(why.cause) from None
    return ScoreText(text, writer.heads, writer.tables)


@dataclass(frozen=True)
class _TableElement:
    """Element of a tensor of the outer graph."""

    table: Node  # the tensor
    indices: tuple[Any, ...]  # one index per dim, None for open dims


class _ProgramWriter:
    """Writer of function bodies as lines; values are Names, numbers, outer nodes and their elements."""

    def __init__(self, editor: GraphEditor, like: Node) -> None:
        self.editor, self.like = editor, like
        self.lines: dict[str, Name] = {}
        self.emitted: list[Node] = []
        self.heads: list[Node] = []
        self.tables: list[Node] = []
        self.indices = [Name("b"), Name("head0"), Name("q"), Name("k")]

    def inline(self, body: GraphModule, operands: Sequence[Any]) -> Any:
        """Inline a body and return its value. Raises NotSymbolic."""
        return self._read_value(interpret_graph(body, operands, self._write_computed))

    def line(self, op: Any, args: list[Any], kwargs: dict[str, Any]) -> Name:
        """Append a call on elements and return its value."""
        return self._write(program.call_text(op, args, kwargs))

    def _write(self, text: str) -> Name:
        return self.lines.setdefault(text, Name(f"t{len(self.lines)}"))

    def result(self, value: Any) -> str:
        """Return the program that ends with the value."""
        lines = [f"{name} = {text}" for text, name in self.lines.items() if name != value]
        last = next((text for text, name in self.lines.items() if name == value), None)
        return "; ".join([*lines, last or program.call_text(aten.clone.default, [value], {})])

    def _write_computed(self, node: Node, env: Mapping[Node, Any]) -> Any:
        constant = constant_value(node)
        if constant is not None:
            return self._write(program.typed_constant(constant, node.meta["val"].dtype))
        if node.op == "get_attr":
            raise NotSymbolic(f"it creates a tensor, {node.name}")
        operands = [env[x] for x in node.all_input_nodes]
        if operands and all(isinstance(x, Node) for x in operands):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            return self._outer_op(node.target, args, kwargs)
        if node.target in (aten.index.Tensor, aten.select.int):
            return self._write_lookup(node, env)
        if not program.is_known_op(node.target) or node.meta["val"].ndim:
            raise NotSymbolic(f"it calls {node.target}, which is not elementwise over pairs")
        args, kwargs = (self._write_arguments(x, env) for x in (list(node.args), dict(node.kwargs)))
        return self.line(node.target, args, {k: v for k, v in kwargs.items() if v is not None and k != "pin_memory"})

    def _write_arguments(self, x: Any, env: Mapping[Node, Any]) -> Any:
        if isinstance(x, dict):
            return {k: self._write_arguments(v, env) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [self._write_arguments(y, env) for y in x]
        return self._read(x, env)

    def _read(self, x: Any, env: Mapping[Node, Any]) -> Any:
        return self._read_value(env[x] if isinstance(x, Node) else x)

    def _read_value(self, found: Any) -> Any:
        """Return an argument of a line. Raises NotSymbolic."""
        if isinstance(found, _TableElement):
            if None in found.indices:
                raise NotSymbolic(f"it indexes only some dims of {found.table.name}")
            return self.line(aten.index.Tensor, [self._table(found.table), list(found.indices)], {})
        if isinstance(found, Node):
            if is_tensor(found) and found.meta["val"].ndim:
                raise NotSymbolic(f"it reads {found.name} without an index")
            return self._table(found)
        if isinstance(found, Name) and found == "head0" and not self.heads:
            self.heads.append(self._head_numbers())
        return found

    def _write_lookup(self, node: Node, env: Mapping[Node, Any]) -> _TableElement:
        call = OpCall(node)
        of = env[call.operands[0]]
        if isinstance(of, Node):
            of = _TableElement(of, (None,) * len(node_shape(of)))
        if not isinstance(of, _TableElement):
            raise NotSymbolic(f"it indexes {call.operands[0].name}, which it computes for each pair")
        open_dims = [d for d, index in enumerate(of.indices) if index is None]
        if node.target is aten.select.int:
            operands: list[Any] = [None] * call.dim() + [
                self._write(program.typed_constant(call["index"], torch.int64))
            ]
        else:
            operands = [None if x is None else self._read(x, env) for x in call["indices"]]
        indices = list(of.indices)
        for dim, index in zip(open_dims, operands):
            indices[dim] = index
        return _TableElement(of.table, tuple(indices))

    def _table(self, x: Node) -> Name:
        if not is_tensor(x):
            value = x.meta["val"]
            if not isinstance(value, int | torch.SymInt):
                raise NotSymbolic(f"it reads {x.name}, a number that may change between calls")
            kind = {"dtype": torch.int64, "device": self.like.args[0].meta["val"].device}
            x = self._outer_op(aten.full.default, ([], self.editor.sizes(as_size(value))), kind)
        if x not in self.tables:
            self.tables.append(x)
        return Name(f"table{self.tables.index(x)}")

    def _head_numbers(self) -> Node:
        q = self.like.args[0]
        kind = {"dtype": torch.int64, "device": q.meta["val"].device}
        return self._outer_op(aten.arange.default, (self.editor.sizes(node_shape(q)[1]),), kind)

    def _outer_op(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Emit an op in the outer graph."""
        self.emitted.append(self.editor.compute(target, args, self.like, kwargs))
        return self.emitted[-1]


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
