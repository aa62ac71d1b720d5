"""Find the inputs with equal values on all ranks of a group, and select those that the ranks compare.

At compilation the ranks exchange digests of their inputs (`InputDigests`). From these follow facts on which the passes
rely (`InputFacts`). Before each call the ranks compare the inputs that `ComparedInputs` selects. A label numbers the
tensors (input_0) or the symbols (size_0) among the inputs. It is equal on all ranks, in contrast to names of inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Return the digests of a Dynamo graph's inputs and options, which this rank sends to its groups."""
    values = {label: value_digest(local_value(x)) for label, x in zip(_input_labels(inputs), inputs) if label}
    # Shards of a tensor of equal elements, such as a mask of ones, are equal on all ranks, as a full tensor is. Digests
    # do not distinguish the two, so that these tensors are listed.
    with use_real_tensors():
        numbered_tensors = enumerate(local_tensors(inputs))  # in the order of labels
        constants = [f"input_{i}" for i, x in numbered_tensors if x.ndim > 1 and is_constant(x)]
    return InputDigests(values, frozenset(constants), options)


@register_sendable
@dataclass(frozen=True)
class InputDigests:
    """Digests of the inputs of one rank, as text."""

    values: dict[str, str]  # digest of each input, by label
    constants: frozenset[str]  # labels of the tensors whose elements are all equal
    options: str  # text of the options


def combine_facts(mine: InputDigests, all_digests: Sequence[InputDigests | None]) -> InputFacts:
    """Return the facts about the inputs that follow from the digests of all ranks, for the passes.

    Args:
        mine: The digests of this rank.
        all_digests: The digests of each rank; None for one that does not compile.
    """
    values_of_ranks = [digests.values if digests is not None else {} for digests in all_digests]
    differing = frozenset(label for label in mine.values if len({values.get(label) for values in values_of_ranks}) > 1)
    return InputFacts(
        differing=differing, equal=frozenset(mine.values) - differing, constants=mine.constants - differing
    )


def check_options(all_digests: Sequence[InputDigests | None]) -> None:
    """Raise SpError, on every compiling rank, if the options differ.

    Ranks with different options would run different collectives.
    """
    options = {rank: digests.options for rank, digests in enumerate(all_digests) if digests is not None}
    if len({*options.values()}) > 1:
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in options.items())
        raise SpError("SP610", f"the ranks of this group were given different options:\n{rows}")


