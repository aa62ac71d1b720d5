"""Attention of local queries to local keys, forward and backward: two operators that stay opaque in a graph.

They read the rank and their vectors when they run, so that their Python bodies may skip blocks; a graph that holds them
is the same on every rank. One operator call is the kernel calls of its blocks, and their results put together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce, wraps
from itertools import groupby
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.masks import score as score_text
from sp_compile.lowering.masks.blocks import FULL_WINDOW, Block, Kind, PackedCall, Window
from sp_compile.lowering.masks.score_program import may_have_fills
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.lowering.triton.flex.flex_calls import CannotCompileError

from .kernel_args import Kernel, KernelKey, cpu_copy_bytes, operand_bytes
from .kernels import expected_kernel, kernel_for
from .masking import CallMask
from .merge_blocks import GradAccumulator, SoftmaxAccumulator, empty_rows_first, merge
from .op_args import LocalArgs
from .packed import split_by_length
from .ring_kernel import split_keys_values

CPU_SCORES, GPU_SCORES = 1 << 20, 1 << 26
"""The most scores, or elements of a mask that is data, for which one kernel call makes tensors. A CPU is
fastest while they stay in its cache."""
GPU_BIAS = 4 * GPU_SCORES
"""The most elements of a bias, or of its gradient, that one kernel call gets or gives: it has one such tensor of q's
dtype at a time, dense arithmetic four of float32. Each call writes the gradients of all its keys."""

QueryStrip = list[tuple[Block | PackedCall, Kernel]]
"""Blocks with the same queries, and what runs them."""
AttendBody = TypeVar("AttendBody", bound=Callable[..., tuple[Tensor, ...]])


def _retry_without_fused(body: AttendBody) -> AttendBody:
    """Where a fused kernel cannot be compiled the others take its place: the table leaves it out from then on."""

    @wraps(body)
    def run(*args: Any) -> tuple[Tensor, ...]:
        try:
            return body(*args)
        except CannotCompileError:
            return body(*args)

    return cast(AttendBody, run)


def _grad_shape(args: LocalArgs, wanted: bool) -> Sequence[int]:
    if not wanted:
        return (0,)
    return (args.num_learned(),) if args.mask is None else args.mask.shape


def _kernel_key(
    device: torch.device, q: Tensor, v: Tensor, kind: Kind, rows: int, mask: Tensor | None, mask_grad: bool,
    dropout: bool, score: bool,
) -> KernelKey:  # fmt: skip
    """What decides the kernel of a block. kind: as the predicate has it. mask: data, bool or added to the scores."""
    bias = None if mask is None or mask.dtype == torch.bool else mask.dtype
    kind = kind if mask is None or bias is not None else Kind.MASKED
    return KernelKey(device, q.dtype, kind, max(q.shape[3], v.shape[3]), rows, dropout, score, bias, mask_grad)


class PlanRunner:
    """What runs the calls and the blocks of a plan."""

    def __init__(self, q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> None:
        dropout, score = masking.dropout is not None, bool(masking.score)
        self._need = _kernel_key(q.device, q, v, Kind.FULL, 0, masking.mask, mask_grad, dropout, score)
        self._plan, self._data, self._rows, self._batch = masking.plan, masking.mask is not None, q.shape[2], q.shape[0]
        self._row_bytes = q.shape[1] * self._need.head_dim * q.element_size()

    def of(self, kind: Kind, rows: int, window: Window = FULL_WINDOW, square: bool = False) -> Kernel:
        if self._need.kind is Kind.MASKED:
            kind = Kind.MASKED
        return kernel_for(self._need._replace(kind=kind, rows=rows, window=window, square=square))

    def _from_call(self, call: Block | PackedCall) -> Kernel:
        queries, keys = call.query_rows[1], call.key_rows[1]
        if isinstance(call, PackedCall):
            return self.of(call.kind, queries, call.window, call.window.left is not None and call.square)
        return self.of(call.kind, min(queries, keys), call.window, queries == keys)

    def calls(self) -> tuple[list[tuple[PackedCall, Kernel]], list[tuple[Block, Kernel]]]:
        """Those for many sequences, and all others. Blocks alone, if a kernel does not know a window that there is."""
        packed, others = self._plan.packed, self._plan.others
        if not self._data and not self.of(Kind.PACKED, self._rows).supports_masks:
            calls = [(call, self._from_call(call)) for call in packed]
            blocks = [(block, self._from_call(block)) for block in others]
            told = any(kernel.supports_masks for block, kernel in blocks if block.kind is not Kind.MASKED)
            if not told and not any(kernel.supports_masks for _, kernel in calls):
                return [*self._split_by_length(calls, len(blocks))], blocks
        return [], [(block, self._from_call(block)) for block in self._plan.blocks]

    def _split_by_length(
        self, calls: list[tuple[PackedCall, Kernel]], besides: int
    ) -> Iterator[tuple[PackedCall, Kernel]]:
        """As `split_by_length` has them, if their kernel wants that."""
        for kernel, alike in groupby(calls, key=lambda pair: pair[1]):
            same = tuple(call for call, _ in alike)
            row_bytes = self._row_bytes if kernel.pads else None
            yield from ((call, kernel) for call in split_by_length(same, self._batch, row_bytes, besides))


def _query_strips(q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> Iterator[QueryStrip]:
    """The calls in groups of the same queries, cut where a kernel would make too large tensors.

    If tensors would have to tell which pairs of a block attend, and a fused kernel may read that, it is one call.
    Where scores may hold fills, queries have all of their keys in one.
    """
    kernels = PlanRunner(q, v, masking, mask_grad)
    calls, found = kernels.calls()
    if any(one.supports_masks for _, one in found):
        every = Block(0, q.shape[2], 0, v.shape[2], Kind.MASKED)
        one = kernels.of(every.kind, min(every.q_len, every.k_len))
        if one.fused:
            yield [(every, one)]
            return
    if may_have_fills(masking.score):
        found = list(_merge_same_queries(found, masking.predicate, kernels))
    yield from (QueryStrip([call]) for call in calls)
    for _, same in groupby(found, key=lambda pair: (pair[0].query_rows, pair[0].kind is Kind.BAND)):
        together = list(same)
        whole: QueryStrip = [pair for pair in together if not pair[1].supports_masks]
        if whole:
            yield whole  # a part of a causal block is masked
        strip = [pair for pair in together if pair[1].supports_masks]
        if not strip:
            continue
        rows = min(_max_strip_rows(q, masking, mask_grad, *pair) for pair in strip)
        first = strip[0][0]
        for low in range(0, first.q_len, rows):
            yield [(_slice_block_rows(block, low, rows, kernel), kernel) for block, kernel in strip]


def _merge_same_queries(
    found: Sequence[tuple[Block, Kernel]], predicate: str, kernels: PlanRunner
) -> Iterator[tuple[Block, Kernel]]:
    """One block for all of the same queries."""
    for _, same in groupby(found, key=lambda pair: pair[0].query_rows):
        blocks = [block for block, _ in same]
        first, low = blocks[0], min(block.k_off for block in blocks)
        keys = max(block.k_off + block.k_len for block in blocks) - low
        whole = Block(*first.query_rows, low, keys, Kind.MASKED, (predicate,) if predicate else ())
        yield whole, kernels.of(Kind.MASKED, min(first.q_len, keys))


def _max_strip_rows(q: Tensor, masking: CallMask, mask_grad: bool, block: Block, kernel: Kernel) -> int:
    """The most query rows of one call."""
    if kernel.dense or mask_grad:
        tensors = q.shape[0] * q.shape[1]
    elif masking.mask is not None:
        tensors = masking.mask.shape[0] * masking.mask.shape[1]
    else:
        return block.q_len
    scores = CPU_SCORES if q.device.type == "cpu" else GPU_SCORES if kernel.dense else GPU_BIAS
    scores //= score_text.num_saved_tensors(masking.score)
    return max(1, min(block.q_len, scores // (tensors * block.k_len)))


def _slice_block_rows(block: Block, low: int, rows: int, kernel: Kernel) -> Block:
    """The block's rows [low, low + rows), as far as there are any."""
    if rows >= block.q_len:
        return block
    rows = min(rows, block.q_len - low)
    cut = block._replace(q_off=block.q_off + low, q_len=rows)
    if block.kind is not Kind.CAUSAL:
        return cut
    return cut._replace(kind=Kind.CAUSAL if kernel.aligned_at_end else Kind.MASKED, k_len=low + rows)


