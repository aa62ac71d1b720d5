"""Match batched matrix products in all forms: rows of `left` times rows of `right`.

    matmul(q, k.transpose(-1, -2))    bmm    baddbmm(beta=0)    einsum("bqhd,bkhd->bhqk", q, k)

A `ProductOperand` is an operand with the permutation that brings it to (leading dims, rows, width), derived from the
op's rule. Matching creates no nodes.
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
    """Operand whose dims, permuted by `order`, are (leading dims, rows, width)."""

    node: Node  # the operand
    order: tuple[int, ...]  # its dims in the order (leading dims, rows, width)

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape in that order."""
        shape = node_shape(self.node)
        return tuple(shape[d] for d in self.order)

    def transpose(self) -> ProductOperand:
        """Return the operand as (leading dims, width, rows)."""
        return ProductOperand(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def simplify(self) -> ProductOperand:
        """Return the operand before its permutations, which are merged into the order: they need not run."""
        source, inner_order = move_source(self.node), permutation_of(self.node)
        if source is None or inner_order is None or is_identity(self.order):
            return self
        return ProductOperand(source, tuple(inner_order[d] for d in self.order)).simplify()

    def materialize(self, editor: GraphEditor, like: Node) -> Node:
        """Return a node with the dims in order."""
        operand = self.simplify()
        if is_identity(operand.order):
            return operand.node
        return editor.compute(aten.permute.default, (operand.node, list(operand.order)), like)


@dataclass(frozen=True)
class ProductMatch:
    """Product left (..., m, c) times right (..., n, c), scaled: (..., m, n)."""

    left: ProductOperand  # (..., m, c)
    right: ProductOperand  # (..., n, c)
    scale: float  # factor of the product
    order: tuple[int, ...]  # dims of the result in the order (..., m, n)


def match_product(node: Node, with_addend: bool = False) -> ProductMatch | None:
    """Match a product without broadcasting and with at least three dims, or return None.

    Args:
        node: Node to match.
        with_addend: Match products with an addend, too, see `product_addend`.
    """
    if node.target not in BATCHED_PRODUCTS:
        return None
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or len(rule.operands) != (3 if "beta" in call.args else 2):
        return None
    scale = call.get("alpha", 1.0)
    if (call.get("beta", 0) != 0 and not with_addend) or not isinstance(scale, (int, float)):
        return None
    (a, b), (out,) = rule.operands[-2:], rule.results
    batch = [f for f in out if f in a and f in b]
    contracted = [f for f in a if f in b and f not in out]
    rows = [f for f in out if f in a and f not in b]
    columns = [f for f in out if f in b and f not in a]
    if not batch or [len(rows), len(columns), len(contracted)] != [1, 1, 1]:
        return None
    summed_alone = (set(a) ^ set(b)) - set(out)  # factors of one operand that are summed over
    broadcasts = "" in (*a, *b)
    if summed_alone or broadcasts:
        return None
    left = ProductOperand(call.operands[-2], tuple(a.index(f) for f in (*batch, *rows, *contracted)))
    right = ProductOperand(call.operands[-1], tuple(b.index(f) for f in (*batch, *columns, *contracted)))
    order = tuple(out.index(f) for f in (*batch, *rows, *columns))
    same_batch = all(map(is_same_size, left.shape[:-2], right.shape[:-2]))
    return ProductMatch(left, right, float(scale), order) if same_batch else None


def product_addend(node: Node) -> tuple[Node, float] | None:
    """Return the addend of baddbmm and its factor, or None if nothing is added."""
    call = OpCall(node) if node.target is aten.baddbmm.default else None
    if call is None or not isinstance(call["beta"], (int, float)) or call["beta"] == 0:
        return None
    return call.operands[0], float(call["beta"])


def transpose_product(product: ProductMatch) -> ProductMatch:
    """Return the same product with exchanged operands, so that callers need to match only one order."""
    return ProductMatch(product.right, product.left, product.scale, (*product.order[:-2], *product.order[:-3:-1]))
