"""Describe the sharded inputs and outputs of a rank's program, for the runtime that (un)wraps them.

The program has inputs and outputs with this rank's rows only; its caller passes and receives `Sharded` values, which
have a layout. The number of an input or output is its index. The caller does not receive all outputs. A gradient token
is a one-element output through which the gradient of a sharded output returns to the program. A deferred output is
computed from other values, its operands, when the caller reads it; the operands are extra outputs. Balanced rows are in
an order that is computed at run time, a `RowPermutation`.
"""

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
    """An output that stays sharded."""

    name: str  # in the user's code
    where: str  # the user's line that computes it
    layout: Layout  # without `parts`
    length: Size  # rows of the sharded dim, over all ranks
    # Fields `outer`, `inner`, `before` and `after` of the layout; symbolic ones are evaluated in each call.
    parts: Mapping[str, Size] = field(default_factory=dict)
    grad_token: int | None = None  # number of the output that is its gradient token (collectives/grad_tokens.py)
    deferred: DeferredGraph | None = None  # the graph that computes it when it is read
    shape: tuple[Size, ...] = ()  # of the full tensor


@dataclass(frozen=True)
class GraphBoundary:
    """The sharded inputs and outputs of a program, by number."""

    layouts: Mapping[int, Layout] = field(default_factory=dict)  # layouts of the sharded inputs
    results: Mapping[int, ShardedOutput] = field(default_factory=dict)  # the sharded outputs
    rows: frozenset[int] = frozenset()  # outputs of which a rank has only rows, plain tensors included
    writes: Mapping[int, int] = field(default_factory=dict)  # outputs that are written to sharded inputs, by input
    # The input that is the symbol, or the input and its dim, see `symbol_sources` of `runtime/sharded_values.py`.
    symbols: Mapping[sympy.Symbol, tuple[int, int | None]] = field(default_factory=dict)
    num_program_outputs: int | None = None  # outputs without gradient tokens and operands of deferred outputs
    balanced_order: tuple[int, ...] = ()  # numbers of the three outputs that are a `RowPermutation`
    views: Sequence[ResultView] = ()  # outputs that are views of other outputs or of arguments
    hidden: int = 0  # number of outputs that exist only for `views`
    written: Sequence[int] = ()  # arguments that the program changes in place
    own_rows: frozenset[int] = frozenset()  # inputs of which each rank passes its own rows, as plain tensors


def first_balanced(layouts: Mapping[int, Layout]) -> int | None:
    """Return the index of the first input whose rows are in a balanced order (computed at run time), or None.

    All balanced inputs have one order, which the program and its outputs keep: the runtime reads it from this input.
    """
    return next((i for i, layout in layouts.items() if layout.is_balanced), None)
