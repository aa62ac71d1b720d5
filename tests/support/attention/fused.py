"""The fused kernel of a GPU on CPU tensors: its graphs, run by torch's own arithmetic for flex_attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_compile.lowering.attention import kernels
from sp_compile.lowering.attention.kernels import KERNELS
from sp_compile.lowering.triton.flex import calls

FLEX = next(kernel for kernel in KERNELS if kernel.fused)
ANYWHERE = replace(FLEX, device=None, dtypes=None, rows=0, capability=(0, 0), switch=calls.works)


class Programs:
    """A compiler that runs graphs as they are, and keeps the fake inputs of each."""

    def __init__(self) -> None:
        self.made: list[Sequence[Tensor]] = []

    def __call__(self, graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
        self.made.append(fakes)
        return lambda xs: graph(*xs)


@contextlib.contextmanager
def fused_here() -> Iterator[Programs]:
    """Inside, every attention without dropout is the fused kernel's, whatever its blocks are."""
    programs, dense = Programs(), KERNELS[-1]
    with mock.patch.object(kernels, "KERNELS", (ANYWHERE, dense)), calls.COMPILER.to(programs):
        yield programs
