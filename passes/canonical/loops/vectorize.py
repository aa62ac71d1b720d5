"""Batch the steps of a loop: one op on the values of all steps, as a tensor with a dim for the steps.

    pointwise ops, matmul            the op itself, operands aligned
    linear, layer_norm, rms_norm     the op itself
    ops along dims, einsum           the op itself, with shifted dims
    everything else                  the ops that torch.func.vmap creates

Ops and the dim of the steps are preserved where possible, so that rules and later passes see the graph of a model
without a loop. Unchanged: ops without a vmap rule, random draws.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import is_copy
from sp_compile.passes.sharding.rule import lookup_rule

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
        """Move the dim of the steps to position `time`."""
        if x.time == time:
            return x
        order = [d for d in range(x.ndim + 1) if d != x.time]
        order.insert(time, x.time)
        return BatchedValue(self._permute(x.node, order), time)

    def _permute(self, node: Node, order: list[int]) -> Node:
        if node.target is aten.permute.default:
            node, order = node.args[0], [node.args[1][d] for d in order]
        if order == sorted(order):
            return node
        return self.compute(aten.permute.default, (node, order), node)

    def narrow(self, x: BatchedValue, start: int, length: int) -> BatchedValue:
        """Return `length` steps from `start` on."""
        extent = x.node.meta["val"].shape[x.time]
        if start < 0 or start + length > extent:
            raise NotALoop("steps out of range")
        if length == extent:
            return x
        return BatchedValue(self.compute(aten.slice.Tensor, (x.node, x.time, start, start + length), x.node), x.time)

    def flip(self, x: BatchedValue) -> BatchedValue:
        """Return the steps in reverse order."""
        return BatchedValue(self.compute(aten.flip.default, (x.node, [x.time]), x.node), x.time)

    def split_rows(self, x: BatchedValue, rows: int) -> BatchedValue:
        """Split the steps into pieces of `rows` rows: (N * rows) -> (N, rows)."""
        if rows == 1:
            return BatchedValue(self.unsqueeze(x.node, x.time + 1), x.time)
        shape = list(node_shape(x.node))
        shape[x.time : x.time + 1] = [exact_quotient(shape[x.time], rows), rows]
        return BatchedValue(self.reshape(x.node, shape, x.node), x.time)

    def append_step(self, seed: Value, rest: BatchedValue, last: bool) -> BatchedValue:
        """Add a step before the rest, or after it if `last` is True."""
        one = self.unsqueeze(self.expand_to(seed, rest.shape, rest.node), rest.time)
        parts = [rest.node, one] if last else [one, rest.node]
        return BatchedValue(self.compute(aten.cat.default, (parts, rest.time), rest.node), rest.time)

    def expand_to(self, x: Value, shape: Sequence[Size], like: Node) -> Node:
        """Expand a node or a number to `shape` and the dtype of `like`, without rounding."""
        value, wanted = like.meta["val"], self.sizes.list(shape)
        if not isinstance(x, Node):
            options = {"dtype": value.dtype, "device": value.device}
            return self.compute(aten.full.default, (wanted, x), like, options)
        found = x.meta["val"]
        extents = as_sizes(found.shape)
        rounds = found.ndim and torch.promote_types(found.dtype, value.dtype) != value.dtype
        grows = all(a == 1 or is_same_size(a, b) for a, b in zip(extents[::-1], shape[::-1]))
        if rounds or not grows or len(extents) > len(shape):
            raise NotALoop("a value of another type")
        x = self.cast(x, value.dtype, x)
        if is_same_shape(extents, shape):
            return x
        return self.compute(aten.expand.default, (x, wanted), x)

    def unsqueeze(self, node: Node, dim: int, count: int = 1) -> Node:
        """Insert `count` dims of size 1."""
        for _ in range(count):
            node = self.compute(aten.unsqueeze.default, (node, dim), node)
        return node

    def align(self, x: Value, trailing_dims: int) -> Value:
        """Insert dims after the dim of the steps (or its position), so that the operand broadcasts."""
        if isinstance(x, BatchedValue):
            if x.ndim >= trailing_dims:
                return self.move_steps(x, x.ndim - trailing_dims).node
            return self.unsqueeze(self.move_steps(x, 0).node, 1, trailing_dims - x.ndim)
        if is_tensor(x) and x.meta["val"].ndim > trailing_dims:
            return self.unsqueeze(x, x.meta["val"].ndim - trailing_dims)
        return x

    def batch(self, node: Node, leaves: Sequence[Value]) -> Value:
        """Apply the op of one step to all steps.

        Args:
            node: The op of one step.
            leaves: Batched values in place of the leaves of its arguments.

        Returns:
            The batched result.
        """
        if node.target is operator.getitem:
            return leaves[0][leaves[1]]
        for way in (
            _batch_pointwise,
            _batch_identity_view,
            _batch_matmul,
            _batch_trailing,
            _batch_dim_op,
            _batch_einsum,
        ):
            found = way(self, node, leaves)
            if found is not None and _has_spec(found, node):
                return found
        found = self._vmap(node, leaves)
        if not _has_spec(found, node):
            raise NotALoop(f"{node.target} has another meaning for batched steps")
        return found

    def pointwise(self, target: Any, *operands: Value, like: Node) -> Value:
        """Apply a pointwise op; the result is batched if an operand is."""
        if not any(isinstance(x, BatchedValue) for x in operands):
            return self.compute(target, operands, like)
        return self.broadcast(target, pytree.tree_flatten((operands, {}))[1], operands, like)

    def broadcast(self, target: Any, spec: Any, leaves: Sequence[Value], like: Node, rows: int = 0) -> BatchedValue:
        """Apply an op whose operands broadcast except for the last `rows` dims."""
        steps = [x for x in leaves if isinstance(x, BatchedValue)]
        ndim = max(step_ndim(x) for x in leaves)
        trailing = max((x for x in steps if x.trailing_dims >= rows), key=lambda x: x.ndim, default=None)
        place = ndim if trailing is None else trailing.trailing_dims
        args, kwargs = pytree.tree_unflatten([self.align(x, place) for x in leaves], spec)
        return BatchedValue(self.compute(target, args, like, kwargs), ndim - place)

    def _vmap(self, node: Node, leaves: Sequence[Value]) -> Value:
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, BatchedValue) or is_tensor(x)]
        operands = [self.move_steps(x, 0).node if isinstance(x, BatchedValue) else x for x in leaves]
        plain = torch.fx.map_arg(operands, lambda n: n.meta["val"])
        spec = _value_spec(node)

        def step(*values: torch.Tensor) -> Any:
            """Run the node's function on tensors of one step."""
            filled = list(plain)
            for i, x in zip(tensors, values):
                filled[i] = x
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return node.target(*args, **kwargs)

        values = [plain[i].detach() for i in tensors]
        dims = tuple(0 if isinstance(leaves[i], BatchedValue) else None for i in tensors)
        if not values:
            raise NotALoop("lists of values")
        try:
            body = trace_function(torch.func.vmap(step, in_dims=dims), values)
        except (RuntimeError, ValueError) as error:
            raise NotALoop(f"{node.target} cannot be batched") from error
        return self._inline(body, [operands[i] for i in tensors], node)

    def _inline(self, body: GraphModule, operands: list[Node], like: Node) -> Value:
        if any(n.op not in ("placeholder", "call_function", "output") for n in body.graph.nodes):
            raise NotALoop(f"{like.target} contains constants")
        out = self.inline(body, operands, like)
        if not all(is_tensor(x) for x in pytree.tree_leaves(out)):
            raise NotALoop(f"{like.target} does not return tensors")
        return [BatchedValue(x, 0) for x in out] if isinstance(out, list | tuple) else BatchedValue(out, 0)


