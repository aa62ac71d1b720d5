"""Random draws under sequence parallelism: independent on shards, equal on replicated values.

Users seed all ranks equally. A draw on a shard must differ between ranks, or tokens t and t + S/n would share a dropout
mask. A graph that draws therefore runs under a generator state derived from the rank. The user's generator advances by
one draw, equally on every rank. Draws on replicated values are synchronized by `sp::broadcast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import OpOverload

from .call import OpCall, node_packet

aten = torch.ops.aten
RANDOM_DROPOUT_OPS = [aten.native_dropout]
for _kind in ("", "alpha_", "feature_", "feature_alpha_"):
    RANDOM_DROPOUT_OPS += [getattr(aten, f"{_kind}dropout"), getattr(aten, f"{_kind}dropout_")]
_SEED_STRIDE = 0x9E3779B97F4A7C15 >> 1  # well mixed bits, which separate the seeds of the ranks


def has_random_ops(gm: GraphModule) -> bool:
    """Return True if the graph draws random numbers, so that it needs `with_rank_rng`."""
    return any(is_random(node) for node in gm.graph.nodes)


def is_random(node: torch.fx.Node) -> bool:
    """Return True if the node draws random numbers.

    Attention and dropout draw only if they are active and their probability is not zero.
    """
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        # A higher-order op draws if one of its bodies does, which are attributes of the module.
        names = [x.target for x in node.all_input_nodes if x.op == "get_attr"]
        bodies = [getattr(node.graph.owning_module, name, None) for name in names]
        return any(isinstance(body, GraphModule) and has_random_ops(body) for body in bodies)
    call, is_dropout = OpCall(node), node_packet(node) in RANDOM_DROPOUT_OPS
    is_seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    if not (is_seeded or is_dropout or "dropout_p" in call.args):
        return False
    probability = call.get("p" if is_dropout else "dropout_p")  # None for draws that have none
    is_active = call.get("train", call.get("training", True))
    return is_active is not False and probability != 0


def with_rank_rng(run: Callable[..., Any], ranks: Ranks) -> Callable[..., Any]:
    """Return a function that runs `run` with generators seeded by rank, for graphs that draw on shards.

    Ranks then draw different numbers, as for different rows. The user's CPU generator advances by one draw, equally on
    all ranks.
    """

    def run_with_rank_seed(*args: Any) -> Any:
        """Run the function with a seed of this rank, derived from a draw of the user's CPU generator."""
        seed = int(torch.randint(0, 1 << 62, ()).item())  # 62 random bits, which fit in an int64
        rank = dist.get_rank(ranks.process_group)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((seed + rank * _SEED_STRIDE) % (1 << 63))  # a non-negative int64
            return run(*args)

    return run_with_rank_seed
