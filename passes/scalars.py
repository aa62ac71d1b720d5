"""The number that a tensor without dims holds, where the graph itself says it: torch.tensor(-1e9), full([], 8.0)."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from .._compat import FakeTensor
from ..call import is_tensor

aten = torch.ops.aten
COPIES = (
    aten.lift_fresh_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
)


def scalar(x: Any, dtype: torch.dtype) -> float | None:
    """A Python number, or what a tensor of no dims and of this dtype holds; None if it is not known, or not exactly."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)
    if not is_tensor(x) or x.meta["val"].ndim or x.meta["val"].dtype != dtype:
        return None
    if x.op == "get_attr":
        held = operator.attrgetter(x.target)(x.graph.owning_module)
        return float(held) if _is_constant(x) and not isinstance(held, FakeTensor) else None
    if x.op != "call_function":
        return None
    if x.target in (aten.full.default, aten.scalar_tensor.default):
        return scalar(x.args[1 if x.target is aten.full.default else 0], dtype)
    if x.target in COPIES:
        return scalar(x.args[0], dtype)
    root = scalar(x.args[0], dtype) if x.target is aten.sqrt.default else None
    return math.sqrt(root) if root is not None and root >= 0 else None


def _is_constant(x: Node) -> bool:
    """Written down by a trace, make_fx's or export's: neither a parameter nor a buffer, which the user may change."""
    return bool(x.meta.get("constant")) or str(x.target).startswith(("_tensor_constant", "lifted_tensor_"))
