"""Sequence parallelism for unmodified PyTorch models: `torch.compile(model, backend="sp")`."""

from . import lowering as _lowering  # noqa: F401  (registers the sp:: ops)
from . import rules as _rules  # noqa: F401  (registers the sharding rules)
from .capture import capture_export
from .config import SPConfig
from .declare import declare_groups
from .errors import SpError
from .explain import Report
from .functional import gathered_attention, hybrid_attention, ring_attention, ulysses_attention
from .permute_call import all_to_all_permute
from .pipeline import parallelize
from .rule import rule as sharding_rule
from .scans import (
    exclusive_scan,
    inclusive_scan,
    linear_scan,
    parallel_exclusive_scan,
    parallel_inclusive_scan,
    segmented_scan,
)
from .symmetric_memory import declare_symmetric_memory
from .verify import explain, verify

__all__ = [
    "Report",
    "SPConfig",
    "SpError",
    "all_to_all_permute",
    "capture_export",
    "declare_groups",
    "declare_symmetric_memory",
    "exclusive_scan",
    "explain",
    "gathered_attention",
    "hybrid_attention",
    "inclusive_scan",
    "linear_scan",
    "parallel_exclusive_scan",
    "parallel_inclusive_scan",
    "parallelize",
    "ring_attention",
    "segmented_scan",
    "sharding_rule",
    "ulysses_attention",
    "verify",
]
