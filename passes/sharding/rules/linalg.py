"""Rules of batched linear algebra: an op reads a full matrix, the last two dims; all other dims pass.

    linalg_solve_triangular(A: (..., n, n), B: (..., n, k))    a rank solves the systems of its part of the batch

With left=True, each column of B is a system of its own, so that the columns pass, too.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.rule import BoundRule, register_rule_function

from ._build import align_names, along_dims, factor_names, replace_dims

aten = torch.ops.aten
MATRIX_OPS = parse_overloads("""
    linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex linalg_matrix_exp linalg_qr linalg_eigh
    linalg_eigvalsh linalg_svd linalg_svdvals linalg_det linalg_slogdet linalg_lu linalg_lu_factor matrix_exp cholesky
    linalg_matrix_power
""")


@register_rule_function(*MATRIX_OPS)
def _matrix_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an op on each matrix of a batch, such as det or qr: the batch dims pass.

    The last two dims are gathered. After the batch dims, results may have any dims, or none, as det.
    """
    num_batch_dims = call.ndim() - 2
    result_ndims = [len(shape) for shape in call.result_shapes()]
    if num_batch_dims < 0 or any(ndim < num_batch_dims for ndim in result_ndims):
        return None
    results = tuple(replace_dims(factor_names(ndim), range(num_batch_dims, ndim), "new") for ndim in result_ndims)
    rule = along_dims(call, range(num_batch_dims, call.ndim()))
    return BoundRule(rule.operands, results, rule.kinds)


@register_rule_function(aten.linalg_solve_triangular.default, aten.linalg_solve.default)
def _solve_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of solving A X = B for batches of matrices A (n, n) and B (n, k): the batch dims pass.

    Each column of B is a system of its own, so k passes, too, unless left=False solves X A = B. The dims n are
    gathered. None if A or B is not a matrix or a batch of matrices, or if B has fewer batch dims than A.
    """
    shape = call.result_shapes()[0]
    a_ndim, b_ndim, result_ndim = call.ndim(0), call.ndim(1), len(shape)
    # B must have all batch dims of the result; A may lack leading ones, along which it broadcasts.
    if a_ndim < 2 or b_ndim < 2 or b_ndim != result_ndim or a_ndim > result_ndim:
        return None
    if call.node.target is aten.linalg_solve.default and call.shape(1)[:-2] != call.shape(0)[:-2]:
        return None  # B may be a batch of vectors
    names = factor_names(len(shape))
    # The batch dims of A broadcast to those of the result, but its (n, n) does not broadcast to (n, k): align a shape
    # that ends in (n, k), and drop these two names.
    batch_of_a = align_names((*call.shape(0)[:-2], *shape[-2:]), shape, names)[:-2]
    b = align_names(call.shape(1), shape, names)
    gathered = names[-2:-1] if call["left"] else names[-2:]
    return BoundRule(((*batch_of_a, "i", "j"), b), (names,), dict.fromkeys((*gathered, "i", "j"), "replicate"))
