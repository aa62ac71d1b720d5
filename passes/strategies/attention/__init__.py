"""Ways to split attention over ranks, one file each, and the choice among them.

A file holds all that is known of its strategy and registers it; no other file names it. So can one of yours:

    from sp_compile.passes.strategies.attention import Candidate, ShardedAttention, Strategy, register_strategy

    class Mine(ShardedAttention):           # the pass: what it claims, and the op that it puts in an attention's place
        op = torch.ops.sp.mine.default      # of this file, too

    register_strategy(Strategy(name="mine", preference=4, rewrite=Mine, candidates=..., sends=...))

The pass goes by the name of its class in lower case, which is the strategy's. What `candidates` and `sends` are given
and return: `Strategy` in `cost/attention.py`; a whole one: the toy in `tests/support/attention`. A file of this folder
imports from where these names come from, as the others here do: `.base`, and the modules of `sp_compile.passes.cost`.
"""

from sp_compile.passes.base import import_submodules
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.exchange_cost import HeadBytes
from sp_compile.passes.cost.machine import Machine

from .base import AttentionPass, ShardedAttention, attention_passes, register_strategy

__all__ = [
    "AttentionPass",
    "AttentionShape",
    "Candidate",
    "HeadBytes",
    "Machine",
    "ShardedAttention",
    "Strategy",
    "attention_passes",
    "register_strategy",
]

import_submodules(__name__, __path__)
