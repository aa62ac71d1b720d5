"""What a kernel of attention is given for one block, and by what one is chosen.

Shapes: q (B, Hq, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, E), out and grad (B, Hq, Q, E), lse (B, Hq, Q); no dim
is empty and Hkv divides Hq. ``out`` and ``lse`` given to a backward are those over all keys, of which the
block holds some. A row that attends to nothing has out 0 and lse -inf, and gives no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.masks.blocks import FULL_WINDOW, Kind, Window
from sp_compile.lowering.torch_compat import active_flash_attention, size_hint
from sp_compile.lowering.triton.flex.flex_texts import PairTexts

from .packed import PackedSequences


class ScoreProgram(NamedTuple):
    """A text of ``masks/score.py``, and what it reads, which broadcasts to (B, Hq, Q, K)."""

    text: str
    values: dict[str, Tensor]


@dataclass(frozen=True)
class KernelArgs:
    """What is the same for all elements of a block's scores, and the tensors that broadcast to them."""

    scale: float
    causal: bool = False
    """The last query attends to all keys, each before it to one less. Only for kernels that are not dense. As many
    queries as keys, but for kernels whose rows say `aligned_at_end`."""
    allowed: Tensor | None = None
    """bool (B | 1, Hq | 1, Q | 1, K | 1): True where a query may attend."""
    bias: Tensor | None = None
    """float (B | 1, Hq | 1, Q | 1, K | 1), added to the scaled scores."""
    keep_mask: Tensor | None = None
    """bool (B, Hq, Q, K): the weights that dropout keeps."""
    score: ScoreProgram | None = None
    """What becomes of the scaled scores, before the bias."""
    keep_prob: float = 1.0
    """The probability of that."""
    bias_grad: bool = False
    table_grads: Mapping[str, Tensor] = field(default_factory=dict)
    """Where the gradients of the score's tables are added, by their names."""
    window: Window = FULL_WINDOW
    """The keys that a query sees before and behind its own place. Only for kernels that are not dense."""
    sequences: PackedSequences | None = None
    """The queries and keys of a PACKED call."""
    pairs: PairTexts | None = None
    """What is said of all queries and keys. Only for a fused kernel, and it is given nothing else."""


class KernelKey(NamedTuple):
    """What decides which kernel runs a block."""

    device: torch.device
    dtype: torch.dtype
    kind: Kind
    """MASKED if tensors tell which pairs attend; what is added to scores does not count as such."""
    head_dim: int
    """The wider of D and E."""
    rows: int
    """The fewer of Q and K."""
    dropout: bool = False
    score: bool = False
    """A function of the scores."""
    bias: torch.dtype | None = None
    """Of floats that are added to the scores, if there are any."""
    bias_grad: bool = False
    """Whether they need a gradient, which is one for each score."""
    window: Window = FULL_WINDOW
    """Of a BAND or a PACKED call."""
    square: bool = False
    """Whether it, or each of its sequences, has as many queries as keys."""


class BiasSupport(NamedTuple):
    """What a kernel adds to scores."""

    none: bool = True
    """Whether it is for blocks without."""
    same: bool = False
    """Floats of q's dtype."""
    other: bool = False
    """Those of another dtype, without rounding them to q's where that is narrower than what it computes in."""
    grad: bool = False
    """Whether it gives their gradient."""

    def supports(self, need: KernelKey) -> bool:
        if need.bias is None:
            return self.none
        return (self.same if need.bias == need.dtype else self.other) and (self.grad or not need.bias_grad)


