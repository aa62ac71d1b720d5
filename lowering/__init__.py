"""How the ``sp::`` operators run. Importing this package registers them as ``torch.ops.sp``."""

from . import all_to_all, attend, collectives, masked_attention, pack, scan, sharded_attention, windowed
from .communicator import Communicator, current
from .frames import shard_length

__all__ = [
    "Communicator",
    "all_to_all",
    "attend",
    "collectives",
    "current",
    "masked_attention",
    "pack",
    "scan",
    "shard_length",
    "sharded_attention",
    "windowed",
]