def local_tensors(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local values (`local_value`) of the input tensors, in the order of their labels."""
    return [local_value(x) for x in inputs if isinstance(x, torch.Tensor)]


def local_value(x: Any) -> Any:
    """Return the part of an input that this rank stores, so that its digest needs no communication.

    This is the local shard of a DTensor or sharded value, the inner tensor of a wrapper, or the input.
    """
    if isinstance(x, Sharded):
        return x.local
    local = x.to_local() if isinstance(x, DTensor) else x
    return to_plain_tensor(local) if isinstance(local, torch.Tensor) else local


def _input_labels(inputs: Iterable[Any]) -> list[str]:
    """Return the label of each input.

    It is input_0, input_1, ... for tensors, size_0, ... for symbols, and empty for other inputs.
    """
    tensor_numbers, symbol_numbers = count(), count()
    labels = []
    for x in inputs:
        if isinstance(x, torch.Tensor):
            labels.append(f"input_{next(tensor_numbers)}")
        else:
            labels.append(f"size_{next(symbol_numbers)}" if isinstance(x, torch.SymInt) else "")
    return labels


def is_cheap_to_compare(x: torch.Tensor) -> bool:
    """Return True for integer tensors and small floating tensors, which every call compares completely."""
    return not x.is_floating_point() or x.numel() <= FEW_FLOATS


def is_on_accelerator(x: torch.Tensor) -> bool:
    """Return True if the tensor's device runs asynchronously, so that its value is compared later."""
    return x.device.type != "cpu"


class GraphInput(NamedTuple):
    """Input of a Dynamo graph."""

    node: Node  # its placeholder
    name: str  # from `input_names`
    label: str  # as in `InputFacts`
    value: Any  # the example input

    @property
    def is_state(self) -> bool:
        """Return True for parameters and buffers."""
        return isinstance(self.value, torch.nn.Parameter) or is_module_state(self.node)

    @property
    def is_data(self) -> bool:
        """Return True for tensors with dims that are no parameters or buffers: the data of the call."""
        return isinstance(self.value, torch.Tensor) and self.value.ndim > 0 and not self.is_state


def _graph_inputs(gm: GraphModule, inputs: Sequence[Any]) -> list[GraphInput]:
    """Return the inputs of a graph with their names and labels."""
    columns = zip(gm.graph.find_nodes(op="placeholder"), input_names(gm).values(), _input_labels(inputs), inputs)
    return [GraphInput(*values) for values in columns]


@dataclass(frozen=True)
class ComparedInputs:
    """Names of the inputs of a program that the ranks of a group compare.

    The complete comparison, of the sizes of parameters and the values in `equal`, is made on the first call of each
    model and every `check_every` calls.
    """

    names: Sequence[str] = ()  # of all inputs; "" for those whose sizes may differ
    equal: frozenset[str] = frozenset()  # values must be equal on every rank
    arguments: frozenset[str] = frozenset()  # those in `equal` that change with each call, which compares a sample
    always: frozenset[str] = frozenset()  # values that every call compares
    trained: tuple[str, ...] = ()  # inputs that require grad; Dynamo recompiles if this changes
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of the tensors
    is_assumed: bool = False  # the values were equal at compilation, and the program relies on it


def sequence_inputs(gm: GraphModule, inputs: Sequence[Any], shards: Collection[int], is_run: bool) -> ComparedInputs:
    """Return the compared inputs of a program whose ranks share a sequence, for its guard.

    The compared values are those of the weights and buffers that are used, and of the replicated arguments.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs.
        shards: Indices of the inputs that are local rows of a rank.
        is_run: If False, compare no values, as the program is not run.
    """
    graph_inputs, state, arguments = _graph_inputs(gm, inputs), set(), set()
    for i, x in enumerate(graph_inputs if is_run else ()):
        if isinstance(x.value, torch.Tensor) and (x.is_state or node_info(x.node).parameter):
            if x.node.users:
                state.add(x.name)
        elif i not in shards and not isinstance(x.value, Sharded):  # a replicated argument
            arguments.add(x.name)
    trained = tuple(x.name for x in graph_inputs if isinstance(x.value, torch.Tensor) and x.value.requires_grad)
    names = [x.name for x in graph_inputs]
    return ComparedInputs(
        names,
        equal=frozenset(state | arguments),
        arguments=frozenset(arguments),
        trained=trained,
        dtypes=_dtypes(graph_inputs),
    )


def group_inputs(
    gm: GraphModule, inputs: Sequence[Any], facts: InputFacts, labels: Collection[str] | None
) -> ComparedInputs:
    """Return the compared inputs of a program with its own collectives, for the guard of one group.

    Sizes are compared, with two exceptions: those of parts that ranks may split unevenly, such as shards of a weight,
    and, if each rank has its own data, Python scalars, which may be sizes of that data.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs.
        facts: Facts of the inputs on the group.
        labels: Labels of the inputs on whose equal values the program relies; None to compare no values.
    """
    graph_inputs = _graph_inputs(gm, inputs)
    # `facts.differing` has the labels of inputs whose values differ between the ranks: data of a rank's own, or a part
    # of a tensor if it is no data, such as a parameter.
    has_own_data = any(x.is_data and x.label in facts.differing for x in graph_inputs)
    names = []  # "" for inputs whose sizes are not compared
    for x in graph_inputs:
        is_part = not x.is_data and x.label in facts.differing
        belongs_to_data = has_own_data and is_python_number(x.node)
        names.append("" if is_part or belongs_to_data else x.name)
    tensors = [x for x in graph_inputs if isinstance(x.value, torch.Tensor)]
    weights = {x.name for x in tensors if isinstance(x.value, torch.nn.Parameter)}
    same_on_ranks = {x.name for x in tensors if x.label in (facts.equal or ()) and not isinstance(x.value, DTensor)}
    # Values of weights are compared in the complete comparison (`equal`), and only if the program relies on them. Other
    # tensors that were equal at compilation are compared by every call (`always`).
    return ComparedInputs(
        names,
        equal=frozenset(x.name for x in tensors if x.label in (labels or ()) and x.name in weights),
        always=frozenset(same_on_ranks - weights if labels is not None else ()),
        trained=tuple(x.name for x in tensors if x.value.requires_grad and x.name not in weights),
        dtypes=_dtypes(graph_inputs),
        is_assumed=True,
    )


def _dtypes(graph_inputs: Sequence[GraphInput]) -> dict[str, str]:
    """Return the dtype of each tensor, such as "bfloat16", by name."""
    tensors = [x for x in graph_inputs if isinstance(x.value, torch.Tensor)]
    return {x.name: str(x.value.dtype).removeprefix("torch.") for x in tensors}
