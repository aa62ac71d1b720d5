"""Which inputs of a program the ranks compare before they run it: by value, or by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from . import _compat
from .agree import input_names
from .passes.tensor_parallel import Facts


def equal_arguments(gm: GraphModule, example_inputs: Sequence[Any], facts: Facts) -> list[str]:
    """Names of the arguments and buffers that were equal on all ranks at compilation, and must stay so."""
    nodes = gm.graph.find_nodes(op="placeholder")
    tensors = [(n, x) for n, x in zip(nodes, example_inputs) if isinstance(x, torch.Tensor)]
    equal = [pair for i, pair in enumerate(tensors) if f"input_{i}" in (facts.equal or ())]
    return [n.name for n, x in equal if not isinstance(x, (torch.nn.Parameter, DTensor))]


def equal_inputs(gm: GraphModule, example_inputs: Sequence[Any], inputs: str) -> list[str]:
    """Inputs whose values the ranks compare: parameters, and global arguments. A buffer may hold what nobody reads."""
    out = []
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        argument = inputs == "global" and not node.meta.get("sp_param", False)
        if isinstance(example, torch.nn.Parameter) or argument:
            out.append(node.name)
    return out


def sized_inputs(gm: GraphModule, example_inputs: Sequence[Any], facts: Facts) -> list[str]:
    """Names of the inputs whose sizes are to be the same on every rank; "" for parts that ranks may cut unevenly."""
    names = input_names(gm)
    tensors = symbols = 0
    for i, (node, x) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if isinstance(x, torch.Tensor):
            part = isinstance(x, torch.nn.Parameter) or _compat.is_module_state(node) or x.ndim == 0
            if part and f"input_{tensors}" in facts.differ:
                names[i] = ""
            tensors += 1
        elif isinstance(x, torch.SymInt):
            if f"size_{symbols}" in facts.differ:
                names[i] = ""
            symbols += 1
    return names
