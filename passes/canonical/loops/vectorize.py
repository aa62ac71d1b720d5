"""Batch the steps of a loop: one op on the values of all steps, as a tensor with a dim for the steps.

    pointwise ops, matmul            the op itself, operands aligned
    linear, layer_norm, rms_norm     the op itself
    ops along dims, writes, einsum   the op itself, with shifted dims
    everything else                  the ops that torch.func.vmap creates

A node of shape (B, D) at each of S steps becomes one node of shape (B, S, D), a `BatchedValue` whose `time`, the dim of
the steps, is 1. An op of one step has *leaves*: the operands and constants in its arguments, in the order of a pytree.
The functions below get the batched leaves in the same order. A value that is not batched is constant over the steps.

`LoopBuilder` (reroll.py) calls `batch` for every column of a loop; a batcher returns None for ops of other kinds, and
anything that cannot be batched raises `NotALoop`, so that the loop remains. Ops and the dim of the
steps are preserved where possible, so that rules and later passes see the graph of a model without a loop. Unchanged:
ops without a vmap rule, random draws.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree, schema_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import constant_value, is_copy
from sp_compile.passes.sharding.rule import lookup_rule

from .lists import SCATTERS
from .steps import NotALoop

aten = torch.ops.aten
MATMULS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
DIM_ARGUMENTS = {"dim", "dim0", "dim1", "dim2"}


@dataclass(frozen=True)
class BatchedValue:
    """Value of every step as one node."""

    node: Node  # the batched tensor
    time: int  # dim of the steps

    @property
    def ndim(self) -> int:
        """Return the number of dims of one step."""
        return int(self.node.meta["val"].ndim) - 1

    @property
    def trailing_dims(self) -> int:
        """Return the number of dims after that of the steps."""
        return self.ndim - self.time

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape of one step."""
        shape = node_shape(self.node)
        return (*shape[: self.time], *shape[self.time + 1 :])


Value: TypeAlias = Any  # BatchedValue | a list of them | Node | a constant; the last two are constant over the steps


