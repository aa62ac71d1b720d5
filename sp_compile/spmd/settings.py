"""What decides over a rank's program beside its graph: the options, and torch's settings. Ranks compare it as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from sp_compile._compat import active_flash_attention, in_checkpoint, is_under_no_sync
from sp_compile.config import SPConfig
from sp_compile.lowering.library import sources_digest

OF_RANKS = ("mesh",)  # names the ranks of one rank's row
FUNCTORCH = """
activation_memory_budget activation_memory_budget_solver activation_memory_budget_runtime_estimator
ban_recompute_long_fusible_chains ban_recompute_materialized_backward ban_recompute_not_in_allowlist
ban_recompute_reductions ban_recompute_used_far_apart recompute_views aggressive_recomputation
max_dist_from_bw treat_parameters_as_free_to_save functionalize_rng_ops cse
enable_activation_offloading joint_custom_pass unsafe_allow_optimization_of_collectives _sync_decision_cross_ranks
""".split()
INDUCTOR = """
fallback_random reorder_for_peak_memory joint_graph_constant_folding pattern_matcher use_joint_graph_passes
use_post_grad_passes joint_custom_pre_pass joint_custom_post_pass post_grad_custom_pre_pass post_grad_custom_post_pass
reorder_for_compute_comm_overlap reorder_for_compute_comm_overlap_passes reorder_prefetch_limit
bucket_all_gathers_fx bucket_all_gathers_fx_bucket_size_determinator bucket_all_gathers_bucket_mode
bucket_reduce_scatters_fx bucket_reduce_scatters_fx_bucket_size_determinator bucket_reduce_scatters_bucket_mode
bucket_all_reduces_fx bucket_all_reduces_fx_bucket_size_determinator
_micro_pipeline_tp _fuse_ddp_communication _fuse_ddp_communication_passes _fuse_ddp_bucket_size _collective.auto_select
aten_distributed_optimizations.enable_overlap_scheduling aten_distributed_optimizations.collective_bucketing
aten_distributed_optimizations.insert_overlap_deps aten_distributed_optimizations.bucket_mode
aten_distributed_optimizations.max_compute_pre_fetch aten_distributed_optimizations.max_coll_distance
aten_distributed_optimizations.allow_comms_decompositions
""".split()
"""Settings that change which collectives a graph has and in which order, as far as this torch knows them."""


def settings(options: Mapping[str, Any]) -> dict[str, str]:
    """Equal on ranks that would compile one graph to the same exchanges: options, torch's settings, versions."""
    given = {**{one.name: one.default for one in fields(SPConfig)}, **options}
    ours = {f"option {name}": _named(value) for name, value in given.items() if name not in OF_RANKS}
    theirs: dict[str, str] = {}
    for config, names in ((functorch_config, FUNCTORCH), (inductor_config, INDUCTOR)):
        theirs |= {f"{config.__name__}.{name}": _named(getattr(config, name, None)) for name in names}
    theirs["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    theirs["torch.nn.attention.current_flash_attention_impl()"] = active_flash_attention() or "torch's"
    return {**ours, **theirs, "version of torch": torch.__version__, "operators of sp_compile": sources_digest()}


def mode() -> str:
    """What of torch's state changes what a program does, and its backward: grad and inference mode, what is around it
    (a checkpoint, a DDP that does not sum gradients now), autocast.
    """
    kinds = ["cpu"] + ([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])
    casts = [f"autocast {kind} {torch.get_autocast_dtype(kind)}" for kind in kinds if torch.is_autocast_enabled(kind)]
    grad = "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad"
    return ", ".join([grad, *["checkpoint"] * in_checkpoint(), *["no_sync"] * is_under_no_sync(), *casts])


def _named(value: Any) -> str:
    """Without addresses, which differ from process to process."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
