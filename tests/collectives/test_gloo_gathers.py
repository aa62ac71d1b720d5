"""Test that functional all-gathers of CPU tensors do not use the kernel of torch that corrupts the heap on Gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.device_mesh import init_device_mesh

TORCHS_KERNEL = "c10d::allgather_into_tensor_coalesced_"
PROGRAM = Path(__file__).parents[1] / "support/programs/gloo_names.py"


def gather(dtype: torch.dtype) -> list[str]:
    """Compare gathered values on this rank; return the names of the operations that ran."""
    mesh = init_device_mesh("cpu", (2,))
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()
    c10d = torch.ops._c10d_functional
    full = torch.arange(24).view(6, 4).to(dtype)
    rows = full.T.contiguous().T[3 * rank : 3 * rank + 3]  # not contiguous
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = [c10d.all_gather_into_tensor(rows, 2, group)]
        found += c10d.all_gather_into_tensor_coalesced([rows, rows], 2, group)
        found = [c10d.wait_tensor(y) for y in found]
        found.append(torch.compile(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x.clone(), 2, group)))(rows))
        found.append(DTensor.from_local(rows, mesh, [Shard(0)]).full_tensor())
    assert len(found) == 5
    for y in found:
        assert y.is_contiguous()
        torch.testing.assert_close(y, full, rtol=0, atol=0)
    return [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_gathers_have_short_names(dtype: torch.dtype, ranks: Ranks) -> None:
    for names in ranks.run(2, gather, dtype):
        assert "c10d::_allgather_base_" in names
        assert TORCHS_KERNEL not in names


@pytest.mark.slow
def test_a_minute_of_gathers_by_two_threads() -> None:
    """Without `corrected`, the program ends with a signal."""
    command = [sys.executable, "-W", "ignore", PROGRAM, "60", "corrected"]
    subprocess.run(command, check=True, timeout=300)
