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
    """Return a rule in which the dims before the last two pass; results may have other dims, or none, after them."""
    batch, results = call.ndim() - 2, []
    for shape in call.result_shapes():
        names = replace_dims(factor_names(len(shape)), range(batch, len(shape)), "new")
        results.append(names)
    if batch < 0 or any(len(shape) < batch for shape in call.result_shapes()):
        return None
    rule = along_dims(call, range(batch, call.ndim()))
    return BoundRule(rule.operands, tuple(results), rule.kinds)


@register_rule_function(aten.linalg_solve_triangular.default, aten.linalg_solve.default)
def _solve_rule(call: OpCall) -> BoundRule | None:
    """Return "... i j, ... j k -> ... i k" without kinds for the batch, and for k where it counts the systems."""
    shape = call.result_shapes()[0]
    if call.ndim(0) < 2 or call.ndim(1) != len(shape) or len(shape) < 2 or len(shape) < call.ndim(0):
        return None
    names = factor_names(len(shape))
    systems = align_names((*call.shape(0)[:-2], *shape[-2:]), shape, names)[:-2]
    right = align_names(call.shape(1), shape, names)
    gathered = names[-2:-1] if call["left"] else names[-2:]
    if call.node.target is aten.linalg_solve.default and call.shape(1)[:-2] != call.shape(0)[:-2]:
        return None  # the second operand may be a batch of vectors
    return BoundRule(((*systems, "i", "j"), right), (names,), dict.fromkeys((*gathered, "i", "j"), "whole"))
