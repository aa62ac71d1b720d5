"""Fuse permute + all-to-all + permute, in any form, into one exchange of two dims.

    x.reshape(b, s, n, h, d).permute(2, 0, 1, 3, 4).contiguous()      x: [b, s, n * h, d]
    all_to_all_single, wait                                     ->    sp.all_to_all_permute(x, 2, 1): [b, n * s, h, d]
    .permute(1, 0, 2, 3, 4).reshape(b, n * s, h, d)

An exchange of two dims scatters one dim over the ranks and gathers the other. The match uses index algebra (see
`arrangement.py`), so that it covers permutes, transposes, chunks and cats. An exchange and its inverse are then
removed. Independent exchanges (q, k and v of an attention) become one sp.all_to_all. Heads that are flattened after an
exchange are flattened before it (see `combine_permutes.py`). The traffic is equal or less. Of the copies on both sides
one remains, which a compiler fuses into the kernel that computes x.

Works on captured graphs, in which no value changes (`capture_export` creates them from exported programs), and on
those of AOTAutograd: forward, backward or joint. Not fused, with a note: unequal shares, results or copies with other
users, other permutations, and sizes for which the match cannot be proved.

Later nodes may have other strides than before. Views that the new strides do not allow become reshapes; outputs of the
graph keep their strides.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CollectivePass, Pass, Passes, register_pass
from sp_compile.passes.capture.check_captured import require_functional, require_ops
from sp_compile.passes.collectives.collective_context import CollectiveContext
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import node_packet
from sp_compile.passes.graph.inline import lower_exchanges
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.sizes import as_sizes, exact_quotient, is_same_size

from . import match_permutes
from .combine_permutes import MergeDimsBeforeExchange, PackExchanges
from .match_permutes import PERMUTE, AllToAllMatch, PermuteMatch, is_all_to_all
from .restride import StrideRepair
from .tidy_permutes import ConcatPadded, DropBuffers

aten = torch.ops.aten
FUSED_NOTE = "permute_all_to_all"  # subject of the notes of FusePermutes in the report


class FusePermutes(Pass):
    """Pass that fuses permute + all-to-all + permute, and DTensor's own op, into sp.all_to_all_permute."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Fuse all exchanges of two dims, note why others are not fused, and return the number of fused ones."""
        return sum(self._match_and_rewrite(node) for node in list(gm.graph.nodes))

    def _match_and_rewrite(self, node: Node) -> bool:
        """Fuse an all-to-all and the nodes around it that only move data, if they are an exchange of two dims.

        Returns True if they are fused. For another all-to-all the reason is noted.
        """
        if _is_dtensor_exchange(node):
            return self._rewrite_dtensor(node)
        if not is_all_to_all(node):
            return False
        exchange = match_permutes.match_all_to_all(node)
        if isinstance(exchange, str):  # a reason, "" for one that is not reported
            if exchange:
                self.note_refusal(node, exchange, FUSED_NOTE)
            return False
        match = match_permutes.match_permute(exchange)
        if match is None:
            self.note_refusal(node, "no exchange of two dims", FUSED_NOTE)
            return False
        self._rewrite(exchange, match)
        return True

    def _rewrite(self, exchange: AllToAllMatch, match: PermuteMatch) -> None:
        """Replace the chain of a match, an all-to-all and the moves around it, by one exchange."""
        x, y = match.x, match.y  # the value before the moves and the all-to-all, and that after them
        with self.graph.inserting_before(exchange.node):
            args = (x, match.scatter_dim, match.gather_dim, exchange.n, exchange.group)
            fused = self.compute(PERMUTE, args, y)
            if not match.exact:  # y has the elements of the exchange in the same order, and another shape
                fused = self.reshape(fused, as_sizes(y.meta["val"].shape), y)
        dims = f"dim {match.scatter_dim} for dim {match.gather_dim} of {list(x.meta['val'].shape)}"
        self.note(exchange.node, f"{dims}, {exchange.n} ranks", FUSED_NOTE)
        y.replace_all_uses_with(fused)
        match_permutes.erase_chain(self.graph, match.chain)

    def _rewrite_dtensor(self, node: Node) -> bool:
        """Replace DTensor's op, which names the gathered and the scattered dim; return False for unequal shards."""
        x, gather, scatter, group = node.args
        before, after = as_sizes(x.meta["val"].shape), as_sizes(node.meta["val"].shape)
        n = exact_quotient(after[gather], before[gather])
        if not isinstance(n, int) or not is_same_size(before[scatter], after[scatter] * n):
            return False
        with self.graph.inserting_before(node):
            fused = self.compute(PERMUTE, (x, scatter, gather, n, group), node)
        self.note(node, f"dim {scatter} for dim {gather}, {n} ranks", FUSED_NOTE)
        self.replace(node, fused)
        return True


class CancelExchanges(Pass):
    """Pass that removes an exchange and its inverse."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Remove all pairs of an exchange and a later one that undoes it, and return their number."""
        return sum(self._cancel(node) for node in gm.graph.find_nodes(op="call_function", target=PERMUTE))

    def _cancel(self, node: Node) -> bool:
        """Replace an exchange by the operand of an earlier one that it undoes; return False without one."""
        first = match_permutes.undone_exchange(node)
        if first is None:
            return False
        source = first.args[0]
        with self.graph.inserting_before(node):
            # The exchange returned new memory, which may be written; an input must not be returned in its place.
            if is_written(node) or match_permutes.is_input_alias(source):
                source = self.compute(aten.clone.default, (source,), node)
            source = self.reshape(source, as_sizes(node.meta["val"].shape), node)
        self.note(node, f"is the inverse of {first.name}; both are removed", "cancelled")
        self.replace(node, source)
        return True


@register_pass
class FuseAllToAllPermutes(CollectivePass, Passes):
    """All passes over permuted exchanges: `FuseAllToAllPermutes()(graph_module)`.

    Args:
        decomposed: True to emit ATen ops and functional collectives, as after AOTAutograd, in place of sp:: ops.
    """

    provides = frozenset({"fused permutes"})
    steps = (DropBuffers, ConcatPadded, FusePermutes, CancelExchanges, PackExchanges, MergeDimsBeforeExchange)

    @classmethod
    def of(cls, context: CollectiveContext) -> Pass | None:
        """Create the pass for a program with process groups of its own; else return None."""
        return cls(decomposed=True) if context.session.groups else None

    def __init__(self, decomposed: bool = False) -> None:
        super().__init__()
        self.decomposed = decomposed

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Run all passes on a graph that has an all-to-all, repair strides, and return the number of changes."""
        require_ops(gm, self.name)
        if not any(map(_is_permute_exchange, gm.graph.nodes)):
            return 0
        require_functional(gm, self.name)
        restride = StrideRepair(gm.graph)  # records the strides before the passes
        changes = super().apply(gm, context)
        if changes:
            if self.decomposed:
                lower_exchanges(gm)
            restride.apply()
            gm.recompile()
        return changes


def _is_permute_exchange(node: Node) -> bool:
    """Return True for every all-to-all; without any, no pass runs on the graph.

    In-place ones and those of unequal shares count, so that the passes refuse or note them.
    """
    in_place = node_packet(node) is torch.ops.c10d.alltoall_base_
    return is_all_to_all(node) or node.target is PERMUTE or _is_dtensor_exchange(node) or in_place


def _is_dtensor_exchange(node: Node) -> bool:
    """Return True for the op by which DTensor moves a sharded dim."""
    return node_packet(node) is torch.ops._dtensor.shard_dim_alltoall
