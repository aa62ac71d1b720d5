"""Slices at a rank's own place, and gathered blocks, said as such: sp::own_rows and sp::all_rows.

    x[:, r*s : (r+1)*s]  on rank r, for every r     ->   own_rows(x, 1)
    wait(all_gather_into_tensor(x)), and cat(split(wait(all_gather_into_tensor(x)), 0), d)   ->   all_rows(x, d)
    wait(all_reduce(pad x with zeros to its place))   ->   all_rows(x, d)

A slice is a rank's own only if it is on all ranks, which no rank can tell alone: the starts are exchanged. Bytes: no
more than before; none where what is sliced is, or what is gathered stays, a shard (see `sequence_parallel_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.base import Pass
from sp_compile.passes.collectives.merge.find_chains import chunks_behind
from sp_compile.passes.collectives.permute.tidy_permutes import placed
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import shape_of
from sp_compile.passes.sharding.group_names import group_of
from sp_compile.passes.sharding.matchers import Piece, piece_of

from .varying import wait_of

c10d, sp = torch.ops._c10d_functional, torch.ops.sp
AskAll = Callable[[list[int]], list[list[int]]]
"""What every rank of the group says, given what this one does."""


class OwnRows(Pass):
    """By hand: `OwnRows(Ranks(n, group), ask_all)(graph_module)`, on every rank of the group."""

    provides = frozenset({"own rows are marked"})

    def __init__(self, ranks: Ranks, ask_all: AskAll) -> None:
        super().__init__(ranks)
        self.ask_all = ask_all

    @classmethod
    def of(cls, job: Any) -> Pass | None:
        apart = job.ranks.group in job.session.differing
        return cls(job.ranks, partial(job.session.rows, job.ranks)) if apart else None

    def apply(self, gm: GraphModule, job: Job) -> int:
        ranks = job.ranks
        blocks = [*_slices(gm, ranks.n), *_pads(gm, ranks)]
        everyone = self.ask_all([block.start for _, block in blocks])
        found = self._mark_gathers(gm, ranks)
        if any(len(starts) != len(blocks) for starts in everyone):
            return found  # not one program: agreement is somebody else's business
        for i, (node, block) in enumerate(blocks):
            if [starts[i] for starts in everyone] == [rank * block.length for rank in range(ranks.n)]:
                target = sp.all_rows.default if node.target is c10d.wait_tensor.default else sp.own_rows.default
                self.respell(node, target, (block.source, block.dim, ranks.n, ranks.group), node)
                found += 1
        return found

    def _mark_gathers(self, gm: GraphModule, ranks: Ranks) -> int:
        found = 0
        for node in gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
            wait = wait_of(node)
            if group_of(node) == ranks.group and wait is not None:
                moved = chunks_behind(wait)  # along another dim than 0
                aside = moved is not None and moved.away == 0 and len(moved.pieces) == ranks.n
                end, dim = (moved.cat, moved.onto) if moved is not None and aside else (wait, 0)
                self.respell(end, sp.all_rows.default, (node.args[0], dim, ranks.n, ranks.group), end)
                found += 1
        return found


def _slices(gm: GraphModule, n: int) -> Iterator[tuple[Node, Piece]]:
    """Every node that is a piece of 1/n of a dim, and that."""
    for node in gm.graph.nodes:
        piece = piece_of(node)
        if piece is not None and piece.keeps and piece.step == 1:
            start, length = piece.start, piece.length
            extent = shape_of(piece.source)[piece.dim]
            if isinstance(start, int) and isinstance(length, int) and length and length * n == extent:
                yield node, piece


def _pads(gm: GraphModule, ranks: Ranks) -> Iterator[tuple[Node, Piece]]:
    """Every sum over the ranks of a block among zeros, as the gradient of a slice is, and where that block lies."""
    for node in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        padded, wait = node.args[0], wait_of(node)
        found = placed(padded) if group_of(node) == ranks.group and node.args[1] == "sum" else None
        if wait is None or found is None or not found.keeps or len(padded.users) != 1:
            continue
        if found.length * ranks.n == shape_of(padded)[found.dim]:
            yield wait, found
