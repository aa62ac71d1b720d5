"""Batched matrix products in every spelling, seen as one: rows of `left` times rows of `right`.

    matmul(q, k.transpose(-1, -2))    bmm    baddbmm(beta=0)    einsum("bqhd,bkhd->bhqk", q, k)

A `Factor` is an operand with the views that bring it to (leading dims, rows, width); reading makes no nodes.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.graph.call import Call
from sp_compile.graph.edit import Editor
from sp_compile.graph.sizes import Size, same, sizes

from .matchers import order_of, source_of

aten = torch.ops.aten
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
        source, behind = source_of(self.node), order_of(self.node)
        if source is None or behind is None or self.order == tuple(range(len(self.order))):
            return self
        return Factor(source, tuple(behind[d] for d in self.order)).settled()

    def made(self, editor: Editor, like: Node) -> Node:
        """The operand as a node whose dims are in order."""
        found = self.settled()
        if found.order == tuple(range(len(found.order))):
            return found.node
        return editor.compute(aten.permute.default, (found.node, list(found.order)), like)


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
