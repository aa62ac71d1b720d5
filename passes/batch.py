"""One op on the values of all steps of a loop at once: a dim more, which counts the steps.

    pointwise ops                  the op itself, operands aligned to each other
    linear, norms, matmul          the op itself, with one more batch dim
    everything else                what torch.func.vmap makes of the op

Every op stays the op that it is wherever it can, so that rules and later passes see what they would have seen in a
model written without a loop. Leaves alone: ops that vmap does not know, random draws.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from .._compat import detect_fake_mode, enable_python_dispatcher, make_fx, pytree
from ..call import is_tensor
from ..rule import Factors, lookup
from ..shapes import Size, same, sizes
from .edit import Editor
from .steps import NotALoop

aten = torch.ops.aten
MATMULS = (aten.matmul.default, aten.mm.default, aten.bmm.default)


@dataclass(frozen=True)
class Steps:
    """A value of every step as one node; its dim `time` counts the steps."""

    node: Node
    time: int

    @property
    def ndim(self) -> int:
        """Of the value of one step."""
        return int(self.node.meta["val"].ndim) - 1

    @property
    def behind(self) -> int:
        """How many dims come after that of the steps."""
        return self.ndim - self.time

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the value of one step."""
        shape = sizes(self.node.meta["val"].shape)
        return (*shape[: self.time], *shape[self.time + 1 :])


Value: TypeAlias = Any  # Steps | a list of them | Node | a constant: the last two are the same at every step


