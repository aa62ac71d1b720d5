"""Attention on local shards, by hand: ulysses_attention, ring_attention, hybrid_attention, gathered_attention.

Every rank passes its shard of q, k and v and gets its shard of the result; gradients flow to the shards. All take

    q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E), any strides; H is a multiple of Hkv; the same s, t on all ranks
    mesh        None: the default process group; a ProcessGroup; a DeviceMesh of one axis, of ("ring", "ulysses") axes,
                or with an axis "sp"; or the `Ranks` of one (`lowering/base/ranks.py`)
    layout      "contiguous": rank r of n holds rows r * s ...; "zigzag": chunks r and 2n - 1 - r of 2n (s is even)
    length, kv_length   of the whole sequences, where the last of the n * s and n * t rows are padding, which may hold
                anything: no query attends to them, and what is returned for them is for no loss to use
    is_causal   query i attends to keys 0..i of the whole sequence
    window      and of these (or, without is_causal, of all) only to those less than `window` positions away
    documents   int (B|1, S), whole on every rank: a query attends to keys of its own document
    attn_mask   bool or additive, whole on every rank, broadcast to (B, H, S, T); its gradient is this rank's share
    dropout_p, seed     weights are dropped by a hash of seed, batch, head, query and key: one seed, the same weights on
                any number of ranks. Without one it is drawn from this rank's generator: torch.manual_seed decides
    scale       1 / sqrt(D) if None
    sinks       (H,), floating-point, the same on every rank: a logit of each query head that no key has, which takes
                its share of the weights and gives nothing; its gradient is this rank's share
    check       compare the call over the ranks first (24 bytes a rank, on the CPU), so that calls which do not fit
                raise on every rank instead of hanging. Not done inside torch.compile

and return (B, H, s, E). Modules that keep (B, s, H, D) pass q.transpose(1, 2) and transpose the result: views, which
cost no copy that (B, H, s, D) would not. Under autocast q, k, v are cast as scaled_dot_product_attention casts them.
Raise SpError for shapes, heads, meshes, layouts and options that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.attention.masked_attention import autocast
from sp_compile.lowering.attention.op_args import ShardArgs
from sp_compile.lowering.attention.ring_kernel import RING_GRADIENTS, window_hops
from sp_compile.lowering.base.dtypes import MIN_FILL
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import LAYOUTS, FrameArg
from sp_compile.lowering.base.library import tag_programs
from sp_compile.lowering.base.ranks import Mesh, Ranks, ranks_of
from sp_compile.lowering.comm import routes

from .rank_call import HOLDS_PATTERN, RankCall, check_choice, needs_gradient, shard_frame, unknown_name

sp = torch.ops.sp


@dataclass(frozen=True)
class AttentionOptions:
    """The options of every attention by hand; see `sp_compile.functional.attention_calls`."""

    layout: str = "contiguous"
    length: int | None = None
    kv_length: int | None = None
    is_causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | int | None = None
    scale: float | None = None
    sinks: Tensor | None = None
    check: bool = True

    def predicate_arguments(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int], str]:
        """rows, cols, pieces, sizes and predicate."""
        parts = ["(k <= q)"] if self.is_causal else []
        if self.window is not None:
            parts += ["(q - k < n0)"] if self.is_causal else ["(q - k < n0) & (k - q < n0)"]
        vectors = [] if self.documents is None else [self.documents]
        parts += ["Eq(row0, col0)"] if vectors else []
        sizes = [] if self.window is None else [self.window]
        return vectors, vectors, [], sizes, " & ".join(parts)


OPTION_NAMES = tuple(f.name for f in fields(AttentionOptions))


@dataclass(frozen=True)
class AttentionMethod:
    """A way to split attention, called as its function. run: from a call and what all operators take of it.

    merges: by log-sum-exps, of blocks of keys. skips: it asks no rank for keys that no query of a causal window needs.
    """

    name: str
    run: Callable[[AttentionCall, tuple[Any, ...]], Tensor]
    merges: bool = False
    skips_steps: bool = False


@dataclass(frozen=True)
class AttentionCall(RankCall):
    """This rank's call. width: ranks that share heads; others: names that are no option."""

    function: AttentionMethod
    q: Tensor
    k: Tensor
    v: Tensor
    ranks: Ranks
    options: AttentionOptions
    width: int | None
    kv_grads: str
    rejected_options: Sequence[str] = ()

    @property
    def group(self) -> Ranks:
        return self.ranks

    def run(self) -> Tensor:
        """The attention. Raises SpError for a call that does not fit."""
        self.require()
        given, ranks = self.options, self.ranks
        seed = given.seed if given.seed is None else torch.as_tensor(given.seed, device=self.q.device)
        weights = given.attn_mask, *given.predicate_arguments(), seed, given.dropout_p, given.scale
        shards = ShardArgs(
            *weights, "", [], [], given.sinks, False, *self.frames(), ranks.n, ranks.group, balance=False
        )
        if torch.compiler.is_compiling():
            _declare_routes(ranks.group, self.width or 1, self.steps())
        return self.function.run(self, (self.q, self.k, self.v, *shards.to_flat()))

    def frames(self) -> tuple[FrameArg, FrameArg]:
        """Where the shards of queries and keys lie."""
        n, given = self.ranks.n, self.options
        of_keys = shard_frame(self.k.shape[2], n, given.kv_length, given.layout)
        return shard_frame(self.q.shape[2], n, given.length, given.layout), of_keys

    def steps(self) -> int:
        """How often keys are attended to on their way round: where a way skips, fewer times for a causal window."""
        given, n, rows = self.options, self.ranks.n, self.q.shape[2]
        q_frame, k_frame = self.frames()
        skips = (
            self.function.skips_steps and given.is_causal and LAYOUTS[given.layout].is_in_order and q_frame == k_frame
        )
        if not skips or given.window is None:
            return n // (self.width or 1)
        return 1 + window_hops(given.window, rows, n)

    def errors(self) -> Iterator[SpError]:
        for name in self.rejected_options:
            yield unknown_name("option", name, OPTION_NAMES)
        yield from self._wrong_operands()
        yield from self._wrong_layout()
        yield from self._wrong_heads()
        yield from self._wrong_masks()
        yield from self._wrong_dropout()
        yield from self._wrong_sinks()

    def _wrong_operands(self) -> Iterator[SpError]:
        q, k, v, shapes = self.q, self.k, self.v, self._shapes()
        fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]
        if not fits or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
            wanted = "q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E)"
            yield SpError("SP504", f"q, k, v: expected {wanted}, got {shapes}.")
        if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
            got = f"{q.dtype}, {k.dtype}, {v.dtype}"
            yield SpError("SP505", f"q, k, v: expected one floating-point dtype, got {got}.")
        if not (q.device == k.device == v.device):
            yield SpError("SP506", f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}.")

    def _wrong_layout(self) -> Iterator[SpError]:
        given, n = self.options, self.ranks.n
        yield from check_choice("layout", given.layout, HOLDS_PATTERN)
        chunks = LAYOUTS[given.layout].chunks
        if self.q.shape[2] % chunks or self.k.shape[2] % chunks:
            yield SpError("SP454", f"layout: expected even lengths for {given.layout!r}, got {self._shapes()}.")
        for name, x, length in (("length", self.q, given.length), ("kv_length", self.k, given.kv_length)):
            rows = x.shape[2] * n
            if length is not None and not 0 < length <= rows:
                limits = f"1 to {rows}, the rows of all {n} ranks ({self._shapes()})"
                yield SpError("SP507", f"{name}: expected {limits}, got {length}.")

    def _wrong_heads(self) -> Iterator[SpError]:
        heads, kv_heads, n, width = self.q.shape[1], self.k.shape[1], self.ranks.n, self.width
        if kv_heads == 0 or heads % kv_heads:
            divisor = f"a divisor of the {heads} query heads"
            yield SpError("SP451", f"k: expected {divisor} as key heads, got {kv_heads} ({self._shapes()}).")
        yield from check_choice("kv_grads", self.kv_grads, tuple(RING_GRADIENTS))
        if width is None:
            yield SpError("SP452", "ulysses: expected the number of ranks that share heads, got None.")
        elif width < 1 or n % width or heads % width:
            yield SpError(
                "SP453",
                f"{self.function.name}: expected a divisor of the {n} ranks and the {heads} query heads as ranks that "
                f"share heads, got {width}.",
            )

    def _wrong_masks(self) -> Iterator[SpError]:
        options, lengths = self.options, [length for _, _, _, length, *_ in self.frames()]
        if options.window is not None and (not isinstance(options.window, int) or options.window < 1):
            expected = "an int of at least 1, each query's own position"
            yield SpError("SP507", f"window: expected {expected}, got {options.window}.")
        x = options.documents
        if x is not None and (x.ndim != 2 or x.shape[0] not in (1, self.q.shape[0]) or {*lengths} != {x.shape[1]}):
            yield SpError(
                "SP504",
                f"documents: expected (B|1, S) with S = {lengths[0]} queries and {lengths[1]} keys of all ranks, got "
                f"{list(x.shape)}.",
            )
        if x is not None and (x.is_floating_point() or x.is_complex()):
            yield SpError("SP505", f"documents: expected integers, got {x.dtype}.")
        full, x = (*self.q.shape[:2], *lengths), options.attn_mask
        if x is None:
            return
        if x.ndim != 4 or any(size not in (1, wanted) for size, wanted in zip(x.shape, full)):
            wanted = f"a shape that broadcasts to {list(full)}, with the rows of all ranks"
            yield SpError("SP504", f"attn_mask: expected {wanted}, got {list(x.shape)}.")
        if x.dtype != torch.bool and not x.is_floating_point():
            wanted = "bool (True: may attend) or floating-point (added)"
            yield SpError("SP505", f"attn_mask: expected {wanted}, got {x.dtype}.")
        merged = self.function.merges or bool(options.predicate_arguments()[-1])
        if options.check and merged and x.is_floating_point() and not x.is_meta and _has_fills(x):
            yield SpError(
                "SP455",
                "attn_mask: large finite numbers are not supported, as their log-sum-exps cannot be merged over "
                "blocks of keys.",
            )

    def _wrong_dropout(self) -> Iterator[SpError]:
        p, seed = self.options.dropout_p, self.options.seed
        if not 0 <= p < 1:
            yield SpError("SP507", f"dropout_p: expected 0 <= dropout_p < 1, got {p}.")
        if isinstance(seed, Tensor) and (seed.dtype != torch.int64 or seed.ndim):
            got = f"{seed.dtype} {list(seed.shape)}"
            yield SpError("SP502", f"seed: expected an int or an int64 tensor of shape (), got {got}.")

    def _wrong_sinks(self) -> Iterator[SpError]:
        x, heads = self.options.sinks, self.q.shape[1]
        if x is not None and (x.shape != (heads,) or not x.is_floating_point() or x.device != self.q.device):
            yield SpError(
                "SP504",
                f"sinks: expected one floating-point number for each of the {heads} query heads, on {self.q.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}.",
            )

    def _shapes(self) -> str:
        return f"q {list(self.q.shape)}, k {list(self.k.shape)}, v {list(self.v.shape)}"

    def description(self) -> str:
        grads = [needs_gradient(x) for x in (self.q, self.k, self.v, self.options.attn_mask, self.options.sinks)]
        given = {name: getattr(self.options, name) for name in OPTION_NAMES if name != "seed"}
        options = [f"{n} {list(x.shape)}" if isinstance(x, Tensor) else f"{n}={x}" for n, x in given.items()]
        ranks = f"{self.width} x {self.ranks.n // (self.width or 1)} ranks"
        how = f"{self.function.name} over {ranks}, kv_grads={self.kv_grads}"
        wants = f"gradients of q, k, v: {grads[:3]}, of any: {any(grads)}"
        return ", ".join([self._shapes(), str(self.q.dtype), how, wants, *options])