def step_ndim(x: Value) -> int:
    """Return the number of dims of one step, 0 for a number."""
    if isinstance(x, BatchedValue):
        return x.ndim
    return int(x.meta["val"].ndim) if is_tensor(x) else 0


def _value_spec(node: Node) -> Any:
    return pytree.tree_flatten((node.args, node.kwargs))[1]


def _has_spec(found: Value, node: Node) -> bool:
    """Return True if a step of the value has the shape and dtype of the node."""
    found, wanted = (x if isinstance(x, list | tuple) else [x] for x in (found, node.meta["val"]))
    if not all(isinstance(y, torch.Tensor) for y in wanted):
        return False
    pairs = list(zip(found, wanted))
    fits = all(x.node.meta["val"].dtype == y.dtype and is_same_shape(x.shape, as_sizes(y.shape)) for x, y in pairs)
    return fits and len(found) == len(wanted)


def _batch_pointwise(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Batch ops that act on each element independently, by their rule."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or rule.reshapes or rule.kinds or rule.sizes or len(rule.results) != 1:
        return None
    if any(isinstance(values, list | tuple) and not any(map(is_tensor, values)) for values in call.args.values()):
        return None  # a number per dim, and batching adds a dim
    (result,) = rule.results
    for dims in rule.operands:
        if len(dims) > len(result) or any(f not in ("", g) for f, g in zip(dims[::-1], result[::-1])):
            return None
    return ops.broadcast(node.target, _value_spec(node), leaves, node)


def _batch_identity_view(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Batch a view to an equal shape."""
    return leaves[0] if is_copy(node) and isinstance(leaves[0], BatchedValue) else None


def _batch_matmul(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    if node.target not in MATMULS:
        return None
    left, right = leaves
    if (
        isinstance(left, BatchedValue)
        and left.trailing_dims
        and step_ndim(right) == 2
        and not isinstance(right, BatchedValue)
    ):
        return BatchedValue(ops.compute(aten.matmul.default, (left.node, right), node), left.time)
    if min(step_ndim(x) for x in leaves) < 2:
        return None
    return ops.broadcast(aten.matmul.default, _value_spec(node), leaves, node, rows=2)


def _batch_trailing(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Batch ops on the last dims of the first operand that accept any number of leading dims."""
    rows = {aten.linear.default: 1}.get(node.target, 0)
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        rows = len(node.args[1])
    x = leaves[0]
    if (
        not rows
        or not isinstance(x, BatchedValue)
        or x.trailing_dims < rows
        or any(isinstance(y, BatchedValue) for y in leaves[1:])
    ):
        return None
    args, kwargs = pytree.tree_unflatten([x.node, *leaves[1:]], _value_spec(node))
    return BatchedValue(ops.compute(node.target, args, node, kwargs), x.time)


def _batch_dim_op(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> Value | None:
    """Batch ops of one tensor along dims; their rule gives the dim of the steps in the result."""
    x = leaves[0]
    if not isinstance(x, BatchedValue) or any(isinstance(y, BatchedValue) or is_tensor(y) for y in leaves[1:]):
        return None
    call = OpCall(node)
    named = {name: value for name, value in call.args.items() if "dim" in name and name != "keepdim"}
    if not named or not DIM_ARGUMENTS.issuperset(named):
        return None
    ndim = x.ndim + (node.target is aten.unsqueeze.default)
    moved = pytree.tree_map(lambda d: _shift_dim(d, x.time, ndim), named)
    if any(d is None for d in pytree.tree_leaves(moved)):
        return None
    args, kwargs = call.with_operands([x.node], **moved)
    out = ops.compute(node.target, args, node, kwargs)
    places = _untouched_dims(out, x.time)
    if places is None:
        return None
    if isinstance(out.meta["val"], torch.Tensor):
        return BatchedValue(out, places[0])
    each = [ops.emit(operator.getitem, (out, i), v, node) for i, v in enumerate(out.meta["val"])]
    return [BatchedValue(one, time) for one, time in zip(each, places)]


def _shift_dim(dim: Any, time: int, ndim: int) -> int | None:
    if not isinstance(dim, int):
        return None
    dim %= max(ndim, 1)
    return dim if dim < time else dim + 1


def _untouched_dims(node: Node, time: int) -> list[int] | None:
    """Return the dim of each result that equals dim `time` of the operand."""
    _, rule = lookup_rule(node) or (None, None)
    if rule is None or rule.reshapes or rule.kind(rule.operands[0][time]) != "pass":
        return None
    factor = rule.operands[0][time]
    if not factor or any(factor not in dims for dims in rule.results):
        return None
    return [dims.index(factor) for dims in rule.results]


def _batch_einsum(ops: BatchedOps, node: Node, leaves: Sequence[Value]) -> BatchedValue | None:
    """Batch einsum with another letter for the steps."""
    if node.target is not aten.einsum.default:
        return None
    text = str(leaves[0]).replace(" ", "")
    before, arrow, after = text.partition("->")
    terms, operands = before.split(","), leaves[1:]
    letter = next((x for x in string.ascii_letters if x not in text), "")
    if not arrow or "." in text or not letter or len(terms) != len(operands):
        return None
    times = [x.time if isinstance(x, BatchedValue) else None for x in operands]
    at = min(next(t for t in times if t is not None), len(after))
    terms = [term if t is None else term[:t] + letter + term[t:] for term, t in zip(terms, times)]
    text = f"{','.join(terms)}->{after[:at]}{letter}{after[at:]}"
    nodes = [x.node if isinstance(x, BatchedValue) else x for x in operands]
    return BatchedValue(ops.compute(node.target, (text, nodes), node), at)
