"""Replace gradients in a tile's graph by summands, from which a loop over tiles computes their sum.

The gradient of a weight is a sum over all tiles (parts of the rows). In place of the gradient of a tile, its graph
returns the operands of the op that computes it, called the summands: `a` and `b` for a @ b. The loop adds their product
to one accumulator, as `total.addmm_(a, b)`. The form, a key of `lowering/tiles/tile_sums.py`, selects the function that
adds them. The forms, and the summands that are returned:

    mm(dz.T, h), or its transpose             "product": dz.T, h
    gradients of grouped matrix products      "groups": rows, their gradients, group ends
    index_put(zeros, index, dy, accumulate)   "rows": dy, index
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import OpCall, op_name
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.strides import is_identity
from sp_compile.passes.sharding.matchers import constant_value, is_float_cast, move_source, permutation_of

aten = torch.ops.aten
WIDE_DTYPES = (torch.float32, torch.float64)
GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
SumForm = tuple[str, list[Node]]  # form and summands


def return_summands(gm: GraphModule, sums: Sequence[bool]) -> list[str]:
    """Replace gradients that a tile's graph returns by the operands of the op that computes them (their summands).

    The gradient of a weight is a sum over all tiles. For `mm(a, b)` the graph then returns a and b, and the loop over
    the tiles runs `total.addmm_(a, b)`, so that no tile stores a separate gradient.

    Args:
        gm: The graph of a tile; edited in place.
        sums: One flag for each of the last outputs, the gradients: True if it is a sum over all tiles.

    Returns:
        The form of each of these outputs, a key of `TILE_SUMS` such as "product", which selects how the loop adds the
        summands; "" for an output that is returned unchanged.
    """
    output = gm.graph.output_node()
    results = list(output.args[0])
    first = len(results) - len(sums)
    outputs, forms = results[:first], list[str]()
    for gradient, is_sum in zip(results[first:], sums, strict=True):
        with gm.graph.inserting_before(output):
            form, summands = _match_sum(gm, gradient) if is_sum else ("", [gradient])
        forms.append(form)
        outputs += summands
    output.args = (outputs,)
    gm.graph.eliminate_dead_code()
    _drop_unused_matrices(gm)
    gm.graph.lint()
    gm.recompile()
    return forms


def _match_sum(gm: GraphModule, x: Node) -> SumForm:
    """Return the form of a gradient x and its summands, the operands from which the loop over tiles computes it.

    The forms are "product", "groups" (grouped products) and "rows" (rows that are added by index). Other gradients are
    returned as ("", [x]).
    """
    if is_float_cast(x):  # not needed: the loop adds in a wide dtype
        x = move_source(x) or x
    return _match_product_sum(gm, x) or _scattered_rows(x) or ("", [x])


def _match_product_sum(gm: GraphModule, x: Node) -> SumForm | None:
    """Return the form and the summands of a matrix product or grouped products; None for other nodes.

    The product may be transposed: (a @ b).T is returned as the summands b.T and a.T.
    """
    is_transposed = False
    order = permutation_of(x)  # None unless x is a permutation of dims
    while order is not None and is_identity(order[:-2]):  # permutes at most the last two dims
        is_transposed ^= not is_identity(order)  # two transpositions cancel
        x = OpCall(x).operands[0]
        order = permutation_of(x)
    if x.target is aten.mm.default and x.meta["val"].dtype in WIDE_DTYPES:
        a, b = x.args[:2]
        return "product", [_transpose(gm, b), _transpose(gm, a)] if is_transposed else [a, b]
    groups = _match_grouped_product(gm, x)
    if groups is None:
        return None
    a, b, ends = groups
    return "groups", [b, a, ends] if is_transposed else [a, b, ends]


def _match_grouped_product(gm: GraphModule, x: Node) -> tuple[Node, Node, Node] | None:
    """Return the operands a, b and the group ends of grouped matrix products, or None for other nodes.

    They compute the gradient of the matrices of experts: that of group g (an expert) is a[start:end].T @ b[start:end],
    where start and end are the ends of groups g - 1 and g.

    On a GPU, torch's own grouped product remains: an addition by group would have to read the group ends on the CPU.
    """
    # Result 1 of this op of transformers is the gradient of the matrices.
    if x.target is operator.getitem and x.args[1] == 1 and op_name(x.args[0]) == GROUPED_BACKWARD:
        rows, _, ends, grad = x.args[0].args  # without the matrices
        return rows, grad, ends
    if x.target is not aten._grouped_mm.default or x.meta["val"].device.type != "cpu":
        return None
    a, b, ends = x.args[:3]
    # With operands of two dims, each group of rows gives a matrix.
    return (_transpose(gm, a), b, ends) if a.meta["val"].ndim == b.meta["val"].ndim == 2 else None


def _drop_unused_matrices(gm: GraphModule) -> None:
    """Replace each backward of grouped products, of which only the gradient of the rows is read, by that gradient.

    The gradient of the matrices (result 1) is not read once `return_summands` returns its operands instead.
    """
    editor = GraphEditor().edit(gm.graph)
    for node in list(gm.graph.nodes):
        # The users of a node with several results are getitem nodes; their second argument is the number of the result.
        if op_name(node) == GROUPED_BACKWARD and {user.args[1] for user in node.users} == {0}:
            _, matrices, ends, grad = node.args
            with gm.graph.inserting_before(node):
                transposed = editor.compute(aten.transpose.int, (matrices, 1, 2), node)
                grouped_mm = torch.ops.transformers.grouped_mm_fallback.default
                grad_rows = editor.compute(grouped_mm, (grad, transposed, ends), node)
            editor.replace(node, [grad_rows])  # result 0, the only one that is read


def _scattered_rows(x: Node) -> SumForm | None:
    """Return the form "rows" and the summands of index_put(zeros, [index], rows, accumulate=True): rows and index.

    It is the gradient of an embedding or of an index along the first dim. None for other nodes.
    """
    if x.target is not aten.index_put.default or not OpCall(x)["accumulate"] or x.meta["val"].dtype not in WIDE_DTYPES:
        return None
    zeros, indices, values = x.args[:3]
    if constant_value(zeros) != 0 or len(indices) != 1 or indices[0].meta["val"].dtype != torch.int64:
        return None
    return "rows", [values, indices[0]]


def _transpose(gm: GraphModule, x: Node) -> Node:
    """Append x.t() at the insertion point, and return the node."""
    transposed = gm.graph.call_function(aten.t.default, (x,))
    transposed.meta["val"] = x.meta["val"].t()
    return transposed
