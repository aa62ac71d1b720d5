"""The number that a tensor without dims holds, where the graph itself says it: torch.tensor(-1e9), full([], 8.0).

Batched matrix products in every spelling, seen as one: rows of `left` times rows of `right`.

    matmul(q, k.transpose(-1, -2))    bmm    baddbmm(beta=0)    einsum("bqhd,bkhd->bhqk", q, k)

A `Factor` is an operand with the views that bring it to (leading dims, rows, width); reading makes no nodes.
"""

from __future__ import annotations

import math
import operator
import string
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile._compat import FakeTensor

from .call import Call, is_tensor
from .edit import Editor
from .sizes import Size, same, sizes

aten = torch.ops.aten
COPIES = (
    aten.lift_fresh_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
)


def scalar(x: Any, dtype: torch.dtype) -> float | None:
    """A Python number, or what a tensor of no dims and of this dtype holds; None if it is not known, or not exactly."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)
    if not is_tensor(x) or x.meta["val"].ndim or x.meta["val"].dtype != dtype:
        return None
    if x.op == "get_attr":
        held = operator.attrgetter(x.target)(x.graph.owning_module)
        return float(held) if _is_constant(x) and not isinstance(held, FakeTensor) else None
    if x.op != "call_function":
        return None
    if x.target in (aten.full.default, aten.scalar_tensor.default):
        return scalar(x.args[1 if x.target is aten.full.default else 0], dtype)
    if x.target in COPIES:
        return scalar(x.args[0], dtype)
    root = scalar(x.args[0], dtype) if x.target is aten.sqrt.default else None
    return math.sqrt(root) if root is not None and root >= 0 else None


def _is_constant(x: Node) -> bool:
    """Written down by a trace, make_fx's or export's: neither a parameter nor a buffer, which the user may change."""
    return bool(x.meta.get("constant")) or str(x.target).startswith(("_tensor_constant", "lifted_tensor_"))


PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)


@dataclass(frozen=True)
class Factor:
    """An operand whose dims, taken in `order`, are (leading dims, rows, width)."""

    node: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        shape = sizes(self.node.meta["val"].shape)
        return tuple(shape[d] for d in self.order)

    def swapped(self) -> Factor:
        """(leading dims, width, rows)"""
        return Factor(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def settled(self) -> Factor:
        """Without the transpose that the order would undo."""
        source = self.node.args[0] if self.node.args else None
        if self.order == tuple(range(len(self.order))) or not is_tensor(source):
            return self
        behind = _order_of(self.node)
        return Factor(source, tuple(behind[d] for d in self.order)).settled() if behind else self

    def made(self, editor: Editor, like: Node) -> Node:
        """The operand as a node whose dims are in order."""
        found = self.settled()
        if found.order == tuple(range(len(found.order))):
            return found.node
        return editor.compute(aten.permute.default, (found.node, list(found.order)), like)


def _order_of(node: Node) -> tuple[int, ...] | None:
    """The dims of its operand in the order of the node's, if the node is a transpose."""
    ndim = node.meta["val"].ndim
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        return tuple(d % ndim for d in node.args[1])
    if node.target is aten.transpose.int:
        a, b = (d % ndim for d in node.args[1:])
    elif node.target in (aten.mT.default, aten.t.default, aten.numpy_T.default) and ndim == 2:
        a, b = 0, 1
    elif node.target is aten.mT.default:
        a, b = ndim - 2, ndim - 1
    else:
        return None
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@dataclass(frozen=True)
class Product:
    """left (..., m, c) times right (..., n, c), scaled: (..., m, n); `order`: the result's dims in that order."""

    left: Factor
    right: Factor
    scale: float
    order: tuple[int, ...]

    @property
    def is_straight(self) -> bool:
        """Are the result's dims (leading dims, m, n)?"""
        return self.order == tuple(range(len(self.order)))


def product_of(node: Node) -> Product | None:
    """The node as a product; None if it is none, or its operands broadcast or have fewer than three dims."""
    if node.op != "call_function" or node.target not in PRODUCTS:
        return None
    call = Call(node)
    found = _einsum(call) if node.target is aten.einsum.default else _matmul(call)
    if found is None or len(found.left.order) < 3 or len(found.left.order) != len(found.right.order):
        return None
    fronts = zip(found.left.shape[:-2], found.right.shape[:-2])
    return found if all(same(a, b) for a, b in fronts) else None


def _matmul(call: Call) -> Product | None:
    left, right = call.operands[-2:]
    if left.meta["val"].ndim != right.meta["val"].ndim or left.meta["val"].ndim < 3:
        return None
    scale = 1.0
    if "beta" in call.args:
        if call["beta"] != 0 or not isinstance(call["alpha"], (int, float)):
            return None
        scale = float(call["alpha"])
    straight = tuple(range(left.meta["val"].ndim))
    return Product(Factor(left, straight), Factor(right, straight).swapped(), scale, straight)


def _einsum(call: Call) -> Product | None:
    terms = _letters(call)
    if terms is None or len(call.operands) != 2:
        return None
    a, b, out = terms
    batch = [x for x in out if x in a and x in b]
    contracted = [x for x in a if x in b and x not in out]
    rows, columns = ([x for x in out if x in one and x not in other] for one, other in ((a, b), (b, a)))
    alone = (set(a) ^ set(b)) - set(out)
    if [len(rows), len(columns), len(contracted)] != [1, 1, 1] or alone:
        return None
    left, right = call.operands
    return Product(
        Factor(left, tuple(a.index(x) for x in (*batch, *rows, *contracted))),
        Factor(right, tuple(b.index(x) for x in (*batch, *columns, *contracted))),
        1.0,
        tuple(out.index(x) for x in (*batch, *rows, *columns)),
    )


def _letters(call: Call) -> tuple[str, str, str] | None:
    """The dims of both operands and of the result, one letter each."""
    text = str(call["equation"]).replace(" ", "")
    inputs, arrow, out = text.partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2 or len(call.operands) != 2:
        return None
    free = [x for x in string.ascii_letters if x not in text]
    depths = {call.ndim(i) - len(p) + 3 for i, p in enumerate(parts) if "..." in p}
    if len(depths) > 1:
        return None
    dots = "".join(free[: next(iter(depths), 0)])
    a, b, c = (p.replace("...", dots) for p in (*parts, out))
    repeated = any(len(set(p)) < len(p) for p in (a, b, c))
    return None if repeated or [len(a), len(b)] != [call.ndim(0), call.ndim(1)] else (a, b, c)


def transposed(product: Product) -> Product:
    """The same product, seen with its operands exchanged."""
    return Product(product.right, product.left, product.scale, (*product.order[:-2], *product.order[:-3:-1]))
