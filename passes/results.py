"""Which results of a graph stay in shards, as the option `outputs` says of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile._compat import enter_autocast, exit_autocast, pytree
from sp_compile.graph.closure import closure
from sp_compile.graph.edit import drop_dead
from sp_compile.graph.modes import autocast_regions
from sp_compile.graph.record import record
from sp_compile.graph.sizes import bytes_now
from sp_compile.lowering.collectives.late import LateGraph

LARGE_RESULT = 1 << 20  # bytes of a result that outputs="auto" leaves in shards: a millisecond of a slow link, or less

GATHER = "a result of the model (outputs='gather')"
SMALL = f"a result of the model, smaller than {LARGE_RESULT >> 20} MiB"


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


def why_whole(value: torch.Tensor, words: Sequence[str]) -> str:
    """Why a result that lies in shards is gathered; "" if it stays."""
    if "gather" in words:
        return GATHER
    if "local" in words:
        return ""
    return SMALL if "lazy" not in words and bytes_now(value) < LARGE_RESULT else ""


def gradients_by_ticket(gm: GraphModule, numbers: Iterable[int]) -> dict[int, int]:
    """Results of a rank's program, and what it returns behind all of them: a ticket for the gradient of each.

    Of those with these numbers with which the program itself goes on, as with logits of which it makes a loss.
    """
    output = gm.graph.output_node()
    leaves, found = list(output.args[0]), dict[int, int]()
    for i in numbers:
        node = leaves[i]
        if node.op != "call_function" or not any(user is not output for user in node.users):
            continue
        ticket = _tapped(node)
        leaves[i] = _detached(node, output)
        found[i] = len(leaves)
        leaves.append(ticket)
    if found:
        _return(gm, leaves)
    return found


def made_late(gm: GraphModule, numbers: Iterable[int], learns: bool) -> dict[int, LateGraph]:
    """Results of a rank's program that whoever reads them makes: those with these numbers that only repeat, for the
    caller, what tiles do. What they are made of is returned in their place, and behind all results.

    learns: are gradients recorded?
    """
    output = gm.graph.output_node()
    leaves, found = list(output.args[0]), dict[int, LateGraph]()
    for node, its in _numbers(leaves, numbers).items():
        inside = _again(node, output)
        if inside is None:
            continue
        graph, operands = _apart(gm, inside, node)
        where, tickets = [], []
        for x in operands:
            tickets.append(len(leaves) if learns and _may_learn(x) else None)
            if tickets[-1] is not None:
                leaves.append(_tapped(x))
            argument = _argument(x)
            where.append((argument is not None, len(leaves) if argument is None else argument))
            if argument is None:
                leaves.append(_detached(x, output))
        late = LateGraph(graph, node.meta["val"], tuple(where), tuple(tickets))
        for i in its:  # something that every rank has rows of
            leaves[i] = leaves[next(number for is_argument, number in where if not is_argument)]
            found[i] = late
    if found:
        _return(gm, leaves)
        drop_dead(gm.graph)
        gm.recompile()
    return found


def _numbers(leaves: Sequence[Any], numbers: Iterable[int]) -> dict[Node, list[int]]:
    found: dict[Node, list[int]] = {}
    for i in numbers:
        found.setdefault(leaves[i], []).append(i)
    return found


def _again(node: Node, output: Node) -> list[Node] | None:
    """The nodes that make it for the caller alone, in order; None if others read one of them, or tiles do not do it."""
    if not record(node).again or set(node.users) != {output}:
        return None
    inside = closure([node], lambda n: [x for x in n.all_input_nodes if record(x).again])
    if any(user not in inside for n in inside if n is not node for user in n.users):
        return None
    return [n for n in node.graph.nodes if n in inside]


def _apart(gm: GraphModule, inside: Sequence[Node], result: Node) -> tuple[GraphModule, list[Node]]:
    """These nodes as a graph of their own, in the autocast where they are, and what it takes."""
    graph, made = Graph(), dict[Node, Node]()
    operands = [x for x in dict.fromkeys(x for n in inside for x in n.all_input_nodes) if x not in inside]
    for x in operands:
        made[x] = graph.placeholder(x.name)
    regions = [graph.call_function(enter_autocast, tuple(one)) for one in autocast_regions(result)]
    for n in inside:
        made[n] = graph.node_copy(n, made.__getitem__)
    for one in reversed(regions):
        graph.call_function(exit_autocast, (one,))
    graph.output(made[result])
    return GraphModule(gm, graph), operands


def _may_learn(x: Node) -> bool:
    return record(x).requires_grad is not False and x.meta["val"].is_floating_point() and x.op == "call_function"


def _argument(x: Node) -> int | None:
    """The number of the program's argument whose value it is; None of what is computed."""
    if x.target is operator.getitem and x.args[0].target is torch.ops.sp.reduce_grad.default:  # type: ignore[union-attr]
        x = x.args[0].args[0][x.args[1]]  # type: ignore[union-attr,index]
    return list(x.graph.find_nodes(op="placeholder")).index(x) if x.op == "placeholder" else None


def _tapped(node: Node) -> Node:
    """Let the program go on with a value that has a gradient from elsewhere, too; the ticket for that."""
    graph, output = node.graph, node.graph.output_node()
    with graph.inserting_after(node):
        both = graph.call_function(torch.ops.sp.tap.default, (node,))
    with graph.inserting_after(both):
        value, ticket = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
    node.replace_all_uses_with(value, lambda user: user not in (both, output))
    return ticket


def _detached(node: Node, output: Node) -> Node:
    with node.graph.inserting_before(output):
        made: Node = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    return made


def _return(gm: GraphModule, leaves: Sequence[Any]) -> None:
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(leaves),)
    gm.graph.lint()
    gm.recompile()


def returned_orders(gm: GraphModule) -> tuple[int, int]:
    """The numbers of two results more, the last ones of a rank's program: the order that it deals, and its inverse."""
    graph = gm.graph
    (dealt,) = graph.find_nodes(op="call_function", target=torch.ops.sp.deal.default)
    with graph.inserting_before(graph.output_node()):
        orders = [graph.call_function(operator.getitem, (dealt, i)) for i in (0, 1)]
    for i, node in enumerate(orders):
        node.meta["val"] = dealt.meta["val"][i]
    leaves: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    _return(gm, [*leaves, *orders])
    return len(leaves), len(leaves) + 1
