"""A scan lowering that is registered from outside the package: one row after the other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from sp_compile.lowering.scan.kernels.generic import GenericKernels, Map, num_rows, slice_rows
from sp_compile.lowering.scan.monoids import Combine
from sp_compile.lowering.scan.scan_table import register_lowering
from sp_compile.lowering.torch_compat import pytree


def _inclusive(combine: Combine, states: Any, dim: int, lift: Map, lower: Map) -> tuple[Any, Any]:
    run = [lift(slice_rows(states, dim, 0, 1))]
    for i in range(1, num_rows(states, dim)):
        run.append(combine(run[-1], lift(slice_rows(states, dim, i, i + 1))))
    return lower(pytree.tree_map(lambda *leaves: torch.cat(leaves, dim), *run)), run[-1]


def registered(priority: int = 60) -> ExitStack:
    """Register the lowering until the context exits; by default after all others."""
    return register_lowering("toy", GenericKernels(_inclusive), lambda problem: priority)
