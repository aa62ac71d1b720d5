"""Checks of integrations before communication: sizes, backends, and calls that would train wrongly."""

from __future__ import annotations

import dataclasses
import os
import re
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.parity import error_text
from support.ranks import Ranks, mesh
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tree.test_layers import FILES

from sp_compile import SpError
from sp_compile.integrations.ddp import compile_under_ddp
from sp_compile.integrations.fsdp import compile_under_fsdp


def test_only_integrations_import_their_libraries() -> None:
    """`import sp_compile` and `sp_compile.data` import none of these libraries."""
    wanted = "accelerate transformers lightning trl peft torchdata datasets".split()
    pattern = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(wanted)})\b", re.MULTILINE)
    found = {module for module, file in FILES.items() if pattern.search(file.read_text())}
    files = "accelerate", "cached_rows", "over_replicas", "parallelism", "run_script", "shard_cache", "transformers"
    files += "_compat.attention_names", "_compat.sampling", "_compat.trainers"
    assert found == {f"sp_compile.integrations.{name}" for name in files}


@pytest.fixture
def accelerate() -> Any:
    """The integration, where its package is."""
    pytest.importorskip("accelerate")
    import sp_compile.integrations.accelerate as integration

    return integration


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        ({}, 4, (1, 1, 4)),
        ({"dp_replicate_size": 2}, 4, (2, 1, 2)),
        ({"sp_size": 2}, 4, (2, 1, 2)),
        ({"cp_size": 2}, 4, (2, 1, 2)),
        ({"dp_replicate_size": 2, "sp_size": 2}, 4, (2, 1, 2)),
        ({"dp_replicate_size": 4}, 4, (4, 1, 1)),
        ({"dp_replicate_size": 2, "sp_size": 2}, 1, (1, 1, 1)),
    ],
)
def test_sizes_of_replicas(
    accelerate: Any, given: dict[str, int], processes: int, expected: tuple[int, int, int]
) -> None:
    config = accelerate.ParallelismConfig(**given)
    assert accelerate.axis_sizes(config, processes) == expected
    assert accelerate.axis_sizes(None, processes) == (1, 1, processes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1, 8)),
        ({"sp_size": 2}, (1, 4, 2)),
        ({"cp_size": 2}, (1, 4, 2)),
        ({"dp_shard_size": 2}, (1, 2, 4)),
        ({"dp_replicate_size": 2}, (2, 1, 4)),
        ({"dp_replicate_size": 2, "sp_size": 2}, (2, 2, 2)),
        ({"dp_shard_size": 2, "cp_size": 2}, (2, 2, 2)),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, (2, 2, 2)),
        ({"dp_shard_size": 8}, (1, 8, 1)),
    ],
)
def test_sizes_of_shards(accelerate: Any, given: dict[str, int], expected: tuple[int, int, int]) -> None:
    assert accelerate.axis_sizes(accelerate.ParallelismConfig(**given), 8, is_sharded=True) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sp_size": 3}, r"SP826.*\b4\b.*sp_size=3"),
        ({"sp_size": 2, "dp_replicate_size": 4}, "SP826.*dp_replicate_size=4 and sp_size=2"),
        ({"tp_size": 2}, "SP827.*tp_size=2"),
        ({"dp_shard_size": 2}, "SP827.*dp_shard_size=2.*fsdp_version=2"),
    ],
)
def test_sizes_that_do_not_fit(accelerate: Any, given: dict[str, int], words: str) -> None:
    with pytest.raises(SpError, match=words):
        accelerate.axis_sizes(accelerate.ParallelismConfig(**given), 4)


