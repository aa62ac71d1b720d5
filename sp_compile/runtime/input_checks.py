"""Which inputs of a program hold the same values on all ranks of a group, and which of them the ranks compare.

They compare them before they run the program: by value, or by size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.collectives.checksums import is_constant
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import is_module_state, is_python_number, to_plain_tensor, use_real_tensors
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.graph.node_info import node_info
from sp_compile.runtime.control.message import register_sendable

from .fingerprint import input_names, value_digest

FEW_FLOATS = 4096  # floats that are compared on every call; of more, as many


def input_digests(gm: GraphModule, inputs: Sequence[Any], options: str) -> InputDigests:
    """Return what this rank sends of the inputs and options of a Dynamo graph; nothing is exchanged."""
    values = {label: value_digest(local_value(x)) for label, x in zip(_input_labels(inputs), inputs) if label}
    with use_real_tensors():
        tensors = enumerate(local_tensors(inputs))
        blank = [f"input_{i}" for i, x in tensors if x.ndim > 1 and is_constant(x)]
    return InputDigests(values, frozenset(blank), options)


@register_sendable
@dataclass(frozen=True)
class InputDigests:
    """What one rank sends: digests of values by name, tensors of one number throughout, the options."""

    values: dict[str, str]
    blank: frozenset[str]
    options: str


def data_inputs(gm: GraphModule, inputs: Sequence[Any]) -> frozenset[str]:
    """The tensors among the inputs that a call brings with it, as `InputFacts` call them."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), inputs, _input_labels(inputs), strict=True)
    return frozenset(label for node, x, label in rows if isinstance(x, torch.Tensor) and _is_data(node, x))


def _is_data(node: Node, x: torch.Tensor) -> bool:
    held = isinstance(x, torch.nn.Parameter) or is_module_state(node)
    return x.ndim > 0 and not held and not is_python_number(node)


def combine_facts(mine: InputDigests, everyone: Sequence[InputDigests | None]) -> InputFacts:
    """What the ranks know together of the inputs: tensors are called input_0, input_1, ..., symbols size_0, ..."""
    others = [one.values if one is not None else {} for one in everyone]
    differ = frozenset(name for name in mine.values if len({one.get(name) for one in others}) > 1)
    return InputFacts(differing=differ, equal=frozenset(mine.values) - differ, constants=mine.blank - differ)


def check_options(everyone: Sequence[InputDigests | None]) -> None:
    """Raise SpError, on every rank that asked, if their options differ: they would not exchange the same."""
    options = [one.options for one in everyone if one is not None]
    if len(set(options)) > 1:
        each = "\n".join(f"  rank {rank}: {one}" for rank, one in enumerate(options))
        raise SpError("SP610", f"the ranks of this group were given different options:\n{each}")


def local_tensors(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """What this rank holds of the tensors among the inputs, see `local_value`."""
    return [local_value(x) for x in inputs if isinstance(x, torch.Tensor)]


def local_value(x: Any) -> Any:
    """What this rank holds of an input: of a DTensor and of a value in shards its part, of a wrapper what is inside."""
    if isinstance(x, Sharded):
        return x.local
    local = x.to_local() if isinstance(x, DTensor) else x
    return to_plain_tensor(local) if isinstance(local, torch.Tensor) else local


def _input_labels(inputs: Iterable[Any]) -> list[str]:
    """What facts call each input: tensors input_0, input_1, ..., symbols size_0, ..., all else ""."""
    counts = {"input": count(), "size": count()}
    kinds = ["input" if isinstance(x, torch.Tensor) else "size" if isinstance(x, torch.SymInt) else "" for x in inputs]
    return [f"{kind}_{next(counts[kind])}" if kind else "" for kind in kinds]


def equal_arguments(gm: GraphModule, example_inputs: Sequence[Any], facts: InputFacts) -> frozenset[str]:
    """Names of the arguments and buffers that were equal on all ranks at compilation, and must stay so."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, _input_labels(example_inputs))
    equal = [(n, x) for n, x, label in rows if isinstance(x, torch.Tensor) and label in (facts.equal or ())]
    return frozenset(n.name for n, x in equal if not isinstance(x, (torch.nn.Parameter, DTensor)))


def is_cheap_to_compare(a: Any) -> bool:
    """Integers, as tokens are, and few floats: what costs nothing to compare on every call."""
    return isinstance(a, torch.Tensor) and (not a.is_floating_point() or a.numel() <= FEW_FLOATS)


def is_on_accelerator(a: Any) -> bool:
    """Does it lie on a device that works while Python goes on?"""
    return isinstance(a, torch.Tensor) and a.device.type != "cpu"


def equal_inputs(
    gm: GraphModule, example_inputs: Sequence[Any], shards: Collection[int]
) -> tuple[frozenset[str], frozenset[str]]:
    """Inputs whose values the ranks compare: the weights and buffers that are read, and the arguments that are whole;
    and of those the arguments alone, which change from call to call. shards: which inputs are a rank's own rows.
    """
    state, arguments = set(), set()
    for i, (node, example) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs)):
        held = isinstance(example, torch.nn.Parameter) or is_module_state(node) or node_info(node).parameter
        if held and isinstance(example, torch.Tensor):
            state |= {node.name} if node.users else set()
        elif i not in shards and not isinstance(example, Sharded):
            arguments.add(node.name)
    return frozenset(state | arguments), frozenset(arguments)


def common_weights(gm: GraphModule, example_inputs: Sequence[Any], labels: Collection[str]) -> frozenset[str]:
    """Names of the weights among these inputs, which are called as `InputFacts` call them."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, _input_labels(example_inputs), strict=True)
    return frozenset(n.name for n, x, label in rows if label in labels and isinstance(x, torch.nn.Parameter))


def trained_inputs(gm: GraphModule, example_inputs: Sequence[Any], weights: bool) -> list[str]:
    """Names of the inputs that require grad, which Dynamo compiles anew where it changes. weights: those too?"""
    named = [(name, x) for name, x in zip(input_names(gm), example_inputs, strict=True) if name]
    tensors = [(name, x) for name, x in named if weights or not isinstance(x, torch.nn.Parameter)]
    return [name for name, x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]


def sized_inputs(gm: GraphModule, example_inputs: Sequence[Any], facts: InputFacts) -> list[str]:
    """Names of the inputs whose sizes are to be the same on every rank; "" for parts that ranks may cut unevenly, and
    for numbers of Python's where each rank has data of its own, to which they may belong.
    """
    names, own = input_names(gm), not facts.differing.isdisjoint(data_inputs(gm, example_inputs))
    labels, nodes = _input_labels(example_inputs), gm.graph.find_nodes(op="placeholder")
    for i, (node, x, label) in enumerate(zip(nodes, example_inputs, labels, strict=True)):
        whole = isinstance(x, torch.Tensor) and x.ndim > 0
        part = not whole or isinstance(x, torch.nn.Parameter) or is_module_state(node)
        if (part and label in facts.differing) or (own and is_python_number(node)):
            names[i] = ""
    return names


def sharded_data_fix(cause: str, own_rows: bool) -> SpError:
    """Return the error of ranks that were given different data where nothing else differs.

    Args:
        cause: What differs.
        own_rows: Whether each rank passes its own rows of some inputs, so that samplers that shard are right.
    """
    return SpError("SP636", cause) if own_rows else SpError("SP634", cause)