def _block_operands(q: Tensor, k: Tensor, v: Tensor, block: Block | PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    keys = block.key_rows
    return q.narrow(2, *block.query_rows), k.narrow(2, *keys), v.narrow(2, *keys)


def _split_scale_sign(q: Tensor, scale: float) -> tuple[Tensor, int, float]:
    """(q * sign, sign, a scale above 0): PyTorch's causal kernel returns NaN for any other."""
    if scale > 0:
        return q, 1, scale
    sign = -1 if scale < 0 else 0
    return q * sign, sign, -scale if sign else 1.0


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    args, (mask_grad, *others) = LocalArgs.of(rest)
    dtype = accumulation_dtype(q.dtype)
    dmask = q.new_empty(_grad_shape(args, mask_grad), dtype=dtype)
    return empty_rows_first(q, dtype), *_key_grad_buffers(k, v, dtype, *others[1:]), dmask


def _key_grad_buffers(k: Tensor, v: Tensor, dtype: torch.dtype, packed: str = "") -> tuple[Tensor, Tensor]:
    """Where the gradients of keys and values are written: apart, or both in one, and nothing."""
    if not packed:
        dk, dv = (empty_rows_first(x, dtype) for x in (k, v))
        return dk, dv
    batch, heads, rows, width = k.shape
    if packed == "stack":
        both = k.new_empty((2, *k.shape), dtype=dtype)
    elif packed == "rows":
        both = k.new_empty((rows, batch, heads, width + v.shape[3]), dtype=dtype).permute(1, 2, 0, 3)
    else:
        both = k.new_empty((batch, heads, rows, width + v.shape[3]), dtype=dtype)
    return both, k.new_empty((0,), dtype=dtype)


def _score_bytes(q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool, tensors: int) -> int:
    """Bytes of so many tensors of a strip's scores, where arithmetic on them is all that computes a call; or 0."""
    queries, keys = size_hint(q.shape[2]), size_hint(k.shape[2])
    device, of_scores = torch.device("cuda") if q.is_meta else q.device, (args.dropout_p > 0, bool(args.score))
    need = _kernel_key(device, q, v, Kind.FULL, min(queries, keys), args.mask, mask_grad, *of_scores)
    if not expected_kernel(need).dense:
        return 0
    most, heads = CPU_SCORES if device.type == "cpu" else GPU_SCORES, size_hint(q.shape[:2].numel())
    tensors += score_text.num_saved_tensors(args.score) > 1  # what it keeps of a smaller strip
    return tensors * min(most, heads * queries * keys) * accumulation_dtype(q.dtype).itemsize


def _forward_workspace(workspace: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Kernels have their workspace; then what they lay out, rows before heads, is copied."""
    args, _ = LocalArgs.of(rest)
    workspace = _score_bytes(q, k, v, args, False, 4 if args.dropout_p else 3) or workspace
    rows = size_hint(q.shape[:3].numel())
    out, lse = rows * size_hint(v.shape[3]) * q.element_size(), rows * accumulation_dtype(q.dtype).itemsize
    return max(workspace + cpu_copy_bytes(q, k, v) + lse, out + lse)


def _backward_workspace(
    workspace: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> int:
    """Kernels have their workspace and what they give; then that is cast, or copied to what is sent.

    A gradient of one kernel that is neither is a result as it lies. Of a zigzag shard kernels have half the queries
    each, and add to results that are there.
    """
    args, (mask_grad, *others) = LocalArgs.of(rest)
    workspace = _score_bytes(q, k, v, args, mask_grad, 6 if args.score else 5) or workspace
    wide = accumulation_dtype(q.dtype).itemsize // q.element_size()
    given, packed = operand_bytes(q, k, v), any(others[1:])
    sent = operand_bytes(k, v) * wide if packed else 0
    moved = given if wide > 1 else operand_bytes(k, v) if packed else 0
    if wide > 1 and args.q_span[1] > 1:
        moved = max(moved, (workspace + operand_bytes(q)) // 2 + operand_bytes(k, v))
    return max(workspace + cpu_copy_bytes(q, k, v) + operand_bytes(lse) + sent + given - given * wide, moved)


@opaque(
    f"attend(Tensor q, Tensor k, Tensor v, {LocalArgs.schema()}, Tensor[]? after=None) -> (Tensor out, Tensor lse)",
    lambda q, k, v, *_: (
        q.new_empty([*q.shape[:3], v.shape[3]]),
        q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
    ),
    replays=False,  # which kernels it calls, documents tell
    inside=_forward_workspace,
)
@_retry_without_fused
def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shard(queries), Shard(keys) -> Shard(queries): the softmax average over this rank's keys.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, E), any strides, Hkv divides Hq -> out
    (B, Hq, Sq, E) in q's dtype and lse (B, Hq, Sq), the log-sum-exp of the scaled masked scores in float32 or
    float64, both contiguous; 0 and -inf where a query attends to nothing. Bytes: none. ``after`` only orders: what is
    sent, or added up, before this block.

    The mask's rows are those of the local queries, (B | 1, Hq | 1, Sq | 1, whole key length | 1). Dropout keeps
    weights by a hash of ``seed``, batch, head, query and key. All else: see ``LocalArgs``.
    """
    args, _ = LocalArgs.of(rest)
    q, _, scale = _split_scale_sign(q, args.scale)
    masking, total = CallMask.of(q, k, args), SoftmaxAccumulator(q, v.shape[3])
    for strip in _query_strips(q, v, masking, mask_grad=False):
        parts = [
            kernel.forward(*_block_operands(q, k, v, block), masking.kernel_args(block, q.shape[0], scale, kernel))
            for block, kernel in strip
        ]
        total.add(*reduce(lambda a, b: merge(*a, *b), parts), strip[0][0].query_rows)
    return total.total()


@opaque(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{LocalArgs.schema()}, bool mask_grad, Tensor[]? after=None, str packed='') "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    _fake_backward,
    replays=False,
    inside=_backward_workspace,
)
@_retry_without_fused
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``attend`` over some of the keys, given ``out`` and ``lse`` over all of them.

    Shapes: grad and out (B, Hq, Sq, E), lse (B, Hq, Sq) -> dq, dk, dv as q, k, v, heads behind the sequence in
    memory, and dmask as mask, or the gradients of all tables that are floats as one, flat (empty (0,) without
    ``mask_grad``), in float32 for half types. The results of disjoint
    sets of keys add up exactly. Bytes: none; ``after`` as above.

    packed: "" or how dk and dv are to be sent: as one, (B, Hkv, Sk, D + E), in the place of dk, and dv empty (0,).
    "last": contiguous; "rows": the keys' dim is the outermost in memory. "stack": (2, B, Hkv, Sk, D), of one width.
    """
    args, (mask_grad, *others) = LocalArgs.of(rest)
    q, sign, scale = _split_scale_sign(q, args.scale)
    masking, dtype = CallMask.of(q, k, args), accumulation_dtype(q.dtype)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    sent = _key_grad_buffers(k, v, dtype, *others[1:]) if any(others[1:]) else None
    places = (None, None) if sent is None else split_keys_values(sent[0], k, v)
    dq, dk, dv = (GradAccumulator(x, dtype, place) for x, place in zip((q, k, v), (None, *places)))
    wanted = args.mask is not None and mask_grad
    dmask = q.new_zeros(_grad_shape(args, mask_grad), dtype=dtype)
    tables = enumerate(args.split_tables(dmask) if mask_grad else [])
    of_tables = {f"table{i}": x for i, x in tables if x is not None}
    for block, kernel in (pair for strip in _query_strips(q, v, masking, wanted) for pair in strip):
        queries, keys = block.query_rows, block.key_rows
        given, *of_rows = (x.narrow(2, *queries) for x in (grad, out, lse))
        case = masking.kernel_args(block, q.shape[0], scale, kernel)
        case = replace(case, bias_grad=wanted, table_grads=of_tables)
        dq_part, dk_part, dv_part, dbias = kernel.backward(given, *_block_operands(q, k, v, block), *of_rows, case)
        dq.add(dq_part, queries)
        dk.add(dk_part, keys)
        dv.add(dv_part, keys)
        if dbias is not None and isinstance(block, Block):
            masking.add_grad(dmask, dbias, block)
    of_queries, *of_keys = (one.total() for one in (dq, dk, dv))
    of_queries = of_queries if sign == 1 else of_queries * sign
    return of_queries, *(of_keys if sent is None else sent), dmask
