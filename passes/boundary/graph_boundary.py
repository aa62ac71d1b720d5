"""Sharded inputs and outputs of a rank's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from sp_compile.lowering.collectives.deferred import DeferredGraph
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.passes.capture.view_writes import ResultView
from sp_compile.passes.graph.sizes import Size


@dataclass(frozen=True)
class ShardedOutput:
    """One result that stays in shards. name: in the user's code. where: the line that makes it.

    layout: how it lies, but for `parts`: Layout's outer, inner, before and after, which a call may have to tell.
    length: of the dim. ticket: the number of the result that is a ticket for its gradient, see
    `lowering/collectives/grad_tokens.py`. late: what makes it when somebody reads it; shape: of the whole then.
    """

    name: str
    where: str
    layout: Layout
    length: Size
    parts: Mapping[str, Size] = field(default_factory=dict)
    ticket: int | None = None
    late: DeferredGraph | None = None
    shape: tuple[Size, ...] = ()


@dataclass(frozen=True)
class GraphBoundary:
    """What a program takes and returns in shards, by number. symbols: see `symbol_sources`.

    own: how many results the graph returned itself, behind which lie tickets and what results are made of.

    rows: the results of which a rank has rows alone, those too that are plain tensors. writes: which result is what the
    program writes to an input in shards, by the number of that; nobody else is given it. deal: three results more that
    are `RowPermutation`, or none.

    views: the results that are made of other results, or of arguments, as views of them; hidden: how many results the
    program returns for these alone. written: the arguments that the program changes in place.

    own_rows: the inputs of which each rank passes rows of its own, as plain tensors.
    """

    layouts: Mapping[int, Layout] = field(default_factory=dict)
    results: Mapping[int, ShardedOutput] = field(default_factory=dict)
    rows: frozenset[int] = frozenset()
    writes: Mapping[int, int] = field(default_factory=dict)
    symbols: Mapping[sympy.Symbol, tuple[int, int | None]] = field(default_factory=dict)
    own_ranks: int | None = None
    balanced_order: tuple[int, ...] = ()
    views: Sequence[ResultView] = ()
    hidden: int = 0
    written: Sequence[int] = ()
    own_rows: frozenset[int] = frozenset()

    @property
    def order_input(self) -> int | None:
        """The number of the input whose order the program keeps."""
        return first_balanced(self.layouts)


def first_balanced(layouts: Mapping[int, Layout]) -> int | None:
    """The number of the argument whose order the program keeps, if it takes rows that are dealt."""
    return next((i for i, layout in layouts.items() if layout.is_balanced), None)
