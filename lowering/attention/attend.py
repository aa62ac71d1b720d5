"""Compute attention of local queries over local keys: the opaque operators attend and attend_backward.

They read the rank and the vectors at run time, so their Python bodies can skip blocks. The graph that contains them is
equal on every rank. One operator call runs the kernels of all blocks and merges their results.
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
from sp_compile.lowering.masks.blocks import FULL_WINDOW, Block, Kind, PackedCall, Window
from sp_compile.lowering.masks.score import may_have_fills, num_saved_tensors
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.lowering.triton.flex.flex_calls import CannotCompileError

from .kernel_args import Kernel, KernelKey, cpu_copy_bytes, operand_bytes
from .kernels import expected_kernel, kernel_for
from .masking import CallMask
from .merge_blocks import GradAccumulator, SoftmaxAccumulator, empty_rows_first, merge
from .op_args import LocalArgs
from .packed import split_by_length
from .ring_kernel import split_keys_values

# The maximum number of scores, or of tensor mask elements, that one kernel call materializes. A CPU is fastest while
# they fit its cache.
CPU_SCORES, GPU_SCORES = 1 << 20, 1 << 26
# The maximum number of elements of a bias, or of its gradient, in one kernel call. A kernel with a bias has one such
# tensor of q's dtype at a time; dense arithmetic has four in float32. Each call writes the gradients of all its keys.
GPU_BIAS = 4 * GPU_SCORES

QueryStrip = list[tuple[Block | PackedCall, Kernel]]  # blocks with the same queries, and their kernels
AttendBody = TypeVar("AttendBody", bound=Callable[..., tuple[Tensor, ...]])


def _retry_without_fused(body: AttendBody) -> AttendBody:
    """Run the body again with other kernels if a fused kernel cannot be compiled.

    The table excludes the fused kernel from then on.
    """

    @wraps(body)
    def run(*args: Any) -> tuple[Tensor, ...]:
        """Run the body, at most twice."""
        try:
            return body(*args)
        except CannotCompileError:
            return body(*args)

    return cast(AttendBody, run)


def _grad_shape(args: LocalArgs, wanted: bool) -> Sequence[int]:
    """Return the shape of dmask: that of the mask, (number of table elements,), or (0,)."""
    if not wanted:
        return (0,)
    return (args.num_learned(),) if args.mask is None else args.mask.shape


def _kernel_key(
    device: torch.device, q: Tensor, v: Tensor, kind: Kind, rows: int, mask: Tensor | None, mask_grad: bool,
    dropout: bool, score: bool,
) -> KernelKey:  # fmt: skip
    """Return the key that selects the kernel of a block.

    Args:
        device: The device of the call.
        q: The queries.
        v: The values.
        kind: The kind by the predicate alone.
        rows: The smaller number of rows, of queries and keys.
        mask: A tensor mask, bool or additive.
        mask_grad: Whether the mask needs a gradient.
        dropout: Whether there is dropout.
        score: Whether there is a score function.
    """
    bias = None if mask is None or mask.dtype == torch.bool else mask.dtype
    kind = kind if mask is None or bias is not None else Kind.MASKED
    return KernelKey(device, q.dtype, kind, max(q.shape[3], v.shape[3]), rows, dropout, score, bias, mask_grad)


class PlanRunner:
    """Kernel selection for the calls and blocks of a plan."""

    def __init__(self, q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> None:
        """Store the properties of the call that select kernels."""
        dropout, score = masking.dropout is not None, bool(masking.score)
        self._need = _kernel_key(q.device, q, v, Kind.FULL, 0, masking.mask, mask_grad, dropout, score)
        self._plan, self._data, self._rows, self._batch = masking.plan, masking.mask is not None, q.shape[2], q.shape[0]
        self._row_bytes = q.shape[1] * self._need.head_dim * q.element_size()

    def of(self, kind: Kind, rows: int, window: Window = FULL_WINDOW, square: bool = False) -> Kernel:
        """Return the kernel of a block of this kind.

        Args:
            kind: The kind by the predicate alone.
            rows: The smaller number of rows, of queries and keys.
            window: The window of a BAND or PACKED call.
            square: Whether the block, or each of its sequences, has the same number of queries and keys.
        """
        if self._need.kind is Kind.MASKED:
            kind = Kind.MASKED
        return kernel_for(self._need._replace(kind=kind, rows=rows, window=window, square=square))

    def _from_call(self, call: Block | PackedCall) -> Kernel:
        queries, keys = call.query_rows[1], call.key_rows[1]
        if isinstance(call, PackedCall):
            return self.of(call.kind, queries, call.window, call.window.left is not None and call.square)
        return self.of(call.kind, min(queries, keys), call.window, queries == keys)

    def calls(self) -> tuple[list[tuple[PackedCall, Kernel]], list[tuple[Block, Kernel]]]:
        """Return the packed calls and the other blocks, with their kernels.

        If a kernel does not support a window of the plan, all calls are blocks.
        """
        packed, others = self._plan.packed, self._plan.others
        if not self._data and not self.of(Kind.PACKED, self._rows).supports_masks:
            calls = [(call, self._from_call(call)) for call in packed]
            blocks = [(block, self._from_call(block)) for block in others]
            has_mask_kernel = any(kernel.supports_masks for block, kernel in blocks if block.kind is not Kind.MASKED)
            if not has_mask_kernel and not any(kernel.supports_masks for _, kernel in calls):
                return [*self._split_by_length(calls, len(blocks))], blocks
        return [], [(block, self._from_call(block)) for block in self._plan.blocks]

    def _split_by_length(
        self, calls: list[tuple[PackedCall, Kernel]], other_sequences: int
    ) -> Iterator[tuple[PackedCall, Kernel]]:
        """Split the calls by sequence length if their kernel pads sequences."""
        for kernel, group in groupby(calls, key=lambda pair: pair[1]):
            same = tuple(call for call, _ in group)
            row_bytes = self._row_bytes if kernel.pads else None
            yield from ((call, kernel) for call in split_by_length(same, self._batch, row_bytes, other_sequences))


def _query_strips(q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> Iterator[QueryStrip]:
    """Yield the calls in strips of the same queries, cut where a kernel would create too large tensors.

    If masks would be tensors and a fused kernel supports their texts, there is one call. If scores may hold fills, all
    keys of a query are in one block.
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
        unmaskable: QueryStrip = [pair for pair in together if not pair[1].supports_masks]
        if unmaskable:
            yield unmaskable  # a part of a causal block would be masked
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
    """Merge blocks with the same queries into one MASKED block."""
    for _, same in groupby(found, key=lambda pair: pair[0].query_rows):
        blocks = [block for block, _ in same]
        first, low = blocks[0], min(block.k_off for block in blocks)
        keys = max(block.k_off + block.k_len for block in blocks) - low
        merged = Block(*first.query_rows, low, keys, Kind.MASKED, (predicate,) if predicate else ())
        yield merged, kernels.of(Kind.MASKED, min(first.q_len, keys))


