"""What Inductor's own settings for overlap and bucketing do to the order of a rank's exchanges on a GPU."""

from __future__ import annotations

from typing import Any

from support.cuda.programs import Sizes, attention
from torch._inductor import config as inductor

OPTIMIZATIONS = "aten_distributed_optimizations"
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "overlap scheduling": {
        f"{OPTIMIZATIONS}.enable_overlap_scheduling": True,
        f"{OPTIMIZATIONS}.compute_estimator": "analytical",
        f"{OPTIMIZATIONS}.collective_bucketing": False,
    },
    "overlap scheduling and bucketing": {
        f"{OPTIMIZATIONS}.enable_overlap_scheduling": True,
        f"{OPTIMIZATIONS}.compute_estimator": "analytical",
        f"{OPTIMIZATIONS}.collective_bucketing": True,
    },
    "bucketing": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all", "bucket_all_reduces_fx": "all"},
    "reordering": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    },
}


def order(setting: str, strategy: str, n: int, sizes: Sizes, **options: Any) -> tuple[list[str], list[str]]:
    """What happens forward and backward."""
    with inductor.patch(SETTINGS[setting]):
        rank = attention.__wrapped__(strategy, n, sizes, **options)
    return rank.forward.text().splitlines(), rank.backward.text().splitlines()
