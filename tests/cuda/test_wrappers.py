"""Golden order of a rank's operations on a GPU: exchanges start early enough to be hidden by attention blocks.

In `n = route`, n is the number of the exchange, and the route names its ranks; `of n` marks a reader of its result.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from support.cuda.programs import Attention, Sizes, attention, inputs_of
from support.cuda.worker import AbsentGpu
from support.cuda.wrappers import compiled
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering

slow = pytest.mark.slow


def events(gpu: AbsentGpu, strategy: str, n: int, **options: Any) -> str:
    rank = gpu.run(partial(attention, **options), strategy, n, Sizes())
    return f"{rank.forward.text()}\n-- backward\n{rank.backward.text()}"


def test_ring(gpu: AbsentGpu) -> None:
    assert_expected_inline(
        events(gpu, "ring", 3),
        """\
rank
kernel
product
kernel
1 = shift:1:1 bfloat16[2, 1, 4, 131072, 128]
product
kernel
attend step 0 of 1
wait 1
2 = shift:1:1 bfloat16[2, 1, 4, 131072, 128]
attend step 1 of 1, 2
merge_to
wait 2
attend step 2 of 2
merge_to
kernel
product
kernel x 3
3 = all_reduce float32[]
wait 3
kernel
-- backward
kernel
product
pack
1 = shift:1:1 bfloat16[2, 1, 4, 131072, 128]
attend_backward step 0 of 1
2 = shift:1:1 float32[2, 1, 4, 131072, 128]
product
3 = all_reduce bfloat16[1048576]
wait 1
4 = shift:1:1 bfloat16[2, 1, 4, 131072, 128]
attend_backward_parts step 1 of 1, 4, 2
add_rows_into
wait 2
add_rows_into of 2
5 = shift:1:1 float32[2, 1, 4, 131072, 128]
wait 4
attend_backward_parts step 2 of 4, 5
add_rows_to
wait 5
add_rows_to of 5
6 = shift:-2:1 bfloat16[2, 1, 4, 131072, 128]
wait 6
kernel
product
7 = all_reduce bfloat16[1048576]
product
8 = all_reduce bfloat16[1048576]
wait 8
wait 7
wait 3""",
    )


def test_ulysses(gpu: AbsentGpu) -> None:
    assert_expected_inline(
        events(gpu, "ulysses", 2),
        """\
rank
kernel
product x 2
kernel
1 = all_to_all_single bfloat16[2, 131072, 1024]
wait 1
_scaled_dot_product_flash_attention of 1
kernel
2 = all_to_all_single bfloat16[2, 4, 16777216]
wait 2
kernel
product
kernel x 3
3 = all_reduce float32[]
wait 3
kernel
-- backward
kernel
product
kernel
1 = all_to_all_single bfloat16[2, 131072, 512]
product
2 = all_reduce bfloat16[1048576]
wait 1
_scaled_dot_product_flash_attention_backward of 1
kernel
3 = all_to_all_single bfloat16[2, 2, 67108864]
wait 3
kernel
product
4 = all_reduce bfloat16[1048576]
kernel
product
5 = all_reduce bfloat16[1048576]
wait 5
wait 4
wait 2""",
    )


def test_groups_of_heads(gpu: AbsentGpu) -> None:
    """A group is attended to while the next one's exchange and the last one's result are under way."""
    assert_expected_inline(
        events(gpu, "ulysses", 2, ulysses_chunks=2),
        """\
rank
kernel
product x 2
kernel
1 = all_to_all_single bfloat16[2, 131072, 512]
wait 1
kernel
2 = all_to_all_single bfloat16[2, 131072, 512]
_scaled_dot_product_flash_attention of 1
kernel
3 = all_to_all_single bfloat16[2, 2, 16777216]
wait 2
_scaled_dot_product_flash_attention of 2
kernel
4 = all_to_all_single bfloat16[2, 2, 16777216]
wait 4
wait 3
kernel
product
kernel x 3
5 = all_reduce float32[]
wait 5
kernel
-- backward
kernel
product
kernel
1 = all_to_all_single bfloat16[2, 131072, 256]
product
2 = all_reduce bfloat16[1048576]
wait 1
kernel
3 = all_to_all_single bfloat16[2, 131072, 256]
_scaled_dot_product_flash_attention_backward of 1
kernel
4 = all_to_all_single bfloat16[2, 1, 67108864]
wait 3
_scaled_dot_product_flash_attention_backward of 3
kernel
5 = all_to_all_single bfloat16[2, 1, 67108864]
wait 5
wait 4
kernel
product
6 = all_reduce bfloat16[1048576]
kernel
product
7 = all_reduce bfloat16[1048576]
wait 7
wait 6
wait 2""",
    )


def inferred(strategy: str, n: int, **options: Any) -> str:
    with torch.no_grad():
        return compiled(Attention(Sizes()), inputs_of(Sizes(), n), n, attention=strategy, **options).forward.text()


def without_kernels(text: str) -> list[str]:
    """A forward that keeps something writes it."""
    return [line for line in text.splitlines() if not line.startswith("kernel")]


@pytest.mark.parametrize("strategy", ["gather", pytest.param("ring", marks=slow), pytest.param("ulysses", marks=slow)])
def test_inference_has_the_order_of_training(gpu: AbsentGpu, strategy: str) -> None:
    """No backward, and the same forward: exchanges start as early, and waits are as late."""
    training = gpu.run(attention, strategy, 2, Sizes()).forward.text()
    assert without_kernels(gpu.run(inferred, strategy, 2)) == without_kernels(training)


def test_gather(gpu: AbsentGpu) -> None:
    assert_expected_inline(
        events(gpu, "gather", 2),
        """\
