"""One spelling for what models spell in several ways, before anything is analysed. The program's value is unchanged.

    spellings         ops that read only an operand's dtype or device say so
    reroll            loops over time, unrolled      ->  scans, and one body for all steps
    scan_rounds       scans in log2 S rounds         ->  scans
    eager_attention   matmul, softmax, matmul        ->  scaled_dot_product_attention
    stack_heads       one attention per head         ->  one attention of all heads
    masks             masks computed from positions  ->  is_causal, no mask, or sp.masked_attention with a predicate
    group_heads       repeated key and value heads   ->  enable_gqa
    repeats           repeat_interleave              ->  unsqueeze, expand, reshape
    associative_scan  the op by this name            ->  sp.scan, sp.linear_scan
    scan_idioms       cumsum(x) - x, flip-cumsum-flip   ->  sp.scan, exclusive, reverse
    reduce_pairs      Functions that only reduce     ->  sp.reduce_pair
    paddings          pad and conv1d, pad and slice  ->  sp.conv1d, sp.shift: nothing longer than its sequence

Each has a module of its own, which says what it leaves alone. Bytes moved: none.
"""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from sp_compile.graph.edit import Editor
from sp_compile.passes.canonical.attention.eager import EagerAttention
from sp_compile.passes.canonical.attention.heads import StackHeads, group_heads
from sp_compile.passes.canonical.attention.masks import Masks
from sp_compile.passes.canonical.loops.reroll import Reroll
from sp_compile.sharding.attention import attention_nodes

from .associative_scan import AssociativeScans
from .paddings import Paddings
from .reduce_pairs import spell_pairs
from .scan_idioms import ScanIdioms
from .scan_rounds import ScanRounds
from .spellings import Repeats, respell


class Canonicalize(PassBase):
    """Brings a captured graph to its canonical form."""

    def call(self, graph_module: GraphModule) -> PassResult:
        changed = respell(graph_module)
        changed = spell_pairs(graph_module) or changed
        for rewrite in (Reroll, ScanRounds, EagerAttention, StackHeads, Masks):
            changed = rewrite(graph_module).run() or changed
        changed = _group_heads(graph_module) or changed
        for late in (Repeats, AssociativeScans, ScanIdioms, Paddings):
            changed = late(graph_module).run() or changed
        if changed:
            graph_module.graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, changed)


def _group_heads(gm: GraphModule) -> bool:
    editor, changed = Editor(), False
    editor.edit(gm.graph)
    for node in attention_nodes(gm):
        before = node.all_input_nodes
        if group_heads(node):
            changed = True
            editor.drop(*before)
    return changed
