"""One call of a kernel, as the lowering table sees it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """What a row of the table decides by. kind: "scan", "extremes", "linear" or "linear_total".

    x is (outer, length, inner) of dtype, the result of result's. total: is a scan asked for its total?
    """

    kind: str
    device: str
    outer: int
    length: int
    inner: int
    dtype: torch.dtype
    result: torch.dtype
    accumulate: torch.dtype
    op: str = ""
    segmented: bool = False
    exclusive: bool = False
    reverse: bool = False
    lagged: bool = False
    total: bool = True
