"""A graph as ranks compare it: one number on every call, and its lines where the numbers differ.

What of a program is the same on every rank: its text but for numbers, the numbers written in it, its inputs.

A tensor-parallel program may name its rank: `ids - 12` on one rank is `ids - 24` on the next. Its text shows what those
numbers touch only when it lies beside the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import known_process_group, namespace_of, pytree, real_tensors, size_hint
from sp_compile.config import Ranks
from sp_compile.errors import first_frame, source_line, trace_of
from sp_compile.lowering.collectives.checksums import checksum

from .agree import answers
from .message import hashed, spoken
from .named_groups import every_node, is_collective

WIDTH = 160  # characters of a line in an error message


class TextLine(NamedTuple):
    """One operation. text: all that is compared of it; name and stack trace: what a person is told."""

    text: str
    name: str
    trace: str


@dataclass(frozen=True)
class Program:
    """digest: equal for programs that ranks may run together. lines: its operations, in order."""

    digest: int = 0
    lines: tuple[TextLine, ...] = ()

    def first_difference(self, ranks: Ranks) -> list[str]:
        """What each rank has where their lines first differ; every rank of the group has to come here.

        Empty if they do not differ. Two exchanges: of a digest a line, then of one line a rank.
        """
        hashes: list[list[int]] = _told(ranks, [hashed(line.text) for line in self.lines])
        shortest, longest = min(map(len, hashes)), max(map(len, hashes))
        differ = (i for i in range(shortest) if len({one[i] for one in hashes}) > 1)
        first = next(differ, shortest)
        if first == longest:
            return []
        if first == len(self.lines):
            return _told(ranks, "nothing more")
        _, name, trace = self.lines[first]
        short = name if len(name) <= WIDTH else name[: WIDTH - 3] + "..."
        return _told(ranks, f"{short} at {source_line(trace)}")


def _told(ranks: Ranks, mine: Any) -> list[Any]:
    """What every rank tells of its program."""
    return answers(ranks, "compares", "programs", mine)


@spoken
@dataclass(frozen=True)
class Text:
    """A graph for comparison. shape: its ops and how they are joined; exchanges: those among its ops, in order;
    numbers: a digest of what each node has for arguments beside other nodes' results."""

    shape: int
    exchanges: int
    numbers: tuple[int, ...]


def subject_of(gm: GraphModule) -> str:
    """What a person calls the program: the function that was compiled, and its first line that computes something."""
    for node in gm.graph.nodes:
        frame = first_frame(trace_of(node)) if node.op == "call_function" else ""
        if frame:
            return frame
    return "a program"


def text_of(gm: GraphModule) -> Text:
    """The text of a graph, without names of groups and numbers of devices."""
    numbers, joints = [], []
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        named = is_collective(node)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        written = [_written(leaf) for leaf in leaves if not (isinstance(leaf, Node) or (named and names_group(leaf)))]
        numbers.append(hashed(f"{written} {_constant(gm, node)}"))
        edges = [order[leaf] if isinstance(leaf, Node) else None for leaf in leaves]
        if node.op != "output":
            joints.append(f"{node.op} {_target(node)} {edges} {spec}")
    return Text(hashed("\n".join(joints)), hashed(" ".join(_exchanges(gm))), tuple(numbers))


def program_of(gm: GraphModule) -> Program:
    """What ranks have to have in common to wait for each other: the exchanges, or all ops where none are in sight."""
    text = text_of(gm)
    return Program(text.exchanges if _exchanges(gm) else text.shape, tuple(_lines(gm)))


def _lines(gm: GraphModule) -> Iterator[TextLine]:
    """Each op and which of the ops before it it follows on, whatever the inputs are; bodies of regions included."""
    order: dict[Node, int] = {}
    for node in every_node(gm):
        if node.op not in ("placeholder", "output"):
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            edges = [order.get(leaf, "input") for leaf in leaves if isinstance(leaf, Node)]
            order[node] = len(order)
            yield TextLine(f"{_call(node)} {edges} {spec}", _call(node) or node.name, trace_of(node))


def _exchanges(gm: GraphModule) -> list[str]:
    """The exchanges, in order, bodies of regions included."""
    return [_call(node) for node in every_node(gm) if is_collective(node)]


def _call(node: Node) -> str:
    """An op; of an exchange what it does with the values as well: sum, max."""
    leaves = pytree.tree_leaves((node.args, node.kwargs)) if is_collective(node) else ()
    words = [leaf for leaf in leaves if isinstance(leaf, str) and not names_group(leaf)]
    return " ".join([_target(node), *words])


def names_group(leaf: Any) -> bool:
    """Is this what the rank calls a process group of its own?"""
    return isinstance(leaf, str) and known_process_group(leaf)


def unlike(gm: GraphModule, everyone: Sequence[Text]) -> frozenset[str] | None:
    """Names of the nodes that are written with other numbers on other ranks; None if the graphs differ in more."""
    first = everyone[0]
    if any(text.shape != first.shape for text in everyone):
        return None
    rows = zip(gm.graph.nodes, zip(*(text.numbers for text in everyone)))
    return frozenset(node.name for node, row in rows if node.op != "output" and len(set(row)) > 1)


def digest(x: Any) -> str:
    """Something that is equal for equal values: of a tensor its shape and a checksum of its bits."""
    if isinstance(x, torch.Tensor):
        with real_tensors():
            value = str(x.item()) if x.ndim == 0 else checksum(x)
        return f"{x.dtype} {tuple(x.shape)} {value}"
    return str(size_hint(x)) if isinstance(x, torch.SymInt) else str(x)


def _target(node: Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    target: Any = node.target
    return str(target) if namespace_of(target) else getattr(target, "__qualname__", str(target))


def _written(leaf: Any) -> str:
    """A device counts without its number: each rank has its own."""
    return leaf.type if isinstance(leaf, torch.device) else repr(leaf)


def _constant(gm: GraphModule, node: Node) -> str:
    """The value of a constant, the text of a body."""
    if node.op != "get_attr":
        return ""
    value = attrgetter(str(node.target))(gm)
    if isinstance(value, GraphModule):
        return str(text_of(value))
    return digest(value) if isinstance(value, torch.Tensor) else ""
