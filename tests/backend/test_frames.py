"""Compilation keeps none of its frames alive: neither fake tensors nor torch's cleanup at the end of a frame."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import Decoder, seeded, tokens
from support.variants.attention_variants import EXCHANGED, LONGEST, OTHERS
from support.variants.attention_variants import Model as Attending
from support.variants.loops import LOOPS, inputs
from torch import Tensor
from torch._guards import TracingContext, tracing

from sp_compile import explain
from sp_compile.lowering.torch_compat import keep_first_call_fake

Signs = list["weakref.ref[Sign]"]


class Sign:
    """An object that dies with its frame."""


@pytest.fixture
def signs() -> Iterator[Signs]:
    """Return a sign per frame that has called `lower`; garbage collection is off during the test."""
    entries = importlib.import_module("sp_compile.backend")
    found: Signs = []
    lower = entries.lower

    def watched(*args: Any) -> Any:
        sign = Sign()
        found.append(weakref.ref(sign))
        return lower(*args)

    gc.disable()
    with mock.patch.object(entries, "lower", watched), torch._dynamo.config.patch(run_gc_after_compile=False):
        yield found
    gc.enable()


def check(signs: Signs, run: Callable[[], Any]) -> None:
    """Check frames, with one retry: first-time imports and caches may store frames, but not for each program."""
    for _ in range(2):
        signs.clear()
        run()
        assert signs
        if [one() for one in signs] == [None] * len(signs):
            return
    raise AssertionError("a frame that called `lower` is alive, and nothing but the garbage collector will free it")


def test_decoder(signs: Signs) -> None:
    check(signs, lambda: explain(seeded(Decoder), tokens(8), sp=2))


@pytest.mark.sampled(every=32)
@pytest.mark.parametrize("name", {**EXCHANGED, **OTHERS})
def test_attention(signs: Signs, name: str) -> None:
    attend = {**EXCHANGED, **OTHERS}[name]
    padding = torch.arange(LONGEST) < torch.tensor([[LONGEST - 3], [LONGEST]])
    positions = torch.arange(LONGEST).expand(2, -1) % 5
    check(signs, lambda: explain(seeded(lambda: Attending(attend)), tokens(LONGEST), padding, positions, sp=2))


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("name", LOOPS)
def test_loop(signs: Signs, name: str) -> None:
    check(signs, lambda: explain(LOOPS[name][0], *inputs(name), sp=2))


def rotated_sums(x: Tensor) -> Tensor:
    """A cat of two values that a recognizer of loops begins to read, and refuses: they are no steps."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * 2 - b * 3, a * 3 + b * 2], -1).cumsum(1)


def test_refused_programs(signs: Signs) -> None:
    check(signs, lambda: explain(rotated_sums, torch.randn(2, 6, 4), sp=2))


class Late:
    """DDPOptimizer's sign on a frame that only the garbage collector frees."""

    def __init__(self, context: TracingContext) -> None:
        self.context, self.itself = context, self
        context.fakify_first_call = True

    def __del__(self) -> None:
        self.context.fakify_first_call = False


def test_the_first_call_of_a_bucket_is_fake() -> None:
    context = TracingContext(None)
    with tracing(context):
        Late(context)
        keep_first_call_fake()
        gc.collect()
        assert context.fakify_first_call
