"""Translate a score_mod of flex_attention to text of `lowering/masks/score.py`.

    30 * tanh(score / 30)                          30*tanh(s/30)
    score + slopes[h] * (k - q)                    s + head0*(k - q), and slopes

Unchanged, with a note: lookups by query, key or batch entry (bias tables), selections (where), and learned vectors,
whose gradient is not implemented.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks import score
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.sharding.matchers import carries_gradient, constant_value, move_source

from .elements import NotSymbolic

aten = torch.ops.aten
HEAD_NUMBER = sympy.Symbol("h")
BATCH_NUMBER = sympy.Symbol("b")
_SCORE_OPS: dict[Any, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "pow": operator.pow,
    "tanh": sympy.tanh,
    "exp": sympy.exp,
    "abs": sympy.Abs,
}


def score_text(body: GraphModule, reads: Sequence[Any]) -> tuple[str, list[Node]]:
    """Return the text of a score_mod and the values of the outer graph that it reads.

    Args:
        body: A function of the score, b, h, q and k, all scalars, and of captured values.
        reads: The captured values.

    Returns:
        The text, "" for the identity, and the nodes it reads: numbers, or vectors with a number per head.

    Raises:
        NotSymbolic: No text describes the function.
    """
    inputs = body.graph.find_nodes(op="placeholder")
    places = [score.SCORE_NAME, BATCH_NUMBER, HEAD_NUMBER, score.score_symbol("q"), score.score_symbol("k")]
    reader = _ScoreReader(dict(zip(inputs, [*places, *reads])))
    found = reader.value(body.graph.output_node().args[0])
    if found == score.SCORE_NAME:
        return "", []
    if found.free_symbols & {BATCH_NUMBER, HEAD_NUMBER}:
        raise NotSymbolic("its score_mod computes with the index of a head or a batch entry")
    text = str(found)
    try:
        score.check_score(text)
    except SpError as why:
        raise NotSymbolic(why.cause) from None
    return text, reader.heads


class _ScoreReader:
    """Reader of expressions in one body; `env` maps its inputs to expressions or outer values."""

    def __init__(self, env: dict[Node, Any]) -> None:
        self.env = env
        self.heads: list[Node] = []

    def value(self, x: Any) -> Any:
        """Return the expression of a value. Raises NotSymbolic."""
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return sympy.Rational(repr(x)) if isinstance(x, float) else sympy.Integer(x)
        if not isinstance(x, Node):
            raise NotSymbolic(f"its score_mod has the operand {x!r}")
        if x not in self.env:
            self.env[x] = self._read_computed(x)
        found = self.env[x]
        if isinstance(found, (int, float)):
            return self.value(found)
        if is_tensor(found) and not found.meta["val"].ndim:
            return self._read_captured(found)
        if not isinstance(found, sympy.Expr):
            raise NotSymbolic(f"its score_mod reads the captured tensor {x.name} without an index")
        return found

    def _read_computed(self, node: Node) -> Any:
        constant = constant_value(node)
        if constant is not None:
            return self.value(constant)
        if node.target is aten.index.Tensor:
            return self._read_lookup(OpCall(node))
        if node.target is aten.item.default:  # of a Python float that may change between calls
            return self.value(node.args[0])
        source = move_source(node)
        if source is not None and source.meta["val"].ndim == node.meta["val"].ndim == 0:
            if node.meta["val"].dtype in HALF or not node.meta["val"].is_floating_point():
                raise NotSymbolic(f"its score_mod rounds to {node.meta['val'].dtype}")
            return self.value(source)
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        plain = all(v in (1, None) for v in node.kwargs.values())
        if name not in _SCORE_OPS or not plain:
            raise NotSymbolic(f"its score_mod calls {node.target}, which a score text does not support")
        return _SCORE_OPS[name](*map(self.value, node.args))

    def _read_lookup(self, call: OpCall) -> sympy.Expr:
        """Return vector[h], a number per head."""
        vector, indices = self.env.get(call["self"]), [self.env.get(i) for i in call["indices"]]
        if not isinstance(vector, Node) or indices != [HEAD_NUMBER] or call.ndim("self") != 1:
            raise NotSymbolic("its score_mod indexes more than one number per head")
        return self._read_captured(vector)

    def _read_captured(self, x: Node) -> sympy.Expr:
        """Return a number, or a number per head, from the outer graph."""
        if carries_gradient(x):
            raise NotSymbolic(f"its score_mod reads {x.name}, which may need a gradient")
        if x not in self.heads:
            self.heads.append(x)
        return score.score_symbol(f"head{self.heads.index(x)}")
