"""The passes. Each runs by hand on a graph, as `examples/` shows; `sp_compile.pipeline` runs them in order.

`sp_compile.passes.<Pass>` is every pass, whatever folder it lives in; that is imported when somebody asks for the pass.
"""

from importlib import import_module
from typing import Any

_CLASSES = {
    "base": "Pass Passes Spelling check_order flat register spellings unregister",
    "job": "Job Lap Note Settings analyse settings",
    "rewrite": "Rewrite",
    "canonical.canonicalize": "Canonicalize",
    "canonical.associative_scan": "AssociativeScan AssociativeScans Trees",
    "canonical.attention.eager": "EagerAttention",
    "canonical.attention.heads": "GroupHeads StackHeads",
    "canonical.attention.masks": "Masks",
    "canonical.loops.lists": "WrittenLists",
    "canonical.loops.reroll": "Reroll",
    "canonical.paddings": "Paddings",
    "canonical.reduce_pairs": "ReducePairs",
    "canonical.scan_idioms": "ScanIdioms",
    "canonical.scan_rounds": "ScanRounds",
    "canonical.spellings": "Explicit Repeats",
    "strategies.attention.choose": "ChooseAttention",
    "strategies.attention.expand_heads": "ExpandHeads",
    "strategies.attention.gathered": "Gathered",
    "strategies.attention.hybrid": "Hybrid",
    "strategies.attention.ring": "Ring",
    "strategies.attention.ulysses": "Ulysses",
    "strategies.draws": "Draws",
    "strategies.gather": "Gather Undo",
    "strategies.local_scan": "SlowScans",
    "strategies.pick": "Pick",
    "strategies.reduce": "Means Reduce",
    "strategies.scan": "NestedScan Scan",
    "strategies.sequence": "Aligned LocalOutputs Sequences",
    "strategies.windows": "Halo",
    "localize.localize": "Localize",
    "localize.memory_order": "RestoreStrides",
    "localize.prove": "Prove validate",
    "collectives.merge.merge": "MergeReductions",
    "collectives.permute.permute": "PermuteAllToAll",
    "tensor_parallel.scatter": "SequenceParallelLinear",
}
_HOME = {name: module for module, names in _CLASSES.items() for name in names.split()}
_MODULES = {
    "gather": "strategies.gather",
    "scan": "strategies.scan",
    "merge_reductions": "collectives.merge.merge",
    "permute_all_to_all": "collectives.permute.permute",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
