"""Compute attention of local queries over local keys: the opaque operators attend and attend_backward.

    mask of the call  ->  plan of blocks, some FULL, CAUSAL or MASKED, none empty  ->  one kernel call per block
                      ->  merge of the results by log-sum-exp

They read the rank, and the vectors that masks compare (documents, positions), at run time, so their Python bodies can
skip blocks in which no pair attends. The graph that contains them is equal on every rank.

    block          a rectangle of local queries x local keys, with a `Kind`: the form of its mask (``masks/blocks.py``)
    packed call    one kernel call for several sequences, such as documents, each with a window
    window         a range of keys around the position of each query; a BAND is a block with a window
    strip          kernel calls with the same queries, whose results are merged
    fill           a large finite score in place of -inf, which a score function may return
    dmask          the gradient of the tensor mask, or the flat one of the tables that a score function indexes
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.masks.blocks import FULL_WINDOW, Block, Kind, PackedCall, Window
from sp_compile.lowering.masks.score import may_have_fills, num_saved_tensors
from sp_compile.lowering.torch_compat import size_hint

from .kernel_args import Kernel, KernelKey, cpu_copy_bytes, operand_bytes
from .kernels import expected_kernel, kernel_for, retry_without_flex
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
BlockCall = tuple[Block, Kernel]
PackedKernelCall = tuple[PackedCall, Kernel]
QueryStrip = list[tuple[Block | PackedCall, Kernel]]  # calls with the same queries, whose results are merged


def dmask_shape(args: LocalArgs, is_needed: bool) -> Sequence[int]:
    """Return the shape of dmask, a result of attend_backward: the gradient of the tensor mask, or of all score tables.

    Those of tables, the tensors that a score function indexes, are flat in one dim. (0,) if no gradient is needed.
    """
    if not is_needed:
        return (0,)
    return (args.num_learned(),) if args.mask is None else args.mask.shape


def _kernel_key(
    device: torch.device, q: Tensor, v: Tensor, rows: int, mask: Tensor | None, mask_grad: bool, dropout: bool,
    score: bool,
) -> KernelKey:  # fmt: skip
    """Return the key by which `kernel_for` selects the kernel of a block (queries x keys) without a predicate.

    Args:
        device: The device of the call.
        q: The queries.
        v: The values.
        rows: The number of queries or of keys, the smaller one.
        mask: A tensor mask, bool or additive.
        mask_grad: Whether the mask needs a gradient.
        dropout: Whether there is dropout.
        score: Whether there is a score function.
    """
    bias = None if mask is None or mask.dtype == torch.bool else mask.dtype
    kind = Kind.FULL if mask is None or bias is not None else Kind.MASKED  # an additive mask excludes no pair
    head_dim = max(q.shape[3], v.shape[3])
    q_rows, k_rows = math.prod(q.shape[:3]), v.shape[0] * v.shape[2]
    # Elements of the largest operand: as it is, and with key heads repeated to the query heads, as some kernels need.
    sizes = [head_dim * max(q_rows, k_rows * key_heads) for key_heads in (v.shape[1], q.shape[1])]
    elements, repeated_elements = (size if isinstance(size, int) else 0 for size in sizes)  # a symbol: unknown
    return KernelKey(
        device, q.dtype, kind, head_dim, rows, dropout=dropout, score=score, bias=bias, bias_grad=mask_grad,
        elements=elements, repeated_elements=repeated_elements,
    )  # fmt: skip


class KernelSelector:
    """Kernel selection for the blocks and packed calls of one attention."""

    def __init__(self, q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> None:
        """Store the properties of the attention by which kernels are selected.

        Args:
            q: The queries.
            v: The values.
            masking: The mask, and its plan: the blocks (queries x keys) in which pairs attend.
            mask_grad: Whether the mask needs a gradient.
        """
        dropout, score = masking.dropout is not None, bool(masking.score)
        # `select` replaces rows=0 by the rows of a block.
        self._key = _kernel_key(q.device, q, v, 0, masking.mask, mask_grad, dropout, score)
        self._plan, self._has_mask = masking.plan, masking.mask is not None
        self._batch, heads, self._rows, _ = q.shape
        self._row_bytes = heads * self._key.head_dim * q.element_size()  # of a row in all heads

    def select(self, kind: Kind, rows: int, window: Window = FULL_WINDOW, is_square: bool = False) -> Kernel:
        """Return the kernel of a block of this kind.

        Args:
            kind: The kind of the block by the predicate, without the tensor mask.
            rows: The number of queries or of keys, the smaller one.
            window: The window of a BAND or PACKED call.
            is_square: Whether the block, or each of its sequences, has the same number of queries and keys.
        """
        if self._key.kind is Kind.MASKED:  # a bool tensor mask applies to every block
            kind = Kind.MASKED
        return kernel_for(self._key._replace(kind=kind, rows=rows, window=window, is_square=is_square))

    def _select_for(self, call: Block | PackedCall) -> Kernel:
        """Return the kernel of a block or of a packed call, from its sizes and window."""
        queries, keys = call.query_rows[1], call.key_rows[1]
        if isinstance(call, PackedCall):  # `is_square`, which visits all sequences, matters only with a left limit
            return self.select(call.kind, queries, call.window, call.window.left is not None and call.is_square)
        return self.select(call.kind, min(queries, keys), call.window, queries == keys)

    def select_all(self) -> tuple[list[PackedKernelCall], list[BlockCall]]:
        """Return the calls that the attention runs, with their kernels: packed calls, and blocks.

        A packed call computes several sequences, such as documents, each with a window (a range of keys around each
        query). Windows are used only if all kernels that would run them support windows, which kernels with mask
        tensors (`can_mask`) do not: if one of these is selected, the blocks of the plan without windows are
        returned, and no packed calls.
        """
        if not self._has_mask and not self.select(Kind.PACKED, self._rows).can_mask:
            packed = [(call, self._select_for(call)) for call in self._plan.packed]  # for kernels with windows
            blocks = [(block, self._select_for(block)) for block in self._plan.others]  # blocks in no packed call
            window_kernels = [kernel for _, kernel in packed]
            window_kernels += [kernel for block, kernel in blocks if block.kind is not Kind.MASKED]  # no window
            if not any(kernel.can_mask for kernel in window_kernels):
                return [*self._split_by_length(packed, len(blocks))], blocks
        return [], [(block, self._select_for(block)) for block in self._plan.blocks]

    def _split_by_length(self, packed: list[PackedKernelCall], other_calls: int) -> Iterator[PackedKernelCall]:
        """Yield the packed calls, split by sequence length where a kernel pads the sequences of a call to the longest.

        Args:
            packed: The packed calls and their kernels.
            other_calls: The number of other calls of the attention.
        """
        for kernel, group in groupby(packed, key=lambda pair: pair[1]):
            calls = tuple(call for call, _ in group)
            row_bytes = self._row_bytes if kernel.pads else None
            yield from ((call, kernel) for call in split_by_length(calls, self._batch, row_bytes, other_calls))


def _query_strips(q: Tensor, v: Tensor, masking: CallMask, mask_grad: bool) -> Iterator[QueryStrip]:
    """Yield the kernel calls of an attention as strips: lists of calls with the same queries, to merge their results.

    The calls are those of the plan, except in three cases. If blocks need tensor masks and a fused kernel can evaluate
    the predicate instead, one call computes all pairs. If a score function may return fills (large finite scores in
    place of -inf), results cannot be merged, so that all keys of a query are in one block. If a kernel would create too
    large tensors for a strip, the strip is cut into several with fewer queries.

    Args:
        q: The queries.
        v: The values.
        masking: The mask, its plan of blocks, and the score function.
        mask_grad: Whether the mask needs a gradient.
    """
    selector = KernelSelector(q, v, masking, mask_grad)
    packed_calls, block_calls = selector.select_all()
    if any(kernel.can_mask for _, kernel in block_calls):
        all_pairs = Block(0, q.shape[2], 0, v.shape[2], Kind.MASKED)
        kernel = selector.select(all_pairs.kind, min(all_pairs.q_len, all_pairs.k_len))
        if kernel.fused:
            yield [(all_pairs, kernel)]
            return
    if may_have_fills(masking.score):
        block_calls = list(_merge_same_queries(block_calls, masking.predicate, selector))
    yield from (QueryStrip([call]) for call in packed_calls)
    # Blocks with the same queries are consecutive. A BAND is not merged with blocks for kernels without windows.
    for _, group in groupby(block_calls, key=lambda call: (call[0].query_rows, call[0].kind is Kind.BAND)):
        calls = list(group)
        # A kernel without tensor masks has no tensors that grow with the queries, so its calls are not cut. Nor could
        # it run the lower rows of a causal block alone: the first of them attends to several keys.
        uncut: QueryStrip = [call for call in calls if not call[1].can_mask]
        if uncut:
            yield uncut
        strip = [call for call in calls if call[1].can_mask]
        if strip:
            rows = min(_max_strip_rows(q, masking, mask_grad, block, kernel) for block, kernel in strip)
            for low in range(0, strip[0][0].q_len, rows):
                yield [(_slice_block_rows(block, low, rows, kernel), kernel) for block, kernel in strip]


def _merge_same_queries(calls: Sequence[BlockCall], predicate: str, selector: KernelSelector) -> Iterator[BlockCall]:
    """Yield one MASKED block, with its kernel, in place of all blocks with the same queries.

    It has all keys from the first to the last of these blocks, and evaluates the predicate for each pair.
    """
    for _, group in groupby(calls, key=lambda call: call[0].query_rows):
        blocks = [block for block, _ in group]
        first, low = blocks[0], min(block.k_off for block in blocks)
        keys = max(block.k_off + block.k_len for block in blocks) - low
        merged = Block(*first.query_rows, low, keys, Kind.MASKED, (predicate,) if predicate else ())
        yield merged, selector.select(Kind.MASKED, min(first.q_len, keys))


def _max_strip_rows(q: Tensor, masking: CallMask, mask_grad: bool, block: Block, kernel: Kernel) -> int:
    """Return the maximum number of query rows of one kernel call, so that its largest tensors are not too large.

    These are the scores of a dense kernel, or the tensor mask and its gradient. Without either, it is all rows.
    """
    # The number of (rows, keys) matrices: one per batch entry and head, unless a mask broadcasts.
    if kernel.dense or mask_grad:
        matrices = q.shape[0] * q.shape[1]
    elif masking.mask is not None:
        matrices = masking.mask.shape[0] * masking.mask.shape[1]
    else:
        return block.q_len
    max_elements = GPU_SCORES if kernel.dense else GPU_BIAS
    if q.device.type == "cpu":
        max_elements = CPU_SCORES
    max_elements //= num_saved_tensors(masking.score)  # a score function has several tensors of this size
    return max(1, min(block.q_len, max_elements // (matrices * block.k_len)))


def _slice_block_rows(block: Block, low: int, rows: int, kernel: Kernel) -> Block:
    """Return the part of a block with its query rows [low, low + rows), or fewer at its end.

    A part of a causal block has fewer keys, and its last query attends to the last key. Only some kernels compute this
    form of causal masks; others need a tensor mask.
    """
    if rows >= block.q_len:
        return block
    rows = min(rows, block.q_len - low)
    sliced = block._replace(q_off=block.q_off + low, q_len=rows)
    if block.kind is not Kind.CAUSAL:
        return sliced
    # Its last query is row low + rows - 1 of the block, which attends to the keys [0, low + rows).
    return sliced._replace(kind=Kind.CAUSAL if kernel.aligned_at_end else Kind.MASKED, k_len=low + rows)


def _block_operands(q: Tensor, k: Tensor, v: Tensor, block: Block | PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, k and v with the block's rows, the operands of its kernel."""
    return q.narrow(2, *block.query_rows), k.narrow(2, *block.key_rows), v.narrow(2, *block.key_rows)


