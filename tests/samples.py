"""Sample calls of every op that has a rule: sizes that 2 and 3 divide, one of a kind with a broadcast or a default.

The first sample of an op is the canonical one, printed in the golden table. Pointwise ops get theirs from their schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[Any, list[Sample]] = {}
_generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return i(2, *shape).bool()


def c(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape))


def one(op: Any, *args: Any, **kwargs: Any) -> None:
    for each in op if isinstance(op, tuple) else (op,):
        SAMPLES.setdefault(each, []).append((args, kwargs))


def attention_and_matmul() -> None:
    sdpa = aten.scaled_dot_product_attention.default
    one(sdpa, f(2, 4, 6, 3), f(2, 4, 12, 3), f(2, 4, 12, 4))
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 6, 3), f(2, 6, 6, 4), is_causal=True)
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), b(2, 1, 6, 12) | True)
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), f(6, 12))
    one(sdpa, f(2, 6, 6, 3), f(2, 6, 12, 3), f(2, 6, 12, 4), f(6, 1, 12))
    one(sdpa, f(2, 8, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4), is_causal=True, enable_gqa=True)
    one(sdpa, f(4, 6, 2), f(4, 6, 2), f(4, 6, 2), scale=1.0)
    one(sdpa, f(2, 3, 4, 6, 2), f(2, 3, 4, 6, 2), f(2, 3, 4, 6, 2))
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


def norms_and_softmax() -> None:
    statistics = (f(6), unit(6))
    one(aten.batch_norm.default, f(4, 6, 3), f(6), f(6), None, None, True, 0.1, 1e-5, False)
    one(aten.batch_norm.default, f(4, 6), f(6), None, *statistics, False, 0.1, 1e-5, False)
    one(aten.cosine_similarity.default, f(4, 6, 2), f(4, 6, 2), 1)
    one(aten.cosine_similarity.default, f(4, 6), f(1, 6), -1)
    one(aten.cosine_similarity.default, f(4, 6), f(6), -1)
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


def embedding_and_indexing() -> None:
    one(aten.embedding.default, f(6, 4), i(6, 2, 6))
    one(aten.embedding.default, f(6, 4), i(6, 4), 0)
    one(aten.one_hot.default, i(6, 2, 4), 6)
    one(aten.one_hot.default, i(6, 2, 4))
    bounds = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    one(aten.bucketize.Tensor, f(4, 6), bounds)
    one((aten.bucketize.Scalar,), 0.3, bounds)
    one((aten.searchsorted.Scalar,), bounds, 0.3)
    one(aten.searchsorted.Tensor, f(4, 6).sort().values, f(4, 2))
    one(aten.searchsorted.Tensor, bounds, f(4, 2))
    one(aten.isin.Tensor_Scalar, i(3, 4, 6), 1)
    one(aten.isin.Tensor_Tensor, i(9, 4, 6), i(9, 2))
    one(aten.gather.default, f(2, 4, 6), 1, i(4, 2, 6, 6))
    one(aten.gather.default, f(4, 6), -1, i(6, 2, 4))
    one(aten.gather.default, f(4, 6), 0, i(4, 1, 6))
    one(aten.take_along_dim.default, f(2, 4, 6), i(4, 2, 6, 6), 1)
    one(aten.take_along_dim.default, f(2, 4, 6), i(4, 2, 6, 1), 1)
    one(aten.take_along_dim.default, f(1, 4, 6), i(4, 2, 1, 6), 1)
    one(aten.index_select.default, f(4, 6, 2), 1, i(6, 4))
    one(aten.index_select.default, f(4, 6), 1, i(6))
    x = f(4, 6, 2, 6)
    for indices in (
        [None, i(6, 4)],
        [i(4, 4, 6)],
        [None, i(6, 4, 2), i(2, 4, 2)],
        [i(4, 4, 1), i(6, 6)],
        [i(4, 6), None, i(2, 6)],
        [i(4, 6), None, None, i(6, 4, 1)],
        [None, None, i(2), i(6, 4)],
        [i(4)],
        [b(4, 6)],
    ):
        one(aten.index.Tensor, x, indices)
        if indices[0] is None or indices[0].dtype != torch.bool:
            put = aten.index.Tensor(x, indices)
            for op in (aten.index_put.default, aten._unsafe_index_put.default):
                one(op, x, indices, torch.randn(put.shape, dtype=x.dtype, generator=_generator), True)
                one(op, x, indices, f(1), True)
    one(aten.index_put.default, x, [None, i(6, 4)], f(4, 1, 2, 6), True)
    for values in (f(), f(1), f(2, 6), f(1, 1, 6)):
        one(aten.index_put.default, x, [b(4, 6)], values)
    one(aten.index_put.default, f(6, 4), [torch.arange(6) < 3], f(3, 4))
    one(aten.select_scatter.default, f(2, 4, 6), f(2, 6), 1, -1)
    one(aten.slice_scatter.default, f(2, 4, 6), f(2, 4, 3), -1, 1, 4)
    one(aten.index_add.default, f(4, 6), 1, i(6, 4), f(4, 4))
    one(aten.index_copy.default, f(4, 6), 1, torch.tensor([3, 0, 5, 1]), f(4, 4))
    one(aten.index_fill.int_Scalar, f(4, 6), 1, i(6, 2), 7.0)
    index = i(4, 2, 2, 6)
    one(aten.scatter.src, f(2, 4, 6), 1, torch.tensor([[[2] * 6, [0] * 6]] * 2), f(2, 2, 6))
    one(aten.scatter.value, f(2, 4, 6), 1, index, 7.0)
    one(aten.scatter.reduce, f(2, 4, 6), 1, index, f(2, 2, 6), reduce="add")
    one(aten.scatter.value_reduce, f(2, 4, 6), 1, index, 7.0, reduce="add")
    one(aten.scatter_add.default, f(2, 4, 6), 1, index, f(2, 2, 6))
    one(aten.scatter_add.default, f(4, 4, 6), 1, index, f(2, 2, 6))
    one(aten.scatter_add.default, f(2, 4, 6), 1, index, f(4, 2, 6))
    one(aten.scatter_reduce.two, f(2, 4, 6), 1, index, f(2, 2, 6), "amax")


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
        one(
            (aten.nll_loss2d.default, aten.nll_loss_nd.default),
            f(2, 5, 6, 4),
            i(5, 2, 6, 4),
            None,
            reduction,
            -100,
        )


def _some_ignored(target: Tensor) -> Tensor:
    return target.index_fill(0, torch.tensor([0, 1, 7]), -100)


def reductions() -> None:
    x = f(2, 4, 6)
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
    whole = """amax amin aminmax argmax argmin count_nonzero max mean median min nanmean nanmedian nansum
    prod std std_mean sum var var_mean""".split()
    for name in whole:
        one(getattr(aten, name).default, x)
    for name in "amax amin logsumexp nanmean nansum special_logsumexp".split():
        one(getattr(aten, name).default, x, [1])
        one(getattr(aten, name).default, x, [0, -1], True)
    for name in (
        "mean.dim",
        "sum.dim_IntList",
        "std.dim",
        "std_mean.dim",
        "var.dim",
        "var_mean.dim",
        "all.dims",
        "any.dims",
    ):
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet), overload)
        flag = (True,) if packet[:3] in ("std", "var") else ()
        one(op, x, [-1], *flag)
        one(op, x, [0, 1], *flag, True)
        one(op, x, [], *flag)
    for name in "max median min nanmedian".split():
        one(getattr(aten, name).dim, x, 1)
        one(getattr(aten, name).dim, x, -1, True)
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
    one(
        (aten.std.correction, aten.std_mean.correction, aten.var.correction, aten.var_mean.correction), x, [1]
    )
    one((aten.sum.default, aten.amax.default), f())
    for name in "argsort cummax cummin cumprod cumsum logcumsumexp sort".split():
        one(getattr(aten, name).default, x, -1)
        one(getattr(aten, name).default, x, 1)
    one((aten.argsort.stable, aten.sort.stable), x, stable=True, dim=1)
    one(aten.topk.default, x, 2, -1)
    one(aten.diff.default, x, 1, 1)
    one(aten.diff.default, x, 1, -1, f(2, 4, 2), f(2, 4, 1))


def views() -> None:
    x = f(2, 4, 6)
    one((aten.adjoint.default, aten.mH.default, aten.mT.default), x)
    one(aten.adjoint.default, c(2, 4, 6))
    one((aten.movedim.int, aten.moveaxis.int), x, 0, -1)
    one((aten.movedim.intlist, aten.moveaxis.intlist), f(2, 4, 6, 3), [0, -1], [2, 0])
    one(aten.numpy_T.default, x)
    one(aten.permute.default, x, [1, -1, 0])
    one((aten.swapaxes.default, aten.swapdims.default, aten.transpose.int), x, 0, -1)
    one(aten.t.default, f(4, 6))
    one(aten.t.default, f(6))
    one(aten.diag_embed.default, f(4, 6))
    one(aten.view_as_complex.default, f(4, 6, 2))
    one(aten.view_as_real.default, c(4, 6))
    one(aten.atleast_1d.default, x)
    one(aten.atleast_1d.default, f())
    one((aten._unsafe_view.default, aten.reshape.default, aten.view.default), x, [2, 24])
    one((aten.reshape.default, aten.view.default), x, [8, -1])
    one((aten.reshape.default, aten.view.default), x, [2, 2, 2, 6])
    one((aten.reshape.default, aten.view.default), f(6, 4), [6, 2, 2])
    one(aten._reshape_alias.default, x, [8, 6], [6, 1])
    one(aten.flatten.using_ints, x, 0, 1)
    one(aten.ravel.default, x)
    one(aten.reshape_as.default, x, f(8, 6))
    one(aten.unflatten.int, f(2, 12), 1, [4, -1])
    one(aten.view_as.default, x, f(2, 24))
    one((aten.broadcast_to.default, aten.expand.default), f(4, 1), [6, 4, 6])
    one((aten.broadcast_to.default, aten.expand.default), f(2, 1, 6), [-1, 4, -1])
    one(aten.broadcast_tensors.default, [f(4, 1), f(6)])
    one(aten.expand_as.default, f(4, 1), f(2, 4, 6))
    one(aten.unsqueeze.default, x, 1)
    one(aten.unsqueeze.default, x, -1)
    one(aten.squeeze.default, f(1, 4, 1, 6))
    one(aten.squeeze.dim, f(4, 1, 6), 1)
    one(aten.squeeze.dim, f(4, 2), -1)
    one(aten.squeeze.dims, f(4, 1, 2), [1, 2])
    one(aten.squeeze.dims, f(4, 1, 2), [])
    one(aten.repeat.default, f(4, 6), [3, 1, 2])
    one(aten.tile.default, x, [3, 1])
    one(aten.repeat_interleave.self_int, x, 3, 1)
    one(aten.repeat_interleave.self_int, x, 3)
    one((aten.cat.default, aten.concat.default, aten.concatenate.default), [x, f(2, 2, 6)], 1)
    one(aten.cat.default, [x, f(0)], -1)
    one(aten.cat.default, [f(2, 0, 6), x], 1)
    one(aten.cat.default, [f(2, 0, 6), x, f(0), x], 1)
    one(aten.cat.default, [f(4), f(0), f(2)])
    one(aten.stack.default, [x, f(2, 4, 6)], 1)
    one(aten.meshgrid.default, [f(4), f(6)])
    one(aten.meshgrid.indexing, [f(4), f(6)], indexing="ij")
    one(aten.meshgrid.indexing, [f(4), f(6), f(2)], indexing="xy")
    one(aten.flip.default, x, [1])
    one(aten.roll.default, x, [1, 2], [0, -1])
    one(aten.roll.default, x, [1])
    one((aten.constant_pad_nd.default, aten.pad.default), x, [0, 0, 1, 2])
    one(aten.pad.default, x, [1, -1], "constant", 1.0)
    one(aten.diagonal.default, f(4, 2, 6), 0, 0, 2)
    one((aten.tril.default, aten.triu.default), x)
    one(aten.unfold.default, x, 1, 2, 2)
    one(aten.select.int, x, 1, -1)
    one(aten.unbind.int, x, 1)
    one(aten.slice.Tensor, x, 2, 0, 5)
    one(aten.slice.Tensor, x, 2, -5, 1 << 62)
    one(aten.slice.Tensor, x, 2, None, None, 2)
    one(aten.slice.Tensor, x, 1, 3, None)
    one(aten.narrow.default, x, 2, -5, 4)
    one((aten.chunk.default, aten.tensor_split.sections, aten.unsafe_chunk.default), x, 2, 2)
    one((aten.chunk.default, aten.tensor_split.sections), f(2, 7), 3, 1)
    one((aten.split.Tensor, aten.unsafe_split.Tensor), x, 3, -1)
    one(
        (aten.split.sizes, aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default), x, [4, 2], -1
    )
    one(aten.tensor_split.indices, x, [1, 3], -1)
    one(aten.tensor_split.indices, x, [3, 1], -1)


def images() -> None:
    one((aten.conv1d.default,), f(4, 2, 6), f(6, 2, 3), f(6), [1], [1])
    one(aten.conv1d.default, f(2, 6), f(4, 2, 3))
    one(aten.conv1d.padding, f(4, 2, 6), f(6, 2, 3), None, [1], "same")
    one(aten.conv2d.default, f(2, 4, 6, 6), f(4, 1, 3, 3), f(4), [1, 1], [1, 1], [1, 1], 4)
    one(aten.conv2d.padding, f(2, 2, 6, 6), f(4, 2, 3, 3), f(4), [1, 1], "same")
    one(aten.conv3d.default, f(2, 2, 2, 4, 4), f(4, 2, 2, 2, 2))
    one(aten.conv3d.padding, f(2, 2, 2, 4, 4), f(4, 2, 2, 2, 2), None, [1, 1, 1], "valid")
    one(aten.conv_transpose1d.default, f(4, 2, 6), f(2, 6, 3))
    one(aten.conv_transpose2d.input, f(4, 2, 6, 6), f(2, 6, 3, 3))
    one(aten.conv_transpose3d.input, f(2, 2, 2, 4, 4), f(2, 4, 2, 2, 2))
    one(aten.convolution.default, f(4, 2, 6), f(6, 2, 3), f(6), [1], [1], [1], False, [0], 1)
    line, image = f(2, 4, 6), f(2, 4, 6, 6)
    one((aten.adaptive_avg_pool1d.default, aten.adaptive_max_pool1d.default), line, [3])
    one((aten.avg_pool1d.default, aten.max_pool1d.default, aten.max_pool1d_with_indices.default), line, [2])
    one((aten.reflection_pad1d.default, aten.replication_pad1d.default), line, [1, 2])
    one((aten.upsample_linear1d.vec,), line, [12], False, None)
    one(aten.upsample_nearest1d.vec, line, [12], None)
    one((aten.adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default), image, [3, 3])
    one(
        (aten.avg_pool2d.default, aten.max_pool2d.default, aten.max_pool2d_with_indices.default),
        image,
        [2, 2],
    )
    one((aten.reflection_pad2d.default, aten.replication_pad2d.default), image, [1, 2, 1, 0])
    one((aten.upsample_bicubic2d.vec, aten.upsample_bilinear2d.vec), image, [12, 12], False, None)
    one(aten.upsample_nearest2d.vec, image, [12, 12], None)
    one(aten.pixel_shuffle.default, image, 2)
    one(aten.pixel_unshuffle.default, image, 2)
    one(aten.grid_sampler.default, f(2, 4, 6, 6), unit(2, 4, 6, 2), 0, 0, False)


def others() -> None:
    x = f(2, 4, 6)
    one((aten.bernoulli.default,), unit(2, 4, 6))
    one(aten.bernoulli.Tensor, x, unit(2, 4, 6))
    one(aten.copy.default, x, f(4, 1))
    one(aten.fill.Tensor, x, f())
    one(aten.masked_fill.Tensor, x, b(4, 6), f())
    one(aten.randint_like.low_dtype, x, 1, 5)
    one((aten.feature_alpha_dropout.default, aten.feature_dropout.default), x, 0.5, True)
    one(aten.prelu.default, x, f(4))
    one(aten.prelu.default, x, f(1))
    one((aten.to.other, aten.type_as.default), x, x.float())
    one((aten.to.other, aten.type_as.default), x, f(6).float())
    one(aten.view.dtype, x, torch.int64)
    one(aten.view.dtype, x, torch.int32)
    one(aten.multinomial.default, unit(4, 6), 2)
    made = (
        aten.empty.memory_format,
        aten.ones.default,
        aten.rand.default,
        aten.randn.default,
        aten.zeros.default,
    )
    one(made, [2, 4, 6])
    one(aten.full.default, [2, 4, 6], 3.0)
    one(aten.randint.default, 5, [2, 4, 6])
    one(aten.randint.low, 1, 5, [2, 4, 6])
    one((aten.new_empty.default, aten.new_ones.default, aten.new_zeros.default), x, [6, 4])
    one(aten.new_full.default, x, [6, 4], 3.0)
    one(aten.scalar_tensor.default, 1.0)


_BY_NAME = {
    "condition": b,
    "decimals": 1,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "mask": b,
    "rounding_mode": "floor",
    "train": False,
}
_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


def of_pointwise(op: Any) -> list[Sample]:
    """Values for the required arguments of a pointwise op, of a dtype it takes: operands alike, and broadcasting."""
    out = []
    for shapes in [((2, 6), (2, 6), (2, 6)), ((4, 1), (6,), (2, 1, 1)), ((6,), (4, 6), (2, 4, 1))]:
        for dtype in _DTYPES:
            sample = _pointwise_sample(op, shapes, dtype)
            try:
                op(*sample[0], **sample[1])
            except (RuntimeError, NotImplementedError):
                continue
            out.append(sample)
            break
    return out


def _pointwise_sample(op: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Sample:
    given = iter(shapes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            continue
        kind = str(argument.type)
        value = _BY_NAME.get(argument.name, 0.5 if kind == "float" else 2)
        if kind == "Tensor":
            value = b(*next(given)) if value is b else (unit(*next(given)) * 3).to(dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def build() -> Mapping[Any, list[Sample]]:
    for family in _FAMILIES:
        family()
    return SAMPLES


_FAMILIES: tuple[Callable[[], None], ...] = (
    attention_and_matmul,
    norms_and_softmax,
    embedding_and_indexing,
    losses,
    reductions,
    views,
    images,
    others,
)
