"""Compute checksums of tensors, by which ranks compare weights, inputs and gradients.

Checksums are equal only for bitwise equal tensors, up to collisions. A summary is three floats that are nearly equal
for nearly equal tensors, such as gradients that ranks round differently. Tensors are read in pieces, with some MiB of
scratch memory for tensors of any size. `checksum` returns a text at once. `start_checksums` returns checksums of a
device that are copied asynchronously: reading them does not wait for later work of the device.
"""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sp_compile.lowering import triton

PIECE_ELEMENTS = 1 << 19  # elements; their bits, positions and hashes are 12 MiB of int64
# Odd factors with well mixed bits, as int64, whose products wrap: 2**64 over the golden ratio, and those of SplitMix64.
HASH_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
FREED_CHECKSUM = "none, its memory was freed"  # in place of the checksum of a tensor without memory
Summary = tuple[float, ...]  # a magnitude and more floats, nearly equal for nearly equal tensors
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by bytes of an element


def checksum(x: Any) -> str:
    """Return a checksum of a tensor's elements and their order, or "" if there is nothing to compare.

    Waits for the device. The text differs between a CPU (SHA-256) and other devices (`checksum_of`).

    Args:
        x: Any value. Values that are not tensors, tensors without elements and scalars on the CPU have the checksum "".
    """
    if not isinstance(x, torch.Tensor) or x.numel() == 0 or (x.ndim == 0 and x.device.type == "cpu"):
        return ""
    if x.device.type != "cpu":
        return str(checksum_of(x).item())
    if is_freed(x):
        return FREED_CHECKSUM
    if x.layout is torch.strided and x.is_contiguous() and not (x.is_complex() or x.is_neg()):  # in most calls
        return hashlib.sha256(_memory_of(x)).hexdigest()[:16]
    digest = hashlib.sha256()
    for piece in flat_parts(_view_as_real(x)):
        elements = piece.resolve_neg().contiguous()
        digest.update(_memory_of(elements))
    return digest.hexdigest()[:16]