NO_BIAS = BiasSupport()
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Kernel:
    """One row of the table: what a kernel takes, and how it is called. What is None is not asked."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, KernelArgs], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    dense: bool = False
    """Whether it keeps all scores of its block in memory. It then knows masks only as ``allowed``."""
    fused: bool = False
    """Whether it reads texts about pairs and scores itself. It then runs all queries and keys of a call at once."""
    device: str | None = None
    dtypes: frozenset[torch.dtype] | None = None
    kinds: frozenset[Kind] | None = None
    biases: BiasSupport = NO_BIAS
    aligned_at_end: bool = False
    """Whether a causal block may have fewer queries than keys."""
    windows: Callable[[Window, bool], bool] = lambda window, square: True
    """Which windows it knows of those that are asked for: see `KernelKey`."""
    pads: bool = False
    """Whether it has memory for each sequence of a PACKED call as for the longest, and takes none that is empty."""
    head_dim: int | None = None
    """The widest."""
    rows: int = 0
    """The fewest."""
    capability: tuple[int, int] = (0, 0)
    """Of CUDA, the least."""
    generations: frozenset[int] | None = None
    """The major numbers of capabilities."""
    flash: str | None = None
    """What has to be active behind aten's flash attention: "" for torch's own."""
    repeatable: int | None = None
    """The widest heads of which its backward gives the same bits each time; 0: none."""
    rate: str = "named"
    """What the cost model calls its throughput."""
    switch: Callable[[], bool] = lambda: True
    """What else has to hold in this process."""

    @property
    def supports_masks(self) -> bool:
        """Whether tensors may tell it which pairs attend."""
        return self.kinds is None or Kind.MASKED in self.kinds

    def can_run(self, need: KernelKey) -> bool:
        """Whether it runs such blocks here."""
        return self.is_for_device(need) and self._supports(need.device) and self.switch()

    def _supports(self, device: torch.device) -> bool:
        if self.capability == (0, 0) and self.generations is None:
            return True
        capability = _device_capability(device)
        return self.capability <= capability and (self.generations is None or capability[0] in self.generations)

    def is_for_device(self, need: KernelKey) -> bool:
        """Whether it runs such blocks on a device that can."""
        if self.device not in (None, need.device.type) or (not self.dense and need.head_dim == 0):
            return False
        if self.flash is not None and self.flash != _active_flash_attention():
            return False
        if torch.are_deterministic_algorithms_enabled() and not is_within(need.head_dim, self.repeatable):
            return False
        return (
            (self.dtypes is None or need.dtype in self.dtypes)
            and (self.kinds is None or need.kind in self.kinds)
            and self.windows(need.window, need.square)
            and self.biases.supports(need)
            and (self.dense or not need.dropout)
            and (self.dense or self.fused or not need.score)
            and is_within(need.head_dim, self.head_dim)
            and self.rows <= need.rows
        )


def is_within(width: int, most: int | None) -> bool:
    """None: there is no most."""
    return most is None or width <= most


def _active_flash_attention() -> str:
    """What is active, if it is one that has rows of its own; another does what torch's does, or raises."""
    active = active_flash_attention()
    return active if active in ("FA3", "FA4") else ""


@cache
def _device_capability(device: torch.device) -> tuple[int, int]:
    """Of HIP that of which all kernels that it has are."""
    return (8, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def finite_lse(lse: Tensor) -> Tensor:
    """exp(score - lse) of a row that attends to nothing must be 0, for a score of -inf as well."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def operand_bytes(*xs: Tensor) -> int:
    """Of all together, in the call that is being compiled."""
    return sum(size_hint(x.numel()) * x.element_size() for x in xs)


def cpu_copy_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes of what the CPU's kernel is given as copies, because of rows that are apart; 0: none.

    Each row is read once for every few rows of the other side, and rows that neighbour each other are read faster:
    from 512 rows on both sides on that is 1 to 15 % of the kernel's time (float32 and float64; half types, which the
    kernel packs itself, gain nothing), and a copy less than 1 %.
    """
    apart = [x for x in (q, k, v) if not x.is_contiguous()]
    many = min(size_hint(q.shape[2]), size_hint(k.shape[2])) >= _LARGE_ROWS
    if not apart or not many or q.device.type != "cpu" or q.dtype in HALF:
        return 0
    nbytes = operand_bytes(*apart)
    return nbytes if nbytes <= _MAX_COPIED else 0


_LARGE_ROWS, _MAX_COPIED = 512, 64 << 20


def pad_last_dim(width: int, *xs: Tensor) -> list[Tensor]:
    """Zeros behind the last dim, which change neither scores nor the part that is kept.

    The kernels read whole rows without asking for their stride.
    """
    return [_has_dense_rows(x) if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in xs]


def _has_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
