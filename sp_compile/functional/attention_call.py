"""Validate and run the call of an attention function on the shards of one rank.

Sizes: B batch, H query heads, Hkv key heads, D head dim, E head dim of values, s queries and t keys of a rank, S
queries and T keys of all ranks. A frame describes which rows of the shards are valid and in which order they are. A
predicate is the text of a mask as a condition on query position q and key position k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.attention.op_args import ShardArgs
from sp_compile.lowering.attention.ring_kernel import RING_GRADIENTS, window_hops
from sp_compile.lowering.base.dtypes import MIN_FILL, has_gradient_dtype
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import LAYOUTS, FrameArg
from sp_compile.lowering.base.library import tag_programs
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes

from .rank_call import STATIC_LAYOUTS, RankCall, check_choice, check_tensors, needs_gradient, shard_frame


@dataclass(frozen=True)
class AttentionOptions:
    """Options that the attention functions share, with the names of their arguments."""

    layout: str  # order of the rows over the ranks, "contiguous" or "zigzag"
    length: int | None  # global query rows without padding; None: no row is padding
    kv_length: int | None  # global key rows without padding; None: no row is padding
    is_causal: bool  # a query attends to keys up to its own position
    window: int | None  # a query attends to keys at a distance below this; None for all
    documents: Tensor | None  # (B | 1, S) integers, replicated: the document of each position
    attn_mask: Tensor | None  # bool, or floats that are added to the scores
    dropout_p: float  # probability of dropping a weight
    seed: Tensor | int | None  # seed of the dropout, equal on all ranks
    scale: float | None  # factor of the scores; None for 1 / sqrt(head_dim)
    sinks: Tensor | None  # one extra score per head in the softmax, without a value
    check: bool  # compare the calls of all ranks

    def predicate_arguments(self) -> dict[str, Any]:
        """Return the mask predicate and the values that it reads, by the names of the fields of `AttentionArgs`.

        Returns:
            The predicate combines `is_causal`, `window` and `documents`. In it, q and k are the positions of a query
            and a key, n0 is the window (in sizes), and row0 and col0 are the documents of the two (in rows and cols).
            Pieces are empty: the operator creates them.
        """
        parts = ["(k <= q)"] if self.is_causal else []
        if self.window is not None:
            parts += ["(q - k < n0)"] if self.is_causal else ["(q - k < n0) & (k - q < n0)"]
        vectors = [] if self.documents is None else [self.documents]
        parts += ["Eq(row0, col0)"] if vectors else []
        sizes = [] if self.window is None else [self.window]
        predicate = " & ".join(parts)
        return {"rows": vectors, "cols": vectors, "pieces": [], "sizes": sizes, "predicate": predicate}


@dataclass(frozen=True)
class AttentionMethod:
    """Implementation of one attention function."""

    name: str  # name of the function
    run: Callable[[AttentionCall, tuple[Any, ...]], Tensor]  # applies the operator to its common arguments
    merges: bool = False  # True if results of key blocks are merged by their log-sum-exp
    skips_steps: bool = False  # True if key blocks outside a causal window are not exchanged


@dataclass(frozen=True)
class AttentionCall(RankCall):
    """Call of an attention function on this rank."""

    function: AttentionMethod  # the function that was called
    q: Tensor  # (B, H, s, D)
    k: Tensor  # (B, Hkv, t, D)
    v: Tensor  # (B, Hkv, t, E)
    ranks: Ranks  # the ranks that share the sequence
    options: AttentionOptions  # the other arguments of the function
    width: int | None  # number of adjacent ranks that exchange heads; None if it is not known
    kv_grads: str  # key of `RING_GRADIENTS`

    @property
    def group(self) -> Ranks:
        """Return the ranks that take part in the call; `RankCall.require` compares their calls.

        Returns:
            The ranks that share the sequence.
        """
        return self.ranks

    def run(self) -> Tensor:
        """Validate the call and run its operator.

        Returns:
            (B, H, s, E), the rows of this rank.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        options, ranks = self.options, self.ranks
        seed = None if options.seed is None else torch.as_tensor(options.seed, device=self.q.device)
        q_frame, k_frame = self.frames()
        shards = ShardArgs(
            mask=options.attn_mask,
            **options.predicate_arguments(),
            seed=seed,
            dropout_p=options.dropout_p,
            scale=options.scale,
            score="",  # only flex_attention has a score function, with heads and tables
            heads=[],
            tables=[],
            sinks=options.sinks,
            lse=False,  # only graphs of the compiler request this and `balance`
            q_frame=q_frame,
            k_frame=k_frame,
            n=ranks.n,
            group=ranks.group,
            balance=False,
        )
        if torch.compiler.is_compiling():  # the groups of the call must exist before a compiled program runs
            _declare_traced_routes(ranks.group, self.width or 1, self.steps())
        return self.function.run(self, (self.q, self.k, self.v, *shards.to_flat()))

    def frames(self) -> tuple[FrameArg, FrameArg]:
        """Return the frames of the queries and of the keys, which exclude padding from the attention.

        Returns:
            Two frame arguments; see `lowering/base/frames.py`.
        """
        n, options = self.ranks.n, self.options
        q_frame = shard_frame(self.q.shape[2], n, options.length, options.layout)
        return q_frame, shard_frame(self.k.shape[2], n, options.kv_length, options.layout)

    def steps(self) -> int:
        """Return the number of key blocks that each rank attends to, its own included.

        Returns:
            The number of ranks on the ring. A function with `skips_steps` needs fewer for a causal window over
            contiguous shards of one length: its own block, and those of the earlier ranks that the window reaches.
        """
        options, n, rows = self.options, self.ranks.n, self.q.shape[2]
        q_frame, k_frame = self.frames()
        is_causal_in_order = options.is_causal and LAYOUTS[options.layout].is_in_order and q_frame == k_frame
        if options.window is not None and self.function.skips_steps and is_causal_in_order:
            return 1 + window_hops(options.window, rows, n)
        return n // (self.width or 1)

    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument; `require` raises the first one.

        Returns:
            SP502 to SP507 for invalid values, and SP451 to SP455 for heads, ranks, layouts and masks.
        """
        yield from self._wrong_types()
        yield from self._wrong_operands()
        yield from self._wrong_layout()
        yield from self._wrong_heads()
        yield from self._wrong_masks()
        yield from self._wrong_dropout()
        yield from self._wrong_sinks()

    def _wrong_types(self) -> Iterator[SpError]:
        """Yield errors for wrong Python types, on which the other checks would raise."""
        options = self.options
        optional = {"documents": options.documents, "attn_mask": options.attn_mask, "sinks": options.sinks}
        given = {name: x for name, x in optional.items() if x is not None}
        yield from check_tensors(q=self.q, k=self.k, v=self.v, **given)
        for name, value in (("length", options.length), ("kv_length", options.kv_length)):
            if value is not None and not isinstance(value, (int, torch.SymInt)):
                yield SpError("SP502", f"{name}: expected an int, got {type(value).__name__}.")
        if not isinstance(options.dropout_p, (int, float, torch.SymFloat)):
            yield SpError("SP502", f"dropout_p: expected a number, got {type(options.dropout_p).__name__}.")

    def _wrong_operands(self) -> Iterator[SpError]:
        """Yield errors for shapes, dtypes and devices of q, k and v."""
        q, k, v = self.q, self.k, self.v
        has_batches = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]
        if not has_batches or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
            expected = "q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E)"
            yield SpError("SP504", f"q, k, v: expected {expected}, got {self._shapes()}.")
        if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
            got = f"{q.dtype}, {k.dtype}, {v.dtype}"
            yield SpError("SP505", f"q, k, v: expected one floating-point dtype, got {got}.")
        if not (q.device == k.device == v.device):
            yield SpError("SP506", f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}.")

    def _wrong_layout(self) -> Iterator[SpError]:
        """Yield errors for an unknown layout, lengths that it cannot split, and more rows than the ranks have."""
        options, n = self.options, self.ranks.n
        yield from check_choice("layout", options.layout, STATIC_LAYOUTS)
        chunks = LAYOUTS[options.layout].chunks
        if self.q.shape[2] % chunks or self.k.shape[2] % chunks:
            expected = f"even lengths for layout={options.layout!r}"
            yield SpError("SP454", f"q, k, v: expected {expected}, got {self._shapes()}.")
        for name, x, length in (("length", self.q, options.length), ("kv_length", self.k, options.kv_length)):
            rows = x.shape[2] * n
            if length is not None and not 0 < length <= rows:
                limits = f"1 to {rows}, the rows of all {n} ranks ({self._shapes()})"
                yield SpError("SP507", f"{name}: expected {limits}, got {length}.")
        # With `is_causal`, padded keys are after all queries; a mask may exclude them.
        may_attend_to_padding = not options.is_causal and options.attn_mask is None
        if may_attend_to_padding and options.length is not None and options.kv_length is None:
            rows = self.q.shape[2] * n
            if self.q.shape[2] == self.k.shape[2] and options.length != rows:
                got = f"{options.length} of {rows} rows"
                yield SpError("SP509", f"kv_length: expected the number of keys without padding, as queries are {got}.")

    def _wrong_heads(self) -> Iterator[SpError]:
        """Yield errors for numbers of heads that key heads or ranks do not divide, and for `kv_grads`."""
        heads, kv_heads, n, width = self.q.shape[1], self.k.shape[1], self.ranks.n, self.width
        if kv_heads == 0 or heads % kv_heads:
            expected = f"a number of key heads that divides the {heads} query heads"
            yield SpError("SP451", f"k: expected {expected}, got {kv_heads} ({self._shapes()}).")
        yield from check_choice("kv_grads", self.kv_grads, tuple(RING_GRADIENTS))
        if width is None:
            yield SpError("SP452", "ulysses: expected the number of ranks that share heads, got None.")
        elif not isinstance(width, (int, torch.SymInt)):
            yield SpError("SP502", f"ulysses: expected an int, got {type(width).__name__}.")
        elif width < 1 or n % width or heads % width:
            expected = f"a number of ranks that share heads and that divides the {n} ranks and the {heads} query heads"
            yield SpError("SP453", f"{self.function.name}: expected {expected}, got {width}.")

    def _wrong_masks(self) -> Iterator[SpError]:
        """Yield errors for `window`, `documents` and `attn_mask`, whose lengths are those of all ranks."""
        options = self.options
        # A frame is [outer, size, start, length, ...]: `length` rows of all ranks, without padding.
        q_length, k_length = (frame[3] for frame in self.frames())
        if options.window is not None and (not isinstance(options.window, int) or options.window < 1):
            expected = "an int of at least 1 (1: only the query's own position)"
            yield SpError("SP507", f"window: expected {expected}, got {options.window}.")
        if options.documents is not None:
            yield from self._wrong_documents(options.documents, q_length, k_length)
        mask, full_shape = options.attn_mask, (*self.q.shape[:2], q_length, k_length)
        if mask is None:
            return
        if mask.ndim != 4 or any(size not in (1, full_size) for size, full_size in zip(mask.shape, full_shape)):
            expected = f"a shape that broadcasts to {list(full_shape)}, with the rows of all ranks"
            yield SpError("SP504", f"attn_mask: expected {expected}, got {list(mask.shape)}.")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            expected = "bool (True: may attend) or floating-point (added)"
            fix = "Pass mask.bool() for a mask of 0 and 1."
            yield SpError("SP505", f"attn_mask: expected {expected}, got {mask.dtype}.", fix)
        # Some functions always merge results of key blocks; all do so with a predicate (causal, window or documents).
        is_merged = self.function.merges or bool(options.predicate_arguments()["predicate"])
        if options.check and is_merged and mask.is_floating_point() and not mask.is_meta and _has_fill_values(mask):
            yield SpError(
                "SP455",
                "attn_mask: expected -inf for pairs that may not attend, got a large finite number, with which blocks "
                "of keys cannot be merged.",
            )

    def _wrong_documents(self, documents: Tensor, q_length: int, k_length: int) -> Iterator[SpError]:
        """Yield errors unless the documents are integers, one for each query and key of all ranks."""
        shape = documents.shape
        if documents.ndim != 2 or shape[0] not in (1, self.q.shape[0]) or {q_length, k_length} != {shape[1]}:
            expected = f"(B|1, S) with S = {q_length} queries and {k_length} keys of all ranks"
            yield SpError("SP504", f"documents: expected {expected}, got {list(shape)}.")
        if has_gradient_dtype(documents):
            yield SpError("SP505", f"documents: expected integers, got {documents.dtype}.")

    def _wrong_dropout(self) -> Iterator[SpError]:
        """Yield errors for the probability and the seed of dropout."""
        p, seed = self.options.dropout_p, self.options.seed
        if not 0 <= p < 1:
            yield SpError("SP507", f"dropout_p: expected 0 <= dropout_p < 1, got {p}.")
        is_scalar = isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.ndim == 0
        if seed is not None and not is_scalar and not isinstance(seed, (Integral, torch.SymInt)):
            got = f"{seed.dtype} {list(seed.shape)}" if isinstance(seed, Tensor) else type(seed).__name__
            yield SpError("SP502", f"seed: expected an int or an int64 tensor of shape (), got {got}.")

    def _wrong_sinks(self) -> Iterator[SpError]:
        """Yield errors unless there is one floating-point sink per query head on the device of q."""
        sinks, heads, device = self.options.sinks, self.q.shape[1], self.q.device
        if sinks is None:
            return
        if sinks.shape != (heads,):
            yield SpError("SP504", f"sinks: expected shape [{heads}], one per query head, got {list(sinks.shape)}.")
        if not sinks.is_floating_point():
            fix = "Convert the sinks with sinks.to(q.dtype)."
            yield SpError("SP505", f"sinks: expected a floating-point dtype, got {sinks.dtype}.", fix)
        if sinks.device != device:
            yield SpError("SP506", f"sinks: expected the device of q, {device}, got {sinks.device}.")

    def _shapes(self) -> str:
        """Return the shapes of q, k and v as text, for errors and `description`."""
        return f"q {list(self.q.shape)}, k {list(self.k.shape)}, v {list(self.v.shape)}"

    def description(self) -> str:
        """Return what must be equal on all ranks, as text that the ranks compare and errors show.

        Returns:
            The shapes, the dtypes, the function, the required gradients and the options, without the seed.
        """
        options, width = self.options, self.width
        grads = [needs_gradient(x) for x in (self.q, self.k, self.v, options.attn_mask, options.sinks)]
        values = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "seed"}
        option_texts = [
            f"{name} {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}={value}"
            for name, value in values.items()
        ]
        ranks = f"{width} x {self.ranks.n // (width or 1)} ranks"
        function = f"{self.function.name} over {ranks}, kv_grads={self.kv_grads}"
        grads_text = f"gradients of q, k, v: {grads[:3]}, of any: {any(grads)}"
        return ", ".join([self._shapes(), str(self.q.dtype), function, grads_text, *option_texts])


def _has_fill_values(mask: Tensor) -> bool:
    """Return True if the mask contains large finite values such as `torch.finfo.min`.

    A float32 log-sum-exp of such values loses the logarithm of their count, so key blocks cannot be merged. A traced
    mask is not read.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(((mask <= -MIN_FILL) & mask.isfinite()).any())


@torch.compiler.assume_constant_result
def _declare_traced_routes(group: str, stride: int, steps: int) -> None:
    """Declare the routes of a traced call, and add the operators' version to the key of torch's caches.

    A route is the communicator of an exchange between some of the ranks. A compiled program may be loaded from a cache
    without tracing, so both must be known before the call runs. The decorator makes Dynamo call this at trace time.

    Args:
        group: The name of the group.
        stride: The number of adjacent ranks that exchange heads.
        steps: The number of key blocks, from `steps`.
    """
    routes.declare_attention_routes(group, stride, steps)
    tag_programs()