def test_one_process_warns_of_sizes(accelerate: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerate.axis_sizes(accelerate.ParallelismConfig(), 1)
    assert not caplog.records
    accelerate.axis_sizes(accelerate.ParallelismConfig(sp_size=7), 1)
    assert [record.args for record in caplog.records] == [("sp_size=7",)]


def test_settings_of_handlers(accelerate: Any) -> None:
    from accelerate.utils import TorchContextParallelConfig as Torch

    for strategy in ("allgather", "alltoall"):
        config = accelerate.ParallelismConfig(cp_size=4, cp_handler=Torch(cp_comm_strategy=strategy))
        found = error_text(lambda config=config: accelerate.axis_sizes(config, 4)) if strategy == "alltoall" else ""
        assert ("SP827" in found) == (strategy == "alltoall")
    assert accelerate.axis_sizes(accelerate.ParallelismConfig(cp_size=4, cp_handler=Torch()), 4).sequence == 4


@pytest.mark.parametrize(
    ("handler", "given"),
    [
        ("sp_handler", {"sp_seq_length": 64}),
        ("sp_handler", {"sp_seq_length": 64, "sp_seq_length_is_variable": False}),
        ("sp_handler", {"sp_attn_implementation": "flash_attention_2"}),
        ("tp_handler", {"enable_async_tp": True}),
    ],
)
def test_no_field_of_a_handler_is_ignored(accelerate: Any, handler: str, given: dict[str, Any]) -> None:
    """Each field is refused if it is not the default, also one that later versions of accelerate add."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, TorchTensorParallelConfig

    create = {"sp_handler": DeepSpeedSequenceParallelConfig, "tp_handler": TorchTensorParallelConfig}[handler]
    assert accelerate.axis_sizes(accelerate.ParallelismConfig(sp_size=2, **{handler: create()}), 2) == (1, 1, 2)
    config = accelerate.ParallelismConfig(sp_size=2, **{handler: create(**given)})
    assert re.match(
        f"SP827: .*{handler} with {next(iter(given))}=", error_text(lambda: accelerate.axis_sizes(config, 2))
    )
    later = dataclasses.make_dataclass("Later", [("new_setting", int, 1)])
    config = accelerate.ParallelismConfig(sp_size=2, sp_handler=later(2))
    assert "SP827" in error_text(lambda: accelerate.axis_sizes(config, 2))


def test_the_backend_name_is_scoped(accelerate: Any) -> None:
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    before = list(DynamoBackend)
    with accelerate.register_backend_name():
        plugin = TorchDynamoPlugin(backend="sp")
        assert plugin.to_kwargs()["backend"] == "sp"
        with accelerate.register_backend_name():
            pass
        assert DynamoBackend("SP") is plugin.backend
    assert list(DynamoBackend) == before
    with pytest.raises(ValueError, match="'SP'"):
        DynamoBackend("SP")


@pytest.fixture
def fresh(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each Accelerator as the first one of a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    return accelerate


@pytest.mark.parametrize("given", [{}, {"dynamo_backend": "sp"}])
def test_one_process_compiles(fresh: Any, given: dict[str, Any]) -> None:
    accelerator = fresh.SequenceParallelAccelerator(cpu=True, sp_options={"compiler": "aot_eager"}, **given)
    assert (accelerator.mesh, accelerator.sp_size) == (None, 1)
    model = nn.Linear(4, 4)
    expected = model(torch.ones(2, 4))
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert accelerator.prepare_model(model) is model
    torch.testing.assert_close(prepared(torch.ones(2, 4)), expected)


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 2), ({"step_scheduler_with_optimizer": False}, 1), ({"split_batches": True}, 1)]
)
def test_schedulers_count_replicas(fresh: Any, given: dict[str, bool], steps: int) -> None:
    """As accelerate counts processes: one step if the optimizer does not count, or if replicas split each batch."""
    if "split_batches" in given:
        from accelerate.utils import DataLoaderConfiguration

        given = {"dataloader_config": DataLoaderConfiguration(**given)}  # type: ignore[dict-item]
    accelerator = fresh.SequenceParallelAccelerator(cpu=True, **given)
    accelerator.mesh, accelerator.replicas = object(), 2  # as with two replicas
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.1**steps)]


def test_placements_without_an_optimizer(fresh: Any) -> None:
    """With FSDP, an optimizer is added to a model that is prepared for evaluation."""
    accelerator = fresh.SequenceParallelAccelerator(cpu=True)
    accelerator.mesh, model, loader = object(), nn.Linear(1, 1), torch.utils.data.DataLoader(range(2))
    accelerator._optimizers.append(added := mock.Mock())
    accelerator.compile = mock.Mock()
    with (
        mock.patch.object(fresh.SequenceParallelAccelerator, "is_fsdp2", True),
        mock.patch.object(accelerator.state, "fsdp_plugin", mock.Mock(cpu_ram_efficient_loading=True), create=True),
        mock.patch.object(fresh.Accelerator, "prepare", return_value=(model, loader, added)) as prepare,
    ):
        assert accelerator.prepare(model, loader, device_placement=[True, False]) == (model, loader)
        assert prepare.call_args.kwargs == {"device_placement": [True, False, None]}
        accelerator._optimizers.append(added)
        accelerator.prepare(model, loader)
        assert prepare.call_args.kwargs == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dynamo_backend": "inductor"}, "SP821.*'inductor'"),
        ({"dynamo_plugin": {"mode": "max-autotune"}}, "SP821.*'max-autotune'"),
        ({"dynamo_plugin": {"use_regional_compilation": True}}, "SP821.*use_regional_compilation"),
        ({"sp_options": {"mesh": None}}, "SP822: sp_options: .*'mesh'"),
        ({"fsdp_plugin": 1}, r"SP823: fsdp_version: .*\b2\b.*\b1\b"),
    ],
)
def test_accelerator_errors(fresh: Any, given: dict[str, Any], words: str) -> None:
    if "fsdp_plugin" in given:
        from accelerate.utils import FullyShardedDataParallelPlugin

        given = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=given["fsdp_plugin"])}
    if "dynamo_plugin" in given:
        from accelerate.utils import TorchDynamoPlugin

        given = {"dynamo_plugin": TorchDynamoPlugin(**given["dynamo_plugin"])}
    with pytest.raises(SpError, match=words):
        fresh.SequenceParallelAccelerator(cpu=True, **given)


def test_a_disabled_plugin_compiles_nothing(fresh: Any) -> None:
    from accelerate.utils import TorchDynamoPlugin

    for disable in (True, False):
        plugin = TorchDynamoPlugin(disable=disable)
        model = fresh.SequenceParallelAccelerator(cpu=True, dynamo_plugin=plugin).prepare(nn.Linear(1, 1))
        assert (model._compiled_call_impl is None) == disable


def test_processes_that_accelerate_does_not_know(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = fresh.SequenceParallelAccelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpError, match=r"SP825: 2 .*\b1\b"):
        accelerator._check_processes()


def test_a_model_that_is_compiled_already() -> None:
    for compiled in (torch.compile(nn.Linear(2, 2)), compile_under_ddp(nn.Linear(2, 2))):
        with pytest.raises(SpError, match="SP831"):
            compile_under_ddp(compiled)
    with pytest.raises(SpError, match=r"SP102: options: .*'atention'"):
        compile_under_ddp(nn.Linear(2, 2), atention="ring")


def test_bases_of_a_trainer_in_the_wrong_order() -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer

    from sp_compile.integrations.transformers import SequenceParallel

    with pytest.raises(SpError, match=r"SP847: Wrong: .*Mine, SequenceParallel"):
        type("Wrong", (type("Mine", (Trainer,), {}), SequenceParallel), {})
    with pytest.raises(SpError, match="SP847"):
        type("Wrong", (Trainer, SequenceParallel), {})
    assert type("Right", (SequenceParallel, Trainer), {}).__mro__.index(Trainer) > 1


def test_a_model_without_fsdp() -> None:
    with pytest.raises(SpError, match=r"SP833: model: .*Linear"):
        compile_under_fsdp(nn.Linear(2, 2))


class Sums(nn.Module):
    """More parameters than DDP's first bucket takes, so that `optimize_ddp` would cut it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4))).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.cumsum(1)).square().mean()


def under_ddp() -> tuple[int, float, str]:
    """Return (graphs, largest gradient error against a single device, error of a call without DDP)."""
    torch.manual_seed(0)
    model, alone = Sums(), Sums()
    alone.load_state_dict(model.state_dict())
    x = torch.randn(1, 9, 384, dtype=torch.float64)
    alone(x).backward()
    compile_under_ddp(model, mesh(), compiler="aot_eager")
    wrapped = DistributedDataParallel(model, process_group=mesh().get_group())
    torch._dynamo.utils.counters.clear()
    wrapped(x).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
    with torch.no_grad():
        model(x)
    try:
        model(x)
    except SpError as error:
        return graphs, worst, str(error)
    return graphs, worst, f"nothing on rank {dist.get_rank()}"


def test_a_model_under_ddp_is_one_graph(ranks: Ranks) -> None:
    for graphs, worst, message in ranks.run(2, under_ddp):
        assert graphs == 1
        assert worst < 1e-10
        assert "SP832" in message


def metrics() -> tuple[list[Any], list[str]]:
    """Return metrics of both ranks in every form, and the errors for different and for missing metrics."""
    from sp_compile.integrations.over_replicas import gather_over_replicas

    rank, group = dist.get_rank(), dist.new_group([0, 1], timeout=timedelta(seconds=3), group_desc="metrics")
    if rank > 1:
        return [], []
    array = np.float64([rank])  # which JSON would give back as a list
    given = [{"loss": torch.tensor(rank), "more": (torch.full((2,), rank),)}, [rank, ("a", None)], [array]]
    found = [gather_over_replicas(one, group) for one in given]
    found.append(gather_over_replicas([torch.ones(1)], group, as_objects=True))
    errors = [error_text(lambda: gather_over_replicas(torch.ones(rank + 1), group))]
    errors.append(error_text(lambda: gather_over_replicas([1] if rank else torch.ones(2), group)))
    return found, [*errors, error_text(lambda: gather_over_replicas([1], group)) if rank == 0 else ""]


def test_metrics_of_replicas(accelerate: Any, ranks: Ranks) -> None:
    for (tensors, plain, arrays, objects), (sizes, kinds, alone) in ranks.run(4, metrics)[:2]:
        assert tensors["loss"].tolist() == [0, 1]
        assert tensors["more"][0].tolist() == [0, 0, 1, 1]
        assert plain == [0, ("a", None), 1, ("a", None)]
        assert arrays == [np.float64([0]), np.float64([1])]
        assert objects == [torch.ones(1)] * 2
        assert sizes.startswith("SP829: ")
        assert "replica 0: tensors torch.float32 [1]\n  replica 1: tensors torch.float32 [2]" in sizes
        assert "replica 1: values" in kinds
        assert not alone or re.match("SP62[12]: ", alone), alone


def counted() -> dict[str, Any]:
    """Return the batches of a rank in two replicas of two ranks, and its error for sums that differ."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import recursively_apply

    import sp_compile.integrations.accelerate as integration

    given = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, given))
        for one in (AcceleratorState, GradientState, PartialState):
            stack.enter_context(mock.patch.object(one, "_shared_state", {}))
        config = integration.ParallelismConfig(dp_replicate_size=2)
        accelerator = integration.SequenceParallelAccelerator(cpu=True, parallelism_config=config)
        replica = dist.get_rank() // 2
        rows, count = torch.arange(2.0) + 10 * replica, torch.tensor(3 + replica)
        found = {
            "gather": accelerator.gather({"rows": rows})["rows"].tolist(),
            "number": accelerator.gather(count).tolist(),
            "for metrics": accelerator.gather_for_metrics(rows).tolist(),
            "padded": accelerator.gather(accelerator.pad_across_processes(rows[: 1 + replica])).tolist(),
            "sum": accelerator.reduce(rows).tolist(),
            "count": accelerator.reduce(count).item(),
            "mean": accelerator.reduce(rows, "mean").tolist(),
            "max": accelerator.reduce(rows, "max").tolist(),
        }
        for length, name in ((7, "three of the last batch"), (5, "one of the last batch")):
            loader = accelerator.prepare(torch.utils.data.DataLoader(range(length), 2))
            last = [accelerator.gather_for_metrics([x, {"twice": 2 * x}]) for x in loader][-1]
            found[name] = recursively_apply(torch.Tensor.tolist, last)
            found[f"{name}, as objects"] = [accelerator.gather_for_metrics(x.tolist()) for x in loader][-1]
        if dist.get_rank() == 3:
            accelerator.set_trigger()
        found["triggers"] = [accelerator.check_trigger(), accelerator.check_trigger()]
        found["error"] = error_text(lambda: accelerator.reduce(torch.tensor(dist.get_rank() == 3).int()))
    return found


def test_rows_are_counted_once(accelerate: Any, ranks: Ranks) -> None:
    for found in ranks.run(4, counted):
        assert re.match(r"SP828: .*\b2 ranks", found.pop("error"))
        assert found == {
            "gather": [0, 1, 10, 11],
            "number": [3, 4],
            "for metrics": [0, 1, 10, 11],
            "padded": [0, 0, 10, 11],
            "sum": [10, 12],
            "count": 7,
            "mean": [5, 6],
            "max": [10, 11],
            "three of the last batch": [[4, 5, 6], {"twice": [8, 10, 12]}],
            "three of the last batch, as objects": [4, 5, 6],
            "one of the last batch": [[4], {"twice": [8]}],
            "one of the last batch, as objects": [4],
            "triggers": [True, False],
        }
