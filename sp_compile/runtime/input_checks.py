"""Find the inputs with equal values on all ranks of a group, and select those that the ranks compare.

The ranks compare values or sizes before they run the program.
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

FEW_FLOATS = 4096  # largest floating tensor that every call compares, in elements


def input_digests(gm: GraphModule, inputs: Sequence[Any], options: str) -> InputDigests:
    """Return the digests of the inputs and options of a Dynamo graph on this rank, without communication."""
    values = {label: value_digest(local_value(x)) for label, x in zip(_input_labels(inputs), inputs) if label}
    with use_real_tensors():
        tensors = enumerate(local_tensors(inputs))
        blank = [f"input_{i}" for i, x in tensors if x.ndim > 1 and is_constant(x)]
    return InputDigests(values, frozenset(blank), options)


@register_sendable
@dataclass(frozen=True)
class InputDigests:
    """Digests of the inputs of one rank."""

    values: dict[str, str]  # digest of each input, by label
    blank: frozenset[str]  # tensors whose elements are all equal
    options: str  # text of the options


def data_inputs(gm: GraphModule, inputs: Sequence[Any]) -> frozenset[str]:
    """Return the labels of the input tensors that are data of the call, as in `InputFacts`."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), inputs, _input_labels(inputs), strict=True)
    return frozenset(label for node, x, label in rows if isinstance(x, torch.Tensor) and _is_data(node, x))


def _is_data(node: Node, x: torch.Tensor) -> bool:
    held = isinstance(x, torch.nn.Parameter) or is_module_state(node)
    return x.ndim > 0 and not held and not is_python_number(node)


def combine_facts(mine: InputDigests, everyone: Sequence[InputDigests | None]) -> InputFacts:
    """Return the facts about the inputs that follow from the digests of all ranks.

    Tensors are labeled input_0, input_1, ..., symbols size_0, ...
    """
    others = [one.values if one is not None else {} for one in everyone]
    differ = frozenset(name for name in mine.values if len({one.get(name) for one in others}) > 1)
    return InputFacts(differing=differ, equal=frozenset(mine.values) - differ, constants=mine.blank - differ)


def check_options(everyone: Sequence[InputDigests | None]) -> None:
    """Raise SpError, on every compiling rank, if the options differ.

    Ranks with different options would run different collectives.
    """
    options = [one.options for one in everyone if one is not None]
    if len(set(options)) > 1:
        each = "\n".join(f"  rank {rank}: {one}" for rank, one in enumerate(options))
        raise SpError("SP610", f"the ranks of this group were given different options:\n{each}")


def local_tensors(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local values of the input tensors, see `local_value`."""
    return [local_value(x) for x in inputs if isinstance(x, torch.Tensor)]


def local_value(x: Any) -> Any:
    """Return the local shard of a DTensor or sharded value, the inner tensor of a wrapper, or the input."""
    if isinstance(x, Sharded):
        return x.local
    local = x.to_local() if isinstance(x, DTensor) else x
    return to_plain_tensor(local) if isinstance(local, torch.Tensor) else local


def _input_labels(inputs: Iterable[Any]) -> list[str]:
    """Return the label of each input as in `InputFacts`.

    Tensors are input_0, input_1, ..., symbols size_0, ..., and other inputs "".
    """
    counts = {"input": count(), "size": count()}
    kinds = ["input" if isinstance(x, torch.Tensor) else "size" if isinstance(x, torch.SymInt) else "" for x in inputs]
    return [f"{kind}_{next(counts[kind])}" if kind else "" for kind in kinds]


def equal_arguments(gm: GraphModule, example_inputs: Sequence[Any], facts: InputFacts) -> frozenset[str]:
    """Return the names of arguments and buffers that were equal at compilation and must remain equal."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, _input_labels(example_inputs))
    equal = [(n, x) for n, x, label in rows if isinstance(x, torch.Tensor) and label in (facts.equal or ())]
    return frozenset(n.name for n, x in equal if not isinstance(x, (torch.nn.Parameter, DTensor)))


def is_cheap_to_compare(a: Any) -> bool:
    """Return True for integer tensors and small floating tensors, which every call can compare."""
    return isinstance(a, torch.Tensor) and (not a.is_floating_point() or a.numel() <= FEW_FLOATS)


def is_on_accelerator(a: Any) -> bool:
    """Return True if the tensor is on a device that runs asynchronously."""
    return isinstance(a, torch.Tensor) and a.device.type != "cpu"


def equal_inputs(
    gm: GraphModule, example_inputs: Sequence[Any], shards: Collection[int]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the inputs whose values the ranks compare, and of the arguments among them.

    The inputs are the weights and buffers that are used, and the replicated arguments. Arguments change with each call.

    Args:
        gm: The graph.
        example_inputs: Its inputs.
        shards: Indices of the inputs that are local rows of a rank.
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
    """Return the names of the weights with the given labels, as in `InputFacts`."""
    rows = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, _input_labels(example_inputs), strict=True)
    return frozenset(n.name for n, x, label in rows if label in labels and isinstance(x, torch.nn.Parameter))


def trained_inputs(gm: GraphModule, example_inputs: Sequence[Any], weights: bool) -> list[str]:
    """Return the names of the inputs that require grad. Dynamo recompiles if this changes.

    Args:
        gm: The graph.
        example_inputs: Its inputs.
        weights: If True, include parameters.
    """
    named = [(name, x) for name, x in zip(input_names(gm), example_inputs, strict=True) if name]
    tensors = [(name, x) for name, x in named if weights or not isinstance(x, torch.nn.Parameter)]
    return [name for name, x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]


def sized_inputs(gm: GraphModule, example_inputs: Sequence[Any], facts: InputFacts) -> list[str]:
    """Return the names of the inputs whose sizes must be equal on every rank.

    The name is "" for parts that ranks may split unevenly. It is also "" for Python scalars where each rank has its own
    data, since the scalars may belong to that data.
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
    """Return the error for ranks that received different data and are otherwise equal.

    Args:
        cause: Text of the difference.
        own_rows: If True, each rank passes its own rows of some inputs, so that sharding samplers are correct.
    """
    return SpError("SP636", cause) if own_rows else SpError("SP634", cause)
