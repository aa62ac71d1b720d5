"""Image encoders of transformers under FSDP2 by layer: layers are on shards, and one program fits all sizes of images."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import step_errors
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile

transformers = pytest.importorskip("transformers")
multimodal = pytest.importorskip("models.hf.test_multimodal")

LOSS, GRADIENT = 2e-6, 1e-9  # transformers computes losses in float32
SIZES = [
    [(4, 4), (4, 8)],
    [(4, 8), (8, 8)],
    [(8, 8), (4, 12)],
    [(12, 8), (8, 4)],
]  # patches of the two images of a batch


def batch_of(sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Return a batch of two rows with an image each, of which four patches are one token."""
    batch = multimodal.tokens(*(h * w // 4 for h, w in sizes))
    grid = torch.tensor([(1, h, w) for h, w in sizes])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, dtype=torch.float64)
    types = (batch["input_ids"] == multimodal.IMAGE).int()
    return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Yield a list to which messages of Dynamo are added in the context."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def train(build: Any, checkpoint: bool) -> tuple[list[tuple[float, float, list[set[str]]]], list[str]]:
    """Return for each size the errors of loss and gradients, and the sp:: ops of the new graphs; messages of Dynamo."""
    new: list[set[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Record the ops."""
        new.append({str(node.target) for node in graph.graph.nodes if str(node.target).startswith("sp.")})
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    single, _ = build(True)
    single.double()
    model = sp_compile.fully_shard_and_compile(
        copy.deepcopy(single), mesh(), compiler=compiler, cost={}, checkpoint=checkpoint
    )
    found = []
    with record_warnings() as messages:
        for sizes in SIZES:
            torch.manual_seed(1)
            new.clear()
            found.append((*step_errors(model, single, batch_of(sizes)), list(new)))
    return found, messages


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("build", [multimodal.qwen25_vl, multimodal.qwen3_vl])
@pytest.mark.parametrize("n", [2, 4])
def test_sizes_of_images(ranks: Ranks, n: int, build: Any, checkpoint: bool) -> None:
    """The second size compiles graphs with dynamic sizes; later sizes compile none. No graph break is reported."""
    for found, messages in ranks.run(n, train, build, checkpoint, timeout=300):
        assert all(loss < LOSS and gradient < GRADIENT for loss, gradient, _ in found)
        attention = [ops for ops in found[0][2] if any("attention" in op for op in ops)]
        assert len(attention) >= 2  # a layer of the encoder, and one of the text model
        assert [bool(graphs) for *_, graphs in found] == [True, True, False, False]
        assert not [text for text in messages if "item()" in text]


def _alternate(build: Any) -> list[tuple[float, float]]:
    """Return the errors of loss and gradients of steps with and without images in turn."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    single, with_images = build(True)
    single.double()
    batches = with_images, build(False)[1]
    model = sp_compile.fully_shard_and_compile(copy.deepcopy(single), mesh(), compiler="aot_eager", cost={})
    return [step_errors(model, single, batches[step % 2]) for step in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("build", [multimodal.llava, multimodal.qwen25_vl])
def test_batches_with_and_without_images(ranks: Ranks, build: Any) -> None:
    """All ranks have a batch of one kind in a step; layers that a step does not call have no gradients."""
    for errors in ranks.run(2, _alternate, build, timeout=300):
        assert all(loss < LOSS and gradient < 1e-6 for loss, gradient in errors)  # norms are computed in float32


def test_encoders_are_found() -> None:
    """Those that pass cumulated lengths to their attention function, with their layers, and no other model."""
    from sp_compile.integrations._compat.attention_names import attend_to_packed_images, find_image_encoders

    model, _ = multimodal.qwen25_vl(False)
    other, _ = multimodal.gemma3(False)
    ((encoder, layers),) = find_image_encoders(model).items()
    assert encoder is model.model.visual
    assert layers == [*encoder.blocks]
    assert not find_image_encoders(other)
    attend_to_packed_images(encoder)
    assert not find_image_encoders(model)
    again = type(model)(model.config)  # the configuration has not changed
    assert [*find_image_encoders(again)] == [again.model.visual]


def test_attention_to_packed_images() -> None:
    """One call for all images equals a call for each image, eager and compiled; an image may have one patch."""
    from sp_compile.integrations._compat.attention_names import CUMULATED_LENGTHS, _attend_to_images

    module = nn.Module()
    module.is_causal = False
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    parts = [F.scaled_dot_product_attention(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 5), (5, 6), (6, 9))]
    expected = torch.cat(parts, dim=2).transpose(1, 2)
    starts = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    for function in (_attend_to_images, torch.compile(_attend_to_images, backend="eager", fullgraph=True)):
        result, _ = function(module, q, k, v, is_causal=False, **{CUMULATED_LENGTHS: starts})
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_registered_attention_function_is_called(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each image, as without this package, eager and compiled: here one with other scores."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from sp_compile.integrations._compat.attention_names import attend_to_packed_images

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert "max_length_q" not in kwargs
        return sdpa_attention_forward(module, 3 * query, *args, **kwargs)

    def encode(model: nn.Module) -> Tensor:
        features: Tensor = model(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
        return features

    torch.manual_seed(0)
    batch = batch_of(SIZES[0])
    single = multimodal.qwen25_vl(False)[0].double().model.visual
    encoder = copy.deepcopy(single)
    before = encode(single)
    if not is_first:
        attend_to_packed_images(encoder)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attend)
    expected = encode(single)
    assert (expected - before).abs().max() > 1e-6
    if is_first:
        attend_to_packed_images(encoder)
    torch.testing.assert_close(encode(encoder), expected, rtol=0, atol=1e-12)
    for block in encoder.blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(encode(encoder), expected, rtol=0, atol=1e-12)
