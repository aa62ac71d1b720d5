"""Reduce sums over the sharded sequence once, at the first use of a Partial; means become sum / count.

    amax(x, S)                     ->  sp.extreme(x, S): the maximum of those of the ranks

    mean(x, S)                     ->  all_reduce(sum(x, S)) / S
    group_norm(x) over C / G, S    ->  y * rsqrt(mean(y * y) + eps), with y = x - mean(x), then as for means
    cross_entropy(x, t, "mean")    ->  all_reduce(cross_entropy(x, t, "sum")) / count(t)
    mse_loss(x, y, "mean")         ->  all_reduce(sum(mse_loss(x, y, "none"))) / numel

A Partial is a value of which each rank has one summand. The count is that of the global sequence (targets that are not
ignored, or their class weights), so a rank without a valid target divides by the same number as the others. Bytes: one
all_reduce of the result. Refuses nothing. A maximum that is differentiated is not claimed.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import HALF, accumulation_dtype
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.graph.modes import settle_dtypes
from sp_compile.passes.graph.sizes import size_product
from sp_compile.passes.sharding.placement import Demand, Partial, Shard
from sp_compile.passes.sharding.rules.norms import CLASS_LOSSES, NONE, SUM
from sp_compile.passes.sharding.window_rules import simplify_size

from .discharge import DemandPass

sp, aten = torch.ops.sp, torch.ops.aten
MEAN_OPS = (aten.mean.default, aten.mean.dim)
GROUP_NORMS = (aten.group_norm.default, aten.instance_norm.default)
SUM_OPS = (aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)


class DecomposeGroupNorms(DemandPass):
    """Decomposition of group norms and instance norms over the sequence into two means, for all ranks."""

    requires = frozenset({"canonical", "sequences"})
    kinds = frozenset({"gathered"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim a norm of values that are sharded along their positions, else ""."""
        if node.target not in GROUP_NORMS:
            return ""
        call = OpCall(node)
        have, is_updated = self.plan.of(call.operands[0]), call.get("running_mean") is not None
        is_claimed = isinstance(have, Shard) and have.dim > 1 and call.get("use_input_stats") is not False
        return None if is_claimed and not is_updated else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a norm by its arithmetic, in the dtype in which torch adds the elements."""
        call, dtype = OpCall(node), node.meta["val"].dtype
        batch, channels, *positions = call.shape()
        groups = call.get("num_groups") or channels  # an instance norm has groups of one channel
        with self.graph.inserting_before(node):
            x = self.cast(call.operands[0], accumulation_dtype(dtype), node)
            x = self.reshape(x, (batch, groups, simplify_size(channels // groups), *positions), node)
            dims = list(range(2, 3 + len(positions)))
            mean = self.compute(aten.mean.dim, (x, dims, True), node)
            x = self.compute(aten.sub.Tensor, (x, mean), node)
            square = self.compute(aten.mul.Tensor, (x, x), node)
            variance = self.compute(aten.mean.dim, (square, dims, True), node)
            variance = self.compute(aten.add.Tensor, (variance, call["eps"]), node)
            x = self.compute(aten.mul.Tensor, (x, self.compute(aten.rsqrt.default, (variance,), node)), node)
            x = self.reshape(x, call.shape(), node)
            for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
                if call[name] is not None:
                    channel = self.reshape(call[name], (channels, *[1] * len(positions)), node)
                    x = self.compute(op, (x, channel), node)
            new = self.cast(x, dtype, node)
        self.replace(node, new)
        self.note(new, "mean and variance over all ranks")


class DecomposeMeans(DemandPass):
    """Decomposition of means, and of losses that sum several operands, into a sum and a count."""

    name = "mean"
    provides = frozenset({"claimed", "decomposed means"})
    kinds = frozenset({"mean", "total"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Decompose every mean and summed loss over the sequence; return their number."""
        settle_dtypes(gm.graph)  # half types get wider sums
        return super().apply(gm, context)

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a mean or a loss by a sum over the sequence; a mean is divided by the count of the full sequence."""
        is_mean = any(demand.kind == "mean" for demand in demands)
        with self.graph.inserting_before(node):
            if node.target in MEAN_OPS:
                new = self._mean(node)
            elif node.target in CLASS_LOSSES and OpCall(node).ndim("target") != OpCall(node).ndim("self"):
                new = self._class_loss(node)  # class indices; targets of the input's shape are class probabilities
            else:
                new = self._elementwise_loss(node, mean=is_mean)
        self.replace(node, new)
        self.note(new, "the sum over all ranks" + (", divided by the count of the full sequence" if is_mean else ""))

    def _mean(self, node: Node) -> Node:
        """Emit sum(x, dims) / count for mean(x, dims), and return the result."""
        call, value = OpCall(node), node.meta["val"]
        dims = call.get("dim") or list(range(call.ndim()))
        count = size_product(call.shape()[d] for d in dims)
        x = call.operands[0]
        dtype = x.meta["val"].dtype
        # mean(x, dtype=torch.float32) of half types, integers or bools casts x before it adds the elements.
        if not dtype.is_floating_point or torch.finfo(value.dtype).bits > torch.finfo(dtype).bits:
            x = self.cast(x, value.dtype, node)
        total = self._sum(x, node, dims, bool(call.get("keepdim")))
        mean = self.compute(aten.div.Tensor, (total, self.sizes(count)), node)
        return self.cast(mean, value.dtype, node)

    def _elementwise_loss(self, node: Node, mean: bool) -> Node:
        """Emit the sum of the losses of all elements, divided by their number if `mean`; return the result."""
        call = OpCall(node)
        args, kwargs = call.with_operands(call.operands, reduction=NONE)
        losses = self.compute(node.target, args, node, kwargs)
        result = self._sum(losses, node)
        if mean:
            count = self.sizes(size_product(node_shape(losses)))
            result = self.compute(aten.div.Tensor, (result, count), node)
        return self.cast(result, node.meta["val"].dtype, node)

    def _class_loss(self, node: Node) -> Node:
        """Emit the mean of a loss with class indices, such as nll_loss: sum(losses) / sum(weights of the targets).

        The weight of a target is 0 if it is ignored, else that of its class, or 1.
        """
        call = OpCall(node)
        dtype = node.meta["val"].dtype
        is_half = dtype in HALF
        args, kwargs = call.with_operands(call.operands, reduction=NONE if is_half else SUM)
        total = self.compute(node.target, args, node, kwargs)
        if is_half:  # the losses of positions are rounded to the half type, but not their sum
            total = self._sum(total, node)
        target, weight = call["target"], call["weight"]
        is_valid = self.compute(aten.ne.Scalar, (target, call["ignore_index"]), node)
        target_weights = is_valid
        if weight is not None:
            # An ignored index may be out of range, so it is replaced by 0.
            index = self.compute(aten.mul.Tensor, (target, is_valid), node)
            class_weights = self.compute(aten.index.Tensor, (weight, [index]), node)
            target_weights = self.compute(aten.where.ScalarOther, (is_valid, class_weights, 0), node)
        count = self.cast(self.compute(aten.sum.default, (target_weights,), node), accumulation_dtype(dtype), node)
        loss = self.compute(aten.div.Tensor, (total, count), node)
        return self.cast(loss, dtype, node)

    def _sum(self, x: Node, node: Node, dims: list[int] | None = None, keepdim: bool = False) -> Node:
        """Emit a sum over dims (None: all) in at least float32, so that the sum over all ranks is rounded only once."""
        kwargs = {"dtype": torch.float32} if x.meta["val"].dtype in HALF else {}
        if dims is None:
            return self.compute(aten.sum.default, (x,), node, kwargs)
        return self.compute(aten.sum.dim_IntList, (x, dims, keepdim), node, kwargs)


class ReducePartials(DemandPass):
    """Reduction of Partial values to replicated ones, once each, right after they are produced."""

    requires = DemandPass.requires | {"decomposed means"}
    kinds = frozenset({"reduce"})

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Emit an all_reduce after each operand that is partial, which all of its users then read."""
        for source in filter(is_tensor, node.all_input_nodes):
            is_reduced = any(user.target is sp.all_reduce.default for user in source.users)
            if isinstance(self.plan.of(source), Partial) and not is_reduced:
                if source.target in SUM_OPS and source.meta["val"].dtype in HALF:
                    self._reduce_half(source)
                    continue
                args = (source, self.context.ranks.n, self.context.ranks.group)
                with self.insert_after(source):
                    self.insert_between(source, self.emit(sp.all_reduce.default, args, source.meta["val"], source))
                self.note(source, "adds the partial sums of the ranks")

    def _reduce_half(self, source: Node) -> None:
        """Replace a sum in a half type by one in float32, of which only the sum over all ranks is rounded.

        The sum of one rank may overflow float16 where that of all ranks does not.
        """
        operand, *others = source.args
        kwargs = {**source.kwargs, "dtype": torch.float32}
        with self.graph.inserting_before(source):
            # sum(x, dtype=torch.float16) rounds the elements of x before it adds them, so they are rounded here, too.
            operand = self.cast(operand, source.meta["val"].dtype, source)
            partial = self.compute(source.target, (operand, *others), source, kwargs)
            reduce_args = (partial, self.context.ranks.n, self.context.ranks.group)
            total = self.emit(sp.all_reduce.default, reduce_args, partial.meta["val"], source)
            rounded = self.cast(total, source.meta["val"].dtype, source)
        self.replace(source, rounded)
        self.note(partial, "adds the partial sums of the ranks")


