"""Pack several tensors into one send buffer with ``sp::pack`` and ``sp::pack_by_owner``.

A compiler that finds an exchange of the same values twice, in a forward and its backward, runs it once and saves the
result: all of K and V on every rank. In a backward that sends again, packing therefore depends on the cotangent, in an
opaque operator. Packing in an order that depends on the rank is opaque, too, as the rank is read at run time.
"""

import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.comm.communicator import current_communicator


@opaque("pack(Tensor[] xs, int dim, Tensor after) -> Tensor", lambda xs, dim, after: torch.cat(xs, dim))
def pack(xs: list[Tensor], dim: int, after: Tensor) -> Tensor:
    """Concatenate the tensors along ``dim``. Bytes: none.

    The backward of ring attention calls it to send keys and values again. ``after``, a cotangent, is not used: as an
    operand it orders the op after the forward, so that no compiler reuses the forward's exchange.
    """
    return torch.cat(xs, dim)


@opaque("pack_by_owner(Tensor[] parts, int stride, str group) -> Tensor", lambda parts, *_: torch.stack(parts))
def pack_by_owner(parts: list[Tensor], stride: int, group: str) -> Tensor:
    """Stack gradients of keys and values by their owner, to which they are sent next.

    The owners are on a ring of every stride-th rank. Shapes: n tensors of one shape -> (n, ...). Bytes: none.

    Args:
        parts: Entry i is the gradient for the rank i steps back on the ring.
        stride: Distance between ranks of the ring.
        group: Name of the process group.

    Returns:
        Entry j is the gradient for the ring's rank j.
    """
    n = len(parts)
    rank = current_communicator().rank(group) // stride % n  # index of this rank on its ring
    return torch.stack([parts[(rank - owner) % n] for owner in range(n)])