class BatchedOps(GraphEditor):
    """Editor that appends ops on batched values at the insertion point of the graph."""

    def move_steps(self, x: BatchedValue, time: int) -> BatchedValue:
        """Return x with the dim of the steps at position `time`."""
        if x.time == time:
            return x
        node, order = x.node, [d for d in range(x.ndim + 1) if d != x.time]
        order.insert(time, x.time)
        if node.target is aten.permute.default:  # one permutation in place of two
            node, order = node.args[0], [node.args[1][d] % len(order) for d in order]
        if order != sorted(order):  # not the identity
            node = self.compute(aten.permute.default, (node, order), node)
        return BatchedValue(node, time)

    def narrow(self, x: BatchedValue, start: int, length: int) -> BatchedValue:
        """Return `length` steps of x from index `start` of their dim on. Raises NotALoop if there are fewer."""
        extent = x.node.meta["val"].shape[x.time]
        if start < 0 or start + length > extent:
            raise NotALoop("steps out of range")
        if length == extent:
            return x
        return BatchedValue(self.compute(aten.slice.Tensor, (x.node, x.time, start, start + length), x.node), x.time)

    def flip(self, x: BatchedValue) -> BatchedValue:
        """Return x with its steps in reverse order."""
        return BatchedValue(self.compute(aten.flip.default, (x.node, [x.time]), x.node), x.time)

    def append_zeros(self, x: BatchedValue, count: int) -> BatchedValue:
        """Emit the same values with `count` zeros after those of the last step."""
        after = x.node.meta["val"].ndim - 1 - x.time  # dims after that of the steps
        return BatchedValue(
            self.compute(aten.constant_pad_nd.default, (x.node, [0, 0] * after + [0, count]), x.node), x.time
        )

    def split_rows(self, x: BatchedValue, rows: int) -> BatchedValue:
        """Split a dim of N * rows into the dim of N steps and one of the `rows` rows that each step has.

        For 3 steps of 2 rows, (B, 6, D) becomes (B, 3, 2, D).
        """
        if rows == 1:
            return BatchedValue(self.unsqueeze(x.node, x.time + 1), x.time)
        shape = list(node_shape(x.node))
        shape[x.time : x.time + 1] = [exact_quotient(shape[x.time], rows), rows]
        return BatchedValue(self.reshape(x.node, shape, x.node), x.time)

    def add_first_step(self, seed: Value, later: BatchedValue, is_last: bool) -> BatchedValue:
        """Join the value of the first step with those of the other steps, and return the values of all steps.

        Args:
            seed: The value of the first step.
            later: The values of the other steps.
            is_last: True if the first step is after the others in the tensor, for loops in reverse.
        """
        constant = constant_value(seed) if isinstance(seed, Node) else seed
        if constant == 0:  # a padding, which ranks compute on their shards
            # (before, after) of each dim, from the last one to the dim of the steps
            widths = [0, 0] * later.trailing_dims + ([0, 1] if is_last else [1, 0])
            padded = self.compute(aten.constant_pad_nd.default, (later.node, widths), later.node)
            return BatchedValue(padded, later.time)
        step = self.unsqueeze(self.expand_to(seed, later.shape, later.node), later.time)
        parts = [later.node, step] if is_last else [step, later.node]
        return BatchedValue(self.compute(aten.cat.default, (parts, later.time), later.node), later.time)

    def expand_to(self, x: Value, shape: Sequence[Size], like: Node, dtype: torch.dtype | None = None) -> Node:
        """Return a node or a number expanded to `shape`, in `dtype`, by default that of `like`.

        Raises NotALoop if the cast may round the values, or if the node does not broadcast to the shape.
        """
        value, sizes = like.meta["val"], self.sizes.list(shape)
        dtype = dtype or value.dtype
        if not isinstance(x, Node):
            options = {"dtype": dtype, "device": value.device}
            return self.compute(aten.full.default, (sizes, x), like, options)
        x_value, x_shape = x.meta["val"], node_shape(x)
        # The ops of one step cast a 0-dim tensor to the dtype of their other operands, too, so it may be rounded here.
        rounds = x_value.ndim and torch.promote_types(x_value.dtype, dtype) != dtype
        broadcasts = all(a == 1 or is_same_size(a, b) for a, b in zip(x_shape[::-1], shape[::-1]))
        if rounds or not broadcasts or len(x_shape) > len(shape):
            raise NotALoop("a value of another type")
        x = self.cast(x, dtype, x)
        return x if is_same_shape(x_shape, shape) else self.compute(aten.expand.default, (x, sizes), x)

    def unsqueeze(self, node: Node, dim: int, count: int = 1) -> Node:
        """Insert `count` dims of size 1 at position `dim`."""
        for _ in range(count):
            node = self.compute(aten.unsqueeze.default, (node, dim), node)
        return node

    def align(self, x: Value, trailing_dims: int) -> Value:
        """Return the tensor of x, with `trailing_dims` dims after the dim of the steps.

        An op on batched values aligns its operands so, because broadcasting compares dims from the last one on. The dim
        of the steps is moved there, or a tensor that is equal for all steps gets a dim of size 1 there if it has more
        dims. Numbers are returned unchanged.
        """
        if isinstance(x, BatchedValue):
            if x.ndim >= trailing_dims:
                return self.move_steps(x, x.ndim - trailing_dims).node
            return self.unsqueeze(self.move_steps(x, 0).node, 1, trailing_dims - x.ndim)
        if is_tensor(x) and x.meta["val"].ndim > trailing_dims:
            return self.unsqueeze(x, x.meta["val"].ndim - trailing_dims)
        return x

    def batch(self, node: Node, leaves: Sequence[Value]) -> Value:
        """Emit the op of one step for all steps.

        Args:
            node: The op of one step.
            leaves: The leaves of its arguments (tensors and constants), with batched values for those that differ
                between the steps.

        Returns:
            The batched result, or a list of them for an op with several results.

        Raises:
            NotALoop: The op cannot be batched.
        """
        if node.target is operator.getitem:  # of an op with several results, whose value is a list
            return leaves[0][leaves[1]]
        for batch_op in BATCHERS:
            try:
                result = batch_op(self, node, leaves)
            except (RuntimeError, ValueError, IndexError) as error:
                raise NotALoop(f"{node.target} cannot be batched") from error
            if result is not None and _is_batch_of(result, node):
                return result
        result = self._vmap(node, leaves)
        if not _is_batch_of(result, node):
            raise NotALoop(f"{node.target} has another meaning for batched steps")
        return result

    def compute_steps(self, target: Any, *operands: Value, like: Node, fixed_dims: int = 0) -> Value:
        """Emit a pointwise op, or a matrix product (`fixed_dims` is 2), on values of steps.

        The result is batched if an operand is.
        """
        if not any(isinstance(x, BatchedValue) for x in operands):
            return self.compute(target, operands, like)
        _, spec = pytree.tree_flatten((operands, {}))  # of the arguments and no keyword arguments
        return self.broadcast(target, spec, operands, like, fixed_dims)

    def broadcast(
        self, target: Any, spec: Any, leaves: Sequence[Value], like: Node, fixed_dims: int = 0
    ) -> BatchedValue:
        """Emit an op for all steps whose operands broadcast, except for their last `fixed_dims` dims.

        For x + y with steps of shape (B, D) and (D,), batched as (B, S, D) and (S, D), it emits the sum of (B, S, D)
        and (S, D): the dim of the steps has one dim after it in both.

        Args:
            target: The op.
            spec: The pytree spec of its (args, kwargs).
            leaves: The leaves of its arguments (tensors and constants), some of them batched.
            like: The node whose metadata the new node copies.
            fixed_dims: The number of last dims that do not broadcast.
        """
        ndim = max(step_ndim(x) for x in leaves)  # of one step of the result
        # All operands get the dim of the steps at the same distance from the last dim: that of the operand with most
        # dims, which need not be permuted then. The dim may not be among the fixed ones, the last dims of the op.
        candidates = [x for x in leaves if isinstance(x, BatchedValue) and x.trailing_dims >= fixed_dims]
        largest = max(candidates, key=lambda x: x.ndim, default=None)
        # The number of dims after that of the steps. Without such an operand the steps become the first dim.
        trailing_dims = ndim if largest is None else largest.trailing_dims
        args, kwargs = pytree.tree_unflatten([self.align(x, trailing_dims) for x in leaves], spec)
        return BatchedValue(self.compute(target, args, like, kwargs), time=ndim - trailing_dims)

    def _vmap(self, node: Node, leaves: Sequence[Value]) -> Value:
        """Emit the op of one step for all steps by the ops that torch.func.vmap creates.

        This is for ops without a batcher. Raises NotALoop if vmap has no rule for the op, or if the result is not only
        tensors.
        """
        # torch accepts dim=0 and dim=-1 of a tensor without dims. When batched, they would be the dim of the steps.
        has_dim = any(name in ("dim", "dims") for name in OpCall(node).args)
        if has_dim and any(isinstance(x, BatchedValue) and not x.ndim for x in leaves):
            raise NotALoop("a dim of a value without dims, which is that of the steps when batched")
        operands = [self.move_steps(x, 0).node if isinstance(x, BatchedValue) else x for x in leaves]
        tensors = [i for i, x in enumerate(operands) if is_tensor(x)]  # the leaves that vmap maps over or shares
        fake_leaves = torch.fx.map_arg(operands, lambda n: n.meta["val"])
        spec = _argument_spec(node)

        def run_step(*values: torch.Tensor) -> Any:
            """Call the op on the tensors of one step, as vmap needs it; other leaves are those of the node."""
            step_leaves = list(fake_leaves)
            for i, x in zip(tensors, values):
                step_leaves[i] = x
            args, kwargs = pytree.tree_unflatten(step_leaves, spec)
            return node.target(*args, **kwargs)

        values = [fake_leaves[i].detach() for i in tensors]
        dims = tuple(0 if isinstance(leaves[i], BatchedValue) else None for i in tensors)
        if not values:  # the operands are lists, the results of ops with several results
            raise NotALoop("lists of values")
        try:
            body = trace_function(torch.func.vmap(run_step, in_dims=dims), values)
        except (RuntimeError, ValueError, IndexError) as error:
            raise NotALoop(f"{node.target} cannot be batched") from error
        if any(n.op not in ("placeholder", "call_function", "output") for n in body.graph.nodes):
            raise NotALoop(f"{node.target} contains constants")
        # An op without a result raises an error for singular matrices in torch.linalg.solve and others.
        if any(n.op == "call_function" and "val" not in n.meta for n in body.graph.nodes):
            raise NotALoop(f"{node.target} contains an op without a result")
        out = self.inline(body, [operands[i] for i in tensors], node)
        if not all(is_tensor(x) for x in pytree.tree_leaves(out)):
            raise NotALoop(f"{node.target} does not return tensors")
        return [BatchedValue(x, 0) for x in out] if isinstance(out, list | tuple) else BatchedValue(out, 0)


