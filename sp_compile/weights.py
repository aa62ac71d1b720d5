"""Which process groups a program talks over, and which of its inputs hold the same values on all ranks of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

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


def cuts(gm: GraphModule) -> str:
    """The numbers by which the program cuts tensors and picks pieces, bodies of regions included, as text."""
    lines = []
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            lines.append(cuts(body))
        elif node.op in ("call_function", "call_method") and _name(node) in CUTS:
            given = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, Node)]
            lines.append(f"{_name(node)} {given}")
    return "\n".join(lines)


CUTS = ("chunk", "getitem", "narrow", "redistribute", "select", "slice", "split", "tensor_split", "unbind")


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0]


def cut_by_rank(gm: GraphModule, ranks: Ranks) -> bool:
    """Do the ranks of a group cut at places of their own? Every one of them has to ask.

    A DTensor that becomes sharded is cut out of sight, so such a program is taken to.
    """
    mine = cuts(gm)
    everyone: list[Any] = [None] * ranks.n
    dist.all_gather_object(everyone, mine, group=ranks.process_group)
    inside = [line for line in mine.splitlines() if line.startswith("redistribute")]
    return len(set(everyone)) > 1 or any("S(" in line.replace("S(-1)", "") for line in inside)


def has_dtensors(inputs: Iterable[Any]) -> bool:
    """Is any input a DTensor?"""
    return any(isinstance(x, DTensor) for x in inputs)


def local_tensors(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the inputs; of a DTensor, what this rank holds."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in inputs if isinstance(x, torch.Tensor)]
