"""What a compilation decides is one decision on all ranks that the program connects, whatever each of them measured."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.parallel.parallel_models import Split, build, tokens
from support.parallel.parallel_training import Trained, watched
from support.ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh

from sp_compile.cost import measure
from sp_compile.cost.machine import Machine

SLOW_ALL_TO_ALL, SLOW_ALL_GATHER = ({f"{op}_latency": 1.0} for op in ("all_to_all", "all_gather"))


def measured_apart() -> list[str]:
    """Each of the two groups over which the sequence is split finds other links fast, as noise or a cold disk do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    tp = Split(2, mesh.get_local_rank("tp"), mesh.get_group("tp"))
    found = Machine.of("cpu", SLOW_ALL_TO_ALL if tp.rank else SLOW_ALL_GATHER)

    def machine(*_: Any) -> Machine:
        return found

    with mock.patch.object(measure, "machine", machine):
        options = {"compiler": "aot_eager", "mesh": mesh}
        with watched(one := Trained()):
            loss = torch.compile(build(tp, layers=1), backend="sp", options=options)(tokens(2, 8, 0))
    assert torch.allclose(loss, build(tp, layers=1)(tokens(2, 8, 0)))
    return one.modes


@pytest.mark.slow
def test_groups_that_measured_apart_split_attention_the_same_way(ranks: Ranks) -> None:
    """Else the tensor-parallel ranks have two programs, and all layers stay full."""
    assert ranks.run(4, measured_apart) == [["ssss"]] * 4