rank
kernel
product
kernel
1 = all_gather_into_tensor bfloat16[131072, 1, 4, 256]
product
wait 1
kernel
2 = all_gather_into_tensor bfloat16[131072, 1, 4, 256]
attend step 0 of 1
wait 2
attend step 0 of 2
merge_to
kernel
product
kernel x 3
3 = all_reduce float32[]
wait 3
kernel
-- backward
kernel
product
pack
1 = all_gather_into_tensor bfloat16[131072, 1, 4, 256]
product
2 = all_reduce bfloat16[1048576]
wait 1
3 = all_gather_into_tensor bfloat16[131072, 1, 4, 256]
attend_backward step 0 of 1
4 = reduce_scatter_tensor float32[65536, 1, 4, 256]
wait 3
attend_backward step 0 of 3
add_into
5 = reduce_scatter_tensor float32[65536, 1, 4, 256]
wait 5
wait 4
kernel
product
6 = all_reduce bfloat16[1048576]
kernel x 2
product
7 = all_reduce bfloat16[1048576]
wait 7
wait 6
wait 2""",
    )


@pytest.mark.slow
def test_hybrid(gpu: AbsentGpu) -> None:
    assert_expected_inline(
        events(gpu, "hybrid", 4),
        """\
rank
kernel
product x 2
kernel
1 = among:2 bfloat16[2, 131072, 1024]
wait 1
kernel x 2
2 = shift:1:2 bfloat16[2, 1, 2, 262144, 128]
kernel
attend step 0 of 2
wait 2
attend step 1 of 2
merge_to
kernel
3 = among:2 bfloat16[2, 4, 16777216]
wait 3
kernel
product
kernel x 3
4 = all_reduce float32[]
wait 4
kernel
-- backward
kernel
product
kernel
1 = among:2 bfloat16[2, 131072, 512]
product
2 = all_reduce bfloat16[1048576]
wait 1
kernel
pack
3 = shift:1:2 bfloat16[2, 1, 2, 262144, 128]
attend_backward step 0 of 3
4 = shift:1:2 float32[2, 1, 2, 262144, 128]
wait 3
attend_backward_parts step 1 of 3, 4
add_rows_to
wait 4
add_rows_to of 4
5 = shift:-1:2 bfloat16[2, 1, 2, 262144, 128]
wait 5
kernel
6 = among:2 bfloat16[2, 2, 67108864]
wait 6
kernel
product
7 = all_reduce bfloat16[1048576]
kernel
product
8 = all_reduce bfloat16[1048576]
wait 8
wait 7
wait 2""",
    )


@pytest.mark.slow
def test_gradients_are_sent_as_they_are_computed(gpu: AbsentGpu) -> None:
    """The sum of a layer's gradients is in flight while attention of the previous layer is computed."""
    sizes = Sizes(rows=8192, heads=32, kv_heads=8, layers=2)
    rank = gpu.run(partial(attention, ulysses_chunks=1), "ulysses", 2, sizes)
    of_sums = [i for i, event in enumerate(rank.backward.events) if "all_reduce" in event]
    of_blocks = [i for i, event in enumerate(rank.backward.events) if "attention_backward" in event]
    assert (len(of_sums), len(of_blocks)) == (6, 2)
    assert of_sums[0] < of_blocks[1]


def padding_of_strides() -> set[bool]:
    """Return Inductor's setting in each graph that it lowers for a GPU."""
    found = set()
    run = GraphLowering.run

    def noted(graph: GraphLowering, *args: Any) -> Any:
        found.add(inductor.comprehensive_padding)
        return run(graph, *args)

    with mock.patch.object(GraphLowering, "run", noted):
        attention.__wrapped__("ulysses", 2, Sizes(rows=1023, head_dim=32))
    return found


@slow
def test_a_tensor_has_one_layout(gpu: AbsentGpu) -> None:
    """Inductor of torch 2.11 read unpadded rows of odd length as padded ones on an H100."""
    assert gpu.run(padding_of_strides) == {False}
