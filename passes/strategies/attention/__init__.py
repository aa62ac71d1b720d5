"""Strategies that shard attention over ranks, one file each, and the choice between them.

A file contains everything about its strategy and registers it; no other file names it. You can register your own:

    from sp_compile.passes.strategies.attention import Candidate, ShardAttention, Strategy, register_strategy

    class AttendWithMine(ShardAttention):   # the pass: the demands that it claims, and the op that replaces attention
        name = "mine"                       # as that of the strategy
        op = torch.ops.sp.mine.default      # defined in the same file, or in lowering/attention/

    register_strategy(Strategy(name="mine", preference=4, rewrite=AttendWithMine, candidates=..., sends=...))

`Strategy` in `cost/attention_cost.py` documents `candidates` and `sends`. `tests/support/attention` has a complete
example. Files of this folder import the classes above from `.base` and `sp_compile.passes.cost`.
"""

from sp_compile.passes.base import import_submodules
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.collective_time import HeadBytes
from sp_compile.passes.cost.exchange_cost import head_bytes
from sp_compile.passes.cost.machine import Machine

from .base import AttentionPass, ShardAttention, attention_passes, register_strategy

__all__ = [
    "AttentionPass",
    "AttentionShape",
    "Candidate",
    "HeadBytes",
    "Machine",
    "ShardAttention",
    "Strategy",
    "attention_passes",
    "head_bytes",
    "register_strategy",
]

import_submodules(__name__, __path__)
