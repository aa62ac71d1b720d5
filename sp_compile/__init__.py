"""Sequence parallelism for unmodified PyTorch models: `torch.compile(model, backend="sp")`."""

from sp_compile.functional.attention_functions import (
    gathered_attention,
    hybrid_attention,
    ring_attention,
    ulysses_attention,
)
from sp_compile.functional.in_shards import in_shards
from sp_compile.functional.permuted_all_to_all import all_to_all_permute, declare_symmetric_memory
from sp_compile.functional.scan_functions import (
    affine_scan,
    exclusive_scan,
    inclusive_scan,
    linear_scan,
    segmented_scan,
)
from sp_compile.integrations.shard_cache import shard_cache
from sp_compile.integrations.shard_layers import fully_shard_and_compile
from sp_compile.lowering import attention as _attention  # noqa: F401  (the packages of lowering register the sp:: ops)
from sp_compile.lowering import collectives as _collectives  # noqa: F401
from sp_compile.lowering import expert_rows as _sorted_rows  # noqa: F401
from sp_compile.lowering import scan as _scan  # noqa: F401
from sp_compile.lowering import tiles as _tiles  # noqa: F401
from sp_compile.lowering import windows as _windows  # noqa: F401
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig, SPOptions
from sp_compile.lowering.scan import kernels as _kernels  # noqa: F401  (registers the implementations of scans)
from sp_compile.passes.capture.capture import capture_export
from sp_compile.passes.report import Report
from sp_compile.passes.sharding import rules as _rules  # noqa: F401  (registers the sharding rules)
from sp_compile.passes.sharding.rule import rule as sharding_rule
from sp_compile.pipeline import parallelize
from sp_compile.planner.explain import explain
from sp_compile.planner.plan import StepPlan, plan
from sp_compile.runtime import compare_gradients as _gradients  # noqa: F401  (registers sp::shared)
from sp_compile.runtime.declare import declare_groups
from sp_compile.runtime.weights import compare_weights
from sp_compile.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Report",
    "SPConfig",
    "SPOptions",
    "SpError",
    "StepPlan",
    "__version__",
    "affine_scan",
    "all_to_all_permute",
    "capture_export",
    "compare_weights",
    "declare_groups",
    "declare_symmetric_memory",
    "exclusive_scan",
    "explain",
    "fully_shard_and_compile",
    "gathered_attention",
    "hybrid_attention",
    "in_shards",
    "inclusive_scan",
    "linear_scan",
    "parallelize",
    "plan",
    "ring_attention",
    "segmented_scan",
    "shard_cache",
    "sharding_rule",
    "ulysses_attention",
    "verify",
]
