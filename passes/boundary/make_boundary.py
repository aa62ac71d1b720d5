"""Determine the sharded inputs and outputs of a local graph, the graph of one rank.

A sharded dim is outer * rows * inner. Its frame describes the rows: they are a window of the sequence, the positions
[start, start + length) of `size`. The global view is the captured graph, whose values are full tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.passes.capture.graph_inputs import GlobalView
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.graph.strides import order_of_strides
from sp_compile.passes.sharding.output_rules import OUTPUT_INFOS, gather_reason
from sp_compile.passes.sharding.placement import Shard

from .graph_boundary import GraphBoundary, ShardedOutput


def make_boundary(
    local: GraphModule, view: GlobalView, ranks: Ranks, symbols: Mapping[sympy.Symbol, tuple[int, int | None]]
) -> GraphBoundary:
    """Return the sharded inputs and outputs of a local graph, once the passes have placed its outputs.

    The runtime wraps and unwraps them. `BoundaryPasses` update the result later, when they add outputs to the graph.

    Args:
        local: The graph of one rank.
        view: The captured graph that it was lowered from.
        ranks: The ranks that shard the sequence.
        symbols: The inputs that the symbols of the captured graph are computed from, as in `GraphBoundary`.
    """
    output_infos = local.meta[OUTPUT_INFOS]  # None for outputs that are not tensors
    inputs = view.graph.graph.find_nodes(op="placeholder")
    return GraphBoundary(
        layouts=view.layouts,
        results=_sharded_outputs(local, view, ranks),
        rows=frozenset(i for i, x in enumerate(output_infos) if x is not None and isinstance(x.placement, Shard)),
        writes=view.writes,
        symbols=symbols,
        views=view.views,
        hidden=view.hidden,
        written=view.written,
        # Inputs with a placement are sharded; those without the layout of a `Sharded` value are plain tensors.
        own_rows=frozenset(i for i, node in enumerate(inputs) if node.name in view.inputs and i not in view.layouts),
    )


def _sharded_outputs(local: GraphModule, view: GlobalView, ranks: Ranks) -> dict[int, ShardedOutput]:
    """Return the outputs that the caller receives as `Sharded` values, by their index.

    These are all outputs placed as Shard, except those with the option "local", which the caller receives as plain
    tensors of the rank's rows. On one rank, outputs that several ranks would gather (small ones, or those with the
    option "gather") are full tensors, too.
    """
    outputs: dict[int, ShardedOutput] = {}
    for i, (output_name, option, info) in enumerate(
        zip(view.names, view.outputs, local.meta[OUTPUT_INFOS], strict=True)
    ):
        if option == "local" or info is None or not isinstance(info.placement, Shard):
            continue
        shard, value, source_line = info
        if ranks.n == 1 and gather_reason(value, [option]):
            continue
        order, frame = tuple(order_of_strides(as_sizes(value.stride()))), shard.frame
        layout = Layout(shard.dim, ranks.n, ranks.group, order, frame.folds)
        after = frame.size - frame.start - frame.length
        sizes = {"outer": shard.outer, "inner": shard.inner, "before": frame.start, "after": after}
        # Sizes that differ from the layout's defaults may be symbolic, so the runtime sets them in each call.
        parts = {name: size for name, size in sizes.items() if not is_same_size(size, getattr(layout, name))}
        outputs[i] = ShardedOutput(output_name, source_line, layout, as_sizes(value.shape)[shard.dim], parts)
    return outputs
