"""Determine the sharded inputs and outputs of a local graph."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.passes.capture.graph_inputs import GlobalView
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.graph.strides import order_of_strides
from sp_compile.passes.sharding.output_rules import OUTPUT_RULES, gather_reason
from sp_compile.passes.sharding.placement import Shard

from .graph_boundary import GraphBoundary, ShardedOutput


def make_boundary(
    local: GraphModule, view: GlobalView, ranks: Ranks, symbols: Mapping[sympy.Symbol, tuple[int, int | None]]
) -> GraphBoundary:
    """Return the sharded inputs and outputs of a local graph.

    Args:
        local: The graph of one rank.
        view: The captured graph that it was lowered from.
        ranks: The ranks that shard the sequence.
        symbols: The inputs that the symbols of the captured graph are computed from.
    """
    rows = frozenset(i for i, one in enumerate(local.meta[OUTPUT_RULES]) if one and isinstance(one.placement, Shard))
    inputs = view.graph.graph.find_nodes(op="placeholder")
    return GraphBoundary(
        view.layouts,
        _sharded_outputs(local, view, ranks),
        rows,
        view.writes,
        symbols,
        views=view.views,
        hidden=view.hidden,
        written=view.written,
        own_rows=frozenset(i for i, node in enumerate(inputs) if node.name in view.inputs and i not in view.layouts),
    )


def _sharded_outputs(local: GraphModule, view: GlobalView, ranks: Ranks) -> dict[int, ShardedOutput]:
    """Return the outputs that stay sharded, by number."""
    found: dict[int, ShardedOutput] = {}
    for i, (name, mode, rule) in enumerate(zip(view.names, view.outputs, local.meta[OUTPUT_RULES], strict=True)):
        if mode == "local" or rule is None or not isinstance(rule.placement, Shard):
            continue
        have, value, where = rule
        if ranks.n == 1 and gather_reason(value, [mode]):
            continue
        order, frame = tuple(order_of_strides(as_sizes(value.stride()))), have.frame
        layout = Layout(have.dim, ranks.n, ranks.group, order, frame.folds)
        after = frame.size - frame.start - frame.length
        parts = {"outer": have.outer, "inner": have.inner, "before": frame.start, "after": after}
        own = {part: value for part, value in parts.items() if not is_same_size(value, getattr(layout, part))}
        found[i] = ShardedOutput(name, where, layout, as_sizes(value.shape)[have.dim], own)
    return found