class Batch(Editor):
    """Appends ops on Steps at the graph's insertion point."""

    def moved(self, x: Steps, time: int) -> Steps:
        """The same with its steps counted by another dim."""
        if x.time == time:
            return x
        order = [d for d in range(x.ndim + 1) if d != x.time]
        order.insert(time, x.time)
        return Steps(self._permuted(x.node, order), time)

    def _permuted(self, node: Node, order: list[int]) -> Node:
        if node.target is aten.permute.default:
            node, order = node.args[0], [node.args[1][d] for d in order]
        if order == sorted(order):
            return node
        return self.compute(aten.permute.default, (node, order), node)

    def narrowed(self, x: Steps, start: int, length: int) -> Steps:
        """Some of the steps."""
        whole = x.node.meta["val"].shape[x.time]
        if start < 0 or start + length > whole:
            raise NotALoop("steps out of range")
        if length == whole:
            return x
        return Steps(self.compute(aten.slice.Tensor, (x.node, x.time, start, start + length), x.node), x.time)

    def flipped(self, x: Steps) -> Steps:
        """The steps in the other order."""
        return Steps(self.compute(aten.flip.default, (x.node, [x.time]), x.node), x.time)

    def joined(self, seed: Value, rest: Steps, last: bool) -> Steps:
        """One step more, in front of the rest or behind it."""
        one = self.unsqueezed(self.shaped(seed, rest.shape, rest.node), rest.time)
        parts = [rest.node, one] if last else [one, rest.node]
        return Steps(self.compute(aten.cat.default, (parts, rest.time), rest.node), rest.time)

    def shaped(self, x: Value, shape: Sequence[Size], like: Node) -> Node:
        """A node or a number as a tensor of this shape and of the dtype of `like`; never rounds."""
        value, wanted = like.meta["val"], self.sizes.list(shape)
        if not isinstance(x, Node):
            options = {"dtype": value.dtype, "device": value.device}
            return self.compute(aten.full.default, (wanted, x), like, options)
        found = x.meta["val"]
        held = sizes(found.shape)
        rounds = found.ndim and torch.promote_types(found.dtype, value.dtype) != value.dtype
        grows = all(a == 1 or same(a, b) for a, b in zip(held[::-1], shape[::-1]))
        if rounds or not grows or len(held) > len(shape):
            raise NotALoop("another kind of value")
        if found.dtype != value.dtype:
            x = self.compute(aten.to.dtype, (x, value.dtype), x)
        if len(held) == len(shape) and all(same(a, b) for a, b in zip(held, shape)):
            return x
        return self.compute(aten.expand.default, (x, wanted), x)

    def unsqueezed(self, node: Node, dim: int, count: int = 1) -> Node:
        """`count` dims of size 1 more."""
        for _ in range(count):
            node = self.compute(aten.unsqueeze.default, (node, dim), node)
        return node

    def aligned(self, x: Value, behind: int) -> Value:
        """The operand with `behind` dims after that of the steps (or none in its place), for ops that broadcast."""
        if isinstance(x, Steps):
            if x.ndim >= behind:
                return self.moved(x, x.ndim - behind).node
            return self.unsqueezed(self.moved(x, 0).node, 1, behind - x.ndim)
        if is_tensor(x) and x.meta["val"].ndim > behind:
            return self.unsqueezed(x, x.meta["val"].ndim - behind)
        return x

    def apply(self, node: Node, leaves: Sequence[Value]) -> Value:
        """What `node` does at one step, on all; leaves: in place of those of its arguments."""
        if node.target is operator.getitem:
            return leaves[0][leaves[1]]
        steps = [x for x in leaves if isinstance(x, Steps)]
        spec = pytree.tree_flatten((node.args, node.kwargs))[1]
        if _is_pointwise(node):
            return self._pointwise(node.target, spec, leaves, steps, node)
        if node.target in MATMULS and all(_ndim(x) >= 2 for x in leaves):
            return self._matmul(leaves, steps, node)
        if _rows(node) and isinstance(leaves[0], Steps) and len(steps) == 1 and steps[0].behind >= _rows(node):
            args, kwargs = pytree.tree_unflatten([steps[0].node, *leaves[1:]], spec)
            return Steps(self.compute(node.target, args, node, kwargs), steps[0].time)
        return self._vmapped(node, spec, leaves)

    def pointwise(self, target: Any, *operands: Value, like: Node) -> Value:
        """A pointwise op of the operands: Steps, or a node where no operand is one."""
        steps = [x for x in operands if isinstance(x, Steps)]
        if not steps:
            return self.compute(target, operands, like)
        spec = pytree.tree_flatten((tuple(operands), {}))[1]
        return self._pointwise(target, spec, operands, steps, like)

    def _pointwise(self, target: Any, spec: Any, leaves: Any, steps: list[Steps], like: Node) -> Steps:
        widest = max(steps, key=lambda x: x.ndim)
        ndim = max(_ndim(x) for x in leaves)
        args, kwargs = pytree.tree_unflatten([self.aligned(x, widest.behind) for x in leaves], spec)
        return Steps(self.compute(target, args, like, kwargs), ndim - widest.behind)

    def _matmul(self, leaves: Sequence[Value], steps: list[Steps], like: Node) -> Steps:
        left, right = leaves
        if isinstance(left, Steps) and left.behind and _ndim(right) == 2 and not isinstance(right, Steps):
            return Steps(self.compute(aten.matmul.default, (left.node, right), like), left.time)
        ndim = max(_ndim(x) for x in leaves)
        args = tuple(self.aligned(x, ndim) for x in leaves)
        return Steps(self.compute(aten.matmul.default, args, like), 0)

    def _vmapped(self, node: Node, spec: Any, leaves: Sequence[Value]) -> Value:
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Steps) or is_tensor(x)]
        operands = [self.moved(x, 0).node if isinstance(x, Steps) else x for x in leaves]
        dims = tuple(0 if isinstance(leaves[i], Steps) else None for i in tensors)
        plain = torch.fx.map_arg(operands, lambda n: n.meta["val"])

        def step(*given: torch.Tensor) -> Any:
            filled = list(plain)
            for i, x in zip(tensors, given):
                filled[i] = x
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return node.target(*args, **kwargs)

        values = [plain[i].detach() for i in tensors]
        mode = detect_fake_mode(values)
        try:
            with mode, enable_python_dispatcher():  # type: ignore[union-attr]
                body = make_fx(torch.func.vmap(step, in_dims=dims), tracing_mode="real")(*values)
        except (RuntimeError, ValueError) as error:
            raise NotALoop(f"{node.target} cannot be batched") from error
        return self._inlined(body, [operands[i] for i in tensors], node)

    def _inlined(self, body: torch.fx.GraphModule, operands: list[Node], like: Node) -> Value:
        placed = dict(zip(body.graph.find_nodes(op="placeholder"), operands))
        for n in body.graph.nodes:
            if n.op == "call_function":
                args, kwargs = torch.fx.map_arg((n.args, n.kwargs), placed.__getitem__)
                placed[n] = self.compute(n.target, args, like, kwargs)
            elif n.op not in ("placeholder", "output"):
                raise NotALoop(f"{like.target} holds constants")
        out = torch.fx.map_arg(body.graph.output_node().args[0], placed.__getitem__)
        return [Steps(x, 0) for x in out] if isinstance(out, list | tuple) else Steps(out, 0)


def _ndim(x: Value) -> int:
    if isinstance(x, Steps):
        return x.ndim
    return int(x.meta["val"].ndim) if is_tensor(x) else 0


def _is_pointwise(node: Node) -> bool:
    """Does the op act on each element alone, by its rule?"""
    found = lookup(node)
    rule = found[1] if found is not None else None
    if not isinstance(rule, Factors) or rule.kinds or rule.sizes or len(rule.results) != 1:
        return False
    (result,) = rule.results
    return all(
        len(dims) <= len(result) and all(f in ("", g) for f, g in zip(dims[::-1], result[::-1]))
        for dims in rule.operands
    )


def _rows(node: Node) -> int:
    """How many of the last dims of its first operand an op works on that takes any dims before them; 0: no such op."""
    if node.target is aten.linear.default:
        return 1
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        return len(node.args[1])
    return 0
