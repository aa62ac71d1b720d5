"""Store a rank's rows of a cache of keys and values, and attend to the rows of all ranks.

Each rank stores some positions of each layer. A decoding step computes its queries on every rank. They attend to the
rows of the rank, and the partial results of the ranks are merged by their log-sum-exps: one all-gather a layer of
(head dim + 1) numbers for each query and head. New positions go to the ranks in turn.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from sp_compile.lowering.attention.kernel_args import KernelArgs, KernelKey
from sp_compile.lowering.attention.kernels import kernel_for
from sp_compile.lowering.attention.merge_blocks import add_sinks, merge
from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import own_positions
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.torch_compat import pytree

ROWS_ATTENTION = "sp_compile_rows"  # name of `attend_to_rows` in transformers' table of attention functions
MAX_SCORES = 2**26  # elements of the mask, and of scores, of one kernel call
# Arguments of attention functions of transformers that do not change the result: the mask tensor has their effect, or
# they are for training, packed sequences without a cache, or outputs of the model.
WITHOUT_EFFECT = frozenset(
    "sliding_window is_causal position_ids cache_position cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "use_cache cache past_key_values output_hidden_states return_dict logits_to_keep num_items_in_batch".split()
)


class CachedRows(Tensor):
    """Keys or values of some positions, which only `attend_to_rows` may read: for others they are incomplete."""

    layer: RowsLayer  # the layer that stores them
    positions: Tensor  # int64 (rows,), position of each row
    start: int  # first position that a mask describes
    plain: Tensor  # the rows as a regular tensor

    @classmethod
    def of(cls, rows: Tensor, layer: RowsLayer, positions: Tensor, start: int) -> CachedRows:
        """Return a tensor (B, H, rows, D) as `CachedRows`, which only `attend_to_rows` may read.

        Args:
            rows: The rows.
            layer: The layer that stores them.
            positions: int64 (rows,), position of each row.
            start: The first position that a mask describes.

        Returns:
            A view of the rows.
        """
        view = rows.as_subclass(cls)
        view.layer, view.positions, view.start, view.plain = layer, positions, start, rows
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a size or another property; raise SpError for an operation, whose result would be incomplete.

        Raises:
            SpError: The model applies an operation (SP843).
        """
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # a property, such as x.shape or x.mT
            value = func(args[0].plain)
            if not isinstance(value, Tensor):
                return value
        number = next((x.layer.number for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, CachedRows)), "?")
        owner = f"the cached keys or values of layer {number}"
        raise SpError("SP843", f"{name} is called on {owner}, of which this rank has only a part.")


class PromptLayer(DynamicLayer):
    """Layer of the cache of a prompt, which torch.compile traces: it stores the keys and values as they are."""

    def __init__(self, is_sliding: bool) -> None:
        """Create an empty layer, in place of one with a window if `is_sliding`."""
        super().__init__()
        self.is_sliding = is_sliding

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the prompt, and return them.

        Args:
            key_states: (B, H, Q, D), new keys.
            value_states: (B, H, Q, E), new values.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            The keys and values.
        """
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class _GuardedRows:
    """Attribute of a `RowsLayer`, whose rows (B, H, rows, D) or None other code gets as `CachedRows`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"  # attribute with the plain rows

    def __get__(self, layer: RowsLayer, owner: type) -> Any:
        rows = getattr(layer, self.name)
        return None if rows is None else CachedRows.of(rows, layer, layer.positions, start=0)

    def __set__(self, layer: RowsLayer, rows: Tensor | None) -> None:
        setattr(layer, self.name, rows)