def _argument_spec(node: Node) -> Any:
    """Return the pytree spec of the node's (args, kwargs), by which tree_unflatten rebuilds them from leaves."""
    _, spec = pytree.tree_flatten((node.args, node.kwargs))
    return spec


def leaf_names(node: Node) -> list[str]:
    """Return, for each leaf of a node's arguments (a tensor or a constant), the name of its argument.

    cat([a, b], 1) has the names tensors, tensors, dim.
    """
    argument_names = [x.name for x in schema_of(node.target).arguments]
    arguments = [*zip(argument_names, node.args), *node.kwargs.items()]
    return [name for name, value in arguments for _ in pytree.tree_leaves(value)]


def _is_batch_of(batched: Value, node: Node) -> bool:
    """Return True if one step of each batched result has the shape and dtype of the result of the node."""
    # An op with several results has a list of values, another op one value.
    results, step_values = (x if isinstance(x, list | tuple) else [x] for x in (batched, node.meta["val"]))
    if not all(isinstance(value, torch.Tensor) for value in step_values) or len(results) != len(step_values):
        return False
    return all(
        result.node.meta["val"].dtype == value.dtype and is_same_shape(result.shape, as_sizes(value.shape))
        for result, value in zip(results, step_values)
    )


def step_ndim(x: Value) -> int:
    """Return the number of dims of one step of a value, 0 for a number."""
    if isinstance(x, BatchedValue):
        return x.ndim
    return int(x.meta["val"].ndim) if is_tensor(x) else 0