def _has_fills(mask: Tensor) -> bool:
    """Numbers such as finfo.min: a float32 has lost the logarithm of how many there are."""
    if torch.compiler.is_compiling():
        return False
    return bool(((mask <= -MIN_FILL) & mask.isfinite()).any())


def _run_hybrid(call: AttentionCall, args: tuple[Any, ...]) -> Tensor:
    return sp.hybrid_attention(*args, call.width, call.kv_grads)


def _run_ring(call: AttentionCall, args: tuple[Any, ...]) -> Tensor:
    return sp.ring_attention(*args, call.steps(), call.kv_grads)


ULYSSES_FUNCTION, HYBRID_FUNCTION = (
    AttentionMethod("ulysses_attention", _run_hybrid),
    AttentionMethod("hybrid_attention", _run_hybrid, merges=True),
)
RING_FUNCTION = AttentionMethod("ring_attention", _run_ring, merges=True, skips_steps=True)
GATHERED_FUNCTION = AttentionMethod("gathered_attention", lambda call, args: sp.gathered_attention(*args))


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Heads are exchanged for sequence: two all-to-alls. The ranks must divide the query heads (arXiv:2309.14509)."""
    ranks = ranks_of(mesh)
    return _call_attention(ULYSSES_FUNCTION, q, k, v, ranks, options, ranks.n)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, kv_grads: str = "travel", **options: Any
) -> Tensor:
    """Keys and values go round in n - 1 shifts, or as many as a causal window needs (arXiv:2310.01889); any heads.

    kv_grads: "travel", gradients of keys and values go round behind them; "scatter", they go home in one exchange.
    """
    return _call_attention(RING_FUNCTION, q, k, v, ranks_of(mesh), options, 1, kv_grads)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    ulysses: int | None = None,
    kv_grads: str = "travel",
    **options: Any,
) -> Tensor:
    """Ulysses between `ulysses` neighbouring ranks, a ring between their neighbourhoods (arXiv:2405.07719).

    ulysses: a divisor of n and of the query heads; that of the mesh's "ulysses" axis if None. One rank needs none.
    """
    ranks = ranks_of(mesh)
    width = 1 if ranks.n == 1 else ranks.ulysses if ulysses is None else ulysses
    return _call_attention(HYBRID_FUNCTION, q, k, v, ranks, options, width, kv_grads)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Keys and values are gathered, and gathered again in the backward; any number of heads."""
    return _call_attention(GATHERED_FUNCTION, q, k, v, ranks_of(mesh), options, 1)


def _call_attention(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    options: Mapping[str, Any],
    width: int | None,
    kv_grads: str = "travel",
) -> Tensor:
    others = [name for name in options if name not in OPTION_NAMES]
    given = AttentionOptions(**{name: value for name, value in options.items() if name in OPTION_NAMES})
    if given.attn_mask is not None and given.attn_mask.ndim < 4:
        given = replace(given, attn_mask=given.attn_mask[(None,) * (4 - given.attn_mask.ndim)])
    q, k, v = autocast(q, k, v)
    if given.attn_mask is not None:
        given = replace(given, attn_mask=autocast(given.attn_mask)[0])
    call = AttentionCall("attention", given.check, method, q, k, v, ranks, given, width, kv_grads, others)
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call.run()
    with torch.autocast(device, enabled=False):
        return call.run()


@torch.compiler.assume_constant_result
def _declare_routes(group: str, stride: int, steps: int) -> None:
    """A compiled program may come from a cache, untraced: its routes are known then, and it was made of these ops."""
    routes.declare_attention_routes(group, stride, steps)
    tag_programs()