def _split_scale_sign(q: Tensor, scale: float) -> tuple[Tensor, int, float]:
    """Return (signed q, sign, positive scale) with signed q = sign * q, and signed q * positive scale = q * scale.

    PyTorch's causal kernel returns NaN for scales that are not positive. A scale of 0 becomes a sign of 0 and a scale
    of 1. The backward multiplies dq by the sign. Example: a scale of -0.5 gives (-q, -1, 0.5).
    """
    if scale > 0:
        return q, 1, scale
    sign = -1 if scale < 0 else 0
    return q * sign, sign, -scale if sign else 1.0


def _parse_backward(arguments: Sequence[Any]) -> tuple[LocalArgs, bool, str]:
    """Return (LocalArgs, mask_grad, packed) of the arguments after lse of ``attend_backward``, which documents them.

    ``attend_backward_parts`` has no argument ``packed``; for its arguments, the returned packed is "".
    """
    args, (mask_grad, *others) = LocalArgs.of(arguments)
    packed = next((x for x in others if isinstance(x, str)), "")  # the only string among the others
    return args, mask_grad, packed


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return empty results of ``attend_backward``, for fake tensors."""
    (args, mask_grad, packed), dtype = _parse_backward(arguments), accumulation_dtype(q.dtype)
    dmask = q.new_empty(dmask_shape(args, mask_grad), dtype=dtype)
    return empty_rows_first(q, dtype), *_key_grad_buffers(k, v, dtype, packed), dmask


def _key_grad_buffers(k: Tensor, v: Tensor, dtype: torch.dtype, packed: str) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the results dk and dv: separate ones, or one for both and a tensor (0,).

    The one for both is sent without a copy. ``packed`` is its layout: "" for separate tensors; "stack" (2, B, Hkv, Sk,
    D); "last" (B, Hkv, Sk, D + E), contiguous; "rows" the same shape with the keys outermost in memory.
    """
    if not packed:
        return empty_rows_first(k, dtype), empty_rows_first(v, dtype)
    batch, heads, rows, width = k.shape
    if packed == "stack":
        both = k.new_empty((2, *k.shape), dtype=dtype)
    elif packed == "rows":
        both = k.new_empty((rows, batch, heads, width + v.shape[3]), dtype=dtype).permute(1, 2, 0, 3)
    else:
        both = k.new_empty((batch, heads, rows, width + v.shape[3]), dtype=dtype)
    return both, k.new_empty((0,), dtype=dtype)


