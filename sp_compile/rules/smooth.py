"""Ops whose derivative is finite wherever their value is.

A slice of a sharded sequence keeps the rows that it cuts off: the same local value, under a shorter window. One device
never computes on those rows. Behind the ops listed here that does no harm: their cotangents are zero and stay so. Any
other op may turn them into 0 * inf (the square root of a zero), so `passes/localize.py` replaces the rows first.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

SMOOTH = frozenset(
    {
        aten.add.Tensor,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.cos.default,
        aten.cross_entropy_loss.default,
        aten.dropout.default,
        aten.einsum.default,
        aten.gelu.default,
        aten.layer_norm.default,
        aten.linear.default,
        aten.log_softmax.int,
        aten.masked_fill.Scalar,
        aten.matmul.default,
        aten.mean.default,
        aten.mean.dim,
        aten.mm.default,
        aten.mse_loss.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.nll_loss_nd.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.softmax.int,
        aten.sub.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.tanh.default,
        aten.where.self,
    }
)
