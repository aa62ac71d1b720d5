"""Find the inputs with equal values on all ranks of a group, and select those that the ranks compare.

The ranks compare values or sizes before they run the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

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


def is_cheap_to_compare(a: Any) -> bool:
    """Return True for integer tensors and small floating tensors, which every call can compare."""
    return isinstance(a, torch.Tensor) and (not a.is_floating_point() or a.numel() <= FEW_FLOATS)


def is_on_accelerator(a: Any) -> bool:
    """Return True if the tensor is on a device that runs asynchronously."""
    return isinstance(a, torch.Tensor) and a.device.type != "cpu"


class GraphInput(NamedTuple):
    """Input of a Dynamo graph."""

    node: Node
    name: str  # from `input_names`
    label: str  # as in `InputFacts`
    value: Any

    @property
    def is_state(self) -> bool:
        """Return True for parameters and buffers."""
        return isinstance(self.value, torch.nn.Parameter) or is_module_state(self.node)

    @property
    def is_data(self) -> bool:
        """Return True for tensors with dims that are data of the call."""
        return isinstance(self.value, torch.Tensor) and self.value.ndim > 0 and not self.is_state


def _graph_inputs(gm: GraphModule, inputs: Sequence[Any]) -> list[GraphInput]:
    rows = zip(gm.graph.find_nodes(op="placeholder"), input_names(gm).values(), _input_labels(inputs), inputs)
    return [GraphInput(*row) for row in rows]


@dataclass(frozen=True)
class ComparedInputs:
    """Names of the inputs of a program that the ranks of a group compare.

    The sizes of parameters, and the values in `equal`, are compared on the first call of each model and every
    `check_every` calls.
    """

    names: Sequence[str] = ()  # of all inputs; "" for those whose sizes may differ
    equal: frozenset[str] = frozenset()  # values must be equal on every rank
    arguments: frozenset[str] = frozenset()  # those in `equal` that change with each call, which compares a sample
    always: frozenset[str] = frozenset()  # values that every call compares
    trained: tuple[str, ...] = ()  # inputs that require grad; Dynamo recompiles if this changes
    is_assumed: bool = False  # the values were equal at compilation, and the program relies on it


def sequence_inputs(gm: GraphModule, inputs: Sequence[Any], shards: Collection[int], is_run: bool) -> ComparedInputs:
    """Return the compared inputs of a program whose ranks share a sequence.

    The values are those of the weights and buffers that are used, and of the replicated arguments.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs.
        shards: Indices of the inputs that are local rows of a rank.
        is_run: If False, compare no values, as the program is not run.
    """
    rows, state, arguments = _graph_inputs(gm, inputs), set(), set()
    for i, one in enumerate(rows if is_run else ()):
        held = one.is_state or node_info(one.node).parameter
        if held and isinstance(one.value, torch.Tensor):
            state |= {one.name} if one.node.users else set()
        elif i not in shards and not isinstance(one.value, Sharded):
            arguments.add(one.name)
    trained = tuple(one.name for one in rows if isinstance(one.value, torch.Tensor) and one.value.requires_grad)
    return ComparedInputs(
        [one.name for one in rows], frozenset(state | arguments), frozenset(arguments), trained=trained
    )


def group_inputs(
    gm: GraphModule, inputs: Sequence[Any], facts: InputFacts, labels: Collection[str] | None
) -> ComparedInputs:
    """Return the compared inputs of a program with its own collectives over a group.

    Sizes are not compared for parts that ranks may split unevenly, and for Python scalars where each rank has its own
    data, since the scalars may belong to that data.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs.
        facts: Facts of the inputs on the group.
        labels: The inputs whose equal values the program relies on, as in `InputFacts`; None to compare no values.
    """
    rows = _graph_inputs(gm, inputs)
    has_own_data = any(one.is_data and one.label in facts.differing for one in rows)
    parts = [not one.is_data and one.label in facts.differing for one in rows]
    sized = [not part and not (has_own_data and is_python_number(one.node)) for one, part in zip(rows, parts)]
    tensors = [one for one in rows if isinstance(one.value, torch.Tensor)]
    weights = {one.name for one in tensors if isinstance(one.value, torch.nn.Parameter)}
    always = {one.name for one in tensors if one.label in (facts.equal or ()) and not isinstance(one.value, DTensor)}
    return ComparedInputs(
        [one.name if is_sized else "" for one, is_sized in zip(rows, sized)],
        frozenset(one.name for one in tensors if one.label in (labels or ()) and one.name in weights),
        always=frozenset(always - weights if labels is not None else ()),
        trained=tuple(one.name for one in tensors if one.value.requires_grad and one.name not in weights),
        is_assumed=True,
    )
