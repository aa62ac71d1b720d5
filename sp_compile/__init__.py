"""Sequence parallelism for unmodified PyTorch models: `torch.compile(model, backend="sp")`."""

from . import lowering as _lowering  # noqa: F401  (registers the sp:: ops)
from . import rules as _rules  # noqa: F401  (registers the sharding rules)
from .config import SPConfig
from .errors import SpError
from .rule import rule as sharding_rule
from .verify import explain, verify

__all__ = ["SPConfig", "SpError", "explain", "sharding_rule", "verify"]
