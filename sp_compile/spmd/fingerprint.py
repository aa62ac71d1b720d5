"""A graph as ranks compare it: one number on every call, and its lines where the numbers differ.

What of a program is the same on every rank: its text but for numbers, the numbers written in it, its inputs.

A tensor-parallel program may name its rank: `ids - 12` on one rank is `ids - 24` on the next. Its text shows what those
numbers touch only when it lies beside the others'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile._compat import known_process_group, namespace_of, pytree, real_tensors, size_hint
from sp_compile.config import Ranks
from sp_compile.errors import source_line, trace_of
from sp_compile.lowering.collectives.checksums import checksum

from .named_groups import is_exchange

WIDTH = 160  # characters of a line in an error message


class Line(NamedTuple):
    """One operation. text: all that is compared of it; name and stack trace: what a person is told."""

    text: str
    name: str
    trace: str


@dataclass(frozen=True)
class Program:
    """digest: equal for programs that ranks may run together. lines: its operations, in order."""

    digest: int = 0
    lines: tuple[Line, ...] = ()

    def first_difference(self, ranks: Ranks) -> list[str]:
        """What each rank has where their lines first differ; every rank of the group has to come here.

        Empty if they do not differ. Two exchanges: of a digest a line, then of one line a rank.
        """
        hashes: list[list[int]] = gathered([hashed(line.text) for line in self.lines], ranks)
        shortest, longest = min(map(len, hashes)), max(map(len, hashes))
        differ = (i for i in range(shortest) if len({one[i] for one in hashes}) > 1)
        first = next(differ, shortest)
        if first == longest:
            return []
        if first == len(self.lines):
            return gathered("nothing more", ranks)
        _, name, trace = self.lines[first]
        short = name if len(name) <= WIDTH else name[: WIDTH - 3] + "..."
        return gathered(f"{short} at {source_line(trace)}", ranks)


def gathered(mine: Any, ranks: Ranks) -> list[Any]:
    """Every rank's object, in the order of the ranks."""
    everyone: list[Any] = [None] * ranks.n
    dist.all_gather_object(everyone, mine, group=ranks.process_group)
    return everyone


def hashed(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Text:
    """A graph for comparison. shape: its ops and how they are joined; exchanges: those among its ops, in order;
    numbers: a digest of what each node has for arguments beside other nodes' results."""

    shape: int
    exchanges: int
    numbers: tuple[int, ...]


def text_of(gm: GraphModule) -> Text:
    """The text of a graph, without names of groups and numbers of devices."""
    numbers = []
    for node in gm.graph.nodes:
        named = is_exchange(node)
        written = [
            _spelt(leaf)
            for leaf in pytree.tree_leaves((node.args, node.kwargs))
            if not (isinstance(leaf, Node) or (named and _names_group(leaf)))
        ]
        numbers.append(hashed(f"{written} {_constant(gm, node)}"))
    joints = "\n".join(joint for joint, _ in _joints(gm))
    return Text(hashed(joints), hashed(" ".join(_exchanges(gm))), tuple(numbers))


def _joints(gm: GraphModule) -> Iterator[tuple[str, Node]]:
    """Each op, and the numbers of the ops whose results it is given."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        edges = [order[leaf] if isinstance(leaf, Node) else None for leaf in leaves]
        if node.op != "output":
            yield f"{node.op} {_target(node)} {edges} {spec}", node


def program_of(gm: GraphModule) -> Program:
    """What ranks have to have in common to wait for each other: the exchanges, or all ops where none are in sight."""
    text = text_of(gm)
    return Program(text.exchanges if any(_exchanges(gm)) else text.shape, tuple(_lines(gm)))


def _lines(gm: GraphModule) -> Iterator[Line]:
    """Each op and which of the ops before it it follows on, whatever the inputs are; bodies of regions included."""
    order: dict[Node, int] = {}
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from _lines(body)
        elif node.op not in ("placeholder", "output"):
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            edges = [order.get(leaf, "input") for leaf in leaves if isinstance(leaf, Node)]
            order[node] = len(order)
            yield Line(f"{_call(node)} {edges} {spec}", _call(node) or node.name, trace_of(node))


def _exchanges(gm: GraphModule) -> Iterator[str]:
    """The exchanges, in order, bodies of regions included."""
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from _exchanges(body)
        elif is_exchange(node):
            yield _call(node)


def _call(node: Node) -> str:
    """An op; of an exchange what it does with the values as well: sum, max."""
    leaves = pytree.tree_leaves((node.args, node.kwargs)) if is_exchange(node) else ()
    words = [leaf for leaf in leaves if isinstance(leaf, str) and not _names_group(leaf)]
    return " ".join([_target(node), *words])


def _names_group(leaf: Any) -> bool:
    """Is this what the rank calls a process group of its own?"""
    return isinstance(leaf, str) and known_process_group(leaf)


def unlike(gm: GraphModule, everyone: Sequence[Text]) -> frozenset[str] | None:
    """Names of the nodes that are written with other numbers on other ranks; None if the graphs differ in more."""
    first = everyone[0]
    if any(text.shape != first.shape for text in everyone):
        return None
    rows = zip(gm.graph.nodes, zip(*(text.numbers for text in everyone)))
    return frozenset(node.name for node, row in rows if node.op != "output" and len(set(row)) > 1)


def digests(inputs: Sequence[Any]) -> list[str]:
    """Of each input something that is equal for equal values: of a tensor its shape and a checksum of its bits."""
    return [_digest(x) for x in inputs]


def _digest(x: Any) -> str:
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


def _spelt(leaf: Any) -> str:
    """A device counts without its number: each rank has its own."""
    return leaf.type if isinstance(leaf, torch.device) else repr(leaf)


def _constant(gm: GraphModule, node: Node) -> str:
    """The value of a constant, the text of a body."""
    if node.op != "get_attr":
        return ""
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, GraphModule):
        return str(text_of(value))
    return _digest(value) if isinstance(value, torch.Tensor) else ""
