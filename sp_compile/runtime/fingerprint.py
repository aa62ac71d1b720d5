"""Compute digests of graphs that ranks compare, and lines of text to locate a difference.

Ranks that run one program have the same ops with the same collectives, but other names of process groups and devices.
The text of a node therefore omits these, and the digest of a graph is the hash of its text. The guard sends the digest
at each call; the lines are compared only after the digests differ. A region is a nested graph, the body of a
higher-order op such as a checkpoint or a loop.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import first_called_frame, first_frame, source_line, stack_trace
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import checksum
from sp_compile.lowering.torch_compat import (
    argument_name,
    checkpoint_of,
    class_name,
    compiled_model,
    is_known_process_group,
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

    text: str  # the op with the results that it uses, which ranks compare
    name: str  # the op alone, compared first and shown in messages
    trace: str  # stack trace of the user's line


@dataclass(frozen=True)
class ProgramDigest:
    """Digest of a program, and its operations as text, to locate a difference."""

    digest: int = 0  # equal for programs that ranks may run together
    lines: tuple[TextLine, ...] = ()  # operations in order

    def first_difference(self, ranks: Ranks) -> list[str]:
        """Return the line of each rank at the first difference of their programs, for an error; [] if there is none.

        Every rank of the group must call it. The ranks exchange digests of each line and, if there is a difference, one
        line each. A line whose op differs is preferred to an earlier one that differs only in the results that it uses.

        Args:
            ranks: The ranks of the group.

        Returns:
            One line for each rank, in rank order.
        """
        # hashes[rank][line] is [hash of the op, hash of the op with the results that it uses].
        hashes: list[list[list[int]]] = _gather_programs(
            ranks, [[hash_text(line.name), hash_text(line.text)] for line in self.lines]
        )
        shortest, longest = min(map(len, hashes)), max(map(len, hashes))
        # The lines whose ops differ, then those whose ops differ in the results that they use.
        positions = [(kind, line) for kind in (0, 1) for line in range(shortest)]  # kind: index of the hash of a line
        differing = (line for kind, line in positions if len({program[line][kind] for program in hashes}) > 1)
        first = next(differing, shortest)  # without a difference, the first line that only longer programs have
        if first == longest:  # no program has this line
            return []
        if first == len(self.lines):  # this program ends before it
            return _gather_programs(ranks, "nothing more")
        _, name, trace = self.lines[first]
        short = name if len(name) <= TEXT_WIDTH else name[: TEXT_WIDTH - 3] + "..."
        return _gather_programs(ranks, f"{short} at {source_line(trace)}" if trace else short)


def _gather_programs(ranks: Ranks, mine: Any) -> list[Any]:
    """Exchange values of one comparison of programs, and return the value of every rank."""
    return all_gather_object(ranks, "compares", "programs", mine)


def program_subject(gm: GraphModule) -> str:
    """Return the name of a program for messages, with its first line that computes: "Decoder at FILE:12".

    A model is named by its class, with a line of its forward itself, not of decorators around it. Other programs are
    named by the compiled function; without stack traces the name is "a program".
    """
    traces = [stack_trace(node) for node in gm.graph.nodes if node.op == "call_function"]
    model = compiled_model()
    if model is not None:
        code = getattr(inspect.unwrap(model.forward), "__code__", None)
        frames = (first_frame(trace, code, class_name(model)) for trace in traces if code is not None)
        subject = next(filter(None, frames), "")
        if subject:
            return subject
    return first_called_frame(traces) or "a program"


class NodeText(NamedTuple):
    """Text of one node, without names of groups and device indices."""

    node: Node  # the node
    call: str  # the op
    # for each argument "input 3" for the 4th input, 3 for the result of the 4th op, None for a constant
    operands: tuple[int | str | None, ...]
    spec: str  # nesting of the arguments
    constants: tuple[str, ...]  # the arguments that are no nodes; for an attribute, its value
    body: tuple[NodeText, ...]  # texts of the nested graph, if the node is an attribute that is one
    checkpoint: str  # enclosing checkpoint, which affects collectives of the backward

    @property
    def operations(self) -> list[int | str | None]:
        """Return the operands with "input" for every input, without its number."""
        return ["input" if isinstance(operand, str) else operand for operand in self.operands]

    @property
    def value(self) -> str:
        """Return dtype and shape of the result."""
        value = self.node.meta.get("val")
        return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def graph_lines(gm: GraphModule, inside: str = "") -> tuple[NodeText, ...]:
    """Return the text of each node of a graph, except unused symbolic inputs, which may differ by rank.

    Args:
        gm: The graph.
        inside: Text of the enclosing checkpoint, if the graph is a region; "" for a complete program.
    """
    # Text of each checkpointed region, numbered in the order of their appearance.
    checkpoints: defaultdict[Any, str] = defaultdict(lambda: f"in checkpoint {len(checkpoints)}")
    numbers: dict[Node, int | str] = {}  # as in `NodeText.operands`
    inputs, operations = count(), count()
    lines: list[NodeText] = []
    for node in gm.graph.nodes:
        if is_unused_symbol(node):
            continue
        # Counted separately, so that an additional input on a rank shifts no operation.
        numbers[node] = f"input {next(inputs)}" if node.op == "placeholder" else next(operations)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        operands = tuple(numbers[leaf] if isinstance(leaf, Node) else None for leaf in leaves)
        constants = [_argument_text(node, leaf) for leaf in leaves if not isinstance(leaf, Node)]
        attribute = attrgetter(str(node.target))(gm) if node.op == "get_attr" else None  # a tensor or a region
        if isinstance(attribute, torch.Tensor) and not isinstance(attribute, torch.nn.Parameter):
            constants.append(value_digest(attribute))
        region, policy = checkpoint_of(node)  # the checkpointed region of the node, and the name of its policy
        checkpoint = inside
        if not inside and region is not None:
            checkpoint = f"{checkpoints[region]} {policy}".strip()
        body = graph_lines(attribute, checkpoint) if isinstance(attribute, GraphModule) else ()
        lines.append(NodeText(node, _call_text(node), operands, str(spec), tuple(constants), body, checkpoint))
    return tuple(lines)


def exchange_digest(gm: GraphModule) -> ProgramDigest:
    """Return the digest of the collectives of a graph, or of all ops if it has none.

    Ranks that have other shards of the weights, such as tensor-parallel ranks, compare it: their collectives must be
    equal, not their shapes and constants. Without collectives, all programs would have the digest of an empty text, and
    ranks that run different ones would agree. The digest is then that of the lines. These locate a difference, and have
    all ops, each with the ops whose results it uses. Regions are inlined in both, since their ops run like all others.
    Neither the digest nor the lines distinguish the inputs, since these may differ as well.
    """
    nodes = list(inline_bodies(graph_lines(gm)))
    lines = []
    for text in nodes:
        if text.node.op not in ("placeholder", "output"):
            name = text.call or text.node.name
            lines.append(TextLine(f"{text.call} {text.operations} {text.spec}", name, stack_trace(text.node)))
    exchanges = [f"{text.call} {text.checkpoint}" for text in nodes if is_collective(text.node)]
    return ProgramDigest(hash_text("\n".join(exchanges or [line.text for line in lines])), tuple(lines))


def graph_digest(gm: GraphModule, names: Mapping[str, str] = MappingProxyType({})) -> ProgramDigest:
    """Return the digest of a graph with all its ops, dtypes and local shapes.

    Ranks that share a sequence compare it, since they run the same local graph.

    Args:
        gm: The graph.
        names: Names of its inputs, from `input_names`.
    """
    digest_text, lines = [], []
    for text in inline_bodies(graph_lines(gm)):
        op_text = " ".join(filter(None, [text.node.name, text.call, *text.constants, text.value, text.checkpoint]))
        full_text = f"{op_text} {text.operands} {text.spec}"
        line = TextLine(text=full_text, name=op_text, trace=stack_trace(text.node))
        digest_text.append(line.text)
        # Messages show an input by the user's name and its value. The digest above contains its node like any other.
        if text.node.op == "placeholder":
            value = text.value or "a number that may change, as lengths do under dynamic=True"
            name = f"input {names.get(text.node.name) or text.node.name}: {value}"
            line = TextLine(text=value, name=name, trace="")
        lines.append(line)
    return ProgramDigest(hash_text("\n".join(digest_text)), tuple(lines))


def inline_bodies(lines: Iterable[NodeText]) -> Iterator[NodeText]:
    """Yield the texts of nodes, with each node of a region replaced by the nodes of its body."""
    for line in lines:
        yield from inline_bodies(line.body) if line.body else [line]


def _call_text(node: Node) -> str:
    """Return the text of the op of a node, and for a collective also its reduction, such as sum or max."""
    leaves = pytree.tree_leaves((node.args, node.kwargs)) if is_collective(node) else ()
    texts = [_argument_text(node, leaf) for leaf in leaves if isinstance(leaf, str)]
    return " ".join([_target_text(node), *filter(None, texts)])


def input_names(gm: GraphModule) -> dict[str, str]:
    """Return the name of each input for messages, by the name of its node.

    It is the name of the user's argument, or that of the node if several inputs belong to the argument. It is "" for a
    symbol that only describes memory (strides, offsets), which may differ between ranks and is not compared.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    argument_names = [argument_name(node) for node in nodes]
    unique = [name if argument_names.count(name) == 1 else node.name for node, name in zip(nodes, argument_names)]
    return {node.name: "" if is_unused_symbol(node) else name for node, name in zip(nodes, unique)}


def is_unused_symbol(node: Node) -> bool:
    """Return True for a symbolic input without users, which describes memory and may differ by rank."""
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
    """Return the name of the op; "" for inputs, attributes and the output."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    target: Any = node.target
    # The str() of a Python function has its address, which differs between ranks.
    return str(target) if namespace_of(target) else getattr(target, "__qualname__", str(target))


def _argument_text(node: Node, leaf: Any) -> str:
    """Return the text of an argument without device indices and group names, which differ by rank."""
    if isinstance(leaf, torch.device):
        return leaf.type
    if isinstance(leaf, str) and is_collective(node):
        reduction, _, group = leaf.rpartition(" ")  # ("", "", "3") for the group "3"; sp::reduce_pair has "sum 3"
        is_group = is_known_process_group(group) and (not reduction or reduction.isalpha())
        return reduction if is_group else leaf
    return repr(leaf)