def _batch_pointwise(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Emit the op of a step for all steps if it acts on each element independently; None for other ops.

    The op's sharding rule shows whether it does: all factors pass through (they have no kinds), each dim of an operand
    is the dim of the result to which it broadcasts, and all dims are those of "...", which are named ~0, ~1, ... from
    the last one on. A dim with another name may need a fixed position, as the channels of prelu do.

    Args:
        ops: The editor.
        node: The op of one step.
        leaves: The leaves of its arguments, some of them batched.
    """
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or rule.reshapes or rule.kinds or rule.sizes or len(rule.results) != 1:
        return None
    if any(isinstance(values, list | tuple) and not any(map(is_tensor, values)) for values in call.args.values()):
        return None  # an argument with a number for each dim, and batching adds a dim
    (result,) = rule.results
    for dims in rule.operands:
        broadcasts = all(dim in ("", result_dim) for dim, result_dim in zip(dims[::-1], result[::-1]))
        if len(dims) > len(result) or not broadcasts or not all(dim.startswith("~") for dim in result):
            return None
    return ops.broadcast(node.target, _argument_spec(node), leaves, node)


def _batch_view(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Return the batched operand itself for a copy, or a view to an equal shape; None for other ops."""
    return leaves[0] if is_copy(node) and isinstance(leaves[0], BatchedValue) else None


def _batch_matmul(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Emit a matrix product of a step for all steps; None for other ops, and for vectors."""
    if node.target not in MATMULS:
        return None
    left, right = leaves
    # A (K, N) matrix that all steps share multiplies the last dim, so that the dim of the steps, if it is not the last
    # one, need not be moved.
    is_shared_right = step_ndim(right) == 2 and not isinstance(right, BatchedValue)
    if is_shared_right and isinstance(left, BatchedValue) and left.trailing_dims:
        return BatchedValue(ops.compute(aten.matmul.default, (left.node, right), node), left.time)
    if min(step_ndim(x) for x in leaves) < 2:
        return None
    # The last two dims of each operand, (M, K) and (K, N), are multiplied; the others, with the steps, broadcast.
    return ops.broadcast(aten.matmul.default, _argument_spec(node), leaves, node, fixed_dims=2)


def _batch_trailing(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Emit a linear layer or norm of a step for all steps, as it accepts any number of leading dims.

    None for other ops, if the steps' dim is among the last dims on which it acts, or if its parameters differ by step.
    """
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        num_dims = len(node.args[1])  # of normalized_shape, the last dims
    elif node.target is aten.linear.default:
        num_dims = 1
    else:
        return None
    x, *parameters = leaves
    if not isinstance(x, BatchedValue) or x.trailing_dims < num_dims:
        return None
    if any(isinstance(y, BatchedValue) for y in parameters):
        return None
    args, kwargs = pytree.tree_unflatten([x.node, *parameters], _argument_spec(node))
    return BatchedValue(ops.compute(node.target, args, node, kwargs), x.time)


def _batch_dim_op(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> Value | None:
    """Emit an op along dims of one tensor, such as sum(x, 1), for all steps; None for other ops.

    Its dim arguments are shifted by the dim of the steps. Its sharding rule shows where that dim is in the results.
    """
    x = leaves[0]
    if not isinstance(x, BatchedValue) or any(isinstance(y, BatchedValue) or is_tensor(y) for y in leaves[1:]):
        return None
    call = OpCall(node)
    dim_args = {name: value for name, value in call.args.items() if "dim" in name and name != "keepdim"}
    if not dim_args or not DIM_ARGUMENTS.issuperset(dim_args):  # others, such as `dims`, are left to vmap
        return None
    if node.target is aten.diag_embed.default:  # its two new dims may be before those of the operand
        return None
    ndim = x.ndim + (node.target is aten.unsqueeze.default)  # unsqueeze counts the dims of its result
    if not ndim:
        return None
    shifted_args = pytree.tree_map(lambda d: _shift_dim(d, x.time, ndim), dim_args)
    if any(d is None for d in pytree.tree_leaves(shifted_args)):  # dim=None (all dims) would include the steps
        return None
    args, kwargs = call.with_operands([x.node], **shifted_args)
    out = ops.compute(node.target, args, node, kwargs)
    times = _result_times(out, x.time)
    if times is None:
        return None
    if isinstance(out.meta["val"], torch.Tensor):
        return BatchedValue(out, times[0])
    results = [ops.emit(operator.getitem, (out, i), value, node) for i, value in enumerate(out.meta["val"])]
    return list(map(BatchedValue, results, times))


def _batch_write(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Emit a write into a part of a tensor, select_scatter or slice_scatter, for all steps; None for other ops.

    torch.func.vmap would write each row of a select_scatter several times, which multiplies its gradient.
    """
    if node.target not in SCATTERS:
        return None
    call, (base, source) = OpCall(node), leaves[:2]
    steps = next(node_shape(x.node)[x.time] for x in (base, source) if isinstance(x, BatchedValue))

    def lead_steps(x: Value) -> Node:
        """Return an operand with the steps as the first dim; one that all steps share is repeated."""
        if isinstance(x, BatchedValue):
            return ops.move_steps(x, 0).node
        return ops.expand(ops.unsqueeze(x, 0), (steps, *node_shape(x)), x)

    args, kwargs = call.with_operands([lead_steps(base), lead_steps(source)], dim=call.dim() + 1)
    return BatchedValue(ops.compute(node.target, args, node, kwargs), 0)


def _shift_dim(dim: Any, time: int, ndim: int) -> int | None:
    """Return a dim argument for one step as the argument for all steps; None if it is not an int.

    With the steps in dim 1, dim 0 remains 0, and dim 1 becomes 2.

    Args:
        dim: The dim, possibly negative.
        time: The dim of the steps.
        ndim: The number of dims that `dim` indexes: those of the value at one step, and one more for unsqueeze.
    """
    if not isinstance(dim, int):
        return None
    dim %= max(ndim, 1)
    return dim if dim < time else dim + 1


def _result_times(node: Node, time: int) -> list[int] | None:
    """Return the dim of the steps in each result of an op, or None if the op does not just pass that dim on.

    `time` is the dim of the steps in the operand. The op's sharding rule names the same dim in the results.
    """
    _, rule = lookup_rule(node) or (None, None)
    if rule is None or rule.reshapes:
        return None
    factor = rule.operands[0][time]
    if not factor or rule.kind(factor) != "pass" or any(factor not in dims for dims in rule.results):
        return None
    return [dims.index(factor) for dims in rule.results]


def _batch_einsum(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Emit an einsum for all steps, with another letter for their dim: "ij,jk->ik" becomes "aij,jk->aik".

    None for other ops, and for equations with "..." or without an output.
    """
    if node.target is not aten.einsum.default:
        return None
    equation = str(leaves[0]).replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms, operands = inputs.split(","), leaves[1:]
    letter = next((x for x in string.ascii_letters if x not in equation), "")
    if not arrow or "." in equation or not letter or len(terms) != len(operands):
        return None
    times = [x.time if isinstance(x, BatchedValue) else None for x in operands]
    # In the result, the steps have the dim that they have in the first batched operand.
    time = min(next(t for t in times if t is not None), len(output))
    terms = [term if t is None else term[:t] + letter + term[t:] for term, t in zip(terms, times)]
    equation = f"{','.join(terms)}->{output[:time]}{letter}{output[time:]}"
    nodes = [x.node if isinstance(x, BatchedValue) else x for x in operands]
    return BatchedValue(ops.compute(node.target, (equation, nodes), node), time)


BATCHERS = (_batch_pointwise, _batch_view, _batch_matmul, _batch_trailing, _batch_dim_op, _batch_write, _batch_einsum)
