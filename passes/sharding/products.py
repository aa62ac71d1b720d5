"""Batched matrix products in every spelling, seen as one: rows of `left` times rows of `right`.

    matmul(q, k.transpose(-1, -2))    bmm    baddbmm(beta=0)    einsum("bqhd,bkhd->bhqk", q, k)

A `ProductOperand` is an operand with the views that bring it to (leading dims, rows, width); which dims these are,
the op's
rule says. Reading makes no nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.sizes import Size, is_same_size
from sp_compile.passes.graph.strides import is_identity

from .matchers import move_source, permutation_of
from .rule import lookup_rule

aten = torch.ops.aten
BATCHED_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)


@dataclass(frozen=True)
class ProductOperand:
    """An operand whose dims, taken in `order`, are (leading dims, rows, width)."""

    node: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        shape = node_shape(self.node)
        return tuple(shape[d] for d in self.order)

    def transpose(self) -> ProductOperand:
        """(leading dims, width, rows)"""
        return ProductOperand(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def simplify(self) -> ProductOperand:
        """Without the transpose that the order would undo."""
        source, behind = move_source(self.node), permutation_of(self.node)
        if source is None or behind is None or is_identity(self.order):
            return self
        return ProductOperand(source, tuple(behind[d] for d in self.order)).simplify()

    def materialize(self, editor: GraphEditor, like: Node) -> Node:
        """The operand as a node whose dims are in order."""
        found = self.simplify()
        if is_identity(found.order):
            return found.node
        return editor.compute(aten.permute.default, (found.node, list(found.order)), like)


@dataclass(frozen=True)
class ProductMatch:
    """left (..., m, c) times right (..., n, c), scaled: (..., m, n); `order`: the result's dims in that order."""

    left: ProductOperand
    right: ProductOperand
    scale: float
    order: tuple[int, ...]

    @property
    def is_straight(self) -> bool:
        """Are the result's dims (leading dims, m, n)?"""
        return is_identity(self.order)


def match_product(node: Node, beside: bool = False) -> ProductMatch | None:
    """The node as a product; None if it is none, or its operands broadcast or have fewer than three dims.

    beside: also of one to which something is added: `product_addend` says what.
    """
    found = lookup_rule(node) if node.target in BATCHED_PRODUCTS else None
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
    left = ProductOperand(call.operands[-2], tuple(a.index(x) for x in (*batch, *rows, *contracted)))
    right = ProductOperand(call.operands[-1], tuple(b.index(x) for x in (*batch, *columns, *contracted)))
    order = tuple(out.index(x) for x in (*batch, *rows, *columns))
    alike = all(map(is_same_size, left.shape[:-2], right.shape[:-2]))
    return ProductMatch(left, right, float(scale), order) if alike else None


def product_addend(node: Node) -> tuple[Node, float] | None:
    """What a product adds to itself, and how many times: of baddbmm; None if it adds nothing."""
    call = OpCall(node) if node.target is aten.baddbmm.default else None
    if call is None or not isinstance(call["beta"], (int, float)) or call["beta"] == 0:
        return None
    return call.operands[0], float(call["beta"])


def transpose_product(product: ProductMatch) -> ProductMatch:
    """The same product, seen with its operands exchanged."""
    return ProductMatch(product.right, product.left, product.scale, (*product.order[:-2], *product.order[:-3:-1]))
