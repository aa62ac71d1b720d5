"""Compute digests of graphs that ranks compare, and lines of text to locate a difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import first_frame, source_line, stack_trace
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import checksum
from sp_compile.lowering.torch_compat import (
    argument_name,
    checkpoint_of,
    known_process_group,
    namespace_of,
    pytree,
    size_hint,
    use_real_tensors,
)
from sp_compile.passes.cost.group_names import is_collective
from sp_compile.runtime.control.message import hash_text

from .agreement import all_gather_object

TEXT_WIDTH = 160  # characters of a line in an error message


class TextLine(NamedTuple):
    """One operation of a program as text."""

    text: str  # the text that is compared
    name: str  # the text in messages
    trace: str  # stack trace


@dataclass(frozen=True)
class ProgramDigest:
    """Digest of a program."""

    digest: int = 0  # equal for programs that ranks may run together
    lines: tuple[TextLine, ...] = ()  # operations in order

    def first_difference(self, ranks: Ranks) -> list[str]:
        """Return the line of each rank at the first difference, or [] if there is none.

        Every rank of the group must call it. The ranks exchange digests of each line and, if there is a difference, one
        line each. Lines whose own text differs are preferred to lines that differ only in the results that they use.

        Args:
            ranks: The ranks of the group.

        Returns:
            One line for each rank, in rank order.
        """
        hashes: list[list[list[int]]] = _gather_programs(
            ranks, [[hash_text(line.name), hash_text(line.text)] for line in self.lines]
        )
        shortest, longest = min(map(len, hashes)), max(map(len, hashes))
        places = [(which, i) for which in (0, 1) for i in range(shortest)]
        differ = (i for which, i in places if len({one[i][which] for one in hashes}) > 1)
        first = next(differ, shortest)
        if first == longest:
            return []
        if first == len(self.lines):
            return _gather_programs(ranks, "nothing more")
        _, name, trace = self.lines[first]
        short = name if len(name) <= TEXT_WIDTH else name[: TEXT_WIDTH - 3] + "..."
        return _gather_programs(ranks, f"{short} at {source_line(trace)}" if trace else short)


def _gather_programs(ranks: Ranks, mine: Any) -> list[Any]:
    """Return the value of every rank about its program."""
    return all_gather_object(ranks, "compares", "programs", mine)


def program_subject(gm: GraphModule) -> str:
    """Return the name of a program for messages: the compiled function and its first computing line."""
    for node in gm.graph.nodes:
        frame = first_frame(stack_trace(node)) if node.op == "call_function" else ""
        if frame:
            return frame
    return "a program"


class NodeText(NamedTuple):
    """Text of one node, without names of groups and device indices."""

    node: Node
    call: str  # the op
    takes: tuple[int | str | None, ...]  # index of each node argument, among the inputs or among the operations
    spec: str  # nesting of the arguments
    written: tuple[str, ...]  # the other arguments, and the value of a constant
    body: tuple[NodeText, ...]  # lines of the region that it names
    checkpoint: str  # enclosing checkpoint, which affects collectives of the backward

    @property
    def value(self) -> str:
        """Return dtype and shape of the result."""
        value = self.node.meta.get("val")
        return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def graph_lines(gm: GraphModule, inside: str = "") -> tuple[NodeText, ...]:
    """Return the text of a graph, without symbols that only describe memory and may differ between ranks.

    Args:
        gm: The graph.
        inside: The checkpoint whose body it is.
    """
    checkpoints: defaultdict[Any, str] = defaultdict(lambda: f"in checkpoint {len(checkpoints)}")
    places: dict[Node, int | str] = {}
    inputs, operations = count(), count()
    lines: list[NodeText] = []
    for node in gm.graph.nodes:
        if is_unused_symbol(node):
            continue
        # Counted separately, so that an additional input on a rank shifts no operation.
        places[node] = f"input {next(inputs)}" if node.op == "placeholder" else next(operations)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        takes = tuple(places[leaf] if isinstance(leaf, Node) else None for leaf in leaves)
        written = [_argument_text(node, leaf) for leaf in leaves if not isinstance(leaf, Node)]
        constant = attrgetter(str(node.target))(gm) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and not isinstance(constant, torch.nn.Parameter):
            written.append(value_digest(constant))
        region, policy = checkpoint_of(node)
        own = inside or (f"{checkpoints[region]} {policy}".strip() if region is not None else "")
        body = graph_lines(constant, own) if isinstance(constant, GraphModule) else ()
        lines.append(NodeText(node, _call_text(node), takes, str(spec), tuple(written), body, own))
    return tuple(lines)


def exchange_digest(gm: GraphModule) -> ProgramDigest:
    """Return the digest of the collectives of a graph, or of all ops if it has none.

    Ranks that wait for each other must have it in common. Each line is an op and the ops that it depends on,
    independent of inputs and numbers.
    """
    lines = graph_lines(gm)
    exchanges = _exchange_lines(lines)
    shape = [f"{x.node.op} {_target_text(x.node)} {x.takes} {x.spec}" for x in lines if x.node.op != "output"]
    ops = [line for line in inline_bodies(lines) if line.node.op not in ("placeholder", "output")]
    joints = [(line, ["input" if isinstance(one, str) else one for one in line.takes]) for line in ops]
    text_lines = [
        TextLine(f"{x.call} {takes} {x.spec}", x.call or x.node.name, stack_trace(x.node)) for x, takes in joints
    ]
    return ProgramDigest(hash_text("\n".join(exchanges or shape)), tuple(text_lines))


def graph_digest(gm: GraphModule, names: Mapping[str, str] = MappingProxyType({})) -> ProgramDigest:
    """Return the digest of a graph with all its ops, dtypes and local shapes.

    Args:
        gm: The graph.
        names: Names of its inputs, from `input_names`.
    """
    texts, lines = [], []
    for line in inline_bodies(graph_lines(gm)):
        name = " ".join(filter(None, [line.node.name, line.call, *line.written, line.value, line.checkpoint]))
        one = TextLine(f"{name} {line.takes} {line.spec}", name, stack_trace(line.node))
        texts.append(one.text)
        if line.node.op == "placeholder":
            value = line.value or "a number that may change, as lengths do under dynamic=True"
            one = TextLine(value, f"input {names.get(line.node.name) or line.node.name}: {value}", "")
        lines.append(one)
    return ProgramDigest(hash_text("\n".join(texts)), tuple(lines))


def inline_bodies(lines: Iterable[NodeText]) -> Iterator[NodeText]:
    """Yield the lines, with each region replaced by the lines of its body."""
    for line in lines:
        yield from inline_bodies(line.body) if line.body else [line]


def _exchange_lines(lines: Iterable[NodeText]) -> list[str]:
    """Return the collectives in order, including those in regions."""
    return [f"{line.call} {line.checkpoint}" for line in inline_bodies(lines) if is_collective(line.node)]


def _call_text(node: Node) -> str:
    """Return the op, and for a collective also its reduction, such as sum or max."""
    leaves = pytree.tree_leaves((node.args, node.kwargs)) if is_collective(node) else ()
    words = [_argument_text(node, leaf) for leaf in leaves if isinstance(leaf, str)]
    return " ".join([_target_text(node), *filter(None, words)])


def input_names(gm: GraphModule) -> dict[str, str]:
    """Return the name in messages of each input, by name of its node.

    Names are unique in the graph. The name is "" for a symbol that only describes memory (strides, offsets), which may
    differ between ranks.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    shown = [argument_name(node) for node in nodes]
    unique = [known if shown.count(known) == 1 else node.name for node, known in zip(nodes, shown)]
    return {node.name: "" if is_unused_symbol(node) else name for node, name in zip(nodes, unique)}


def is_unused_symbol(node: Node) -> bool:
    """Return True if the node is a symbolic input without users."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return node.op == "placeholder" and not node.users and isinstance(value, torch.SymInt)


def value_digest(x: Any) -> str:
    """Return text that is equal for equal values; for a tensor its dtype, shape and checksum."""
    if isinstance(x, torch.Tensor):
        with use_real_tensors():
            value = str(x.item()) if x.ndim == 0 else checksum(x)
        return f"{x.dtype} {tuple(x.shape)} {value}"
    return str(size_hint(x)) if isinstance(x, torch.SymInt) else str(x)


def _target_text(node: Node) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    target: Any = node.target
    return str(target) if namespace_of(target) else getattr(target, "__qualname__", str(target))


def _argument_text(node: Node, leaf: Any) -> str:
    """Return the text of an argument without device indices and group names.

    These differ between ranks.
    """
    if isinstance(leaf, torch.device):
        return leaf.type
    if isinstance(leaf, str) and is_collective(node):
        how, _, group = leaf.rpartition(" ")  # "sum 3", as sp::reduce_pair has it
        return how if known_process_group(group) and (not how or how.isalpha()) else leaf
    return repr(leaf)
