"""Programs of torch's flex_attention: the graph that the canonical passes make of one, and ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.capturing import Backend
from torch import Tensor

from sp_compile.lowering.torch_compat import flex_on_any_device
from sp_compile.passes.canonical.canonicalize import Canonicalize

LENGTH = 13
DOCUMENTS = torch.stack([torch.arange(LENGTH) // 4, torch.arange(LENGTH) // 7])
WAYS = [
    (s, n)
    for s in ("ulysses", "ring", "hybrid", "gather", "auto")
    for n in (1, 2, 3, 4)
    # Three ranks do not divide four heads, and two make no neighborhoods.
    if (s, n) not in [("ulysses", 3), ("hybrid", 2), ("hybrid", 3)]
]
"""(strategy, ranks) that fit four heads."""


@pytest.fixture(autouse=True)
def backward_on_a_cpu() -> Iterator[None]:
    """torch refuses the backward on a CPU, where it has no kernel; its own arithmetic has one."""
    with flex_on_any_device():
        yield


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def canonical(function: Callable[..., Tensor], *args: Any, dynamic: bool = False) -> tuple[Any, list[Any]]:
    """The canonical graph of a function, and the notes of the passes."""
    torch._dynamo.reset()
    backend = Backend(lambda graph, given: graph.forward)
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (graph,) = backend.graphs
    passes = Canonicalize()
    passes(graph)
    return graph, passes.notes


def qkv(length: int = LENGTH) -> Tensor:
    return torch.randn(3, 2, 4, length, 8, dtype=torch.float64)
