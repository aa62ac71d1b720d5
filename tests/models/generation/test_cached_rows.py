"""Layers of a sharded cache on simulated ranks: the rows of the ranks are those of transformers' layers, and attention is the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sp_compile import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

pytest.importorskip("transformers")
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from sp_compile.integrations import cached_rows
from sp_compile.integrations.cached_rows import CachedRows, RowsLayer, attend_to_rows

BATCH, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 8


def draw(rows: int, heads: int = KEY_HEADS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, heads, rows, WIDTH, generator=generator, dtype=torch.float64)


def layer_of(n: int, window: int | None = None) -> RowsLayer:
    return RowsLayer(Ranks(n, SIMULATED_GROUP), window)


def plain_layer(window: int | None) -> Any:
    return DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)


def mask_of(layer: CacheLayerMixin, queries: int, window: int | None, padding: int = 0) -> Tensor:
    """Return the mask of the next queries, as transformers makes it from the sizes that the layer returns."""
    length, first = layer.get_mask_sizes(queries)
    key, query = first + torch.arange(length), layer.get_seq_length() + torch.arange(queries)[:, None]
    allowed = (key <= query) & (query - key < (window or 10**6))
    padded = key < torch.tensor([padding, 0])[:, None, None]  # of the first sequence of the batch
    return (allowed & ~padded)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return attention as written, (B, Q, H, D)."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


STEPS = [11, 1, 1, 4, 1, 1, 1]  # positions of the prompt and of the steps


@pytest.mark.parametrize("window", [None, 2, 5, 11, 40])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 13])
def test_steps_attend_to_the_rows_of_all_ranks(n: int, window: int | None) -> None:
    """A prompt, steps of one and of several queries: also more ranks than positions."""
    keys, values = [[draw(rows, seed=2 * i + j) for i, rows in enumerate(STEPS)] for j in range(2)]
    queries = [draw(rows, HEADS, seed=100 + i) for i, rows in enumerate(STEPS)]
    plain = plain_layer(window)
    plain.update(keys[0], values[0])
    masks, expected = [], []
    for q, k, v in list(zip(queries, keys, values))[1:]:
        masks.append(mask_of(plain, q.shape[2], window, padding=3))
        expected.append(attend(q, *plain.update(k, v), masks[-1], None, None))

    def run(_: int) -> tuple[list[Tensor], list[tuple[int, ...]], list[int]]:
        layer = layer_of(n, window)
        layer.fill(keys[0], values[0])
        found, sizes, stored = [], [], [layer.keys.shape[2]]
        for q, k, v, mask in zip(queries[1:], keys[1:], values[1:], masks):
            sizes.append(layer.get_mask_sizes(q.shape[2]))
            assert mask_of(layer, q.shape[2], window, padding=3).equal(mask)
            rows = layer.update(k, v)
            found.append(attend_to_rows(torch.nn.Identity(), q, *rows, mask, scaling=0.3)[0])
            stored.append(layer.keys.shape[2])
        return found, layer.positions.tolist(), stored

    results = run_ranks(n, run)
    for found, _, _ in results:
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    total = sum(STEPS)
    first = 0 if window is None else max(0, total - window + 1)
    assert sorted(p for _, positions, _ in results for p in positions) == list(range(first, total))  # each once
    lengths = [sum(STEPS[: i + 1]) for i in range(len(STEPS))]
    for _, _, stored in results:  # at most one row more than its share of the prompt, and one more of the new rows
        for length, count in zip(lengths, stored):
            assert count <= min(length, (window or 10**6) - 1) / n + 2


@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_softcaps_and_sinks(softcap: float | None, with_sinks: bool) -> None:
    k, v, q, sinks = draw(7), draw(7, seed=1), draw(2, HEADS, seed=2), torch.randn(HEADS, dtype=torch.float64)
    mask = torch.ones(1, 1, 2, 7, dtype=torch.bool).tril(5)
    options = {"softcap": softcap, "s_aux": sinks if with_sinks else None}

    def run(_: int) -> Tensor:
        layer = layer_of(3)
        layer.fill(k[:, :, :5], v[:, :, :5])
        return attend_to_rows(
            torch.nn.Identity(), q, *layer.update(k[:, :, 5:], v[:, :, 5:]), mask, scaling=0.3, **options
        )[0]

    for found in run_ranks(3, run):
        torch.testing.assert_close(found, attend(q, k, v, mask, softcap, sinks if with_sinks else None))


def test_additive_masks_and_queries_without_keys() -> None:
    """Of padding: transformers gives such queries any finite result, which no token reads."""
    k, v, q = draw(5), draw(5, seed=1), draw(2, HEADS, seed=2)
    allowed = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool)[None, None]
    bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)

    def run(_: int) -> list[Tensor]:
        layer = layer_of(2)
        layer.fill(k[:, :, :3], v[:, :, :3])
        rows = layer.update(k[:, :, 3:], v[:, :, 3:])
        return [attend_to_rows(torch.nn.Identity(), q, *rows, mask, scaling=0.3)[0] for mask in (allowed, bias)]

    for results in run_ranks(2, run):
        for found in results:
            torch.testing.assert_close(found[:, 1], attend(q, k, v, allowed, None, None)[:, 1])
            assert found[:, 0].abs().max() == 0


def changed(layer: Any) -> None:
    """Reorder, select and crop, as beam search and assisted decoding do."""
    layer.reorder_cache(torch.tensor([1, 1]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3, 2]))
    layer.crop(-2)


@pytest.mark.parametrize("window", [None, 5])
def test_changes_of_the_batch_and_crops(window: int | None) -> None:
    k, v = draw(7), draw(7, seed=1)
    plain = plain_layer(window)
    if window is not None:
        plain.activate_past_recording()
    plain.update(k, v)
    changed(plain)

    def run(_: int) -> tuple[Tensor, Tensor]:
        layer = layer_of(2, window)
        if window is not None:
            layer.activate_past_recording()
        layer.update(k, v)
        changed(layer)
        assert layer.get_seq_length() == plain.get_seq_length() == 5
        return layer.positions, layer.keys.plain

    positions, keys = (torch.cat(parts, dim) for parts, dim in zip(zip(*run_ranks(2, run)), (0, 2)))
    assert keys[:, :, positions.argsort()].equal(plain.keys)


@pytest.mark.parametrize("crops", [False, True])
def test_steps_that_record_the_past(crops: bool) -> None:
    """Several steps before a crop, or none, attend to the window only."""
    q, k, v = draw(9, HEADS), draw(9, seed=1), draw(9, seed=2)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)

    def run(_: int) -> list[Tensor]:
        layer, found = layer_of(2, window=4), []
        layer.update(k[:, :, :6], v[:, :, :6])
        layer.activate_past_recording()
        for i in range(6, 9):
            width, start = layer.get_mask_sizes(1)
            rows = layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
            mask = allowed[i, start : start + width].expand(1, 1, 1, width)
            found.append(attend_to_rows(torch.nn.Identity(), q[:, :, i : i + 1], *rows, mask, scaling=0.3)[0])
            if crops:
                layer.crop(0)
        return found

    for results in run_ranks(2, run):
        wanted = attend(q, k, v, allowed, None, None)[:, 6:]
        torch.testing.assert_close(torch.cat(results, 1), wanted)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Run the test as one of one simulated rank."""
    with mock.patch.object(cached_rows, "current_communicator", return_value=SimpleNamespace(rank=lambda _: 0)):
        yield


