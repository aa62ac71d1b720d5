"""Define the arguments of a block's attention kernel, and the criteria that select the kernel.

Shapes: q (B, Hq, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, E), out and grad (B, Hq, Q, E), lse (B, Hq, Q). No dim
is empty, and Hkv divides Hq. The ``out`` and ``lse`` of a backward are those over all keys, of which the block has
some. A row that attends to nothing has out 0 and lse -inf, and contributes no gradient.

    block      a rectangle of queries x keys that one kernel call computes; its `Kind` is the form of its mask
    bias       an additive mask
    dense      a kernel that stores all scores of its block
    fused      a kernel that evaluates the texts of masks and score functions itself
    packed     a call for several sequences, as cu_seqlens (``packed.py``)
"""

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


class ScoreCall(NamedTuple):
    """The name of a score function (``masks/score.py``) and its inputs, which broadcast to (B, Hq, Q, K)."""

    name: str  # name of the score function
    values: dict[str, Tensor]  # value of each input, except the score


@dataclass(frozen=True)
class KernelArgs:
    """Arguments of one block-attention kernel call."""

    scale: float  # factor of the scores
    # Whether the last query attends to all keys, and each query before it to one key less. Not for dense kernels. The
    # numbers of queries and keys are equal, except for kernels with `aligned_at_end`.
    causal: bool = False
    allowed: Tensor | None = None  # bool (B | 1, Hq | 1, Q | 1, K | 1): True where a query may attend
    bias: Tensor | None = None  # float (B | 1, Hq | 1, Q | 1, K | 1), added to the scaled scores
    keep_mask: Tensor | None = None  # bool (B, Hq, Q, K): True for weights that dropout keeps
    score: ScoreCall | None = None  # function of the scaled scores, applied before the bias
    keep_prob: float = 1.0  # probability that dropout keeps a weight
    bias_grad: bool = False  # whether the bias needs a gradient
    # tensors to which the gradients of the score's tables are added, by table name
    table_grads: Mapping[str, Tensor] = field(default_factory=dict)
    # Numbers of keys that a query attends to before and after its own position. Not for dense kernels.
    window: Window = FULL_WINDOW
    sequences: PackedSequences | None = None  # queries and keys of a PACKED call
    # Mask text and score function of all queries and keys. Only a fused kernel has it, and no other mask argument.
    pairs: PairTexts | None = None

    def additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bool mask (`allowed`) and the bias as one additive mask of a dtype; None without either."""
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.allowed is None:
            return bias
        zero = torch.zeros((), dtype=dtype, device=self.allowed.device)
        return torch.where(self.allowed, zero if bias is None else bias, -torch.inf)


class KernelKey(NamedTuple):
    """Properties of a block that select its kernel."""

    device: torch.device  # device of the call
    dtype: torch.dtype  # dtype of q
    kind: Kind  # MASKED if tensors select the pairs that attend; an additive bias does not count as such
    head_dim: int  # the larger of D and E
    rows: int  # the smaller of Q and K
    dropout: bool = False  # whether there is dropout
    score: bool = False  # whether there is a score function
    bias: torch.dtype | None = None  # dtype of an additive mask; None without one
    bias_grad: bool = False  # whether the bias needs a gradient, which has one element per score
    window: Window = FULL_WINDOW  # window of a BAND or PACKED call
    is_square: bool = False  # whether the block, or each of its sequences, has the same number of queries and keys
    elements: int = 0  # of the largest operand of the call, of which the block may be a part; 0 if unknown
    repeated_elements: int = 0  # the same if key heads are repeated to the number of query heads


class BiasSupport(NamedTuple):
    """The additive masks that a kernel supports."""

    none: bool = True  # blocks without a bias
    same: bool = False  # a bias of q's dtype
    # a bias of another dtype, without rounding to q's dtype if that is narrower than the dtype of the computation
    other: bool = False
    grad: bool = False  # the gradient of the bias

    def can_add(self, key: KernelKey) -> bool:
        """Return True if the kernel supports the additive mask (bias) of a block with this key.

        If the block has no bias, return True if the kernel supports blocks without one.
        """
        if key.bias is None:
            return self.none
        if key.bias_grad and not self.grad:
            return False
        return self.same if key.bias == key.dtype else self.other


NO_BIAS = BiasSupport()  # support for blocks without a bias only
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # dq, dk, dv and dbias


@dataclass(frozen=True)
class Kernel:
    """A kernel: its functions and the blocks that it supports. None means no restriction."""

    name: str  # name in reports
    # returns out and lse from q, k, v and the arguments
    forward: Callable[[Tensor, Tensor, Tensor, KernelArgs], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]  # returns the gradients from grad, q, k, v, out, lse and the arguments
    dense: bool = False  # Whether it stores all scores of its block. Such a kernel supports masks only as ``allowed``.
    # Whether it reads mask texts and score functions. Such a kernel runs all queries and keys of a call at once.
    fused: bool = False
    device: str | None = None  # type of the device
    dtypes: frozenset[torch.dtype] | None = None  # dtypes of q
    kinds: frozenset[Kind] | None = None  # kinds of blocks
    biases: BiasSupport = NO_BIAS  # additive masks
    aligned_at_end: bool = False  # whether a causal block may have fewer queries than keys
    # returns True if it supports a window, for `KernelKey.window` and `KernelKey.is_square`
    windows: Callable[[Window, bool], bool] = lambda window, is_square: True
    # whether it allocates memory for each sequence of a PACKED call as for the longest, and accepts no empty sequence
    pads: bool = False
    head_dim: int | None = None  # maximum head dim
    rows: int = 0  # minimum number of rows
    elements: int | None = None  # maximum number of elements of an operand, for kernels with 32-bit offsets
    repeats_heads: bool = False  # True if it is called with key heads repeated to the number of query heads
    capability: tuple[int, int] = (0, 0)  # minimum CUDA capability
    generations: frozenset[int] | None = None  # major versions of supported CUDA capabilities
    flash: str | None = None  # implementation that must be active in aten's flash attention; "" for torch's own
    repeatable: int | None = None  # maximum head dim for which its backward is deterministic; 0 if it never is
    rate: str = "named"  # name of its throughput in the cost model
    switch: Callable[[], bool] = lambda: True  # returns True if further conditions of this process hold

    @property
    def can_mask(self) -> bool:
        """Return True if the kernel supports mask tensors."""
        return self.kinds is None or Kind.MASKED in self.kinds

    def can_run(self, key: KernelKey) -> bool:
        """Return True if the kernel can run a block with this key on its device, in this process."""
        return self.can_run_on_type(key) and self._has_capability(key.device) and self.switch()

    def _has_capability(self, device: torch.device) -> bool:
        """Return True if the device has a CUDA capability that the kernel supports.

        `capability` is the minimum, and `generations` are the major versions.
        """
        if self.capability == (0, 0) and self.generations is None:
            return True
        capability = _device_capability(device)
        return self.capability <= capability and (self.generations is None or capability[0] in self.generations)

    def can_run_on_type(self, key: KernelKey) -> bool:
        """Return True if the kernel can run a block with this key on some device of the key's type, such as a GPU.

        The capability of the device is not read, so that all ranks get the same answer.
        """
        if self.device not in (None, key.device.type):
            return False
        # Only a dense kernel, which stores all scores, supports dropout and an empty head dim. A score function needs a
        # dense or a fused kernel.
        if not self.dense and (key.dropout or key.head_dim == 0 or (key.score and not self.fused)):
            return False
        # aten's flash attention runs the implementation that the user has activated.
        if self.flash is not None and self.flash != _active_fa3_or_fa4():
            return False
        # `repeatable` is the maximum head dim for which the backward is deterministic.
        if torch.are_deterministic_algorithms_enabled() and not _is_within(key.head_dim, self.repeatable):
            return False
        return (
            (self.dtypes is None or key.dtype in self.dtypes)
            and (self.kinds is None or key.kind in self.kinds)
            and self.windows(key.window, key.is_square)
            and self.biases.can_add(key)
            and _is_within(key.head_dim, self.head_dim)
            and _is_within(key.repeated_elements if self.repeats_heads else key.elements, self.elements)
            and self.rows <= key.rows
        )


def _is_within(width: int, limit: int | None) -> bool:
    """Return True if ``width`` is at most ``limit`` (inclusive); None means no limit."""
    return limit is None or width <= limit


def _active_fa3_or_fa4() -> str:
    """Return "FA3" or "FA4" if the user has activated this implementation of aten's flash attention, else ""."""
    active = active_flash_attention()
    return active if active in ("FA3", "FA4") else ""