def _score_bytes(q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool, num_tensors: int) -> int:
    """Return the bytes of the score tensors that one kernel call has at a time if the kernel is dense; else 0.

    A dense kernel computes the matrix of scores. For tensors on the meta device, the kernel of a GPU is assumed.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        args: The arguments of the attention.
        mask_grad: Whether the mask needs a gradient.
        num_tensors: The number of tensors of the size of the scores.
    """
    queries, keys = size_hint(q.shape[2]), size_hint(k.shape[2])
    device, has_dropout = torch.device("cuda") if q.is_meta else q.device, args.dropout_p > 0
    key = _kernel_key(device, q, v, min(queries, keys), args.mask, mask_grad, has_dropout, bool(args.score))
    if not expected_kernel(key).dense:
        return 0
    max_scores = CPU_SCORES if device.type == "cpu" else GPU_SCORES
    scores = min(max_scores, size_hint(math.prod(q.shape[:2])) * queries * keys)
    # The intermediate scores of a score function count as one: strips then have fewer rows (`_max_strip_rows`).
    num_tensors += 1 if num_saved_tensors(args.score) > 1 else 0
    return num_tensors * scores * accumulation_dtype(q.dtype).itemsize


def _forward_workspace(workspace: int, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> int:
    """Return the peak memory of the forward, without its operands and results, in bytes, for estimates.

    The peak is during a kernel call, with its workspace, copies of operands and its own lse, or after it, when its out
    and lse are copied to the results. ``workspace`` is that of a kernel that stores no scores.
    """
    args, _ = LocalArgs.of(arguments)
    num_score_tensors = 4 if args.dropout_p else 3  # of a dense kernel at a time
    workspace = _score_bytes(q, k, v, args, mask_grad=False, num_tensors=num_score_tensors) or workspace
    rows = size_hint(math.prod(q.shape[:3]))
    out_bytes = rows * size_hint(v.shape[3]) * q.element_size()
    lse_bytes = rows * accumulation_dtype(q.dtype).itemsize
    return max(workspace + cpu_copy_bytes(q, k, v) + lse_bytes, out_bytes + lse_bytes)


def backward_workspace(
    workspace: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> int:
    """Return the peak memory of the backward, without its operands and results, in bytes, for estimates.

    The peak is at one of two moments, during the kernel call or after it. ``workspace`` is that of a kernel that stores
    no scores. The caller adds the bytes of the results.
    """
    args, mask_grad, packed = _parse_backward(arguments)
    num_score_tensors = 6 if args.score else 5  # of a dense kernel at a time
    workspace = _score_bytes(q, k, v, args, mask_grad, num_score_tensors) or workspace
    widening = accumulation_dtype(q.dtype).itemsize // q.element_size()  # 2 for half types, else 1
    grad_bytes, key_grad_bytes = operand_bytes(q, k, v), operand_bytes(k, v)  # of the kernel, in q's dtype
    sent_bytes = key_grad_bytes * widening if packed else 0  # of the packed dk and dv
    result_bytes = grad_bytes * widening  # which the caller adds, although they do not exist during the kernel call
    in_kernel = workspace + cpu_copy_bytes(q, k, v) + operand_bytes(lse) + sent_bytes + grad_bytes - result_bytes
    after_kernel = 0  # bytes of the kernel's gradients that exist besides the results
    if widening > 1:  # all are cast to a wider dtype
        after_kernel = grad_bytes
    elif packed:  # dk and dv are copied to the packed tensor
        after_kernel = key_grad_bytes
    is_zigzag = args.q_span[1] > 1  # the number of chunks of a shard
    # A second call, for the other half of the queries, adds to existing results: workspace, dq and dk, dv of this call.
    if widening > 1 and is_zigzag:
        after_kernel = max(after_kernel, (workspace + operand_bytes(q)) // 2 + key_grad_bytes)
    return max(in_kernel, after_kernel)


@opaque(
    f"attend(Tensor q, Tensor k, Tensor v, {LocalArgs.schema()}, Tensor[]? after=None, bool filled=True) "
    "-> (Tensor out, Tensor lse)",
    lambda q, k, v, *_: (
        q.new_empty([*q.shape[:3], v.shape[3]]),
        q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
    ),
    replays=False,  # the kernel calls depend on the documents
    inside=_forward_workspace,
)
@retry_without_flex
def attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the softmax average of local queries over local keys: the attention kernel of one rank.

    It runs one kernel per block of queries and keys in which pairs attend, and merges their results. The mask has the
    rows of the local queries: (B | 1, Hq | 1, Sq | 1, global key length | 1). Dropout keeps weights by a hash of
    ``seed``, batch, head, query and key.

    Args:
        q: (B, Hq, Sq, D), any strides.
        k: (B, Hkv, Sk, D), any strides. Hkv divides Hq.
        v: (B, Hkv, Sk, E), any strides.
        *arguments: The fields of ``LocalArgs``, then:
            after: Tensors that must be sent or accumulated before this call. They are not read.
            filled: If False, out is undefined before the first and after the last row with keys, as for ``merge_into``.

    Returns:
        out (B, Hq, Sq, E) in q's dtype, and lse (B, Hq, Sq), the log-sum-exps of the scaled masked scores in float32 or
        float64. Both are contiguous; 0 and -inf where a query attends to nothing.

    Bytes: none.
    """
    args, others = LocalArgs.of(arguments)
    q, _, scale = _split_scale_sign(q, args.scale)
    masking, accumulator = CallMask.of(q, k, args), SoftmaxAccumulator(q, v.shape[3])
    for strip in _query_strips(q, v, masking, mask_grad=False):
        results = [
            kernel.forward(*_block_operands(q, k, v, block), masking.kernel_args(block, scale, kernel))
            for block, kernel in strip
        ]
        # The blocks of a strip have the same queries and different keys.
        out, lse = reduce(lambda merged, result: merge(*merged, *result), results)
        accumulator.add(out, lse, strip[0][0].query_rows)
    return accumulator.total(filled=others[1] if len(others) > 1 else True)


@opaque(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{LocalArgs.schema()}, bool mask_grad, Tensor[]? after=None, str packed='') "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    _fake_backward,
    replays=False,
    inside=backward_workspace,
)
@retry_without_flex
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
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
        *arguments: The fields of ``LocalArgs``, then:
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
    (args, mask_grad, packed), dtype = _parse_backward(arguments), accumulation_dtype(q.dtype)
    # Accumulators of the results; packed dk and dv are views of the tensor that is sent.
    key_buffers = _key_grad_buffers(k, v, dtype, packed) if packed else None
    dk_buffer, dv_buffer = (None, None) if key_buffers is None else split_keys_values(key_buffers[0], k, v)
    dq, dk, dv = GradAccumulator(q, dtype), GradAccumulator(k, dtype, dk_buffer), GradAccumulator(v, dtype, dv_buffer)
    # The sign of the scale: the kernel receives q * sign, because its scale must be positive.
    sign, dmask = sum_gradients((grad, q, k, v, out, lse), args, mask_grad, (dq, dk, dv))
    q_total, *key_totals = (accumulator.total() for accumulator in (dq, dk, dv))
    q_total = q_total if sign == 1 else q_total * sign
    return q_total, *(key_totals if key_buffers is None else key_buffers), dmask


def sum_gradients(
    operands: Sequence[Tensor], args: LocalArgs, mask_grad: bool, accumulators: Sequence[Any]
) -> tuple[int, Tensor]:
    """Run the kernels of a backward, and add their gradients of q, k and v to one accumulator each.

    Args:
        operands: (grad, q, k, v, out, lse) of ``attend_backward``.
        args: Its arguments.
        mask_grad: Whether the mask or the tables need a gradient.
        accumulators: Three objects with a method add(part, rows).

    Returns:
        The sign by which the sum of dq must be multiplied, and dmask. PyTorch's causal kernel requires a positive
        scale: for a negative one, kernels get -q, so that they return -dq. For a scale of 0, the sign is 0.
    """
    grad, q, k, v, out, lse = operands
    q, sign, scale = _split_scale_sign(q, args.scale)
    masking = CallMask.of(q, k, args)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    dmask = q.new_zeros(dmask_shape(args, mask_grad), dtype=accumulation_dtype(q.dtype))
    # Without a tensor mask, dmask is the flat gradient of the tables, to whose views kernels add.
    table_views = enumerate(args.split_tables(dmask) if mask_grad else [])
    table_grads = {f"table{i}": x for i, x in table_views if x is not None}
    bias_grad = args.mask is not None and mask_grad
    for block, kernel in (call for strip in _query_strips(q, v, masking, bias_grad) for call in strip):
        queries, keys = block.query_rows, block.key_rows
        block_grad, *saved = (x.narrow(2, *queries) for x in (grad, out, lse))
        kernel_args = masking.kernel_args(block, scale, kernel)
        kernel_args = replace(kernel_args, bias_grad=bias_grad, table_grads=table_grads)
        *parts, dbias = kernel.backward(block_grad, *_block_operands(q, k, v, block), *saved, kernel_args)
        for accumulator, part, rows in zip(accumulators, parts, (queries, keys, keys)):
            accumulator.add(part, rows)
        # The gradient of a block's part of an additive mask; packed calls, which are no `Block`, have no tensor mask.
        if dbias is not None and isinstance(block, Block):
            masking.add_grad(dmask, dbias, block)
    return sign, dmask
