"""Rows of states: pytrees of tensors that have one size in a common dim."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compat import pytree


def length(states: Any, dim: int) -> int:
    """The number of rows."""
    return pytree.tree_leaves(states)[0].shape[dim]


def rows(states: Any, dim: int, *which: int | None) -> Any:
    """The rows of slice(*which): views."""
    return pytree.tree_map(lambda leaf: leaf[(slice(None),) * (dim % leaf.ndim) + (slice(*which),)], states)


def joined(first: Any, second: Any, dim: int) -> Any:
    """The rows of the one before those of the other; the first itself if the second has none."""
    if not length(second, dim):
        return first
    return pytree.tree_map(lambda *leaves: torch.cat(leaves, dim), first, second)


def interleaved(lefts: Any, rights: Any, dim: int) -> Any:
    """left, right, left, right ...; there may be one left more."""
    pairs = length(rights, dim)
    woven = pytree.tree_map(partial(_woven, dim=dim), rows(lefts, dim, pairs), rights)
    return joined(woven, rows(lefts, dim, pairs, None), dim)


def _woven(left: Tensor, right: Tensor, dim: int) -> Tensor:
    dim %= left.ndim
    return torch.stack((left, right), dim + 1).flatten(dim, dim + 1)