@cache
def _device_capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA capability of a device, such as (9, 0); on HIP (8, 0), which the kernels for HIP support."""
    return (8, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def invert_empty_lse(lse: Tensor) -> Tensor:
    """Return lse with -inf, that of rows without keys, replaced by +inf.

    The weights exp(score - lse) of such a row are then 0, and not NaN.
    """
    return torch.where(lse == -torch.inf, torch.inf, lse)


def operand_bytes(*xs: Tensor) -> int:
    """Return the total bytes of tensors; symbolic sizes count with the sizes of the current call."""
    return sum(size_hint(x.numel()) * x.element_size() for x in xs)


def cpu_copy_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bytes of contiguous copies of q, k and v for the CPU kernel; 0 if they are not worth their cost.

    The kernel reads each key once for every few queries, and reads contiguous rows faster. With at least 512 queries
    and 512 keys, copies save 1 to 15 % of the kernel's time and cost less than 1 %. Half types gain nothing, since the
    kernel packs them itself.
    """
    if q.device.type != "cpu" or q.dtype in HALF or min(size_hint(q.shape[2]), size_hint(k.shape[2])) < 512:
        return 0
    copied_bytes = operand_bytes(*(x for x in (q, k, v) if not x.is_contiguous()))
    return copied_bytes if copied_bytes <= _MAX_COPIED_BYTES else 0


_MAX_COPIED_BYTES = 64 << 20  # the maximum bytes of these copies


def pad_last_dim(width: int, *xs: Tensor) -> list[Tensor]:
    """Return the tensors with the last dim padded with zeros to ``width`` and with stride 1, as kernels require it.

    Zeros change neither scores nor the first elements of outputs, to which callers trim results.
    """
    padded = [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in xs]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]
