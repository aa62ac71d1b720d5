"""Find the node and the user's line of an exchange that a rank waits in, or of an op that raised."""

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
    """Source of an exchange in a program."""

    trace: str  # stack trace of the call; "" if there is none
    inputs: list[str]  # names of program inputs that it reads directly: reduced weight gradients have no single line

    def __str__(self) -> str:
        line = source_line(self.trace)
        more = f" and {len(self.inputs) - SHOWN_INPUTS} more" if len(self.inputs) > SHOWN_INPUTS else ""
        return ", ".join(self.inputs[:SHOWN_INPUTS]) + more if line == UNKNOWN_LINE else line


def exchange_sources(exchanges: Iterable[Node], shown: Mapping[str, str]) -> dict[str, ExchangeSource]:
    """Return the sources of exchanges by node name.

    Args:
        exchanges: Nodes of the exchanges.
        shown: Names to display for inputs of the program, by node name.
    """
    inputs = {node: [x.name for x in node.all_input_nodes if x.op == "placeholder"] for node in exchanges}
    return {node.name: ExchangeSource(stack_trace(node), [shown.get(x, x) for x in xs]) for node, xs in inputs.items()}


def failed_exchange(error: BaseException, places: Mapping[str, ExchangeSource]) -> str:
    """Format the exchange that raised the error at run time; return "" if it is unknown.

    If compiled code runs other compiled code, this is the innermost known exchange.
    """
    names = [name for line in compiled_lines(error) if not line.kernel for name in line.sources if name in places]
    return f"{names[-1]} of {places[names[-1]]}".removesuffix(" of ") if names else ""


def node_lines(graph: Graph) -> dict[str, str]:
    """Map the name of each node with a known source to the user's line."""
    traces = {node.name: trace for node in graph.nodes if (trace := stack_trace(node))}
    lines = {trace: source_line(trace) for trace in {*traces.values()}}
    return {name: lines[trace] for name, trace in traces.items() if lines[trace] != UNKNOWN_LINE}


def failed_line(error: BaseException, lines: Mapping[str, str]) -> str:
    """Return the user's line of the op that raised the error at run time, or "" if it is unknown.

    For a kernel that computes several lines, the first `SHOWN_INPUTS` lines are returned.

    Args:
        error: Error that the program raised.
        lines: Lines by node name, from `node_lines`.
    """
    for line in reversed([*compiled_lines(error)]):
        own = source_line(line.trace)
        found = [own] if own != UNKNOWN_LINE else [*dict.fromkeys(lines[name] for name in _nodes_of_line(line, lines))]
        if found:
            return ", or ".join(found[:SHOWN_INPUTS])
    return ""


def _nodes_of_line(line: CodeLine, names: Iterable[str]) -> list[str]:
    """Return the nodes that a line of compiled code computes.

    Args:
        line: Line of compiled code. If only the ops of its kernel are known, all nodes with these ops are returned,
            those closest to the next node first.
        names: Node names in program order.
    """
    known = [*names]
    places = {name: i for i, name in enumerate(known)}
    sources = [name for name in line.sources if name in places]
    if not line.kernel:
        return sources
    after = min((places[name] for name in sources), default=0)
    of_ops = [name for name in known if f"_{NUMBER_PATTERN.sub('', name)}_" in f"_{line.kernel}_"]
    return sorted(of_ops, key=lambda name: abs(places[name] - after))
