"""How the ``sp::`` operators run. Importing this package registers them as ``torch.ops.sp``."""

from . import (
    all_to_all,
    all_to_all_permute,
    attend,
    collectives,
    masked_attention,
    pack,
    reduce_pair,
    rows,
    scan,
    sharded_attention,
    shared,
    windowed,
)
from .communicator import Communicator, current
from .frames import shard_length

__all__ = [
    "Communicator",
    "all_to_all",
    "all_to_all_permute",
    "attend",
    "collectives",
    "current",
    "masked_attention",
    "pack",
    "reduce_pair",
    "rows",
    "scan",
    "shard_length",
    "sharded_attention",
    "shared",
    "windowed",
]
