"""Where a value lives on the sequence axis of the mesh: frozen data, no algorithms.

A sharded dim is the product outer * window * inner: `(B, S, D) -> (B*S, D)` keeps a sharded S inside a flat dim
(outer = B). The window lies in a Frame: the axis that all values of one sequence share, padded once to a multiple of
the number of ranks. Rank r of n holds the frame's positions [r*s, (r+1)*s), s = ceil(size / n), whatever the window.
Padding holds copies of valid rows, and what a shorter window cuts off keeps its rows or repeats others (sp::window):
finite, and never read by a rule that has not masked them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch.fx import Node

from sp_compile.lowering.base.frames import RowOrder, row_order
from sp_compile.passes.graph.sizes import Size, ceil_div, divides, is_same_size, size_product


@dataclass(frozen=True)
class Frame:
    """`size` positions shared out over the ranks; the value is valid in [start, start + length).

    folds: 1, a rank holds one run of positions; 2, zigzag: rank r of n holds chunks r and 2n - 1 - r of 2n; 0: one
    run of the positions of an order that is known when the program runs (see `passes.localize.deal`).
    """

    size: Size
    start: Size
    length: Size
    folds: int = 1

    @staticmethod
    def full(size: Size, folds: int = 1) -> Frame:
        """The frame of a whole sequence of `size` positions."""
        return Frame(size, 0, size, folds)

    @property
    def order(self) -> RowOrder:
        """What `folds` stands for."""
        return row_order(self.folds)

    def local_length(self, n: int) -> Size:
        """How many positions each of `n` ranks holds, padding included."""
        chunks = self.order.chunks
        return chunks * ceil_div(self.size, chunks * n)

    def is_exact(self, n: int) -> bool:
        """Every position of every rank is valid: no padding to mask."""
        return (
            is_same_size(self.start, 0)
            and is_same_size(self.length, self.size)
            and divides(self.order.chunks * n, self.size)
        )

    def is_same_window(self, other: Frame) -> bool:
        """Are both the same window of the same axis, whatever the symbols are?"""
        mine, others = (self.size, self.start, self.length), (other.size, other.start, other.length)
        return self.folds == other.folds and all(is_same_size(a, b) for a, b in zip(mine, others))


@dataclass(frozen=True)
class Replicate:
    """The same value on every rank.

    partial_grad: its gradient is still one summand per rank (spmd_types' R); otherwise the gradient, too, is the same
    on every rank (I, invariant).
    """

    partial_grad: bool = False

    def __str__(self) -> str:
        return "R+" if self.partial_grad else "R"


@dataclass(frozen=True)
class Shard:
    """Dim `dim` is outer * frame.length * inner in the global view and outer * frame.local(n) * inner on a rank."""

    dim: int
    frame: Frame
    outer: Size = 1
    inner: Size = 1

    def __str__(self) -> str:
        return f"S({self.dim})"

    def on_dim(self, dim: int) -> Shard:
        """The same shard with its factor in another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def has_same_positions(self, other: Shard) -> bool:
        """The same positions on the same ranks, whatever dim they lie in."""
        return (
            self.frame.is_same_window(other.frame)
            and is_same_size(self.outer, other.outer)
            and is_same_size(self.inner, other.inner)
        )

    def local_size(self, n: int) -> Size:
        """The size of the sharded dim on one of `n` ranks."""
        return size_product((self.outer, self.frame.local_length(n), self.inner))

    def frame_arg(self) -> tuple[Size, ...]:
        """The frame as sp:: ops take it: outer, size, start, length, and folds where that is not 1."""
        frame = self.frame
        return (self.outer, frame.size, frame.start, frame.length, *([frame.folds] if frame.folds != 1 else []))


@dataclass(frozen=True)
class Partial:
    """Each rank holds a summand; the value is their sum."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Varying:
    """Each rank holds a value of its own, no piece of a common one: a weight that tensor parallelism has cut."""

    def __str__(self) -> str:
        return "V"


Placement = Replicate | Shard | Partial | Varying
REPLICATE = Replicate()
VARYING = Varying()


@dataclass(frozen=True)
class Demand:
    """`node` needs its operand whole (or scanned, reduced, attended), and it is placed as `have`.

    kind: whole | align | reduce | mean | total | attend | scan | halo | draw | invariant | varying | stale | no rule:
        the reason; what strategies claim it by
    keeps_sharding: the node goes on running on shards of another operand, so a gathered operand's gradient is partial.
    """

    node: Node
    operand: int
    kind: str
    have: Placement
    keeps_sharding: bool = False
    why: str = ""


@dataclass
class PlacementPlan:
    """What propagation found; recomputed after every rewrite, never patched.

    placements: of each node's results.
    wants: for nodes that run on shards, how each tensor operand must arrive.
    """

    placements: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    wants: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    demands: list[Demand] = field(default_factory=list)

    def of(self, node: Node) -> Placement:
        """The placement of a single-result node."""
        placements = self.placements.get(node, ())
        return placements[0] if len(placements) == 1 else REPLICATE
