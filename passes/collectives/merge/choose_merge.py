"""Choose how to merge a chain of collectives: list the exact options, predict their time, select one.

    links 0, 1, 2 over groups a, b, c    ->    blocks {(0, 1): "ab", (2,): "c"}: one collective over ab, then one over c

A link is one collective of the chain, with a group of ranks. An option partitions the links into blocks. Each block is
one collective over the union of its groups, whose ranks are on a grid; a communicator of the union must be declared
(`sp_compile.declare_groups`). A group is represented by its `Partition`: all groups of the same mesh axis, as lists of
ranks. `MergeReductions` (`merge_reductions.py`) lists the options of each chain and runs the best one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sympy.utilities.iterables import multiset_partitions
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import GuardOnDataDependentSymNode, size_hint, statically_known_true
from sp_compile.passes.cost import known_groups
from sp_compile.passes.cost.collective_time import collective_bytes
from sp_compile.passes.cost.known_groups import KnownGroups, Partition, reduce_partitions
from sp_compile.passes.cost.machine import Machine

from .find_chains import CollectiveChain

# Functions that return the union of the groups of a block as a partition, or None if the groups form no grid.
COMPOSERS = {
    "all_reduce": reduce_partitions,
    "reduce_scatter": known_groups.scatter_partitions,
    "all_gather": known_groups.gather_partitions,
}

# Options within this factor of the fastest prediction count as equal; the one with the fewest collectives wins.
MERGE_TIE = 1.05

LinkIndices = tuple[int, ...]  # indices of some links of a chain, in order: a block


@dataclass(frozen=True)
class MergeOption:
    """A way to run a chain: its blocks, and the predicted time."""

    communicators: dict[LinkIndices, str]  # name of the communicator of each block
    time: float  # predicted seconds; nan if sizes are unknown


@dataclass(frozen=True)
class MergeChooser:
    """The choice between the options of a chain."""

    groups: KnownGroups  # the declared groups
    policy: str  # the option merge_reductions
    machine_of: Callable[[Node], Machine]  # constants of a node's device, for groups without measurements

    def options(self, chain: CollectiveChain) -> list[MergeOption]:
        """Return all exact ways to run a chain of collectives, including the one that merges nothing.

        An option partitions the links (the collectives of the chain) into blocks, each of which becomes one collective.
        """
        links = tuple(range(len(chain.links)))
        sizes = range(1, len(links) + 1)
        all_blocks = [block for size in sizes for block in itertools.combinations(links, size)]
        names = {block: self._find_communicator(chain, block) for block in all_blocks}
        # block that one collective can replace -> name of its group
        communicators = {block: name for block, name in names.items() if name is not None}
        # All-reduces over the axes of a grid commute, so that a block may skip links.
        pairs = itertools.combinations(self._link_groups(chain, links), 2)
        commute = chain.links[0].kind == "all_reduce" and all(reduce_partitions(pair) is not None for pair in pairs)
        options = []
        # All partitions of the links into blocks: for (0, 1), these are ((0,), (1,)) and ((0, 1),).
        partitions = [tuple(map(tuple, blocks)) for blocks in multiset_partitions(list(links))]
        # Of equally good options the first one is chosen: that with the fewest links in its first block.
        partitions.sort(key=lambda blocks: [(len(block), block) for block in blocks])
        for blocks in partitions:
            in_order = all(block[-1] - block[0] == len(block) - 1 for block in blocks)  # consecutive links only
            if (commute or in_order) and all(block in communicators for block in blocks):
                chosen = {block: communicators[block] for block in blocks}
                seconds = sum(self._predict_seconds(chain, block, name) for block, name in chosen.items())
                options.append(MergeOption(chosen, seconds))
        return options

    def best(self, options: list[MergeOption]) -> MergeOption:
        """Return the option that the policy selects: of those it allows, the one with the fewest collectives.

        "auto" allows the options that take about as long as the fastest, "intra_node" those that merge collectives only
        between ranks of one machine.
        """
        if self.policy == "auto":
            fastest = min(option.time for option in options)
            tied = [option for option in options if option.time <= fastest * MERGE_TIE]
            options = tied or [unmerged_option(options)]  # none is tied if the times are nan
        elif self.policy == "intra_node":
            options = [option for option in options if self._is_within_nodes(option)]  # the unmerged one remains
        return min(options, key=lambda option: (len(option.communicators), option.time))

    def _is_within_nodes(self, option: MergeOption) -> bool:
        """Return True if all merged collectives are between ranks of one machine, for the policy "intra_node"."""
        merged = [name for block, name in option.communicators.items() if len(block) > 1]
        return all(map(self.groups.is_in_one_node, merged))

    def unmerged_reason(self, chain: CollectiveChain, options: list[MergeOption]) -> str:
        """Return the reason, for the report, why `best` merges none of the collectives of a chain.

        If no option merges any, the reason is given for two of them, the last ones: why these cannot be merged.

        Args:
            chain: The chain of collectives.
            options: Result of `options`.
        """
        unmerged = unmerged_option(options)
        merged = [option for option in options if option is not unmerged]
        if merged and self.policy == "intra_node":
            return "the policy is 'intra_node', and the ranks are on several machines"
        if merged:
            fastest = min(merged, key=lambda option: option.time)
            return f"predicted to be slower merged: {format_predictions(fastest, unmerged)}"
        block = (len(chain.links) - 2, len(chain.links) - 1)
        partitions, kind = self._link_groups(chain, block), chain.links[0].kind
        groups = " and ".join(repr(chain.links[i].group) for i in block)
        union = COMPOSERS[kind](partitions)
        if reduce_partitions(partitions) is None:
            return f"the groups {groups} are not the axes of a full grid: {partitions[0]} and {partitions[1]}"
        if union is None or self.groups.communicator(union, ordered=kind != "all_reduce") is None:
            order = "" if kind == "all_reduce" else ", in the order of their chunks"
            return f"no communicator is declared for the ranks of {groups} together{order}"
        return f"the {len(union[0])} ranks of {groups} are not known to divide the rows"

    def _link_groups(self, chain: CollectiveChain, block: LinkIndices) -> list[Partition]:
        """Return the groups of the links of a block, each as the partition to which it belongs.

        This is the groups of all ranks along the same mesh axis, such as ((0, 2), (1, 3)) for the group (0, 2).
        """
        return [self.groups[chain.links[i].group] for i in block]

    def _find_communicator(self, chain: CollectiveChain, block: LinkIndices) -> str | None:
        """Return the name of the group over which one collective can replace those of the block, or None.

        None if the groups are not the axes of a grid, if no group of all their ranks is declared, or if the number of
        these ranks is not known to divide the rows of a reduce_scatter.
        """
        if len(block) == 1:
            return chain.links[block[0]].group
        kind = chain.links[0].kind
        union = COMPOSERS[kind](self._link_groups(chain, block))  # each row: the ranks of one group of the union
        if union is None or not self._has_same_rows(chain, block, len(union[0])):
            return None
        # The order of the ranks determines which chunk a rank has; a sum does not depend on it.
        return self.groups.communicator(union, ordered=kind != "all_reduce")

    def _has_same_rows(self, chain: CollectiveChain, block: LinkIndices, ranks: int) -> bool:
        """Return True if a merged collective provably gives each rank the same rows as the separate ones.

        A reduce_scatter does so if `ranks`, the number of ranks of the union, divides its rows; others always do.
        """
        first = chain.links[block[0]]
        if first.kind != "reduce_scatter":
            return True
        rows = static_value(first.source).shape[first.dim]
        return bool(statically_known_true(rows % ranks == 0))

    def _predict_seconds(self, chain: CollectiveChain, block: LinkIndices, name: str) -> float:
        """Return the predicted seconds of a block as one collective over the communicator `name`.

        The cost model has the time of an all_reduce as a `line`, latency plus bytes / bandwidth: that measured for the
        communicator, or else that of the device. An all_gather or a reduce_scatter takes half of it, since an
        all_reduce is both.
        """
        line, size = self.groups.lines.get(name), self.groups.size(name)
        if line is None:
            machine = self.machine_of(chain.links[block[0]].node)
            line = machine.line("all_reduce", size, inside=self.groups.is_in_one_node(name))
        nbytes = collective_bytes("all_reduce", self._count_bytes(chain, block), size)
        seconds = line.seconds(nbytes)
        return seconds if chain.links[0].kind == "all_reduce" else seconds / 2

    def _count_bytes(self, chain: CollectiveChain, block: LinkIndices) -> float:
        """Return the bytes that a block reduces, or gathers or scatters in total; nan if sizes are unknown."""
        first, result = chain.links[block[0]], static_value(chain.links[block[-1]].node)
        full = static_value(first.source) if first.kind == "reduce_scatter" else result
        try:  # symbolic sizes have the values of the call that is being compiled
            return math.prod(map(size_hint, full.shape)) * result.dtype.itemsize
        except GuardOnDataDependentSymNode:  # a size that depends on data
            return math.nan


def unmerged_option(options: list[MergeOption]) -> MergeOption:
    """Return the option that merges nothing: it has the most collectives."""
    return max(options, key=lambda option: len(option.communicators))


def format_predictions(merged: MergeOption, unmerged: MergeOption) -> str:
    """Return the predicted times of both options as text for the report."""
    return f"{merged.time * 1e3:.3g} ms instead of {unmerged.time * 1e3:.3g} ms"


def static_value(node: Node) -> torch.Tensor:
    """Return the node's fake tensor.

    Raises:
        SpError: The node has none, as in a graph that was not traced with fake tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise SpError("SP906", f"expected a fake tensor in the metadata of {describe_node(node)}, got none.")
    return value