@pytest.mark.usefixtures("one_rank")
def test_a_reset_layer_is_empty() -> None:
    layer = layer_of(1)
    layer.fill(draw(3), draw(3))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.update(draw(2), draw(2))[0].plain.equal(draw(2))


@pytest.mark.usefixtures("one_rank")
def test_rows_are_read_by_attention_only() -> None:
    """A model that computes with its cached keys, as one that stores them compressed, raises."""
    layer = layer_of(1)
    key, value = layer.update(draw(3), draw(3, seed=1))
    assert isinstance(key, CachedRows)
    assert isinstance(layer.keys, CachedRows)
    assert (key.shape, key.dtype) == (draw(3).shape, torch.float64)
    for use in (
        lambda: key * 2,
        lambda: torch.cat([key, value]),
        lambda: key.transpose(1, 2),
        lambda: key[:, :, 0],
        lambda: key.mT,
        lambda: key.tolist(),
        lambda: torch.cat([layer.keys, layer.values]),
        lambda: layer.values.sum(),
        lambda: plain_layer(None).update(layer.keys, layer.values),
    ):
        with pytest.raises(SpError, match=r"SP843: .* of layer 0, "):
            use()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("width", "options", "text"),
    [
        (3, {"position_bias": torch.ones(1)}, "position_bias"),
        (3, {"dropout": 0.1}, "dropout"),
        (2, {}, r"mask .*\b3 x 3\b"),
        (0, {}, "got None"),
    ],
)
def test_refused_calls_of_attention(width: int, options: dict[str, Any], text: str) -> None:
    mask = torch.ones(1, 1, 3, width, dtype=torch.bool) if width else None
    rows = layer_of(1).update(draw(3), draw(3, seed=1))
    with pytest.raises(SpError, match=f"SP843.*{text}"):
        attend_to_rows(torch.nn.Identity(), draw(3, HEADS), *rows, mask, **options)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_keys_outside_of_the_cache(softcap: float | None, with_sinks: bool) -> None:
    """Such as those of a vision tower, which has the same configuration: also with what SDPA does not support."""
    k, v, q = draw(5), draw(5, seed=1), draw(5, HEADS, seed=2)
    sinks = torch.randn(HEADS, dtype=torch.float64) if with_sinks else None
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS)
    for mask, is_causal in ((allowed.tril(), True), (None, False), (None, None)):  # None: causal, as by SDPA
        options = {"is_causal": is_causal, "softcap": softcap, "s_aux": sinks}
        found, _ = attend_to_rows(module, q, k, v, mask, scaling=0.3, **options)
        right = attend(q, k, v, allowed if is_causal is False else allowed.tril(), softcap, sinks)
        torch.testing.assert_close(found, right)
