"""Permute + all-to-all + permute, however it is spelled, as one exchange of two dims.

    x.reshape(b, s, n, h, d).permute(2, 0, 1, 3, 4).contiguous()      x: [b, s, n * h, d]
    all_to_all_single, wait                                     ->    sp.all_to_all_permute(x, 2, 1): [b, n * s, h, d]
    .permute(1, 0, 2, 3, 4).reshape(b, n * s, h, d)

By index algebra (see `exchanges.py`), so in any spelling: permutes, transposes, chunks and cats, buffers that are
filled by copies. Then an exchange that brings back what another took away goes, with it; exchanges that do not wait for
each other (q, k and v of an attention) become one sp.all_to_all; and heads that are flattened after an exchange are
flattened before it (see `merged_dims.py`). Bytes moved are the same or less; of the copies on both sides one is left,
which a compiler writes from the kernel that makes x. Works on graphs from torch.export, make_fx, Dynamo and
AOTAutograd, forward, backward or joint, functional or not: nothing is read across a write. Leaves alone, with a note:
unequal shares, results or copies that are also used elsewhere, any other permutation, sizes of which it cannot be
proved.

What follows may find other strides than before. Views that the new strides do not allow become reshapes; results of the
graph keep the old ones.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.edit import Editor, copy_of, infer
from sp_compile.graph.inline import lower_exchanges
from sp_compile.graph.sizes import quotient, same, size, sizes
from sp_compile.passes.base import Pass
from sp_compile.passes.job import Job, Note

from .arrangement import name_of, value_of
from .combine import gather_exchanges, merge_first
from .match import Exchange, Match, erase_chain, is_exchange, match, read, sources_of, undone
from .restride import Restride, one_mode
from .tidy import join_padded, make_functional, settle
from .writes import between, writes_of

sp, aten = torch.ops.sp, torch.ops.aten
PERMUTE = sp.all_to_all_permute.default


def permute_all_to_all(gm: GraphModule, decomposed: bool = False, packed: bool = True) -> list[Note]:
    """Rewrite the graph in place; what was done to which exchange, and why not to others."""
    rewrite = PermuteAllToAll(decomposed, packed)
    rewrite(gm)
    return rewrite.notes


class PermuteAllToAll(Pass, Editor):
    """By hand: `PermuteAllToAll()(graph_module)`; `.notes` says what was done.

    decomposed: leave ATen and functional collectives, as after AOTAutograd, instead of sp:: ops.
    packed: put independent exchanges together.
    """

    name = "permute_all_to_all"
    provides = frozenset({"exchanges are joined"})

    def __init__(self, decomposed: bool = False, packed: bool = True) -> None:
        super().__init__()
        self.decomposed, self.packed = decomposed, packed
        self.writes: frozenset[Node] = frozenset()

    def apply(self, gm: GraphModule, job: Job) -> int:
        before = copy_of(gm.graph) if any(map(_may_be_one, gm.graph.nodes)) else None
        lent = [n for n in gm.graph.nodes if "example_value" in n.meta and "val" not in n.meta]
        for node in lent:
            node.meta["val"] = node.meta["example_value"]
        one_mode(gm.graph)
        self.edit(gm.graph)
        restride = Restride(gm.graph)
        prepared = make_functional(gm) | settle(gm.graph)
        self.writes = writes_of(gm.graph)
        prepared |= join_padded(self, self.writes)
        made = [node for node in list(self.graph.nodes) if self._rewritten(node)]
        gone = [
            node for node in self.graph.find_nodes(op="call_function", target=PERMUTE) if self._undone(node)
        ]
        together = gather_exchanges(self.graph, self.writes, self.together) if self.packed else []
        apart = self.graph.find_nodes(op="call_function", target=PERMUTE)
        merged = [node for node in apart if not self.writes and merge_first(self, node)]
        changed = bool(made or gone or together or merged)
        if prepared and not changed and before is not None:  # for nothing
            gm.graph = before
            return 0
        if changed and self.decomposed:
            lower_exchanges(gm)
        if changed:
            restride.apply()
        for node in lent:
            node.meta["example_value"] = node.meta.pop("val")
        return len(made) + len(gone) + len(together) + len(merged)

    def infer(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Any = None) -> Any:
        """Values of Dynamo's graphs are of another mode than the one that compiles."""
        return infer(target, args, kwargs or {})

    def _rewritten(self, node: Node) -> bool:
        if node.op == "call_function" and name_of(node) == "shard_dim_alltoall":
            return self._from_dtensor(node)
        if not is_exchange(node):
            return False
        exchange = read(node)
        found = (
            exchange
            if isinstance(exchange, str)
            else match(exchange, self.writes) or "no exchange of two dims"
        )
        if isinstance(found, str) or isinstance(exchange, str):
            if found:
                self.refused(node, str(found))
            return False
        self._rewrite(exchange, found)
        return True

    def _rewrite(self, exchange: Exchange, found: Match) -> None:
        x, y = found.x, found.y
        with self.graph.inserting_before(exchange.node):
            args = (x, found.scatter_dim, found.gather_dim, exchange.n, exchange.group)
            fresh = self.compute(PERMUTE, args, y)
            if not found.exact:
                shape = self.sizes.list(sizes(value_of(y).shape))
                fresh = self.compute(aten.reshape.default, (fresh, shape), y)
        dims = f"dim {found.scatter_dim} for dim {found.gather_dim} of {list(value_of(x).shape)}"
        self.note(exchange.node, f"{dims}, {exchange.n} ranks")
        y.replace_all_uses_with(fresh)
        erase_chain(self.graph, found.chain)

    def _from_dtensor(self, node: Node) -> bool:
        """DTensor's own op says the dims."""
        x, gather, scatter, group = node.args
        n = quotient(size(value_of(node).shape[gather]), size(value_of(x).shape[gather]))
        if not isinstance(n, int) or not same(
            value_of(x).shape[scatter] * 1, value_of(node).shape[scatter] * n
        ):
            return False
        with self.graph.inserting_before(node):
            fresh = self.compute(PERMUTE, (x, scatter, gather, n, group), node)
        self.note(node, f"dim {scatter} for dim {gather}, {n} ranks")
        self.replace(node, fresh)
        return True

    def _undone(self, node: Node) -> bool:
        """Replace an exchange by the operand of the one that it takes back."""
        for first in sources_of(node):
            how = undone(first, node)
            if how is None:
                continue
            if between(self.writes, first, node):
                continue
            home = first.args[0]
            if self.writes:  # to what comes back, perhaps, and not to what went
                with self.graph.inserting_before(node):
                    home = self.compute(aten.clone.default, (home,), node)
            if not how:
                with self.graph.inserting_before(node):
                    shape = self.sizes.list(sizes(value_of(node).shape))
                    home = self.compute(aten.reshape.default, (home, shape), node)
            self.note(node, f"takes back {first.name}; both are left out", "cancelled")
            self.replace(node, home)
            return True
        return False

    def together(self, members: Sequence[Node]) -> None:
        """Put independent exchanges of the same two dims into one, where the last of them is."""
        _, scatter, gather, n, group = members[0].args
        whole = [1, n, 0, n]  # n positions, one a rank: equal shares of any size
        ndim = value_of(members[0]).ndim
        with self.graph.inserting_before(members[-1]):
            args = ([m.args[0] for m in members], scatter % ndim, whole, gather % ndim, whole, n, group)
            both = self.compute(sp.all_to_all.default, args, members[-1])
            fresh = [self.compute(operator.getitem, (both, i), m) for i, m in enumerate(members)]
        self.note(both, f"{len(members)} exchanges in one", "packed")
        for member, piece in zip(members, fresh):
            member.replace_all_uses_with(piece)
            self.graph.erase_node(member)


def _may_be_one(node: Node) -> bool:
    return is_exchange(node) or "alltoall_base_" in str(node.target)
