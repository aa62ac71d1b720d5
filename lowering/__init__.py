"""How the ``sp::`` operators run. Importing this package registers them as ``torch.ops.sp``."""

from . import all_to_all, collectives
from .communicator import Communicator, current
from .frames import shard_length

__all__ = ["Communicator", "all_to_all", "collectives", "current", "shard_length"]
