"""Merge collectives over several mesh axes into one over the union of the groups.

    all_reduce(wait(all_reduce(x, sum, a)), sum, b)   ->   all_reduce(x, sum, a + b)

A chain is a sequence of collectives of one kind, its links; an option merges blocks of links (`choose_merge.py`).
Chains of two and more links are merged through views, permutations, exact casts, and factors that are Python scalars
and assumed equal on all ranks. Chains of reduce_scatters and all_gathers are merged along any dim, through casts and
factors. The pass works on any graph of functional collectives at ATen level: exported graphs, and the forward, backward
or joint graph of AOTAutograd, where DTensor's redistributions over several axes appear.

Exactness: the groups are the axes of a full grid, so that each rank's value counts once, and the reductions agree. The
result of max and min is equal bit by bit. Sums and products are rounded in another order, and are equal on all ranks,
which two steps do not guarantee. For chains of sum and avg, the factor 1 / (ranks averaged over) is applied once,
before the sum, so that no new overflow occurs. On bfloat16 and float16 this rounds each rank's value, as NCCL's avg
does. A chain of avgs stays one avg. Factors and wider dtypes between two reductions are applied before the merged
one.

Chains are not merged, with a note, for:

- other mixtures of reductions, and averages of integers
- values that are used in between
- groups that overlap or form no grid, and groups without a declared communicator
- orders of gathering without a communicator, and sizes that the ranks do not divide
- merges that the policy excludes

Sums of two all_reduces and coalesced collectives are not merged. A reduce_scatter within machines, an all_reduce
between them and an all_gather is not considered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.options import OPTION_RULES
from sp_compile.passes.base import CollectivePass, Pass, register_pass
from sp_compile.passes.collectives.collective_context import CollectiveContext
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.known_groups import KnownGroups, declared_groups
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.fakes import infer_value

from .choose_merge import LinkIndices, MergeChooser, format_predictions, static_value, unmerged_option
from .find_chains import COLLECTIVES, ChunkMove, CollectiveChain, find_chains

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@register_pass
class MergeReductions(CollectivePass):
    """Pass that merges reductions: `MergeReductions(groups)(graph_module)`, in place.

    `notes` lists the merged chains, and the reasons for which others are not merged. All ranks decide equally if they
    have the same graph and the same results of declare_groups. The pass reads one rank's graph and cannot compare it
    with the others. A number between two reductions, as in all_reduce(all_reduce(x, a) * 2.0, b), must be equal on
    every rank, or the merged values are wrong. Do not apply the pass to programs that differ by rank, for example
    exported ones with a factor `rank + 1`. backend="sp" compares the programs and does not merge in such a case.

    Args:
        groups: The result of declare_groups, or a table of the same form without processes.
        policy: "auto" merges where the cost model predicts a gain, "always" wherever it is exact, "intra_node" where
            the ranks to be merged are on one machine, "never" nowhere.
        cost: Constants that replace the device's defaults, for communicators without a measurement in `groups`.
        strict: True to raise for a chain over an undeclared group, False to note it.

    Raises:
        SpError: An unknown policy or reduction, a graph without shapes, or an undeclared group.
    """

    requires = frozenset({"captured", "fused permutes"})
    provides = frozenset({"merged reductions"})

    @classmethod
    def of(cls, context: CollectiveContext) -> Pass | None:
        """Create the pass for the declared groups; None without any, or with merge_reductions="never"."""
        groups, policy = declared_groups(), context.options.merge_reductions
        if policy == "never" or not groups.members:
            return None
        return cls(groups, policy, context.options.cost, strict=False)

    def __init__(
        self, groups: KnownGroups, policy: str = "auto", cost: Mapping[str, Any] | None = None, strict: bool = True
    ) -> None:
        super().__init__(cost=cost)
        allowed = OPTION_RULES["merge_reductions"].words
        if policy not in allowed:
            raise SpError("SP905", f"policy: expected one of {', '.join(map(repr, allowed))}, got {policy!r}.")
        self.groups, self.policy, self.strict = groups, policy, strict

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Merge chains of collectives in place, note the reasons for others, and return the number of merged chains."""
        self.chooser = MergeChooser(self.groups, self.policy, context.machine_of)
        self.erased: set[Node] = set()  # collectives that a later one has replaced
        for node in gm.graph.nodes:
            if node.target in COLLECTIVES:
                static_value(node)  # raises for a graph without shapes
        # `unjoined`: (collective, reason) for each that follows one of its kind, but cannot be in one chain with it
        chains, unjoined = find_chains(gm.graph)
        refusals = [self._chain_refusal(chain) for chain in chains]  # before any change, as this may raise
        for node, reason in unjoined:
            self.note_refusal(node, reason)
        changes = 0
        for chain, refusal in zip(chains, refusals):
            if refusal is None:
                changes += self._merge_chain(chain)
            else:
                self.note_refusal(chain.links[-1].node, refusal)
        return changes

    def _merge_chain(self, chain: CollectiveChain) -> bool:
        """Run a chain as the best option of the policy, and note it; return True if collectives were merged."""
        options = self.chooser.options(chain)
        best = self.chooser.best(options)
        if best is unmerged_option(options):
            self.note_refusal(chain.links[-1].node, self.chooser.unmerged_reason(chain, options))
            return False
        predicted = format_predictions(best, unmerged_option(options))
        for block, name in best.communicators.items():  # indices of links, and the group of their merged collective
            if len(block) > 1:
                links = [chain.links[i] for i in block]
                self._merge(chain, block, name)
                groups = ", ".join(repr(link.group) for link in links)
                text = f"over {groups}: one over {self.groups.size(name)} ranks ({name!r}), {predicted}"
                self.note(links[-1].node, text)
        return True

    def _chain_refusal(self, chain: CollectiveChain) -> str | None:
        """Return the reason, for a note, for which no part of a chain can be merged, or None.

        Raises:
            SpError: A group is not declared, and `strict` is set.
        """
        if self.policy == "never":
            return "the policy is 'never'"
        undeclared = next((link for link in chain.links if link.group not in self.groups.members), None)
        if undeclared is not None:
            error = self.groups.undeclared_error(undeclared.group, describe_node(undeclared.node))
            if self.strict:
                raise error
            return str(error)
        value = static_value(chain.links[-1].node)
        is_integer = not has_gradient_dtype(value)
        if is_integer and any(link.op == "avg" for link in chain.links):
            return f"an average of {value.dtype} is rounded in every step"
        return None

    def _merge(self, chain: CollectiveChain, block: LinkIndices, name: str) -> None:
        """Merge some collectives of a chain: erase all but the last, which runs over the communicator `name`.

        The values of the nodes from the first to the last one are inferred again, because their sizes change.

        Args:
            chain: The chain.
            block: Indices of the collectives in `chain.links`.
            name: Name of the group of the merged collective.
        """
        last, links = chain.links[block[-1]], [chain.links[i] for i in block]
        averaged_ranks = [self.groups.size(link.group) for link in links if link.op == "avg"]
        for i in block[:-1]:
            self._erase_link(chain, i)
        for node in self._nodes_between(chain, block):
            self._reinfer(node)
        ranks = self.groups.size(name)
        # The chunks are moved before a reduce_scatter, and after an all_gather, along another dim than 0.
        if last.chunks is not None and last.kind == "reduce_scatter":
            self._resize_chunks(last.chunks, ranks)
        x, op = last.operand, last.op
        if averaged_ranks and len(averaged_ranks) < len(links):  # sums and averages: scale once, then sum
            op = "sum"
            with self.graph.inserting_before(last.node):
                x = self.compute(aten.div.Tensor, (x, math.prod(averaged_ranks)), last.node)
        changed = {"reduce_op": op, "group_size": ranks, "group_name": name}
        last.node.args, last.node.kwargs = OpCall(last.node).with_operands([x], **changed)
        self._reinfer(last.node)
        if last.chunks is not None and last.kind == "all_gather":
            if last.chunks.source is not last.node:  # its wait, whose value has changed with that of the all_gather
                self._reinfer(last.chunks.source)
            self._resize_chunks(last.chunks, ranks)

    def _erase_link(self, chain: CollectiveChain, index: int) -> None:
        """Erase a collective of a chain, its waits and its move of chunks. Its readers then read its operand.

        The move is cat(split(x)), which makes it a collective along another dim than 0. The waits are removed from
        `chain.steps`, too.
        """
        steps, link = chain.steps[index], chain.links[index]
        waits = [node for node in steps if node.target is c10d.wait_tensor.default]
        chain.steps[index] = [node for node in steps if node not in waits]
        if link.chunks is not None:
            move = link.chunks
            move.cat.replace_all_uses_with(move.source)
            for node in (move.cat, *move.pieces, move.split):
                self.graph.erase_node(node)
        for node in (*reversed(waits), link.node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            self.graph.erase_node(node)
        self.erased.add(link.node)

    def _resize_chunks(self, move: ChunkMove, count: int) -> None:
        """Extend a move of chunks, cat(split(x)), to `count` chunks, one per rank of the merged collective.

        The chunks keep their size. The value of the split's operand already has `count` of them.
        """
        self._reinfer(move.split)
        values, pieces = move.split.meta["val"], list(move.pieces)
        for piece, value in zip(pieces, values):
            piece.meta["val"] = value
        with self.graph.inserting_before(move.cat):
            for i in range(len(pieces), count):
                pieces.append(self.emit(operator.getitem, (move.split, i), values[i], move.cat))
        move.cat.args = (pieces, *move.cat.args[1:])
        self._reinfer(move.cat)

    def _nodes_between(self, chain: CollectiveChain, block: LinkIndices) -> Iterator[Node]:
        """Yield the remaining nodes between the first and the last merged collective, to infer their values again.

        These include other collectives of the chain, as a block may skip some: `block` has the indices of the links
        to merge, in ascending order, and `chain.steps[i]` the nodes between the links i and i + 1.
        """
        for i in range(block[0], block[-1]):
            yield from chain.steps[i]
            if i + 1 < block[-1] and chain.links[i + 1].node not in self.erased:
                yield chain.links[i + 1].node

    def _reinfer(self, node: Node) -> None:
        """Infer the value of a node (`meta["val"]`) again, after a merge has changed its operands.

        A view may be invalid without the collective that had made its operand contiguous; then the operand is cloned.
        """
        try:
            node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError):
            with self.graph.inserting_before(node):
                layout = {"memory_format": torch.contiguous_format}
                x = self.compute(aten.clone.default, (node.args[0],), node, layout)
            node.replace_input_with(node.args[0], x)
            node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
