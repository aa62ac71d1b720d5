"""Sample calls of lookups, views, windows, factories and resampling."""

from __future__ import annotations

import torch
from support.samples.sample_values import b, c, f, i, one, unit

aten, sp = torch.ops.aten, torch.ops.sp


def tables() -> None:
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


def gathers() -> None:
    one(aten.gather.default, f(2, 4, 6), 1, i(4, 2, 6, 6))
    one(aten.gather.default, f(4, 6), -1, i(6, 2, 4))
    one(aten.gather.default, f(4, 6), 0, i(4, 1, 6))
    one(aten.take_along_dim.default, f(2, 4, 6), i(4, 2, 6, 6), 1)
    one(aten.take_along_dim.default, f(2, 4, 6), i(4, 2, 6, 1), 1)
    one(aten.take_along_dim.default, f(1, 4, 6), i(4, 2, 1, 6), 1)
    one(aten.index_select.default, f(4, 6, 2), 1, i(6, 4))
    one(aten.index_select.default, f(4, 6), 1, i(6))


def indices() -> None:
    x = f(4, 6, 2, 6)
    for at in (
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
        one(aten.index.Tensor, x, at)
        if at[0] is None or at[0].dtype != torch.bool:
            picked = aten.index.Tensor(x, at)
            one((aten.index_put.default, aten._unsafe_index_put.default), x, at, f(*picked.shape), True)
            one((aten.index_put.default, aten._unsafe_index_put.default), x, at, f(1), True)
    one(aten.index_put.default, x, [None, i(6, 4)], f(4, 1, 2, 6), True)
    for values in (f(), f(1), f(2, 6), f(1, 1, 6)):
        one(aten.index_put.default, x, [b(4, 6)], values)
    one(aten.index_put.default, f(6, 4), [torch.arange(6) < 3], f(3, 4))


def writes() -> None:
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


def orders_of_dims() -> None:
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
    one(aten.diag_embed.default, f(2, 4, 6), -1, 0, -2)
    one(aten.view_as_complex.default, f(4, 6, 2))
    one(aten.view_as_real.default, c(4, 6))
    one(aten.atleast_1d.default, x)
    one(aten.atleast_1d.default, f())


def reshapes() -> None:
    x = f(2, 4, 6)
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


def sizes_of_one() -> None:
    x = f(2, 4, 6)
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


def joins() -> None:
    x = f(2, 4, 6)
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
    one((aten.hstack.default, aten.vstack.default, aten.row_stack.default, aten.dstack.default), [x, f(2, 4, 6)])
    one(aten.hstack.default, [f(4), f(2)])
    one(aten.meshgrid.default, [f(4), f(6)])
    one(aten.meshgrid.indexing, [f(4), f(6)], indexing="ij")
    one(aten.meshgrid.indexing, [f(4), f(6), f(2)], indexing="xy")


def moves_within_dims() -> None:
    x = f(2, 4, 6)
    one(aten.flip.default, x, [1])
    one(aten.roll.default, x, [1, 2], [0, -1])
    one(aten.roll.default, x, [1])
    one((aten.constant_pad_nd.default, aten.pad.default), x, [0, 0, 1, 2])
    one(aten.pad.default, x, [1, -1], "constant", 1.0)
    one(aten.diagonal.default, f(4, 2, 6), 0, 0, 2)
    one((aten.tril.default, aten.triu.default), x)
    one(aten.constant_pad_nd.default, x, [0, 0, -1, 0])
    one(aten.unfold.default, x, 1, 2, 1)
    one(aten.unfold.default, x, 1, 2, 2)
    one(sp.roll.default, x, 1, -1)
    one(sp.shift.default, x, 1, 1, -1, 0)
    one(sp.unfold.default, x, 1, 1, 0, 0, 2, 1)


def pieces() -> None:
    x = f(2, 4, 6)
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
    one((aten.split.sizes, aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default), x, [4, 2], -1)
    one(aten.tensor_split.indices, x, [1, 3], -1)
    one(aten.tensor_split.indices, x, [3, 1], -1)
    one((aten.hsplit.int, aten.vsplit.int, aten.dsplit.int), x, 2)
    one((aten.hsplit.array, aten.vsplit.array, aten.dsplit.array), x, [1])
    one(aten.hsplit.int, f(6), 2)


def convolutions() -> None:
    one((aten.conv1d.default,), f(4, 2, 6), f(6, 2, 3), f(6), [1], [1])
    one(aten.conv1d.default, f(2, 6), f(4, 2, 3))
    one(sp.conv_along.default, f(2, 4, 6, 6), f(4, 1, 3, 3), f(4), 2, 1, 1, [1, 1], [1, 1], [1, 1], 4)
    one(sp.conv_along.default, f(4, 2, 6), f(6, 2, 3), f(6), 2, 2, 0, [1], [0], [1], 1)
    one(aten.conv1d.padding, f(4, 2, 6), f(6, 2, 3), None, [1], "same")
    one(aten.conv2d.default, f(2, 4, 6, 6), f(4, 1, 3, 3), f(4), [1, 1], [1, 1], [1, 1], 4)
    one(aten.conv2d.padding, f(2, 2, 6, 6), f(4, 2, 3, 3), f(4), [1, 1], "same")
    one(aten.conv3d.default, f(2, 2, 2, 4, 4), f(4, 2, 2, 2, 2))
    one(aten.conv3d.padding, f(2, 2, 2, 4, 4), f(4, 2, 2, 2, 2), None, [1, 1, 1], "valid")
    one(aten.conv_transpose1d.default, f(4, 2, 6), f(2, 6, 3))
    one(aten.conv_transpose2d.input, f(4, 2, 6, 6), f(2, 6, 3, 3))
    one(aten.conv_transpose3d.input, f(2, 2, 2, 4, 4), f(2, 4, 2, 2, 2))
    one(aten.convolution.default, f(4, 2, 6), f(6, 2, 3), f(6), [1], [1], [1], False, [0], 1)


def pools() -> None:
    line, image = f(2, 4, 6), f(2, 4, 6, 6)
    one((aten.adaptive_avg_pool1d.default, aten.adaptive_max_pool1d.default), line, [3])
    one((aten.avg_pool1d.default, aten.max_pool1d.default), line, [3], [1], [1])
    one((aten.avg_pool1d.default, aten.max_pool1d.default, aten.max_pool1d_with_indices.default), line, [2])
    one(sp.avg_pool1d.default, line, 1, 1, 3, 1)
    one(sp.max_pool1d.default, line, 1, 1, -torch.inf, 3, 1)
    one((aten.reflection_pad1d.default, aten.replication_pad1d.default), line, [1, 2])
    one((aten.upsample_linear1d.vec,), line, [12], False, None)
    one(aten.upsample_nearest1d.vec, line, [12], None)
    one((aten.adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default), image, [3, 3])
    one((aten.avg_pool2d.default, aten.max_pool2d.default, aten.max_pool2d_with_indices.default), image, [2, 2])
    one((aten.reflection_pad2d.default, aten.replication_pad2d.default), image, [1, 2, 1, 0])
    one((aten.upsample_bicubic2d.vec, aten.upsample_bilinear2d.vec), image, [12, 12], False, None)
    one(aten.upsample_nearest2d.vec, image, [12, 12], None)
    one(aten.pixel_shuffle.default, image, 2)
    one(aten.pixel_unshuffle.default, image, 2)
    one(aten.grid_sampler.default, f(2, 4, 6, 6), unit(2, 4, 6, 2), 0, 0, False)


def elements() -> None:
    x = f(2, 4, 6)
    one((aten.bernoulli.default,), unit(2, 4, 6))
    one(aten.binomial.default, f(4, 6).abs().ceil(), unit(4, 6))
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


def factories() -> None:
    x = f(2, 4, 6)
    made = (aten.empty.memory_format, aten.ones.default, aten.rand.default, aten.randn.default, aten.zeros.default)
    one(made, [2, 4, 6])
    one(aten.full.default, [2, 4, 6], 3.0)
    one(aten.randint.default, 5, [2, 4, 6])
    one(aten.randint.low, 1, 5, [2, 4, 6])
    one((aten.new_empty.default, aten.new_ones.default, aten.new_zeros.default), x, [6, 4])
    one(aten.new_full.default, x, [6, 4], 3.0)
    one(aten.scalar_tensor.default, 1.0)


FAMILIES = (
    tables,
    gathers,
    indices,
    writes,
    orders_of_dims,
    reshapes,
    sizes_of_one,
    joins,
    moves_within_dims,
    pieces,
    convolutions,
    pools,
    elements,
    factories,
)
