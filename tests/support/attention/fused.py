"""Run the fused kernel of a GPU on CPU tensors: its graphs by torch's eager flex_attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_compile.lowering.attention import kernels
from sp_compile.lowering.attention.kernels import BLOCK_KERNELS
from sp_compile.lowering.triton.flex import flex_calls as calls

FLEX = next(kernel for kernel in BLOCK_KERNELS if kernel.fused)
ANYWHERE = replace(FLEX, device=None, dtypes=None, rows=0, capability=(0, 0), switch=calls.is_flex_available)


class Programs:
    """A compiler that runs graphs unmodified and records the fake inputs of each."""

    def __init__(self) -> None:
        self.made: list[Sequence[Tensor]] = []

    def __call__(self, graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
        self.made.append(fakes)
        learned = learned_inputs(graph)

        # Eager flex_attention computes gradients of inputs that require them; a kernel those that the graph reads.
        def run(xs: list[Tensor]) -> Any:
            leaves = [x.detach() for x in xs]
            for i in learned:
                leaves[i].requires_grad_()
            return graph(*leaves)

        return run


def learned_inputs(graph: torch.fx.GraphModule) -> set[int]:
    """Return the numbers of a graph's inputs whose gradients by flex_attention are read."""
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    found = set()
    op = torch.ops.higher_order.flex_attention_backward
    for node in graph.graph.find_nodes(op="call_function", target=op):
        captured = [user for user in node.users if user.args[1] == 3]
        read = {user.args[1] for one in captured for user in one.users if user.users}
        found |= {inputs.index(node.args[-2][i]) for i in read}
    return found


@contextlib.contextmanager
def fused_here() -> Iterator[Programs]:
    """Use the fused kernel for every attention without dropout and for blocks of any kind."""
    programs, dense = Programs(), BLOCK_KERNELS[-1]
    with mock.patch.object(kernels, "BLOCK_KERNELS", (ANYWHERE, dense)), calls.COMPILER.force(programs):
        yield programs