class RowsLayer(CacheLayerMixin):
    """Layer of a cache that stores the keys and values of some positions on each rank.

    Of a prompt each rank stores the rows that it has computed. New positions, and all of a layer with a window, go to
    the n ranks in turn: position p to rank p % n. A layer with a window stores the positions that later queries attend
    to, the last `window - 1`.
    """

    is_croppable = True
    _keys: Any  # plain rows
    _values: Any
    keys, values = _GuardedRows(), _GuardedRows()  # type: ignore[assignment]

    def __init__(self, ranks: Ranks, window: int | None = None, number: int = 0) -> None:
        """Create an empty layer.

        Args:
            ranks: The ranks that share the positions.
            window: Number of positions that a query attends to, including its own; None for all.
            number: Index of the layer in the cache, for messages.
        """
        super().__init__()
        self.ranks, self.window, self.is_sliding, self.number = ranks, window, window is not None, number
        self.index = current_communicator().rank(ranks.group)  # of this rank in the group
        self.length = 0  # positions of all ranks since the start
        self.record_past = False  # whether positions before the window are stored until the next `crop`
        self.positions = torch.empty(0, dtype=torch.int64)  # of the rank's rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create keys and values without rows.

        Args:
            key_states: (B, H, Q, D), new keys.
            value_states: (B, H, Q, E), new values.
        """
        self._keys, self._values = key_states[:, :, :0], value_states[:, :, :0]
        self.positions, self.is_initialized = self.positions.to(key_states.device), True

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Store this rank's rows of the keys and values of a prompt (B, H, S, D): sharded or full tensors.

        Args:
            keys: The keys of all positions.
            values: The values of all positions.

        Raises:
            SpError: They are sharded in different ways (SP843).
        """
        self.length = keys.shape[2]
        if not _has_same_layout(keys, values):
            raise SpError("SP843", f"the keys and the values of layer {self.number} are not sharded in the same way.")
        self._keys, self.positions = own_rows(keys, self.ranks)
        self._values, _ = own_rows(values, self.ranks)  # at the same positions
        self.is_initialized = True
        if self.window is not None:
            self._keys, self._values = self._distribute(self._keys), self._distribute(self._values)
            self.positions = self._window_positions(self._keys.device)

    def _window_start(self, length: int) -> int:
        """Return the first position that the query at position `length` attends to."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def _window_positions(self, device: torch.device) -> Tensor:
        """Return this rank's positions in the window of the next query, if position p is stored by rank p % n."""
        start, n = self._window_start(self.length), self.ranks.n
        return torch.arange(start, self.length, device=device)[(self.index - start) % n :: n].clone()

    def _distribute(self, rows: Tensor) -> Tensor:
        """Return the rows of the window that this rank stores if positions go to the ranks in turn.

        A collective: every rank must call it, with the rows that it stores now.
        """
        start = self._window_start(self.length)
        shared = rows.new_zeros((*rows.shape[:2], self.length - start, rows.shape[3]))
        used = self.positions >= start
        shared.index_copy_(2, self.positions[used] - start, rows[:, :, used])
        # The sum over the ranks is the full window, as each row is 0 on all ranks but the one that stores it.
        shared = current_communicator().all_reduce(shared, self.ranks.n, self.ranks.group)
        # The first position p >= start with p % n == the index of this rank, and every n-th after it.
        return shared[:, :, (self.index - start) % self.ranks.n :: self.ranks.n].contiguous()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this rank's share of new keys and values, and return its rows for `attend_to_rows`.

        Args:
            key_states: (B, H, Q, D), new keys.
            value_states: (B, H, Q, E), new values.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            All rows of this rank that the new queries attend to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, n, start = self.length, self.ranks.n, self._window_start(self.length)
        self.length += key_states.shape[2]
        offset = (self.index - first) % n  # of the rank's first new row
        if offset < key_states.shape[2]:
            self._keys = torch.cat([self._keys, key_states[:, :, offset::n]], 2)
            self._values = torch.cat([self._values, value_states[:, :, offset::n]], 2)
            new = torch.arange(first + offset, self.length, n, device=self.positions.device)
            self.positions = torch.cat([self.positions, new])
        used = self.positions >= start if self.record_past else slice(None)  # else no row is before the window
        rows, positions = (self._keys[:, :, used], self._values[:, :, used]), self.positions[used]
        if not self.record_past:
            self._drop_before_window()
        return CachedRows.of(rows[0], self, positions, start), CachedRows.of(rows[1], self, positions, start)

    def _drop_before_window(self) -> None:
        """Drop the rows that later queries do not attend to: the first ones, in a layer with a window."""
        if self.window is not None:
            count = len(self._window_positions(torch.device("cpu")))
            self._keep_rows(slice(len(self.positions) - count, None))

    def _keep_rows(self, rows: slice | Tensor) -> None:
        """Keep some rows, in memory of their own. A slice has no end: slice(2, None) drops the first two rows."""
        if isinstance(rows, slice) and rows.start == 0:  # all rows
            return
        self._keys, self._values = (x[:, :, rows].clone() for x in (self._keys, self._values))
        self.positions = self.positions[rows].clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of all ranks and their first position, for masks.

        Args:
            query_length: The number of new queries.

        Returns:
            The two numbers.
        """
        start = self._window_start(self.length)
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        """Return the number of positions of all ranks.

        Returns:
            The number, with the positions before the window.
        """
        return self.length

    def get_max_length(self) -> int:
        """Return the window, or -1 without one.

        Returns:
            A number of positions.
        """
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Store positions before the window until the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions.

        Args:
            tokens_to_remove: The number of positions; its sign is not used.

        Raises:
            SpError: The layer has a window and does not record the past (SP842).
        """
        if self.window is not None and self.length >= self.window and not self.record_past:
            cause = "cache: expected no call of crop, since positions before a layer's window are not stored."
            raise SpError("SP842", cause, "Call generate() without shard_cache for methods that crop the cache.")
        if self.is_initialized:
            self.length -= abs(tokens_to_remove)
            self._keep_rows(self.positions < self.length)
            self._drop_before_window()

    def reset(self) -> None:
        """Drop all positions."""
        self._keys = self._values = None
        self.is_initialized, self.length, self.positions = False, 0, self.positions[:0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences of the batch, for beam search.

        Args:
            beam_idx: int64 (B,), indices of sequences.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences of the batch.

        Args:
            indices: int64, indices of sequences.
        """
        if self.is_initialized:
            self._keys, self._values = (x[indices.to(x.device)] for x in (self._keys, self._values))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch.

        Args:
            repeats: The number of copies.
        """
        if self.is_initialized:
            self._keys, self._values = (x.repeat_interleave(repeats, 0) for x in (self._keys, self._values))


def _has_same_layout(a: Tensor, b: Tensor) -> bool:
    """Return True if `own_rows` returns the same positions for two tensors."""
    if isinstance(a, Sharded) and isinstance(b, Sharded):
        return a.sharding.has_same_rows(b.sharding)
    return not isinstance(a, Sharded) and not isinstance(b, Sharded)


def own_rows(x: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of keys or values (B, H, S, D), in memory of their own, and their positions.

    A value that is sharded along S over these ranks keeps its split. Of any other value, the rank takes its contiguous
    part. A view of a larger storage is copied, since the cache would keep that storage alive.

    Args:
        x: A sharded value, whose rows the rank has, or the full tensor.
        ranks: The ranks that share the positions.

    Returns:
        The rows without padding, and int64 (rows,).
    """
    length, dim, rank = x.shape[2], 2, current_communicator().rank(ranks.group)
    if isinstance(x, Sharded) and x.sharding.is_plain and x.sharding.dim == dim and x.sharding.n == ranks.n:
        layout = x.sharding
        rows, positions = x.local, own_positions(layout.frame(length), ranks.n, ranks.group, x.device)
        if layout.folds == 1:  # not zigzag: the positions of the ranks are consecutive, and the last ones are padding
            num_remaining = length - len(positions) * rank  # of the sequence, from the first position of this rank on
            valid: slice | Tensor = slice(0, max(0, min(len(positions), num_remaining)))
        else:
            valid = positions < length
        rows, positions = rows[:, :, valid], positions[valid]
        if layout.balanced is not None:  # entry i of the order is the position of the row at place i of the new order
            positions = layout.balanced.order[positions]
    else:
        full = x.full() if isinstance(x, Sharded) else x
        count = -(-length // ranks.n)
        first = min(length, count * rank)
        rows = full[:, :, first : first + count]
        positions = torch.arange(first, first + rows.shape[2], device=full.device)
    is_alone = rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
    return rows if is_alone else rows.clone(memory_format=torch.contiguous_format), positions


def attend_to_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the cached rows of all ranks: an attention function of transformers, as its documentation defines it.

    Args:
        module: The attention module.
        query: (B, Hq, Q, D), equal on all ranks.
        key: `CachedRows` (B, Hkv, rows, D). For regular tensors, which are not from the cache, SDPA is called, unless
            there is a softcap or sinks, which it does not support.
        value: As key.
        attention_mask: bool or additive (B | 1, Hq | 1, Q, K) for all K positions.
        dropout: Must be 0 unless SDPA is called.
        scaling: Factor of the scores; 1 / sqrt(D) by default.
        softcap: Limit of the scores.
        s_aux: (Hq,), the logit of a sink of each head.
        **kwargs: Other arguments of the model.

    Returns:
        The output (B, Q, Hq, E), equal on all ranks, and None.

    Raises:
        SpError: An argument is not supported (SP843).
    """
    rows = next((x for x in (key, value) if isinstance(x, CachedRows)), None)
    if rows is None and softcap is None and s_aux is None:
        plain = AttentionInterface()["sdpa"]
        return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    kind = type(module).__name__ + (f" (layer {rows.layer.number} of the cache)" if rows is not None else "")
    unknown = sorted(
        name for name, x in kwargs.items() if name not in WITHOUT_EFFECT and x is not None and x is not False
    )
    if unknown or dropout:
        got = ", ".join(unknown) or f"dropout={dropout}"
        cause = f"{kind}: expected only a mask, scaling, softcap and s_aux as arguments of its attention, got {got}."
        raise SpError("SP843", cause, None if unknown else "Call model.eval() first.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, CachedRows) and isinstance(value, CachedRows):
        mask = _own_mask(attention_mask, key, query.shape[2], kind)
        out, lse = _merge_ranks(*_attend_locally(query, key.plain, value.plain, mask, scale, softcap), key.layer.ranks)
    elif rows is None:
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as SDPA's default
        mask = _plain_mask(attention_mask, query, key, is_causal)
        out, lse = _attend_locally(query, key, value, mask, scale, softcap)
    else:
        raise SpError("SP843", f"{kind} takes its keys or its values, not both, from the cache.")
    if s_aux is not None:
        out, lse = add_sinks(out, lse, s_aux)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _plain_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """Return the mask with a row for each query; for None SDPA's mask: causal if `is_causal`, else True everywhere."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril() if is_causal and queries > 1 else mask
    return mask.expand(*mask.shape[:-2], queries, keys)


def _own_mask(mask: Tensor | None, key: CachedRows, queries: int, kind: str) -> Tensor:
    """Return the columns of a mask for the positions of this rank's rows, as bool or additive mask.

    Its first column is that of the position `key.start`. `kind` names the attention in messages.

    Raises:
        SpError: The mask does not have a row of each query and a column of each key (SP843).
    """
    width = key.layer.length - key.start
    if mask is None or mask.shape[-1] != width or mask.shape[-2] != queries:
        got = "None" if mask is None else f"one of shape {tuple(mask.shape)}"
        cause = f"attention_mask: expected a mask of {queries} x {width} positions in {kind}, got {got}."
        raise SpError("SP843", cause)
    return mask.index_select(-1, key.positions - key.start)


def _attend_locally(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output (B, Hq, Q, E) and log-sum-exps (B, Hq, Q) of attention to the rows of this rank."""
    dtype, width = accumulation_dtype(q.dtype), v.shape[-1]
    if k.shape[2] == 0:
        return q.new_zeros((*q.shape[:3], width), dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    is_bool = mask.dtype == torch.bool
    # Attend with this many queries at a time, since a kernel may store all their scores.
    step = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs: list[tuple[Tensor, Tensor]] = []
    for queries, part in zip(q.split(step, 2), mask.split(step, -2)):
        if softcap is not None:
            outs.append(_attend_with_softcap(queries, k, v, part, scale, softcap))
            continue
        args = KernelArgs(scale, allowed=part if is_bool else None, bias=None if is_bool else part)
        # A decoding step has one query (rows=1): select a kernel without a minimum number of queries.
        key = KernelKey(
            q.device, q.dtype, Kind.MASKED if is_bool else Kind.FULL, head_dim=max(q.shape[-1], width), rows=1,
            bias=None if is_bool else part.dtype, elements=max(k.numel(), v.numel(), queries.numel()),
        )  # fmt: skip
        outs.append(kernel_for(key).forward(queries, k.to(q.dtype), v.to(q.dtype), args))
    out, lse = (torch.cat(parts, 2) for parts in zip(*outs))
    return out.to(dtype), lse.to(dtype)


def _attend_with_softcap(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the result of `_attend_locally` for scores that are limited by a tanh."""
    dtype, groups = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.tanh(q.to(dtype) @ k.mT * (scale / softcap)) * softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1)
    # For a row without keys, lse is -inf: exp(-inf - 0) is 0, and exp(-inf + inf) would be NaN.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weights @ v, lse


def _merge_ranks(out: Tensor, lse: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps over the rows of all ranks, with the same bits on every rank."""
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    gathered = current_communicator().all_gather(packed, ranks.n, ranks.group)
    parts = [(x[..., :-1], x[..., -1]) for x in gathered.chunk(ranks.n)]
    return reduce(lambda a, b: merge(*a, *b), parts)
