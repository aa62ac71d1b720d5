"""The ways to do a chain of collectives: which of them may be one, what that takes, and which way to choose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import size_hint, statically_known_true
from sp_compile.passes.cost.collective_time import LatencyBandwidth, collective_bytes
from sp_compile.passes.cost.known_groups import (
    KnownGroups,
    Partition,
    gather_partitions,
    reduce_partitions,
    scatter_partitions,
)
from sp_compile.passes.cost.machine import Machine

from .find_chains import CollectiveChain

COMPOSERS = {"all_reduce": reduce_partitions, "reduce_scatter": scatter_partitions, "all_gather": gather_partitions}
MERGE_TIE = 1.05
"""A way that is predicted to take up to so much longer than the fastest is as good; the fewest collectives win."""

LinkSet = tuple[int, ...]
"""Links of a chain, by their numbers."""


@dataclass(frozen=True)
class MergeOption:
    """How a chain may be done: blocks of links, each with its communicator; and the seconds that this takes."""

    blocks: dict[LinkSet, str]
    time: float


@dataclass(frozen=True)
class MergeChooser:
    """What decides: the declared groups, the policy, and for a node the constants of what was not measured."""

    groups: KnownGroups
    policy: str
    machine_of: Callable[[Node], Machine]

    def options(self, chain: CollectiveChain) -> list[MergeOption]:
        """Every way that is exact and has its communicators; the one that merges nothing is among them."""
        count = len(chain.links)
        subsets = [block for k in range(count) for block in itertools.combinations(range(count), k + 1)]
        names = {block: self._communicator(chain, block) for block in subsets}
        parts = self._link_groups(chain, tuple(range(count)))
        pairs = itertools.combinations(parts, 2)
        free = chain.links[0].kind == "all_reduce" and all(reduce_partitions(pair) is not None for pair in pairs)
        found = []
        for blocks in _link_partitions(tuple(range(count))):
            if free or all(block[-1] - block[0] == len(block) - 1 for block in blocks):
                named = {block: name for block in blocks if (name := names[block]) is not None}
                if len(named) == len(blocks):
                    found.append(MergeOption(named, self._total_seconds(chain, named)))
        return found

    def _total_seconds(self, chain: CollectiveChain, named: dict[LinkSet, str]) -> float:
        """Predicted seconds of the blocks, one behind the other."""
        line = self.groups.turns.get(frozenset(named.values()))
        values = {self._bytes(chain, block) for block in named}
        if line is not None and len(named) > 1 and len(values) == 1:
            return self._seconds(chain, line, values.pop(), named.values())
        return sum(self._time(chain, block, name) for block, name in named.items())

    def best(self, ways: list[MergeOption]) -> MergeOption:
        """The one that the policy takes."""
        if self.policy == "auto":
            fastest = min(way.time for way in ways)
            ways = [way for way in ways if way.time <= fastest * MERGE_TIE] or [unmerged_option(ways)]
        elif self.policy == "intra_node":
            inside = self.groups.is_in_one_node
            ways = [way for way in ways if all(len(b) == 1 or inside(name) for b, name in way.blocks.items())]
        return min(ways, key=lambda way: (len(way.blocks), way.time))

    def unmerged_reason(self, chain: CollectiveChain, ways: list[MergeOption]) -> str:
        """Why the chain stays as it is."""
        merged = [way for way in ways if way is not unmerged_option(ways)]
        if merged and self.policy == "intra_node":
            return "the policy is 'intra_node', and the ranks are on several machines"
        if merged:
            fastest = min(merged, key=lambda way: way.time)
            return f"predicted to be slower merged: {format_predictions(fastest, unmerged_option(ways))}"
        block = (len(chain.links) - 2, len(chain.links) - 1)
        parts, kind = self._link_groups(chain, block), chain.links[0].kind
        groups = " and ".join(repr(chain.links[i].group) for i in block)
        union = COMPOSERS[kind](parts)
        if reduce_partitions(parts) is None:
            return f"the groups {groups} are not the axes of a full grid: {parts[0]} and {parts[1]}"
        if union is None or self.groups.communicator(union, ordered=kind != "all_reduce") is None:
            order = "" if kind == "all_reduce" else ", in the order of their chunks"
            return f"no communicator is declared for the ranks of {groups} together{order}"
        return f"the {len(union[0])} ranks of {groups} are not known to divide the rows"

    def _link_groups(self, chain: CollectiveChain, block: LinkSet) -> list[Partition]:
        return [self.groups[chain.links[i].group] for i in block]

    def _communicator(self, chain: CollectiveChain, block: LinkSet) -> str | None:
        """The group over which one collective does what those of the block do; None if there is none."""
        if len(block) == 1:
            return chain.links[block[0]].group
        kind = chain.links[0].kind
        union = COMPOSERS[kind](self._link_groups(chain, block))
        if union is None or not self._keeps_rows(chain, block, len(union[0])):
            return None
        return self.groups.communicator(union, ordered=kind != "all_reduce")

    def _keeps_rows(self, chain: CollectiveChain, block: LinkSet, ranks: int) -> bool:
        """Are the rows that are scattered at once the same as those scattered step by step?"""
        first = chain.links[block[0]]
        rows = static_value(first.source).shape[first.dim] if first.kind == "reduce_scatter" else 0
        return bool(statically_known_true(rows % ranks == 0))

    def _time(self, chain: CollectiveChain, block: LinkSet, name: str) -> float:
        """Predicted seconds of a block done at once."""
        line = self.groups.lines.get(name)
        if line is None:
            machine = self.machine_of(chain.links[block[0]].node)
            inside = self.groups.is_in_one_node(name)
            line = machine.line("all_reduce", self.groups.size(name), inside=inside)
        return self._seconds(chain, line, self._bytes(chain, block), [name])

    def _seconds(self, chain: CollectiveChain, line: LatencyBandwidth, nbytes: float, names: Iterable[str]) -> float:
        """Of the chain's collective over groups in turn; a line of all_reduces is twice that of gathers or scatters."""
        sent = sum(collective_bytes("all_reduce", nbytes, self.groups.size(name)) for name in names)
        return line.seconds(sent) / (1 if chain.links[0].kind == "all_reduce" else 2)

    def _bytes(self, chain: CollectiveChain, block: LinkSet) -> float:
        """Of what a block reduces, gathers in all, or scatters in all."""
        first, last = chain.links[block[0]], static_value(chain.links[block[-1]].node)
        whole = static_value(first.source) if first.kind == "reduce_scatter" else last
        return _num_elements(whole) * last.dtype.itemsize


def unmerged_option(ways: list[MergeOption]) -> MergeOption:
    """The way that merges nothing."""
    return max(ways, key=lambda way: len(way.blocks))


def format_predictions(merged: MergeOption, other: MergeOption) -> str:
    """Both predictions."""
    return f"{merged.time * 1e3:.3g} ms instead of {other.time * 1e3:.3g} ms"


def static_value(node: Node) -> torch.Tensor:
    """The value that the graph tells. Raises SpError if it tells none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise SpError("SP906", f"{describe_node(node)} has no fake tensor, so its shape is not known.")
    return value


def _num_elements(value: torch.Tensor) -> float:
    """How many numbers, in the call that is being compiled; nan where that is not known."""
    try:
        return math.prod(map(size_hint, value.shape))
    except TypeError:
        return math.nan


def _link_partitions(links: LinkSet) -> Iterator[tuple[LinkSet, ...]]:
    """Every way to put the links into blocks."""
    if not links:
        yield ()
        return
    for size in range(len(links)):
        for others in itertools.combinations(links[1:], size):
            rest = tuple(link for link in links[1:] if link not in others)
            yield from (((links[0], *others), *blocks) for blocks in _link_partitions(rest))
