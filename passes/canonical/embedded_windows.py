"""A window of an embedding becomes the embedding of a window, where ranks hold no neighbouring rows.

    embedding(w, ids)[:, 1:]        ->  embedding(w, ids[:, 1:])            layout="zigzag" or "balanced"

As what models have that predict several tokens, beside a window of another start (`h[:, :-1]`): in these layouts rows
could be moved on by a place only when gathered; ids are whole, and are cut where the rows are wanted. Each window's
gradient of the weight is then added up by itself. Leaves alone: contiguous rows, of which a rank sends one or two to
its neighbour, and embeddings whose gradients count how often an id comes.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.call import Call
from sp_compile.lowering.frames import LAYOUTS
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.job import Job
from sp_compile.sharding.matchers import origin

aten = torch.ops.aten


@register
class EmbeddedWindows(Spelling):
    """Rewrites the windows of embeddings in one graph."""

    requires = frozenset({"explicit"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        layout = LAYOUTS.get(job.layout)
        if layout is None or layout.in_order:
            return 0
        return sum([self._respell(n) for n in gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)])

    def _respell(self, node: Node) -> bool:
        call, source = Call(node), origin(node.args[0])
        if source.target is not aten.embedding.default or call.dim() == call.ndim() - 1:
            return False
        made = Call(source)
        if made["scale_grad_by_freq"] or made["sparse"]:
            return False
        weight, ids = made.operands
        window = [call[name] for name in ("start", "end", "step")]
        with self.graph.inserting_before(node):
            cut = self.compute(aten.slice.Tensor, (ids, call.dim(), *window), node)
            options = [made[name] for name in ("padding_idx", "scale_grad_by_freq", "sparse")]
            fresh = self.compute(aten.embedding.default, (weight, cut, *options), node)
        self.replace(node, fresh)
        return True
