"""Permute + all-to-all + permute, however it is spelled, as one exchange of two dims.

    x.reshape(b, s, n, h, d).permute(2, 0, 1, 3, 4).contiguous()      x: [b, s, n * h, d]
    all_to_all_single, wait                                     ->    sp.all_to_all_permute(x, 2, 1): [b, n * s, h, d]
    .permute(1, 0, 2, 3, 4).reshape(b, n * s, h, d)

By index algebra (see `arrangement.py`), so in any spelling: permutes, transposes, chunks and cats. Then an exchange
that brings back what another took away goes, with it; exchanges that do not wait for each other (q, k and v of an
attention) become one sp.all_to_all; and heads that are flattened after an exchange are flattened before it (see
`combine_permutes.py`). Bytes moved are the same or less; of the copies on both sides one is left, which a compiler writes from
the kernel that makes x.

Works on captured graphs, in which no value changes (`capture_export` makes them of exported programs), and on those of
AOTAutograd, forward, backward or joint. Leaves alone, with a note: unequal shares, results or copies that are also used
elsewhere, any other permutation, sizes of which it cannot be proved.

What follows may find other strides than before. Views that the new strides do not allow become reshapes; results of the
graph keep the old ones.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CollectivePass, Pass, Passes, register
from sp_compile.passes.capture.check_captured import require_functional, require_ops
from sp_compile.passes.collectives.collective_context import CollectiveJob
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import packet_of
from sp_compile.passes.graph.inline import lower_exchanges
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.sizes import quotient, same, size, sizes

from .combine_permutes import MergeFirst, PackExchanges
from .match_permutes import (
    PERMUTE,
    AllToAll,
    Match,
    erase_chain,
    is_all_to_all,
    lies_in_input,
    match,
    read,
    sources_of,
    undone,
)
from .restride import Restride
from .tidy_permutes import DropBuffers, JoinPadded

aten = torch.ops.aten
DONE = "permute_all_to_all"  # in the report, whichever of the parts below did it


class JoinPermutes(Pass):
    """Permute + all-to-all + permute, and DTensor's own op, as sp.all_to_all_permute."""

    def apply(self, gm: GraphModule, job: Job) -> int:
        return sum([self._rewritten(node) for node in list(gm.graph.nodes)])

    def _rewritten(self, node: Node) -> bool:
        if _is_dtensors(node):
            return self._from_dtensor(node)
        if not is_all_to_all(node):
            return False
        exchange = read(node)
        found = match(exchange) or "no exchange of two dims" if isinstance(exchange, AllToAll) else exchange
        if isinstance(found, str) or isinstance(exchange, str):
            if found:
                self.refused(node, str(found), DONE)
            return False
        self._rewrite(exchange, found)
        return True

    def _rewrite(self, exchange: AllToAll, found: Match) -> None:
        x, y = found.x, found.y
        with self.graph.inserting_before(exchange.node):
            args = (x, found.scatter_dim, found.gather_dim, exchange.n, exchange.group)
            fresh = self.compute(PERMUTE, args, y)
            if not found.exact:
                fresh = self.reshaped(fresh, sizes(y.meta["val"].shape), y)
        dims = f"dim {found.scatter_dim} for dim {found.gather_dim} of {list(x.meta['val'].shape)}"
        self.note(exchange.node, f"{dims}, {exchange.n} ranks", DONE)
        y.replace_all_uses_with(fresh)
        erase_chain(self.graph, found.chain)

    def _from_dtensor(self, node: Node) -> bool:
        """DTensor's own op says the dims."""
        x, gather, scatter, group = node.args
        n = quotient(size(node.meta["val"].shape[gather]), size(x.meta["val"].shape[gather]))
        if not isinstance(n, int) or not same(x.meta["val"].shape[scatter] * 1, node.meta["val"].shape[scatter] * n):
            return False
        with self.graph.inserting_before(node):
            fresh = self.compute(PERMUTE, (x, scatter, gather, n, group), node)
        self.note(node, f"dim {scatter} for dim {gather}, {n} ranks", DONE)
        self.replace(node, fresh)
        return True


class CancelExchanges(Pass):
    """Neither of two exchanges, the second of which takes back the first."""

    def apply(self, gm: GraphModule, job: Job) -> int:
        return sum([self._undone(node) for node in gm.graph.find_nodes(op="call_function", target=PERMUTE)])

    def _undone(self, node: Node) -> bool:
        """Replace an exchange by the operand of the one that it takes back."""
        for first in sources_of(node):
            how = undone(first, node)
            if how is None:
                continue
            home = first.args[0]
            with self.graph.inserting_before(node):
                if is_written(node) or lies_in_input(home):  # which may be written, and is not to be returned
                    home = self.compute(aten.clone.default, (home,), node)
                if not how:
                    home = self.reshaped(home, sizes(node.meta["val"].shape), node)
            self.note(node, f"takes back {first.name}; both are left out", "cancelled")
            self.replace(node, home)
            return True
        return False


@register
class PermuteAllToAll(CollectivePass, Passes):
    """By hand: `PermuteAllToAll()(graph_module)`; `.notes` says what was done.

    decomposed: leave ATen and functional collectives, as after AOTAutograd, instead of sp:: ops.
    """

    provides = frozenset({"exchanges are joined"})
    steps = (DropBuffers, JoinPadded, JoinPermutes, CancelExchanges, PackExchanges, MergeFirst)

    @classmethod
    def of(cls, job: CollectiveJob) -> Pass | None:
        return cls(decomposed=True) if job.session.groups else None

    def __init__(self, decomposed: bool = False) -> None:
        super().__init__()
        self.decomposed = decomposed

    def apply(self, gm: GraphModule, job: Job) -> int:
        require_ops(gm, self.name)
        if not any(map(_exchanges, gm.graph.nodes)):
            return 0
        require_functional(gm, self.name)
        restride = Restride(gm.graph)
        changes = super().apply(gm, job)
        if changes:
            if self.decomposed:
                lower_exchanges(gm)
            restride.apply()
            gm.recompile()
        return changes


def _exchanges(node: Node) -> bool:
    in_place = packet_of(node) is torch.ops.c10d.alltoall_base_
    return is_all_to_all(node) or node.target is PERMUTE or _is_dtensors(node) or in_place


def _is_dtensors(node: Node) -> bool:
    return packet_of(node) is torch.ops._dtensor.shard_dim_alltoall
