"""Where in a program a rank is that waits in one of its exchanges, or has raised: the node, and the user's line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compile.lowering.base.errors import UNKNOWN_LINE, source_line, stack_trace
from sp_compile.lowering.torch_compat import CodeLine, compiled_lines

SHOWN_INPUTS = 3
NUMBER_PATTERN = re.compile(r"_\d+$")


class ExchangeSource(NamedTuple):
    """An exchange of a program. trace: the stack trace of the call behind it, "" if there is none.

    inputs: those that it is given directly: sums of the gradients of weights belong to no one line.
    """

    trace: str
    inputs: list[str]

    def __str__(self) -> str:
        line = source_line(self.trace)
        more = f" and {len(self.inputs) - SHOWN_INPUTS} more" if len(self.inputs) > SHOWN_INPUTS else ""
        return ", ".join(self.inputs[:SHOWN_INPUTS]) + more if line == UNKNOWN_LINE else line


def exchange_sources(exchanges: Iterable[Node], shown: Mapping[str, str]) -> dict[str, ExchangeSource]:
    """These nodes of a program, by their names. shown: what a person calls the inputs of the program, by theirs."""
    inputs = {node: [x.name for x in node.all_input_nodes if x.op == "placeholder"] for node in exchanges}
    return {node.name: ExchangeSource(stack_trace(node), [shown.get(x, x) for x in xs]) for node, xs in inputs.items()}


def failed_exchange(error: BaseException, places: Mapping[str, ExchangeSource]) -> str:
    """Which exchange has raised the error while its program ran, in words; "" if nobody knows.

    Where compiled code runs other compiled code, the innermost that is known.
    """
    names = [name for line in compiled_lines(error) if not line.kernel for name in line.sources if name in places]
    return f"{names[-1]} of {places[names[-1]]}".removesuffix(" of ") if names else ""


def node_lines(graph: Graph) -> dict[str, str]:
    """The user's line of each node of a program that has one, by the node's name."""
    traces = {node.name: trace for node in graph.nodes if (trace := stack_trace(node))}
    lines = {trace: source_line(trace) for trace in {*traces.values()}}
    return {name: lines[trace] for name, trace in traces.items() if lines[trace] != UNKNOWN_LINE}


def failed_line(error: BaseException, lines: Mapping[str, str]) -> str:
    """The user's line whose op has raised the error while its program ran; "" if nobody knows.

    A kernel that computes several has the first few of these. lines: as `node_lines` gives them.
    """
    for line in reversed([*compiled_lines(error)]):
        own = source_line(line.trace)
        found = [own] if own != UNKNOWN_LINE else [*dict.fromkeys(lines[name] for name in _nodes_of_line(line, lines))]
        if found:
            return ", or ".join(found[:SHOWN_INPUTS])
    return ""


def _nodes_of_line(line: CodeLine, names: Iterable[str]) -> list[str]:
    """Which of these nodes, in the order of their program, a line of code computes; of a kernel of which only the ops
    are known, the nodes of such ops, those first that are close to what comes after it.
    """
    known = [*names]
    places = {name: i for i, name in enumerate(known)}
    sources = [name for name in line.sources if name in places]
    if not line.kernel:
        return sources
    after = min((places[name] for name in sources), default=0)
    of_ops = [name for name in known if f"_{NUMBER_PATTERN.sub('', name)}_" in f"_{line.kernel}_"]
    return sorted(of_ops, key=lambda name: abs(places[name] - after))
