"""Collect the options and torch settings that affect the program of a rank, as comparable text.

Ranks compare the text at each call: a setting that differs would give them programs with other collectives. FUNCTORCH
and INDUCTOR are the settings of torch that determine the collectives of a graph and their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.torch_compat import active_flash_attention, is_in_checkpoint, is_under_no_sync

FUNCTORCH = """
activation_memory_budget activation_memory_budget_solver activation_memory_budget_runtime_estimator
aggressive_recomputation ban_recompute_* recompute_views max_dist_from_bw treat_parameters_as_free_to_save
functionalize_rng_ops cse enable_activation_offloading joint_custom_pass selective_decompose
guess_tangent_strides_as_outputs unsafe_allow_optimization_of_collectives _sync_decision_cross_ranks
""".split()
# names of settings, in which * matches any text
INDUCTOR = """
fallback_random custom_partitioner_fn joint_graph_constant_folding pattern_matcher use_joint_graph_passes
use_post_grad_passes *_custom_pass *_custom_pre_pass *_custom_post_pass reorder_* bucket_* _micro_pipeline_tp
_fuse_ddp_* _collective.* aten_distributed_optimizations.*
""".split()
# settings among them that do not affect graphs: logging and paths of files
IGNORED_SETTINGS = "*debug* *verbose* *.log_* *_path".split()


def settings_fields(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options, torch settings and versions that determine the collectives of a graph, by name.

    Ranks that have equal fields compile a graph to the same collectives. The fields are collected once, when a program
    is compiled.

    Args:
        options: The options of the backend that the user passed, by name; they may be invalid.
    """
    all_options = {**{option.name: option.default for option in fields(SPConfig)}, **options}
    all_options.pop("mesh", None)  # an object with this rank's groups, which differs between ranks
    settings = {f"option {name}": _without_addresses(value) for name, value in all_options.items()}
    for config, patterns in ((functorch_config, FUNCTORCH), (inductor_config, INDUCTOR)):
        for name, value in config.get_config_copy().items():
            if _is_matching_name(name, patterns) and not _is_matching_name(name, IGNORED_SETTINGS):
                settings[f"{config.__name__}.{name}"] = _without_addresses(value)
    settings["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    settings["torch.nn.attention.current_flash_attention_impl()"] = active_flash_attention() or "torch's"
    return {**settings, "version of torch": torch.__version__, "operators of sp_compile": sources_digest()}


def _is_matching_name(name: str, patterns: Sequence[str]) -> bool:
    """Return True if the name of a setting matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mode_text() -> str:
    """Return the torch state that affects a call and its backward, as text that ranks compare.

    The state is grad and inference mode, autocast, an enclosing checkpoint, and a DDP under no_sync.
    """
    modes = ["grad" if torch.is_grad_enabled() else "no_grad"]
    if torch.is_inference_mode_enabled():
        modes = ["inference"]
    if is_in_checkpoint():
        modes.append("checkpoint")
    if is_under_no_sync():
        modes.append("no_sync")
    devices = ["cpu"] + ([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])
    autocast_devices = [device for device in devices if torch.is_autocast_enabled(device)]
    modes += [f"autocast {device} {torch.get_autocast_dtype(device)}" for device in autocast_devices]
    return ", ".join(modes)


def _without_addresses(value: Any) -> str:
    """Return the text of a value without addresses, which differ between processes."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