def _max_strip_rows(q: Tensor, masking: CallMask, mask_grad: bool, block: Block, kernel: Kernel) -> int:
    """Return the maximum number of query rows of one call."""
    if kernel.dense or mask_grad:
        tensors = q.shape[0] * q.shape[1]
    elif masking.mask is not None:
        tensors = masking.mask.shape[0] * masking.mask.shape[1]
    else:
        return block.q_len
    scores = CPU_SCORES if q.device.type == "cpu" else GPU_SCORES if kernel.dense else GPU_BIAS
    scores //= num_saved_tensors(masking.score)
    return max(1, min(block.q_len, scores // (tensors * block.k_len)))


def _slice_block_rows(block: Block, low: int, rows: int, kernel: Kernel) -> Block:
    """Return the rows [low, low + rows) of a block, clipped to its end."""
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
    """Return (q * sign, sign, positive scale): PyTorch's causal kernel returns NaN for other scales."""
    if scale > 0:
        return q, 1, scale
    sign = -1 if scale < 0 else 0
    return q * sign, sign, -scale if sign else 1.0


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return empty results of ``attend_backward``."""
    args, (mask_grad, *others) = LocalArgs.of(rest)
    dtype = accumulation_dtype(q.dtype)
    dmask = q.new_empty(_grad_shape(args, mask_grad), dtype=dtype)
    return empty_rows_first(q, dtype), *_key_grad_buffers(k, v, dtype, *others[1:]), dmask


def _key_grad_buffers(k: Tensor, v: Tensor, dtype: torch.dtype, packed: str = "") -> tuple[Tensor, Tensor]:
    """Create the buffers of dk and dv: separate, or one for both and an empty tensor."""
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
    """Return the bytes of ``tensors`` score tensors of a strip for a dense kernel; 0 for other kernels."""
    queries, keys = size_hint(q.shape[2]), size_hint(k.shape[2])
    device, of_scores = torch.device("cuda") if q.is_meta else q.device, (args.dropout_p > 0, bool(args.score))
    need = _kernel_key(device, q, v, Kind.FULL, min(queries, keys), args.mask, mask_grad, *of_scores)
    if not expected_kernel(need).dense:
        return 0
    most, heads = CPU_SCORES if device.type == "cpu" else GPU_SCORES, size_hint(q.shape[:2].numel())
    tensors += num_saved_tensors(args.score) > 1  # the intermediate scores of a smaller strip
    return tensors * min(most, heads * queries * keys) * accumulation_dtype(q.dtype).itemsize


def _forward_workspace(workspace: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Return the peak of the kernel's workspace and of the copy of its output, in bytes."""
    args, _ = LocalArgs.of(rest)
    workspace = _score_bytes(q, k, v, args, False, 4 if args.dropout_p else 3) or workspace
    rows = size_hint(q.shape[:3].numel())
    out, lse = rows * size_hint(v.shape[3]) * q.element_size(), rows * accumulation_dtype(q.dtype).itemsize
    return max(workspace + cpu_copy_bytes(q, k, v) + lse, out + lse)


def _backward_workspace(
    workspace: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> int:
    """Return the peak memory of the backward, without its operands and results, in bytes.

    First a kernel has its workspace and its results; then these are cast, or copied to the tensor that is sent. The
    gradients of a single kernel without either are results without a copy. For a zigzag shard each kernel has half of
    the queries, and adds to existing results.
    """
    args, (mask_grad, *others) = LocalArgs.of(rest)
    workspace = _score_bytes(q, k, v, args, mask_grad, 6 if args.score else 5) or workspace
    wide = accumulation_dtype(q.dtype).itemsize // q.element_size()
    upstream, packed = operand_bytes(q, k, v), any(others[1:])
    sent = operand_bytes(k, v) * wide if packed else 0
    moved = upstream if wide > 1 else operand_bytes(k, v) if packed else 0
    if wide > 1 and args.q_span[1] > 1:
        moved = max(moved, (workspace + operand_bytes(q)) // 2 + operand_bytes(k, v))
    return max(workspace + cpu_copy_bytes(q, k, v) + operand_bytes(lse) + sent + upstream - upstream * wide, moved)


@opaque(
    f"attend(Tensor q, Tensor k, Tensor v, {LocalArgs.schema()}, Tensor[]? after=None) -> (Tensor out, Tensor lse)",
    lambda q, k, v, *_: (
        q.new_empty([*q.shape[:3], v.shape[3]]),
        q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
    ),
    replays=False,  # the kernel calls depend on the documents
    inside=_forward_workspace,
)
@_retry_without_fused
def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Compute the softmax average of local queries over local keys.

    The mask has the rows of the local queries: (B | 1, Hq | 1, Sq | 1, global key length | 1). Dropout keeps weights by
    a hash of ``seed``, batch, head, query and key.

    Args:
        q: (B, Hq, Sq, D), any strides.
        k: (B, Hkv, Sk, D), any strides. Hkv divides Hq.
        v: (B, Hkv, Sk, E), any strides.
        *rest: The fields of ``LocalArgs``, then ``after``, which only orders: tensors that are sent or accumulated
            first.

    Returns:
        out (B, Hq, Sq, E) in q's dtype, and lse (B, Hq, Sq), the log-sum-exps of the scaled masked scores in float32 or
        float64. Both are contiguous; 0 and -inf where a query attends to nothing.

    Bytes: none.
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
    """Compute the gradients of ``attend`` over some of the keys, from out and lse over all of them.

    The results of disjoint sets of keys add up exactly.

    Args:
        grad: (B, Hq, Sq, E), the cotangent of out.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, E).
        out: (B, Hq, Sq, E), over all keys.
        lse: (B, Hq, Sq), over all keys.
        *rest: The fields of ``LocalArgs``, then:
            mask_grad: Whether the mask or the tables need a gradient.
            after: As for ``attend``.
            packed: "" or the layout in which dk and dv are sent. They are one tensor (B, Hkv, Sk, D + E) in place of
                dk, and dv is empty (0,). "last": contiguous. "rows": the dim of the keys is outermost in memory.
                "stack": (2, B, Hkv, Sk, D), for equal widths.

    Returns:
        dq, dk, dv with the shapes of q, k, v, heads after the sequence in memory. dmask with the shape of the mask, or
        the gradients of all floating-point tables, concatenated and flat; (0,) without ``mask_grad``. Float32 for half
        types.

    Bytes: none.
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
        upstream, *of_rows = (x.narrow(2, *queries) for x in (grad, out, lse))
        case = masking.kernel_args(block, q.shape[0], scale, kernel)
        case = replace(case, bias_grad=wanted, table_grads=of_tables)
        dq_part, dk_part, dv_part, dbias = kernel.backward(upstream, *_block_operands(q, k, v, block), *of_rows, case)
        dq.add(dq_part, queries)
        dk.add(dk_part, keys)
        dv.add(dv_part, keys)
        if dbias is not None and isinstance(block, Block):
            masking.add_grad(dmask, dbias, block)
    of_queries, *of_keys = (one.total() for one in (dq, dk, dv))
    of_queries = of_queries if sign == 1 else of_queries * sign
    return of_queries, *(of_keys if sent is None else sent), dmask
