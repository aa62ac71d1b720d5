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
        """Return the shape of the operand as (leading dims, rows, width)."""
        shape = node_shape(self.node)
        return tuple(shape[d] for d in self.order)

    def transpose(self) -> ProductOperand:
        """Return the operand as (leading dims, width, rows)."""
        return ProductOperand(self.node, (*self.order[:-2], self.order[-1], self.order[-2]))

    def simplify(self) -> ProductOperand:
        """Return the same operand without the permutations by which the program computes it.

        They are merged into `order`: x.mT with the dims (0, 2, 1) is x with the dims (0, 1, 2). An operand that has its
        dims in order already remains the same.
        """
        if is_identity(self.order):
            return self
        source, inner_order = move_source(self.node), permutation_of(self.node)
        if source is None or inner_order is None:  # not a permutation
            return self
        return ProductOperand(source, tuple(inner_order[d] for d in self.order)).simplify()

    def materialize(self, editor: GraphEditor, like: Node) -> Node:
        """Return a node whose dims are (leading dims, rows, width); emit a permute if the program has none.

        Args:
            editor: Editor of the graph.
            like: Node whose metadata the new node gets.
        """
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
    """Match a batched product of two matrices, such as bmm, or return None.

    It has at least one batch dim, in both operands and without broadcasting, and sums over one dim of both.

    Args:
        node: Node to match.
        with_addend: Match products with an addend, too, see `product_addend`.
    """
    if node.target not in BATCHED_PRODUCTS:
        return None
    call, rule = lookup_rule(node) or (None, None)
    num_operands = 3 if call is not None and "beta" in call.args else 2  # baddbmm has an addend
    if call is None or rule is None or len(rule.operands) != num_operands:
        return None
    scale = call.get("alpha", 1.0)
    if (call.get("beta", 0) != 0 and not with_addend) or not isinstance(scale, (int, float)):
        return None
    # The names of the dims, such as "b n i" and "b i m" with the result "b n m" for bmm.
    left_dims, right_dims = rule.operands[-2:]
    (result_dims,) = rule.results
    batch = [f for f in result_dims if f in left_dims and f in right_dims]
    contracted = [f for f in left_dims if f in right_dims and f not in result_dims]
    rows = [f for f in result_dims if f in left_dims and f not in right_dims]
    columns = [f for f in result_dims if f in right_dims and f not in left_dims]
    if not batch or [len(rows), len(columns), len(contracted)] != [1, 1, 1]:
        return None
    summed_alone = (set(left_dims) ^ set(right_dims)) - set(result_dims)  # dims of one operand that are summed over
    broadcasts = "" in (*left_dims, *right_dims)  # a dim of size 1 that broadcasts has no name
    if summed_alone or broadcasts:
        return None
    left = ProductOperand(call.operands[-2], tuple(map(left_dims.index, (*batch, *rows, *contracted))))
    right = ProductOperand(call.operands[-1], tuple(map(right_dims.index, (*batch, *columns, *contracted))))
    order = tuple(map(result_dims.index, (*batch, *rows, *columns)))
    same_batch = all(map(is_same_size, left.shape[:-2], right.shape[:-2]))
    return ProductMatch(left, right, float(scale), order) if same_batch else None


def product_addend(node: Node) -> tuple[Node, float] | None:
    """Return (addend, its factor) of beta * addend + left @ right by baddbmm, or None if nothing is added."""
    call = OpCall(node) if node.target is aten.baddbmm.default else None
    if call is None or not isinstance(call["beta"], (int, float)) or call["beta"] == 0:
        return None
    return call.operands[0], float(call["beta"])


def transpose_product(product: ProductMatch) -> ProductMatch:
    """Return the product with exchanged operands and a transposed result, so that callers match only one order."""
    *batch, rows, columns = product.order
    return ProductMatch(product.right, product.left, product.scale, (*batch, columns, rows))
