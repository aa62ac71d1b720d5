"""Placements of values on the sequence axis of the mesh: frozen data, no algorithms.

A sharded dim is the product outer * window * inner: `(B, S, D) -> (B*S, D)` keeps a sharded S inside a flat dim
(outer = B). The window is part of a Frame: the axis that all values of one sequence share, padded once to a multiple of
the number of ranks. Rank r of n holds the frame's positions [r*s, (r+1)*s), s = ceil(size / n), for any window.
If a program splits the sequence into chunks of c positions, each rank has complete chunks: the size of the frame is a
multiple of c * n, and its granule is c. The dim of the chunks has a frame of its own, in units of blocks.
Padding contains copies of valid rows; positions outside a shorter window keep their rows or repeat others (sp::window).
These rows are finite, and no rule reads them without masking.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from sp_compile.lowering.base.frames import RowOrder, row_order
from sp_compile.passes.graph.sizes import (
    Size,
    ceil_div,
    exact_quotient,
    is_divisor,
    is_same_shape,
    is_same_size,
    size_product,
)


@dataclass(frozen=True)
class Frame:
    """Axis of `size` positions distributed over the ranks; the value is valid in [start, start + length).

    Each rank holds one contiguous run of positions (folds=1), chunks r and 2n - 1 - r of 2n (folds=2, zigzag), or one
    run of a permutation known at run time (folds=0, see `passes.localize.balance_layout`).
    """

    size: Size  # positions of the axis
    start: Size  # first valid position
    length: Size  # number of valid positions
    folds: int = 1  # row order, see `RowOrder`
    granule: int = field(default=1, compare=False)  # divides the positions of each contiguous run of a rank
    block: int = field(default=1, compare=False)  # positions of the sequence in each position of the axis

    @staticmethod
    def full(size: Size, folds: int = 1) -> Frame:
        """Return the frame of a complete sequence: all of its `size` positions are valid."""
        return Frame(size, 0, size, folds)

    @staticmethod
    def of_chunks(length: Size, longest: Size, granule: int, n: int, folds: int = 1) -> Frame:
        """Return the frame of a sequence that is computed in chunks, of which each of `n` ranks has complete ones.

        With chunks of 4 positions on 2 ranks, a sequence of 10 positions has a frame of 16: 2 chunks for each rank.

        Args:
            length: Number of positions.
            longest: Number of positions of the longest value of the sequence, such as the padded one.
            granule: Positions of a chunk.
            n: Number of ranks.
            folds: Row order.
        """
        multiple = granule * n * row_order(folds).chunks
        return Frame(multiple * ceil_div(longest, multiple), 0, length, folds, granule)

    def split(self, block: Size) -> Frame | None:
        """Return the frame of a dim of chunks, for a sequence that is reshaped to chunks of `block` positions.

        It counts chunks in place of positions: 12 positions are 3 chunks of 4. The result is None if a chunk could be
        on two ranks (`granule` is no multiple of it), or only partly valid.
        """
        sizes = [exact_quotient(size, block) for size in (self.size, self.start, self.length)]
        if not isinstance(block, int) or self.granule % block or None in sizes:
            return None
        size, start, length = sizes
        return Frame(size, start, length, self.folds, self.granule // block, self.block * block)

    def merge(self, block: Size) -> Frame | None:
        """Return the frame of positions for one that counts chunks of `block` positions, the inverse of `split`.

        The result is None if the frame does not count such chunks (`Frame.block`).
        """
        if not isinstance(block, int) or self.block % block:
            return None
        sizes = (self.size * block, self.start * block, self.length * block)
        return Frame(*sizes, self.folds, self.granule * block, self.block // block)

    @property
    def order(self) -> RowOrder:
        """Return the order of the positions over the ranks, such as contiguous or zigzag, which `folds` identifies."""
        return row_order(self.folds)

    def local_length(self, n: int) -> Size:
        """Return the number of positions on each of `n` ranks, including padding: 2 for 7 positions on 4 ranks."""
        chunks = self.order.chunks  # of a rank: 2 in zigzag order, else 1
        return chunks * ceil_div(self.size, chunks * n)

    def is_exact(self, n: int) -> bool:
        """Return True if every position of every rank is valid, so that there is no padding to mask."""
        return (
            is_same_size(self.start, 0)
            and is_same_size(self.length, self.size)
            and is_divisor(self.order.chunks * n, self.size)
        )

    def is_same_window(self, other: Frame) -> bool:
        """Return True if both frames provably have equal sizes, equal valid positions and the same row order."""
        sizes, other_sizes = (self.size, self.start, self.length), (other.size, other.start, other.length)
        return self.folds == other.folds and is_same_shape(sizes, other_sizes)


@dataclass(frozen=True)
class Replicate:
    """Equal value on every rank."""

    # the gradient is partial (R in spmd_types); else it is equal on all ranks, too (I, invariant)
    partial_grad: bool = False

    def __str__(self) -> str:
        return "R+" if self.partial_grad else "R"


@dataclass(frozen=True)
class Shard:
    """Placement of a tensor whose dim `dim` is split over the ranks.

    The dim is outer * frame.length * inner in the global view. A rank holds frame.local_length(n) of length.
    """

    dim: int  # sharded dim
    frame: Frame  # axis of the positions
    outer: Size = 1  # size of the factors before the sequence in the dim
    inner: Size = 1  # size of the factors after it

    def __str__(self) -> str:
        return f"S({self.dim})"

    @property
    def is_only_factor(self) -> bool:
        """Return True if the dim has the positions of the frame only: neither a batch before nor choices after them."""
        return is_same_size(self.outer, 1) and is_same_size(self.inner, 1)

    def has_same_positions(self, other: Shard) -> bool:
        """Return True if each rank has the same rows of both values, whose sharded dims may have different indices."""
        return (
            self.frame.is_same_window(other.frame)
            and is_same_size(self.outer, other.outer)
            and is_same_size(self.inner, other.inner)
        )

    def local_size(self, n: int) -> Size:
        """Return the size of the sharded dim on one of `n` ranks."""
        return size_product((self.outer, self.frame.local_length(n), self.inner))

    def frame_arg(self) -> tuple[Size, ...]:
        """Return the frame as an argument of sp:: ops: outer, size, start, length, and folds unless it is 1."""
        frame = self.frame
        return (self.outer, frame.size, frame.start, frame.length, *([frame.folds] if frame.folds != 1 else []))


@dataclass(frozen=True)
class Partial:
    """Each rank holds a summand; the value is their sum."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Varying:
    """Different value on each rank, such as a weight sharded by tensor parallelism."""

    def __str__(self) -> str:
        return "V"


Placement = Replicate | Shard | Partial | Varying
REPLICATE = Replicate()
VARYING = Varying()


@dataclass(frozen=True)
class Demand:
    """Placement that `node` needs of an operand and that the operand does not have; a strategy claims it."""

    node: Node  # node that has the requirement
    operand: int  # index of the operand
    kind: str  # reason and key of the strategy, such as "gathered", "align", "reduce" or "no rule"
    have: Placement  # current placement of the operand
    # the node remains sharded along another operand, so the gathered operand's gradient is partial
    keeps_sharding: bool = False
    why: str = ""  # text for reports


@dataclass
class PlacementPlan:
    """Result of propagation; recomputed after every rewrite, never patched."""

    # placements of the results of each node
    placements: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    # required placements of tensor operands, for nodes that run on shards
    wants: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    demands: list[Demand] = field(default_factory=list)  # unmet requirements

    def of(self, node: Node) -> Placement:
        """Return the placement of a node with one result; `REPLICATE` for nodes with several, or without placements."""
        placements = self.placements.get(node, ())
        return placements[0] if len(placements) == 1 else REPLICATE
