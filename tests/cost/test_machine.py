"""Times that follow from a machine's constants, and how the constants are replaced."""

import math
from dataclasses import replace

import pytest

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.cost.machine import CPU, GPU, Machine


def test_nodes() -> None:
    assert GPU.seconds("all_to_all", 8.0, 8) == pytest.approx(7 / 296e9 + 1e-5)
    assert GPU.seconds("all_to_all", 16.0, 16) == pytest.approx(8 / 45e9 + 1e-5)
    assert GPU.seconds("all_gather", 1.0, 16) == pytest.approx(max(15 / 370e9, 1 / 45e9) + 1e-5)
    assert GPU.seconds("all_gather", 1.0, 2, stride=8) == pytest.approx(1 / 45e9 + 1e-5)
    assert GPU.seconds("shift", 1.0, 8) == pytest.approx(1 / 370e9 + 1e-5)
    assert GPU.seconds("shift", 1.0, 9) == pytest.approx(1 / 45e9 + 1e-5)
    assert GPU.together(3.0, 2.0) == 3.0
    assert CPU.together(3.0, 2.0) == 5.0


def test_overrides() -> None:
    assert Machine.of("cpu") == CPU
    assert Machine.of("cuda") == GPU
    assert Machine.of("cuda", {"flops": 1e15, "ranks_per_node": 4}) == replace(GPU, flops=1e15, ranks_per_node=4)
    with pytest.raises(SpError, match=r"SP703: cost: .*'flop'.*'flops'"):
        Machine.of("cpu", {"flop": 1})
    for name, value in [("flops", 0), ("flops", "1"), ("flops", math.nan), ("overlap", 1.5), ("call", -1)]:
        with pytest.raises(SpError, match=f"SP702: cost: {name}:"):
            Machine.of("cpu", {name: value})
    with pytest.raises(SpError, match="SP702: cost: ranks_per_node:"):
        Machine.of("cpu", {"ranks_per_node": True})


def test_measured_constants_count_beside_a_device_size_only() -> None:
    """cost={} names no constant and selects the defaults, for tests and plans without ranks."""
    found = replace(Machine.of("cpu"), flops=1.0)
    assert Machine.of("cpu", None, found) == found
    assert Machine.of("cpu", {"memory": 5.0}, found) == replace(found, memory=5.0)
    assert Machine.of("cpu", {}, found) == Machine.of("cpu")
