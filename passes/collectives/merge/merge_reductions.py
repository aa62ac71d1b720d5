"""Merge collectives over several mesh axes into one over the union of the groups.

    all_reduce(wait(all_reduce(x, sum, a)), sum, b)   ->   all_reduce(x, sum, a + b)

Chains of two and more are merged through views, permutations, exact casts, and factors that are Python scalars and
assumed equal on all ranks. Chains of reduce_scatters and all_gathers are merged along any dim, through casts and
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

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.options import OPTION_RULES
from sp_compile.passes.base import CollectivePass, Pass, register_pass
from sp_compile.passes.collectives.collective_context import CollectiveJob
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.known_groups import KnownGroups, declared_groups
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.fakes import infer_value

from .choose_merge import LinkSet, MergeChooser, format_predictions, static_value, unmerged_option
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
    def of(cls, job: CollectiveJob) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        known, policy = declared_groups(), job.options.merge_reductions
        return cls(known, policy, job.options.cost, strict=False) if policy != "never" and known.members else None

    def __init__(
        self, groups: KnownGroups, policy: str = "auto", cost: Mapping[str, Any] | None = None, strict: bool = True
    ) -> None:
        super().__init__(cost=cost)
        allowed = OPTION_RULES["merge_reductions"].words
        if policy not in allowed:
            raise SpError("SP905", f"policy: expected one of {', '.join(map(repr, allowed))}, got {policy!r}.")
        self.groups, self.policy, self.strict = groups, policy, strict

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        self.chooser = MergeChooser(self.groups, self.policy, job.machine_of)
        self.gone: set[Node] = set()
        for node in gm.graph.nodes:
            if node.target in COLLECTIVES:
                static_value(node)
        found, broken = find_chains(gm.graph)
        refusals = [self._chain_refusal(chain) for chain in found]
        for node, why in broken:
            self.note_refusal(node, why)
        changes = 0
        for chain, refusal in zip(found, refusals):
            if refusal is None:
                changes += self._merge_chain(chain)
            else:
                self.note_refusal(chain.links[-1].node, refusal)
        return changes

    def _merge_chain(self, chain: CollectiveChain) -> bool:
        """Run a chain as the best option that the policy allows. Returns True if it was merged."""
        options = self.chooser.options(chain)
        best = self.chooser.best(options)
        if best is unmerged_option(options):
            self.note_refusal(chain.links[-1].node, self.chooser.unmerged_reason(chain, options))
            return False
        for block, name in best.blocks.items():
            if len(block) > 1:
                links = [chain.links[i] for i in block]
                self._merge(chain, block, name)
                groups = ", ".join(repr(link.group) for link in links)
                size = self.groups.size(name)
                predicted = format_predictions(best, unmerged_option(options))
                why = f"over {groups}: one over {size} ranks ({name!r}), {predicted}"
                self.note(links[-1].node, why)
        return True

    def _chain_refusal(self, chain: CollectiveChain) -> str | None:
        """Return the reason for which no part of a chain can be merged, or None."""
        if self.policy == "never":
            return "the policy is 'never'"
        undeclared = next((link for link in chain.links if link.group not in self.groups.members), None)
        if undeclared is not None:
            known = ", ".join(map(repr, sorted(self.groups.members))) or "none"
            used = f"group {undeclared.group!r} of {describe_node(undeclared.node)}"
            error = SpError("SP611", f"{used} was not declared; declared groups: {known}.")
            if self.strict:
                raise error
            return str(error)
        value = static_value(chain.links[-1].node)
        rounds = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if rounds and any(link.op == "avg" for link in chain.links):
            return f"an average of {value.dtype} is rounded in every step"
        return None

    # Rewrite a chain.

    def _merge(self, chain: CollectiveChain, block: LinkSet, name: str) -> None:
        """Erase all links of a block but the last, and extend the last one to all ranks."""
        last, links = chain.links[block[-1]], [chain.links[i] for i in block]
        averages = [link for link in links if link.op == "avg"]
        for i in block[:-1]:
            self._erase_link(chain, i)
        for node in self._nodes_between(chain, block):
            self._reinfer(node)
        ranks = self.groups.size(name)
        if last.chunks is not None and last.kind == "reduce_scatter":
            self._resize_chunks(last.chunks, ranks)
        x, op = last.operand, last.op
        if averages and len(averages) < len(links):
            op, divisor = "sum", math.prod(self.groups.size(link.group) for link in averages)
            with self.graph.inserting_before(last.node):
                x = self.compute(aten.div.Tensor, (x, divisor), last.node)
        changed = {"reduce_op": op, "group_size": ranks, "group_name": name}
        last.node.args, last.node.kwargs = OpCall(last.node).with_operands([x], **changed)
        self._reinfer(last.node)
        if last.chunks is not None and last.kind == "all_gather":
            if last.chunks.source is not last.node:
                self._reinfer(last.chunks.source)
            self._resize_chunks(last.chunks, ranks)

    def _erase_link(self, chain: CollectiveChain, number: int) -> None:
        """Erase a link, its wait, and the moves of its chunks."""
        steps, link = chain.steps[number], chain.links[number]
        waits = [node for node in steps if node.target is c10d.wait_tensor.default]
        chain.steps[number] = [node for node in steps if node not in waits]
        if link.chunks is not None:
            chunks = link.chunks
            chunks.joined.replace_all_uses_with(chunks.source)
            for node in (chunks.joined, *chunks.pieces, chunks.split):
                self.graph.erase_node(node)
        for node in (*reversed(waits), link.node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            self.graph.erase_node(node)
        self.gone.add(link.node)

    def _resize_chunks(self, chunks: ChunkMove, count: int) -> None:
        """Move `count` chunks of the same size."""
        self._reinfer(chunks.split)
        split, values, pieces = chunks.split, chunks.split.meta["val"], list(chunks.pieces)
        for piece, value in zip(pieces, values):
            piece.meta["val"] = value
        with self.graph.inserting_before(chunks.joined):
            more = range(len(pieces), count)
            pieces += [self.emit(operator.getitem, (split, i), values[i], chunks.joined) for i in more]
        chunks.joined.args = (pieces, *chunks.joined.args[1:])
        self._reinfer(chunks.joined)

    def _nodes_between(self, chain: CollectiveChain, block: LinkSet) -> Iterator[Node]:
        """Yield the remaining nodes between the first and the last link of a block."""
        for i in range(block[0], block[-1]):
            yield from chain.steps[i]
            if i + 1 < block[-1] and chain.links[i + 1].node not in self.gone:
                yield chain.links[i + 1].node

    def _reinfer(self, node: Node) -> None:
        """Infer a value again.

        A view may be invalid on the operand that a collective had made contiguous; then the operand is cloned.
        """
        try:
            node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError):
            with self.graph.inserting_before(node):
                layout = {"memory_format": torch.contiguous_format}
                x = self.compute(aten.clone.default, (node.args[0],), node, layout)
            node.replace_input_with(node.args[0], x)
            node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
