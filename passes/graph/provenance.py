"""Find the node and the user's line of an exchange that a rank waits in, or of an op that raised.

An exchange is a node that communicates between ranks. The results are text of error messages at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.fx import Graph, Node

from sp_compile.lowering.base.errors import UNKNOWN_LINE, source_line, stack_trace
from sp_compile.lowering.torch_compat import CodeLine, compiled_lines

SHOWN_INPUTS = 3  # number of names or lines in a message
NUMBER_PATTERN = re.compile(r"_\d+$")  # number that fx appends to a repeated node name


class ExchangeSource(NamedTuple):
    """Source of an exchange in a program."""

    trace: str  # stack trace of the call; "" if there is none
    inputs: list[str]  # names of program inputs that it reads directly: reduced weight gradients have no single line

    def __str__(self) -> str:
        line = source_line(self.trace)
        more = f" and {len(self.inputs) - SHOWN_INPUTS} more" if len(self.inputs) > SHOWN_INPUTS else ""
        return ", ".join(self.inputs[:SHOWN_INPUTS]) + more if line == UNKNOWN_LINE else line


def exchange_sources(exchanges: Iterable[Node], shown: Mapping[str, str]) -> dict[str, ExchangeSource]:
    """Return the sources of exchanges by node name, to name them in errors after the graph is compiled.

    Args:
        exchanges: Nodes of the exchanges.
        shown: Names to display for inputs of the program, by node name.
    """
    sources: dict[str, ExchangeSource] = {}
    for node in exchanges:
        inputs = [shown.get(x.name, x.name) for x in node.all_input_nodes if x.op == "placeholder"]
        sources[node.name] = ExchangeSource(stack_trace(node), inputs)
    return sources


def failed_exchange(error: BaseException, sources: Mapping[str, ExchangeSource]) -> str:
    """Format the exchange that raised the error at run time, such as "all_gather of <file>:12: y = f(x)".

    If compiled code runs other compiled code, this is the innermost known exchange. If its line is unknown, the program
    inputs that it reads are named instead, if any. The result is "" if the error is from no known exchange.

    Args:
        error: Error that the program raised.
        sources: Sources of the program's exchanges, from `exchange_sources`.
    """
    # Skip the lines of kernels: a kernel is no exchange, but its `sources` are those of the next line that names its
    # nodes in a comment (see `CodeLine`), which may be the line of an exchange.
    names = [name for line in compiled_lines(error) if not line.kernel for name in line.sources if name in sources]
    if not names:
        return ""
    exchange = names[-1]  # of the innermost line
    source = str(sources[exchange])
    return f"{exchange} of {source}" if source else exchange


def node_lines(graph: Graph) -> dict[str, str]:
    """Map the name of each node with a known source to the user's line, for `failed_line`."""
    traces = {node.name: stack_trace(node) for node in graph.nodes}
    lines = {trace: source_line(trace) for trace in {*traces.values()}}  # many nodes have the same trace
    return {name: lines[trace] for name, trace in traces.items() if lines[trace] != UNKNOWN_LINE}


def failed_line(error: BaseException, lines: Mapping[str, str]) -> str:
    """Return the user's line of the op that raised the error at run time, or "" if it is unknown.

    For a kernel that computes several lines, it is the first few of these: "y = f(x), or z = g(y)".

    Args:
        error: Error that the program raised.
        lines: Lines by node name, from `node_lines`.
    """
    for code_line in reversed([*compiled_lines(error)]):  # the innermost line of compiled code first
        user_lines = [source_line(code_line.trace)]
        if user_lines == [UNKNOWN_LINE]:
            user_lines = [*dict.fromkeys(lines[name] for name in _nodes_of_line(code_line, lines))]
        if user_lines:
            return ", or ".join(user_lines[:SHOWN_INPUTS])
    return ""


def _nodes_of_line(line: CodeLine, names: Iterable[str]) -> list[str]:
    """Return the names of the nodes that a line of compiled code computes.

    The call of a fused kernel does not record all its nodes, but its name contains those of its ops, such as
    triton_fused_add_mul. All nodes of these ops are returned, those closest to the first recorded node first.

    Args:
        line: Line of compiled code.
        names: Node names in program order.
    """
    positions = {name: i for i, name in enumerate(names)}
    sources = [name for name in line.sources if name in positions]
    if not line.kernel:
        return sources
    first_source = min((positions[name] for name in sources), default=0)
    # A kernel's name has the names of ops between underscores, and the node add_3 computes the op add.
    nodes_of_ops = [name for name in positions if f"_{NUMBER_PATTERN.sub('', name)}_" in f"_{line.kernel}_"]
    return sorted(nodes_of_ops, key=lambda name: abs(positions[name] - first_source))
