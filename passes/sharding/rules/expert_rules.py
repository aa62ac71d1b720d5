"""Rules of rows that are sorted by expert: each rank sorts its own (see `lowering/expert_rows.py`).

Factors: r rows, e experts, i and o input and output features. All values between the sort and its inverse may be
sharded along r, and no row leaves its rank. A product of sorted rows reads the weights of all experts (kind
"replicate": gathered) and sums over i. `starts_sequence`: the sort is sharded even if its operand, the expert of each
row, is replicated.
"""

from __future__ import annotations

import torch

from sp_compile.passes.sharding.rule import rule

sp = torch.ops.sp
SORTED_ROWS = (sp.sort_rows.default, sp.to_sorted.default, sp.from_sorted.default, sp.grouped_mm.default)

rule(sp.sort_rows.default, "r -> r, r", starts_sequence=True)
rule([sp.to_sorted.default, sp.from_sorted.default], "r ..., r -> r ...")
rule(sp.grouped_mm.default, "r i, e i o, r -> r o", sum="i", replicate="e")
