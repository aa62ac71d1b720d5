"""Choose how to merge a chain of collectives: list the exact options, predict their time, select one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import size_hint, statically_known_true
from sp_compile.passes.cost.collective_time import collective_bytes
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
"""Options within this factor of the fastest prediction count as equal; the one with the fewest collectives wins."""

LinkSet = tuple[int, ...]
"""Numbers of links of a chain."""


@dataclass(frozen=True)
class MergeOption:
    """A way to run a chain."""

    blocks: dict[LinkSet, str]  # the communicator of each block of links
    time: float  # predicted seconds


@dataclass(frozen=True)
class MergeChooser:
    """The choice between the options of a chain."""

    groups: KnownGroups  # the declared groups
    policy: str  # the option merge_reductions
    machine_of: Callable[[Node], Machine]  # constants of a node's device, for groups without measurements

    def options(self, chain: CollectiveChain) -> list[MergeOption]:
        """Return all exact options that have communicators, including the one that merges nothing."""
        count = len(chain.links)
        subsets = [block for k in range(count) for block in itertools.combinations(range(count), k + 1)]
        names = {block: self._communicator(chain, block) for block in subsets}
        parts = self._link_groups(chain, tuple(range(count)))
        pairs = itertools.combinations(parts, 2)
        free = chain.links[0].kind == "all_reduce" and all(reduce_partitions(pair) is not None for pair in pairs)
        found = []
        for blocks in _link_partitions(tuple(range(count))):
            if free or all(block[-1] - block[0] == len(block) - 1 for block in blocks):
                candidates = {block: name for block in blocks if (name := names[block]) is not None}
                if len(candidates) == len(blocks):
                    seconds = sum(self._seconds(chain, block, name) for block, name in candidates.items())
                    found.append(MergeOption(candidates, seconds))
        return found

    def best(self, options: list[MergeOption]) -> MergeOption:
        """Return the option that the policy selects."""
        if self.policy == "auto":
            fastest = min(one.time for one in options)
            options = [one for one in options if one.time <= fastest * MERGE_TIE] or [unmerged_option(options)]
        elif self.policy == "intra_node":
            inside = self.groups.is_in_one_node
            options = [one for one in options if all(len(b) == 1 or inside(name) for b, name in one.blocks.items())]
        return min(options, key=lambda one: (len(one.blocks), one.time))

    def unmerged_reason(self, chain: CollectiveChain, options: list[MergeOption]) -> str:
        """Return the reason for which the chain is not merged."""
        merged = [one for one in options if one is not unmerged_option(options)]
        if merged and self.policy == "intra_node":
            return "the policy is 'intra_node', and the ranks are on several machines"
        if merged:
            fastest = min(merged, key=lambda one: one.time)
            return f"predicted to be slower merged: {format_predictions(fastest, unmerged_option(options))}"
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
        """Return the group over which one collective replaces those of the block, or None."""
        if len(block) == 1:
            return chain.links[block[0]].group
        kind = chain.links[0].kind
        union = COMPOSERS[kind](self._link_groups(chain, block))
        if union is None or not self._keeps_rows(chain, block, len(union[0])):
            return None
        return self.groups.communicator(union, ordered=kind != "all_reduce")

    def _keeps_rows(self, chain: CollectiveChain, block: LinkSet, ranks: int) -> bool:
        """Return True if a merged scatter sends the same rows to each rank as the separate ones."""
        first = chain.links[block[0]]
        rows = static_value(first.source).shape[first.dim] if first.kind == "reduce_scatter" else 0
        return bool(statically_known_true(rows % ranks == 0))

    def _seconds(self, chain: CollectiveChain, block: LinkSet, name: str) -> float:
        """Return the predicted seconds of a block as one collective.

        A line of all_reduces takes twice the time of a gather or a scatter.
        """
        line, size = self.groups.lines.get(name), self.groups.size(name)
        if line is None:
            machine = self.machine_of(chain.links[block[0]].node)
            line = machine.line("all_reduce", size, inside=self.groups.is_in_one_node(name))
        sent = collective_bytes("all_reduce", self._bytes(chain, block), size)
        return line.seconds(sent) / (1 if chain.links[0].kind == "all_reduce" else 2)

    def _bytes(self, chain: CollectiveChain, block: LinkSet) -> float:
        """Return the bytes that a block reduces, or gathers or scatters in total."""
        first, last = chain.links[block[0]], static_value(chain.links[block[-1]].node)
        full_size = static_value(first.source) if first.kind == "reduce_scatter" else last
        return _num_elements(full_size) * last.dtype.itemsize


def unmerged_option(options: list[MergeOption]) -> MergeOption:
    """Return the option that merges nothing."""
    return max(options, key=lambda way: len(way.blocks))


def format_predictions(merged: MergeOption, other: MergeOption) -> str:
    """Return the predictions of both options as text."""
    return f"{merged.time * 1e3:.3g} ms instead of {other.time * 1e3:.3g} ms"


def static_value(node: Node) -> torch.Tensor:
    """Return the node's fake tensor.

    Raises:
        SpError: The node has none.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise SpError("SP906", f"{describe_node(node)} has no fake tensor, so its shape is not known.")
    return value


def _num_elements(value: torch.Tensor) -> float:
    """Return the number of elements in the call that is being compiled, or nan if it is unknown."""
    try:
        return math.prod(map(size_hint, value.shape))
    except TypeError:
        return math.nan


def _link_partitions(links: LinkSet) -> Iterator[tuple[LinkSet, ...]]:
    """Yield all partitions of the links into blocks."""
    if not links:
        yield ()
        return
    for size in range(len(links)):
        for others in itertools.combinations(links[1:], size):
            rest = tuple(link for link in links[1:] if link not in others)
            yield from (((links[0], *others), *blocks) for blocks in _link_partitions(rest))
