"""How the ``sp::`` operators run. `import sp_compile` registers them as ``torch.ops.sp``."""

from .communicator import Communicator, current
from .frames import shard_length

__all__ = ["Communicator", "current", "shard_length"]
