"""The values of all steps of a loop as one tensor, with a dim that counts the steps; how such tensors are arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ..call import is_tensor
from ..shapes import Size, quotient, same, sizes
from .edit import Editor
from .steps import NotALoop

aten = torch.ops.aten


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

    def in_pieces(self, x: Steps, rows: int) -> Steps:
        """Rows as steps of `rows` rows: (N * rows) -> (N, rows)."""
        if rows == 1:
            return Steps(self.unsqueezed(x.node, x.time + 1), x.time)
        shape = list(sizes(x.node.meta["val"].shape))
        shape[x.time : x.time + 1] = [quotient(shape[x.time], rows), rows]
        return Steps(self.compute(aten.reshape.default, (x.node, self.sizes.list(shape)), x.node), x.time)

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


def ndim_of(x: Value) -> int:
    """How many dims the value of one step has; a number has none."""
    if isinstance(x, Steps):
        return x.ndim
    return int(x.meta["val"].ndim) if is_tensor(x) else 0
