"""Which results of a graph stay in shards, as the option `outputs` says of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import pytree
from sp_compile.graph.sizes import bytes_now
from sp_compile.sharding.placement import DEALT, Shard

LARGE = 1 << 20  # bytes of a result that outputs="auto" leaves in shards: a millisecond of a slow link, or less

GATHER = "a result of the model (outputs='gather')"
SMALL = f"a result of the model, smaller than {LARGE >> 20} MiB"
BALANCED = "a result of the model, whose rows are dealt to ranks (layout='balanced')"


def asked_of(output: Node, outputs: str | Sequence[str]) -> dict[Node, list[str]]:
    """What the option says of each value that the graph returns, once for each time that it does.

    outputs: one word for all, or one for each of the results, nested ones in order.
    """
    leaves = pytree.tree_leaves(output.args[0])
    words = [outputs] * len(leaves) if isinstance(outputs, str) else outputs
    asked: dict[Node, list[str]] = {}
    for leaf, word in zip(leaves, words, strict=True):
        if isinstance(leaf, Node):
            asked.setdefault(leaf, []).append(word)
    return asked


def why_whole(have: Shard, value: torch.Tensor, words: Sequence[str]) -> str:
    """Why a result that lies in shards is gathered; "" if it stays."""
    if "gather" in words:
        return GATHER
    if "local" in words:
        return ""
    if "lazy" not in words and bytes_now(value) < LARGE:
        return SMALL
    return BALANCED if have.frame.folds == DEALT else ""


def gradients_by_ticket(gm: GraphModule, numbers: Iterable[int]) -> dict[int, int]:
    """Results of a rank's program, and what it returns behind all of them: a ticket for the gradient of each.

    Of those with these numbers with which the program itself goes on, as with logits of which it makes a loss.
    """
    graph, output = gm.graph, gm.graph.output_node()
    leaves, found = list(output.args[0]), dict[int, int]()
    for i in numbers:
        node = leaves[i]
        if node.op != "call_function" or not any(user is not output for user in node.users):
            continue
        with graph.inserting_after(node):
            both = graph.call_function(torch.ops.sp.tap.default, (node,))
        with graph.inserting_after(both):
            value, ticket = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
        node.replace_all_uses_with(value, lambda user, both=both: user not in (both, output))
        with graph.inserting_before(output):
            leaves[i] = graph.call_function(torch.ops.aten.detach.default, (node,))
        found[i] = len(leaves)
        leaves.append(ticket)
    if found:
        output.args = (type(output.args[0])(leaves),)
        graph.lint()
        gm.recompile()
    return found