def _memory_of(x: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of a contiguous tensor of any dtype, without a copy; valid while the tensor exists."""
    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr())


def is_freed(x: torch.Tensor) -> bool:
    """Return True if the memory of a tensor was freed, as FSDP does by `untyped_storage().resize_(0)`."""
    return x.layout == torch.strided and x.untyped_storage().nbytes() == 0


@dataclass(frozen=True)
class PendingChecksums:
    """Checksums or summaries that are being copied from a device, and are read later."""

    values: torch.Tensor  # (n,) int64, or (n, 3) float64 for summaries
    copied: torch.Event | None = None  # event of the copy; None on the CPU

    def read(self) -> list[str | Summary]:
        """Return one text per checksum, or the floats of each summary. Waits if the copy is not complete."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        entries = self.values.tolist()  # an int per checksum, a list of three floats per summary
        return [str(x) if isinstance(x, int) else tuple(x) for x in entries]


def start_checksums(xs: Sequence[torch.Tensor]) -> PendingChecksums:
    """Start to compute checksums of non-empty tensors on a common device, without waiting for the device.

    A call of a program then compares its inputs without a delay. With Triton each tensor needs one kernel launch.
    """
    sums = torch.zeros(len(xs), dtype=torch.int64, device=xs[0].device)
    for x, x_sum in zip(xs, sums):  # x_sum is a view of one entry, which is added to
        if triton.can_use_triton(x):
            from sp_compile.lowering.triton import checksum_kernel as kernel  # imports Triton

            kernel.add_checksum(_element_bits(_view_as_real(x).contiguous().view(-1)), x_sum)
        else:
            x_sum += checksum_of(x)
    return start_cpu_copy(sums)


def start_cpu_copy(x: torch.Tensor) -> PendingChecksums:
    """Start to copy checksums, (n,) int64, or summaries, (n, 3) float64, to the CPU, without waiting."""
    if x.device.type == "cpu":
        return PendingChecksums(x)
    values, copied = x.to("cpu", non_blocking=True), torch.Event(x.device.type)
    copied.record()
    return PendingChecksums(values, copied)


def sample_view(x: torch.Tensor, limit: int, turn: int) -> torch.Tensor:
    """Return a view of at most `limit` elements, spread over all dims: a sample of a large tensor.

    Every step-th index of each dim is selected. The limit is shared by the dims, from the shortest to the longest; a
    short one leaves more to the others: shape (2, 1000) and limit 100 have the sample x[:, ::20] of 2 * 50 elements.

    Args:
        x: Any shape and dtype.
        limit: Maximum number of elements.
        turn: Offset of the selection; successive turns select different elements.
    """
    dims = sorted(range(x.ndim), key=x.shape.__getitem__) if x.numel() > limit else []
    for i, dim in enumerate(dims):
        dim_limit = max(1, int(limit ** (1 / (len(dims) - i))))  # this dim and the longer ones have equal shares
        step = -(-x.shape[dim] // dim_limit)  # rounded up
        x = x[(slice(None),) * dim + (slice(turn % step, None, step),)]
        # Turns count through the offsets of this dim first, then through those of the next one, as digits of a number.
        limit, turn = limit // x.shape[dim], turn // step
    return x


def summarize(x: torch.Tensor) -> torch.Tensor:
    """Return a summary of a tensor of floats, its norm and two pseudo-random projections: (3,) float64.

    Plain sums would not suffice: the gradient of a cross entropy has the same sums for any labels. The tensor is read
    twice and not copied.
    """
    x = _view_as_real(x)
    if not x.numel():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    rows, columns = matrix.shape
    column_weights = _pseudo_random(columns, x.device) / columns**0.5  # scaled: half-precision sums do not overflow
    projected = (matrix @ column_weights.to(x.dtype)).double()  # (rows,)
    row_weights = _pseudo_random(rows, x.device)
    norm_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(matrix, dtype=norm_dtype)
    projections = [(projected * weights).sum() for weights in (row_weights, row_weights.flip(0))]
    return torch.stack([norm.double() / columns**0.5, *projections])  # the norm is scaled like the projections


def _pseudo_random(n: int, device: torch.device) -> torch.Tensor:
    """Return fixed pseudo-random weights from -1 to 1, (n,) float64, equal on all ranks."""
    return torch.cos(0.618 * torch.arange(1, n + 1, dtype=torch.float64, device=device).square())


def checksum_of(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum of any tensor: () int64 on its device.

    It is the sum, modulo 2**64, of a hash of each element's bits and index, which is exact for any order of summation.
    A sum of the bits alone would not suffice: it is the same for every order of the elements, and so for all one-hot
    tensors.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    first = 0  # index of the piece's first element
    for piece in flat_parts(_view_as_real(x)):
        bits = _element_bits(piece).long()
        total += _hash_bits(bits, first).sum()
        first += bits.numel()
    return total


def _view_as_real(x: torch.Tensor) -> torch.Tensor:
    """Return x detached; complex numbers as pairs of real ones in a further dim, since their bits can be read."""
    x = x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _element_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer of the same size."""
    return x.resolve_neg().view(_BITS[x.element_size()])


def _hash_bits(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Return a hash of each element's bits and index, int64.

    Args:
        bits: (n,) int64.
        first: Index of the first element.
    """
    # Indices count from 1: with index 0, a first element whose bits are all 0 would have the hash 0.
    index = torch.arange(first + 1, first + 1 + bits.numel(), device=bits.device)
    return mix_bits(index.mul_(HASH_FACTORS[0]).bitwise_xor_(bits))


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Hash each int64 of x in place and return x: SplitMix64's finalizer (Steele et al., 2014).

    Every bit of a result depends on every bit of its input.
    """
    for shift, factor in ((30, HASH_FACTORS[1]), (27, HASH_FACTORS[2]), (31, 1)):
        # x = (x ^ (x >>> shift)) * factor; >> of int64 repeats the sign bit, which the mask removes
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return x


def is_constant(x: torch.Tensor) -> bool:
    """Return True if all elements are equal; False without elements.

    Shards of such an input, such as a mask of ones, are equal on all ranks: their checksums do not show that they are
    shards and not a full input.
    """
    if x.numel() == 0:
        return False
    first = _comparable_values(x.detach()[(0,) * x.ndim])
    return all(bool((_comparable_values(piece) == first).all()) for piece in flat_parts(x.detach()))


def _comparable_values(x: torch.Tensor) -> torch.Tensor:
    """Return x in a dtype for which torch implements ==: float32 for float8, else its own."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def flat_parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order as 1-D tensors of at most PIECE_ELEMENTS; views where possible."""
    if x.numel() <= PIECE_ELEMENTS:
        yield x.reshape(-1)
    elif x.is_contiguous():
        yield from x.view(-1).split(PIECE_ELEMENTS)
    else:
        # Split dim 0 into pieces that fit, or into single rows, which are split along the next dim.
        rows = max(1, PIECE_ELEMENTS // (x.numel() // x.shape[0]))
        pieces = x.split(rows) if x.shape[0] > 1 else [x[0]]
        for piece in pieces:
            yield from flat_parts(piece)
