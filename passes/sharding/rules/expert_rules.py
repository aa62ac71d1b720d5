"""Rules of expert rows sorted by key: each rank sorts its own rows (see `lowering/expert_rows.py`)."""

from __future__ import annotations

import torch

from sp_compile.passes.sharding.rule import rule

sp = torch.ops.sp
SORTED_ROWS = (sp.sort_rows.default, sp.to_sorted.default, sp.from_sorted.default, sp.grouped_mm.default)

rule(sp.sort_rows.default, "r -> r, r", starts_sequence=True)
rule([sp.to_sorted.default, sp.from_sorted.default], "r ..., r -> r ...")
rule(sp.grouped_mm.default, "r i, e i o, r -> r o", sum="i", whole="e")
