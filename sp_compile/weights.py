"""Which process groups a program talks over, and which of its inputs hold the same values on all ranks of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from ._compat import group_names, known_process_group, process_group
from .agree import checksum
from .mesh import Ranks
from .passes.tensor_parallel import Facts


def groups_of(gm: GraphModule, inputs: Sequence[Any]) -> list[Ranks]:
    """The groups of more than one rank that the program's collectives and DTensors name, in order of appearance."""
    names = dict.fromkeys([*_named(gm), *_of_tensors(inputs)])
    found = [name for name in names if dist.is_initialized() and known_process_group(name)]
    ranks = [Ranks(process_group(name).size(), name) for name in found]
    return [r for r in ranks if r.n > 1]


def _named(gm: GraphModule) -> Iterator[str]:
    """Every string and process group among the arguments of functional collectives, in bodies of regions too."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and "c10d" in str(node.target):
            yield from (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str))
        elif node.op == "get_attr":
            value = getattr(gm, str(node.target), None)
            if isinstance(value, GraphModule):
                yield from _named(value)


def _of_tensors(inputs: Iterable[Any]) -> Iterator[str]:
    for x in inputs:
        if isinstance(x, DTensor):
            yield from group_names(x.device_mesh)


def measure_facts(inputs: Sequence[Any], ranks: Ranks) -> Facts:
    """Compare the values of all tensor inputs over the ranks of a group; every rank of it has to ask.

    Tensors are called input_0, input_1, ... in order. Exact: checksums of bits.
    """
    mine = {f"input_{i}": checksum(x) for i, x in enumerate(local_tensors(inputs))}
    everyone: list[Any] = [None] * ranks.n
    dist.all_gather_object(everyone, mine, group=ranks.process_group)
    differ = frozenset(name for name in mine if len({str(one.get(name)) for one in everyone}) > 1)
    return Facts(differ=differ, equal=frozenset(mine) - differ)


def has_dtensors(inputs: Iterable[Any]) -> bool:
    """Is any input a DTensor?"""
    return any(isinstance(x, DTensor) for x in inputs)


def local_tensors(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the inputs; of a DTensor, what this rank holds."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in inputs if isinstance(x, torch.Tensor)]