class ReduceExtremes(DemandPass):
    """Maximum over the sequence of a value that is not differentiated, such as that for the scale of a cast."""

    requires = DemandPass.requires
    provides = frozenset({"claimed", "reduced extremes"})
    kinds = frozenset({"gathered"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim an amax or max of a sharded value that is not differentiated, else ""."""
        is_maximum = node.target in (aten.amax.default, aten.max.default)
        is_claimed = is_maximum and len(demands) == 1 and node not in differentiable_nodes(self.gm)
        return None if is_claimed and isinstance(self.plan.of(node.all_input_nodes[0]), Shard) else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a maximum by an sp::extreme: the maximum of the results of all ranks for their rows."""
        call, x = OpCall(node), node.all_input_nodes[0]
        have, ranks = self.plan.of(x), self.context.ranks
        assert isinstance(have, Shard)
        dims = [d % call.ndim() for d in call.get("dim") or range(call.ndim())]
        with self.graph.inserting_before(node):
            frame = self.sizes.list(have.frame_arg())
            args = (x, dims, bool(call.get("keepdim")), have.dim, frame, ranks.n, ranks.group)
            new = self.emit(sp.extreme.default, args, node.meta["val"], node)
        self.replace(node, new)
        self.note(new, "the maximum of those of the ranks")
