"""Batched matrix products in every spelling, seen as one: rows of `left` times rows of `right`.

    matmul(q, k.transpose(-1, -2))    bmm    baddbmm(beta=0)    einsum("bqhd,bkhd->bhqk", q, k)

A `Factor` is an operand with the views that bring it to (leading dims, rows, width); which dims these are, the op's
rule says. Reading makes no nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.edit import Editor
from sp_compile.passes.graph.sizes import Size, same
from sp_compile.passes.graph.strides import is_identity

from .matchers import order_of, source_of
from .rule import lookup

aten = torch.ops.aten
BATCHED_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)


@dataclass(frozen=True)
class Factor:
    """An operand whose dims, taken in `order`, are (leading dims, rows, width)."""

    node: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        shape = shape_of(self.node)
        return tuple(shape[d] for d in self.order)

    def swapped(self) -> Factor:
        """(leading dims, width, rows)"""
        return Factor(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def settled(self) -> Factor:
        """Without the transpose that the order would undo."""
        source, behind = source_of(self.node), order_of(self.node)
        if source is None or behind is None or is_identity(self.order):
            return self
        return Factor(source, tuple(behind[d] for d in self.order)).settled()

    def made(self, editor: Editor, like: Node) -> Node:
        """The operand as a node whose dims are in order."""
        found = self.settled()
        if is_identity(found.order):
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
        return is_identity(self.order)


def product_of(node: Node, beside: bool = False) -> Product | None:
    """The node as a product; None if it is none, or its operands broadcast or have fewer than three dims.

    beside: also of one to which something is added: `added_to` says what.
    """
    found = lookup(node) if node.target in BATCHED_PRODUCTS else None
    call, rule = found if found is not None else (None, None)
    if call is None or rule is None or len(rule.operands) != (3 if "beta" in call.args else 2):
        return None
    scale = call.get("alpha", 1.0)
    if (call.get("beta", 0) != 0 and not beside) or not isinstance(scale, (int, float)):
        return None
    (a, b), (out,) = rule.operands[-2:], rule.results
    batch = [x for x in out if x in a and x in b]
    contracted = [x for x in a if x in b and x not in out]
    rows, columns = ([x for x in out if x in one and x not in other] for one, other in ((a, b), (b, a)))
    alone = (set(a) ^ set(b)) - set(out)
    if [len(rows), len(columns), len(contracted)] != [1, 1, 1] or alone or "" in (*a, *b) or not batch:
        return None
    left = Factor(call.operands[-2], tuple(a.index(x) for x in (*batch, *rows, *contracted)))
    right = Factor(call.operands[-1], tuple(b.index(x) for x in (*batch, *columns, *contracted)))
    order = tuple(out.index(x) for x in (*batch, *rows, *columns))
    alike = all(map(same, left.shape[:-2], right.shape[:-2]))
    return Product(left, right, float(scale), order) if alike else None


def added_to(node: Node) -> tuple[Node, float] | None:
    """What a product adds to itself, and how many times: of baddbmm; None if it adds nothing."""
    call = Call(node) if node.target is aten.baddbmm.default else None
    if call is None or not isinstance(call["beta"], (int, float)) or call["beta"] == 0:
        return None
    return call.operands[0], float(call["beta"])


def transposed(product: Product) -> Product:
    """The same product, seen with its operands exchanged."""
    return Product(product.right, product.left, product.scale, (*product.order[:-2], *product.order[:-3:-1]))
