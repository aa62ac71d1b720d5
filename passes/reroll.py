"""Loops over time that tracing unrolled become scans, and one body for all steps.

    for t in range(S):                                   h = sp.linear_scan(a, b, h0, 1)     (B, S, D)
        h = a[:, t] * h + b[:, t]                  ->    y = h * c                           (B, S, D)
        ys.append(h * c[:, t])
    y = stack(ys, 1)

A list of S nodes that do the same becomes one node that does it to all steps (steps.py, batched_ops.py); a state that
is affine in the one before becomes a scan (affine.py). Steps are read by select, slices, unbind or split, in order or
in reverse; the first may be another (a state to begin with); rows written into a tensor are a list (written_lists.py).
What else reads the value of one step selects it. Takes time linear in the nodes. Bytes moved: none.
Leaves alone: steps that differ, states that are not affine in the one before, random draws, changes of the grad mode
between steps, lists without a recurrence, loops of which only the last state is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._compat import PYTHON_STATE_CALLS, enter_autocast, exit_autocast, set_grad_enabled
from ..call import Call
from ..shapes import sizes
from .affine import Scans
from .batch import Steps
from .roll import Roll
from .steps import Loop, NotALoop, Read, Ref, reading
from .written_lists import WrittenLists

aten = torch.ops.aten
STATE_CALLS = {set_grad_enabled, enter_autocast, exit_autocast, *PYTHON_STATE_CALLS}


class Reroll(Scans):
    """Rolls up the unrolled loops of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.edit(gm.graph)
        self.budget = 4 * len(gm.graph.nodes)
        self.made: list[Node] = []
        self.rolled: set[Node] = set()  # what loops became

    def run(self) -> bool:
        """True if the graph changed."""
        written = WrittenLists(self.gm).run()
        lists = [n for n in self.graph.nodes if n.target in (aten.stack.default, aten.cat.default)]
        lists.sort(key=lambda n: -len(n.args[0]))  # a loop before the lists of its body
        changed = [bool(n.users) and self._roll(n) for n in lists]
        return written or any(changed)

    def emit(self, *args: Any, **kwargs: Any) -> Node:
        """Append a node, and remember it."""
        self.made.append(super().emit(*args, **kwargs))
        return self.made[-1]

    def _roll(self, listed: Node) -> bool:
        values = _values(listed)
        for turned in (False, True):
            loop, self.made = Loop(self.budget), []
            try:
                loop.read(values[::-1] if turned else values)
                self._rewrite(listed, loop, turned)
                return True
            except NotALoop:
                self._forget()
            finally:
                self.budget = loop.budget
        return False

    def _forget(self) -> None:
        """Erase what was made and nothing uses."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)

    def _rewrite(self, listed: Node, loop: Loop, turned: bool) -> None:
        operands = list(loop.operands())
        again = any(isinstance(x, Read) and x.source in self.rolled for x in operands)
        if not again and not any(isinstance(x, Ref) and x.lag for x in operands):
            raise NotALoop("no recurrence")
        roll = Roll(self, loop)
        steps = [n for c in roll.columns for n in c.nodes]
        owned = set(steps)
        readers = [(u, n) for n in steps for u in n.users if u is not listed and u not in owned]
        anchor = _anchor(roll.shared(), owned, [listed, *(u for u, _ in readers)])
        with self.behind(anchor), _autocast_at(anchor):
            found = roll.run()
            if not again and not roll.scans:
                raise NotALoop("no recurrence")
            result = self._listed(found if turned == roll.reverse else self.flipped(found), listed)
            fresh = [roll.step(n) for _, n in readers]
        for (user, node), one in zip(readers, fresh):
            user.replace_input_with(node, one)
        listed.replace_all_uses_with(result)
        self._clear(listed, loop)

    def _listed(self, found: Steps, listed: Node) -> Node:
        """The values of all steps, arranged as the list is."""
        dim = Call(listed)["dim"] % listed.meta["val"].ndim
        whole = self.moved(found, dim).node
        if listed.target is aten.stack.default:
            return whole
        if whole.target is aten.unsqueeze.default and whole.args[1] == dim + 1:
            return whole.args[0]
        return self.compute(aten.flatten.using_ints, (whole, dim, dim + 1), listed)

    def _clear(self, listed: Node, loop: Loop) -> None:
        """Erase the steps and what only they read."""
        self.graph.erase_node(listed)
        inputs = [i for n in loop.owner for i in n.all_input_nodes if i not in loop.owner]
        for node in sorted(loop.owner, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        self._forget()
        cut = {i.args[0]: None for i in inputs if i.target is operator.getitem}
        self.drop(*inputs)
        for pieces in cut:
            self._separate(pieces)
        self.rolled.update(n for n in self.made if n.users)

    def _separate(self, pieces: Node) -> None:
        """What is left of an unbind or a split reads its piece alone, so that no rank needs all of them."""
        for user in list(pieces.users):
            found = reading(user)
            if found is not None:
                source, dim, rows, index = found
                args = (index * rows, (index + 1) * rows) if rows else (index,)
                target = aten.slice.Tensor if rows else aten.select.int
                with self.behind(pieces):
                    self.replace(user, self.compute(target, (source, dim, *args), user))


def _values(listed: Node) -> list[Node]:
    """The values of a stack, or of a cat of pieces of one size."""
    values = list(listed.args[0])
    if listed.target is aten.cat.default:
        dim = Call(listed)["dim"]
        if len({sizes(v.meta["val"].shape)[dim] for v in values}) > 1:
            return []
    return values if len(set(values)) == len(values) > 1 else []


def _anchor(shared: set[Node], owned: set[Node], readers: list[Node]) -> Node:
    """The last of what is shared; behind it all steps can be computed at once, and before anything reads one."""
    if not shared:
        raise NotALoop("nothing is read")
    anchor, tainted = max(shared), set(owned)
    if any(reader < anchor for reader in readers):
        raise NotALoop("read too early")
    node, last = min(anchor, *owned), max(readers)
    while node is not last:
        if node.target in STATE_CALLS:
            raise NotALoop("another grad mode")
        if node not in owned and any(i in tainted for i in node.all_input_nodes):
            tainted.add(node)
        node = node.next
    if tainted & shared:
        raise NotALoop("what is shared depends on a step")
    return anchor


@contextmanager
def _autocast_at(node: Node) -> Iterator[None]:
    """The autocast regions that the node is in."""
    entered: dict[Node, Any] = {}
    for other in node.graph.find_nodes(op="call_function", target=enter_autocast):
        if other < node:
            entered[other] = other.args
    for other in node.graph.find_nodes(op="call_function", target=exit_autocast):
        if other < node:
            entered.pop(other.args[0], None)
    with ExitStack() as regions:
        for device, dtype, enabled, cache in entered.values():
            regions.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield
