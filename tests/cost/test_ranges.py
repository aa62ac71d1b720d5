"""Ranges of predicted times and memory, the memory that a plan may use, and the rate of an attention's backward."""

from dataclasses import replace

import pytest

from sp_compile.passes.cost.machine import GPU, Machine
from sp_compile.passes.cost.measure import COMMUNICATOR_BYTES, usable_memory
from sp_compile.planner.byte_sizes import SizeUnit
from sp_compile.planner.ranges import ASSUMED_TIMES, MEASURED_TIMES, Ranges, format_byte_range, format_range


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((18.21, 27.34), "18-27"),
        ((0.01234, 0.0151), "0.012-0.015"),
        ((98_765, 148_148), "99,000-150,000"),
        ((9.96, 10.04), "10"),
        ((0.0, 0.0), "0"),
    ],
)
def test_a_range_has_two_digits(bounds: tuple[float, float], text: str) -> None:
    assert format_range(bounds) == text


def test_a_range_of_bytes_has_the_unit_of_the_plan() -> None:
    assert format_byte_range((52.1e9, 63.4e9), SizeUnit("GB")) == "52-63 GB"


def test_times_with_rates_that_were_set_are_more_certain() -> None:
    assert Ranges.of(GPU.replaced_names("cuda")).times == ASSUMED_TIMES
    some = Machine.of("cuda", {"flops": 6e14, "memory_bandwidth": 2.8e12})  # no link
    assert Ranges.of(some.replaced_names("cuda")).times == ASSUMED_TIMES
    measured = replace(some, all_gather_bandwidth=3e11)
    assert Ranges.of(measured.replaced_names("cuda")).times == MEASURED_TIMES


def test_more_seconds_are_fewer_tokens() -> None:
    ranges, tokens = Ranges(), 1000
    (fast, slow), (least, most) = ranges.seconds(2.0), ranges.tokens_per_second(tokens / 2.0)
    assert (least, most) == pytest.approx((tokens / slow, tokens / fast))


def test_an_estimated_size_has_a_wider_range() -> None:
    ranges = Ranges()
    exact, estimated = ranges.memory(100.0, is_exact=True), ranges.memory(100.0, is_exact=False)
    assert estimated[0] < exact[0] < 100 < exact[1] < estimated[1]


def test_a_plan_may_use_what_is_left_after_the_start() -> None:
    """The memory that torch has reserved is of this program; contexts, NCCL and fragments are not."""
    total, reserved, context = 80e9, 5e9, 0.6e9
    usable = usable_memory(total - context - reserved, reserved)
    assert usable < total - context - COMMUNICATOR_BYTES
    assert usable > 0.9 * total
    assert usable_memory(1e8, 0) == 0


def test_the_backward_has_its_own_rate() -> None:
    """As measured with cuDNN on an H100 for 64K causal keys: 612 and 533 TFLOP/s, together 0.855 of the peak."""
    kernel = replace(GPU, flops=GPU.flops * GPU.efficiency("cudnn"), block_keys=0)
    forward = kernel.attention(1e15, 1 << 16)
    backward = kernel.attention_backward(forward)
    assert 1 / forward == pytest.approx(0.612, rel=0.01)
    assert 2.5 / backward == pytest.approx(0.533, rel=0.01)
    assert 3.5e15 / (forward + backward) / GPU.flops == pytest.approx(0.855, rel=0.01)
