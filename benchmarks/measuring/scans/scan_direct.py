"""Call the kernels of a scan directly, without the lowering table: a problem's fields are arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import Pair
from sp_compile.lowering.scan.scan_table import ScanProblem


class Direct(NamedTuple):
    kernels: Any

    def scan(
        self,
        x: Tensor,
        starts: Tensor | None,
        op: str,
        exclusive: bool,
        reverse: bool,
        dtype: torch.dtype,
        accumulate: torch.dtype,
    ) -> Pair:
        options = {"op": op, "segmented": starts is not None, "exclusive": exclusive, "reverse": reverse}
        return self.kernels.scan(ScanProblem.of("scan", x, dtype, accumulate, **options), x, starts)

    def extremes(self, x: Tensor, starts: Tensor | None, op: str, reverse: bool) -> Pair:
        options = {"op": op, "segmented": starts is not None, "reverse": reverse}
        return self.kernels.extremes(ScanProblem.of("extremes", x, x.dtype, x.dtype, **options), x, starts)

    def linear(
        self,
        a: Tensor,
        b: Tensor,
        initial: Tensor | None,
        reverse: bool,
        lagged: bool,
        dtype: torch.dtype,
        accumulate: torch.dtype,
    ) -> Tensor:
        problem = ScanProblem.of("linear", b, dtype, accumulate, reverse=reverse, lagged=lagged)
        return self.kernels.linear(problem, a, b, initial)

    def linear_total(self, a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Pair:
        problem = ScanProblem.of("linear_total", b, accumulate, accumulate, reverse=reverse, lagged=lagged)
        return self.kernels.linear_total(problem, a, b)
