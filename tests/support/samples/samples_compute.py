"""Sample calls of products, normalizations, losses and reductions."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  (a grouped product that knows float64)
from support.attention.score_texts import score_of, traced_score
from support.samples.sample_values import b, c, f, i, one, unit
from torch import Tensor

from sp_compile.lowering.token_functions import FunctionBodies, register_bodies

aten = torch.ops.aten


def attention() -> None:
    sdpa = aten.scaled_dot_product_attention.default
    one(sdpa, f(2, 4, 6, 3), f(2, 4, 12, 3), f(2, 4, 12, 4))
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 6, 3), f(2, 6, 6, 4), is_causal=True)
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), b(2, 1, 6, 12) | True)
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), f(6, 12))
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), f(6, 1, 12))
    one(sdpa, f(2, 8, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4), is_causal=True, enable_gqa=True)
    one(sdpa, f(4, 6, 2), f(4, 6, 2), f(4, 6, 2), scale=1.0)
    one(sdpa, f(2, 3, 4, 6, 2), f(2, 3, 4, 6, 2), f(2, 3, 4, 6, 2))
    masked, queries, keys = torch.ops.sp.masked_attention.default, f(2, 6, 6, 3), f(2, 6, 12, 3)
    some = b(2, 12) | (torch.arange(12) < 3)
    one(masked, queries, keys, keys, [], [some], [], "Ne(col0, 0)", 0.0, None, False)
    one(masked, queries, keys, keys, [], [], [4], "k - q < n0", 0.0, 0.3, False)
    one(
        masked,
        f(2, 6, 3),
        f(2, 12, 3),
        f(2, 12, 4),
        [b(2, 6)],
        [some],
        [],
        "(row0 < 2) & Ne(col0, 0)",
        0.0,
        None,
        False,
    )
    one(masked, f(2, 8, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4), [], [], [], "k <= q", 0.0, None, True)
    one(
        masked, queries, keys, keys, [], [], [], "", 0.0, None, False, score=score_of("tanh(s) + head0/2"), heads=[f(6)]
    )
    biased = traced_score(lambda s, k, head0, table0: aten.add.Tensor(s, aten.index.Tensor(table0, [head0, k])))
    reads = {"score": biased, "heads": [torch.arange(6)], "tables": [f(6, 12)]}
    one(masked, queries, keys, keys, [], [], [], "", 0.0, None, False, **reads)
    one(masked, queries, keys, keys, [], [], [], "", 0.0, None, False, lse=True)
    one(masked, queries, keys, keys, [], [], [], "k <= q", 0.0, None, False, sinks=f(6))
    one(masked, queries, keys, keys, [], [some], [], "Ne(col0, 0)", 0.0, None, False, attn_mask=f(6, 6, 12), sinks=f(6))


def sums_of_products() -> None:
    one(aten.addbmm.default, f(4, 6), f(2, 4, 6), f(2, 6, 6))
    one(aten.addmm.default, f(4, 6), f(4, 12), f(12, 6))
    one(aten.addmm.default, f(6), f(4, 12), f(12, 6), beta=2)
    one(aten.addmv.default, f(4), f(4, 6), f(6))
    one(aten.baddbmm.default, f(2, 4, 6), f(2, 4, 12), f(2, 12, 6))
    one(aten.baddbmm.default, f(1, 6), f(2, 4, 12), f(2, 12, 6))
    one(aten.bilinear.default, f(4, 2, 6), f(4, 2, 4), f(3, 6, 4))
    one(aten.bilinear.default, f(4, 6), f(4, 4), f(6, 6, 4), f(6))
    one(aten.bmm.default, f(2, 4, 12), f(2, 12, 6))
    one((aten.dot.default, aten.inner.default, aten.vdot.default), f(6), f(6))
    one(aten.vdot.default, c(6), c(6))
    one(aten.inner.default, f(2, 6), f(4, 6))


def einsums() -> None:
    for equation, *shapes in [
        ("bsd,dhk->bhsk", (2, 6, 4), (4, 2, 3)),
        ("...ij,...jk", (2, 4, 6), (6, 2)),
        ("bi,bi->b", (4, 6), (4, 6)),
        ("i,j->", (4,), (6,)),
        ("bhqk -> bk", (2, 4, 6, 6)),
        ("ij,jk,kl->il", (2, 4), (4, 6), (6, 4)),
        ("bij,bjk->bik", (1, 4, 6), (2, 6, 4)),
        ("ii->i", (4, 4)),
    ]:
        one(aten.einsum.default, equation, [f(*s) for s in shapes])


def products() -> None:
    one((aten.ger.default, aten.outer.default), f(4), f(6))
    one(aten.linear.default, f(2, 4, 6), f(12, 6))
    one(aten.linear.default, f(2, 4, 6), f(12, 6), f(12))
    one(aten.linear.default, f(4, 6), f(6))
    one(aten.linear.default, f(6), f(4, 6), f(4))
    for left, right in [
        ((2, 4, 6), (2, 6, 4)),
        ((2, 1, 4, 6), (3, 6, 4)),
        ((6,), (6,)),
        ((6,), (2, 6, 4)),
        ((2, 4, 6), (6,)),
        ((4, 6), (6, 2)),
    ]:
        one((aten.matmul.default, aten.linalg_matmul.default), f(*left), f(*right))
    one(aten.mm.default, f(4, 6), f(6, 12))
    one(aten.mv.default, f(4, 6), f(6))


def norms() -> None:
    statistics = (f(6), unit(6))
    one(aten.batch_norm.default, f(4, 6, 3), f(6), f(6), None, None, True, 0.1, 1e-5, False)
    one(aten.batch_norm.default, f(4, 6), f(6), None, *statistics, False, 0.1, 1e-5, False)
    one(aten.cosine_similarity.default, f(4, 6, 2), f(4, 6, 2), 1)
    one(aten.cosine_similarity.default, f(4, 6), f(1, 6), -1)
    one(aten.cosine_similarity.default, f(4, 6), f(6), -1)
    one(aten.pairwise_distance.default, f(2, 4, 6), f(2, 4, 6))
    one(aten.pairwise_distance.default, f(4, 6, 2), f(6, 2), 1.0, 0.1, True)
    one(aten.pairwise_distance.default, f(4, 6), f(4, 1))
    one(aten.pairwise_distance.default, f(6), f(6))
    one(aten.group_norm.default, f(4, 6, 4), 3, f(6), f(6))
    one(aten.instance_norm.default, f(4, 6, 4), f(6), f(6), None, None, True, 0.1, 1e-5, False)
    one(aten.instance_norm.default, f(4, 6, 4), None, None, *statistics, False, 0.1, 1e-5, False)
    one((aten.layer_norm.default, aten.native_layer_norm.default), f(2, 4, 6), [6], f(6), f(6), 1e-5)
    one((aten.layer_norm.default, aten.native_layer_norm.default), f(2, 4, 6), [4, 6], None, None, 1e-5)
    one(aten.rms_norm.default, f(2, 4, 6), [6], f(6))
    one((aten.log_softmax.int, aten.softmax.int), f(2, 4, 6), -1)
    one((aten._log_softmax.default, aten._softmax.default), f(2, 4, 6), 1, False)
    one((aten.log_softmax.int, aten.softmax.int), f(), 0)
    one(aten.glu.default, f(2, 4, 12), -1)


def gradients() -> None:
    of_softmax = (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
    one(of_softmax, f(2, 4, 6), f(2, 4, 6), 1, torch.float64)
    normalized = (f(2, 4, 6), f(2, 4, 6), [6], f(2, 4, 1), unit(2, 4, 1))
    one(aten.native_layer_norm_backward.default, *normalized, f(6), f(6), [True, True, True])
    one(aten.native_layer_norm_backward.default, *normalized, f(6), f(6), [False, True, True])
    one(aten.native_layer_norm_backward.default, *normalized, None, None, [True, False, False])


def losses() -> None:
    elementwise = (
        aten.hinge_embedding_loss.default,
        aten.huber_loss.default,
        aten.kl_div.default,
        aten.l1_loss.default,
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
    )
    for reduction in (1, 0, 2):
        for op in elementwise:
            margin = (1.0,) if op is aten.hinge_embedding_loss.default else ()
            one(op, f(2, 6), f(2, 6).sign(), *margin, reduction)
        one(aten.mse_loss.default, f(4, 6), f(4, 1), reduction)
        one(aten.binary_cross_entropy.default, unit(4, 6), unit(4, 6), None, reduction)
        one(aten.binary_cross_entropy.default, unit(4, 6), unit(4, 6), unit(6), reduction)
        one(aten.binary_cross_entropy_with_logits.default, f(4, 6), unit(4, 6), None, unit(6), reduction)
        one(aten.margin_ranking_loss.default, f(6), f(6), f(6).sign(), 0.5, reduction)
        one(aten.poisson_nll_loss.default, f(4, 6), i(4, 4, 6).double(), True, False, 1e-8, reduction)
        one(aten.cosine_embedding_loss.default, f(6, 4), f(6, 4), f(6).sign(), 0.5, reduction)
        one(aten.multi_margin_loss.default, f(6, 4), i(4, 6), 1, 0.5, None, reduction)
        one(aten.multi_margin_loss.default, f(6, 4), i(4, 6), 2, 0.5, f(4).abs(), reduction)
        one(aten.multilabel_margin_loss.default, f(6, 4), i(4, 6, 4), reduction)
        one(aten.triplet_margin_loss.default, f(2, 6, 4), f(2, 6, 4), f(1, 6, 4), 0.5, 2.0, 1e-6, True, reduction)


def class_losses() -> None:
    for reduction in (1, 0, 2):
        cross = aten.cross_entropy_loss.default
        one(cross, f(12, 5), i(5, 12), None, reduction)
        one(cross, f(12, 5), _some_ignored(i(5, 12)), None, reduction, -100, 0.1)
        one(cross, f(12, 5), _some_ignored(i(5, 12)), unit(5), reduction, -100, 0.1)
        one(cross, f(2, 5, 6), i(5, 2, 6), unit(5), reduction, 2)
        one(cross, f(6, 5), f(6, 5).softmax(-1), unit(5), reduction, -100, 0.1)
        one(cross, f(5), i(5), None, reduction)
        for op in (aten.nll_loss.default, aten.nll_loss_nd.default):
            one(op, f(6, 5), i(5, 6), None, reduction, 2)
            one(op, f(6, 5), i(5, 6), unit(5), reduction, -100)
        one((aten.nll_loss2d.default, aten.nll_loss_nd.default), f(2, 5, 6, 4), i(5, 2, 6, 4), None, reduction, -100)


def _some_ignored(target: Tensor) -> Tensor:
    return target.index_fill(0, torch.tensor([0, 1, 7]), -100)


def truths() -> None:
    position = torch.arange(48).view(2, 4, 6)
    one((aten.all.default,), position != 20)
    one((aten.any.default,), position == 20)
    for dim in (1, -1):
        one(aten.all.dim, position != 20, dim, dim < 0)
        one(aten.any.dim, position == 20, dim, dim < 0)
        one(aten.all.dims, position != 20, [dim], dim < 0)
        one(aten.any.dims, position == 20, [dim], dim < 0)
    one(aten.all.dims, position != 20, None)
    one(aten.any.dims, position == 20, None)


def reductions() -> None:
    x = f(2, 4, 6)
    whole = """amax amin aminmax argmax argmin count_nonzero max mean median min nanmean nanmedian nansum
    prod std std_mean sum var var_mean""".split()
    for name in whole:
        one(getattr(aten, name).default, x)
    for name in "amax amin logsumexp nanmean nansum special_logsumexp".split():
        one(getattr(aten, name).default, x, [1])
        one(getattr(aten, name).default, x, [0, -1], True)
    for name in "mean.dim sum.dim_IntList std.dim std_mean.dim var.dim var_mean.dim all.dims any.dims".split():
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet), overload)
        flag = (True,) if packet[:3] in ("std", "var") else ()
        one(op, x, [-1], *flag)
        one(op, x, [0, 1], *flag, True)
        one(op, x, [], *flag)
    for name in "max median min nanmedian".split():
        one(getattr(aten, name).dim, x, 1)
        one(getattr(aten, name).dim, x, -1, True)


def reductions_of_their_own_kind() -> None:
    x = f(2, 4, 6)
    one((aten.kthvalue.default,), x, 2, 1)
    one((aten.argmax.default, aten.argmin.default, aten.mode.default), x, 1, True)
    one((aten.argmax.default, aten.argmin.default), x)
    one(aten.aminmax.default, x, dim=1)
    one(aten.count_nonzero.default, x > 0, 1)
    one(aten.count_nonzero.dim_IntList, x > 0, [1, 2])
    one(aten.linalg_vector_norm.default, x, 2, [-1], True)
    one(aten.linalg_vector_norm.default, x)
    one(aten.norm.Scalar, x)
    one(aten.norm.ScalarOpt_dtype, x, 2, dtype=torch.float64)
    one(aten.norm.ScalarOpt_dim, x, 2, [1])
    one(aten.norm.ScalarOpt_dim_dtype, x, 2, [1], True, dtype=torch.float64)
    one(aten.prod.dim_int, x, 1)
    one((aten.std.correction, aten.std_mean.correction, aten.var.correction, aten.var_mean.correction), x, [1])
    one((aten.sum.default, aten.amax.default), f())


def orders() -> None:
    x = f(2, 4, 6)
    for name in "argsort cummax cummin cumprod cumsum logcumsumexp sort".split():
        one(getattr(aten, name).default, x, -1)
        one(getattr(aten, name).default, x, 1)
    one(aten.histc.default, f(12), 5, -1.0, 1.0)
    one((aten.argsort.stable, aten.sort.stable), x, stable=True, dim=1)
    one(aten.topk.default, x, 2, -1)
    one(aten.diff.default, x, 1, 1)
    one(aten.diff.default, x, 1, -1, f(2, 4, 2), f(2, 4, 1))


def scans() -> None:
    x, sp = f(2, 4, 6), torch.ops.sp
    one(sp.grouped_mm.default, f(12, 6), f(3, 6, 12), torch.arange(12) // 5, "transformers::grouped_mm_fallback")
    one(sp.scan.default, x, None, 1, "sum")
    one(sp.scan.default, x, i(2, 6).cumsum(0), -1, "max", exclusive=True)
    one(sp.scan.default, x, i(2, 4, 1), 1, "logsumexp", reverse=True)
    one(sp.extremes.default, x, -1, "max")
    one(sp.extremes.default, x, 1, "min", reverse=True)
    one(sp.linear_scan.default, x, f(4, 6), None, 1)
    one(sp.rows.default, x, 1, 1, 2)
    one(sp.affine_scan.default, f(2, 6, 3, 3), f(2, 6, 3, 4), None, 1)
    one(sp.affine_scan.default, f(2, 6, 3, 3), f(2, 6, 3, 4), f(2, 3, 4), 1, reverse=True)
    one(sp.linear_scan.default, f(4, 1), x, f(2, 6), 1, reverse=True)
    q, k, decay, beta, starts = f(2, 6, 2, 4), f(2, 6, 2, 4), -f(2, 6, 2, 1).abs(), f(2, 6, 2).sigmoid(), f(2, 6) > 1
    for op in (sp.linear_attention.default, sp.linear_attention_state.default):
        one(op, q, k, f(2, 6, 2, 3), decay, beta, None, None, starts, None, None, f(2, 2, 4, 3), 0.5, "")
        one(op, q, k, f(2, 6, 2, 3), -f(2, 6, 2, 4).abs(), None, q, k, None, None, None, None, 0.5, "")
    one(sp.token_function.default, [x, x], _product_function())


def _product_function() -> str:
    """Register the bodies of a Function that multiplies two tensors."""

    def forward(a: torch.Tensor, b: torch.Tensor) -> object:
        return a * b, (a, b)

    def backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> object:
        return grad * b, grad * a

    bodies = torch.fx.symbolic_trace(forward), torch.fx.symbolic_trace(backward)
    options = {"non_differentiable_idx": [], "saved_for_backward_idx": [0, 1]}
    return register_bodies(FunctionBodies(*bodies, options))


def linear_algebra() -> None:
    x = f(2, 6, 4, 4)
    matrix = x @ x.transpose(-1, -2) + 4 * torch.eye(4, dtype=x.dtype)
    for name in (
        "linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex linalg_matrix_exp linalg_qr "
        "linalg_eigvalsh linalg_svdvals linalg_det linalg_slogdet linalg_lu linalg_lu_factor matrix_exp cholesky"
    ).split():
        one(getattr(aten, name).default, matrix)
    one(aten.linalg_eigh.default, matrix)
    one(aten.linalg_svd.default, matrix, False)
    one(aten.linalg_matrix_power.default, matrix, 2)
    one(aten.linalg_solve.default, matrix, f(2, 6, 4, 3))
    for how in ({"upper": False, "unitriangular": True}, {"upper": True}, {"upper": True, "left": False}):
        right = f(2, 6, 3, 4) if how.get("left") is False else f(2, 6, 4, 3)
        one(aten.linalg_solve_triangular.default, matrix, right, **how)
    one(aten.linalg_solve_triangular.default, matrix[:1, :1], f(2, 6, 4, 3), upper=False)


FAMILIES = (
    linear_algebra,
    attention,
    sums_of_products,
    einsums,
    products,
    norms,
    gradients,
    losses,
    class_losses,
    truths,
    reductions,
    reductions_of_their_own_kind,
    orders,
    scans,
)
