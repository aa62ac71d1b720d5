"""Trainers that sample: one sample for the ranks of a sequence, and replicas in place of processes."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch.utils.data import DataLoader

from sp_compile import SpError

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ParallelismConfig, gather, gather_object

from sp_compile.integrations._compat.counting import ReplicaCounter, check_trainer
from sp_compile.integrations._compat.sampling import SampleSharer
from sp_compile.integrations.accelerate import SequenceParallelAccelerator


class Sampler:
    """The methods of a Trainer of TRL that sample, score and compute a loss, as it calls them."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        torch.manual_seed(dist.get_rank())

    def _generate_single_turn(self) -> list[float]:
        return [self.accelerator.process_index, torch.rand(()).item()]

    def _generate(self) -> list[float]:
        return [*self._generate_single_turn(), dist.get_rank()]

    def _calculate_rewards(self) -> list[float]:
        return gather(torch.tensor([float(dist.get_rank())])).tolist()

    def _generate_and_score_completions(self) -> dict[str, Any]:
        found = {
            "samples": self._generate(),
            "rewards": self._calculate_rewards(),
            "rank": self.accelerator.process_index,
        }
        return {**found, "objects": gather_object([dist.get_rank()])}

    def compute_loss(self) -> int:
        return self.accelerator.num_processes

    def get_train_dataloader(self) -> tuple[Any, ...]:
        found = self.accelerator.num_processes, self.args.world_size, self.args.process_index
        # accelerate derives the ranks that share a batch from the mesh
        loader = self.accelerator.prepare(DataLoader(range(8), batch_size=2))
        return *found, [batch.tolist() for batch in loader]


class Arguments:
    """The properties of TrainingArguments that count processes."""

    world_size = property(lambda self: dist.get_world_size())
    process_index = property(lambda self: dist.get_rank())


class SharingSampler(SampleSharer, ReplicaCounter, Sampler):
    args = Arguments()


def sampled() -> dict[str, Any]:
    """Return what a rank of two replicas of two ranks samples."""
    rank = str(dist.get_rank())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, given))
        for one in (AcceleratorState, GradientState, PartialState):
            stack.enter_context(mock.patch.object(one, "_shared_state", {}))
        config = ParallelismConfig(dp_replicate_size=2)
        sampler = SharingSampler(SequenceParallelAccelerator(cpu=True, parallelism_config=config))
        found = sampler._generate_and_score_completions()
        found |= {"loss": sampler.compute_loss(), "loader": sampler.get_train_dataloader()}
        assert sampler.args.world_size == sampler.accelerator.num_processes == 4
        return {**found, "next": torch.rand(()).item(), "all": gather_object([1])}


def test_ranks_of_a_sequence_sample_once(ranks: Ranks) -> None:
    found = ranks.run(4, sampled)
    for rank, one in enumerate(found):
        first = found[rank // 2 * 2]
        assert one["samples"] == first["samples"]
        assert one["samples"][::2] == [rank // 2 * 2] * 2
        assert one["next"] == first["next"]
        assert one["rewards"] == [0, 2]
        assert one["objects"] == [rank % 2, rank % 2 + 2]
        assert (one["rank"], one["loss"], one["all"]) == (rank // 2, 2, [1] * 4)
        assert one["loader"] == (2, 2, rank // 2, [[0, 1], [4, 5]] if rank < 2 else [[2, 3], [6, 7]])
    assert found[0]["samples"] != found[2]["samples"]


def count(**given: Any) -> int:
    """Return the number of completions of a step on two replicas of two ranks."""
    sizes = {"per_device_train_batch_size": 2, "steps_per_generation": 3, "num_generations": 4}
    accumulated = {"gradient_accumulation_steps": 3}
    evaluation = {"do_eval": True, "eval_strategy": "no", "per_device_eval_batch_size": 3}
    trainer: Any = object.__new__(SampleSharer)
    trainer.args = SimpleNamespace(**{"generation_batch_size": 24, **sizes, **accumulated, **evaluation, **given})
    trainer.accelerator = SimpleNamespace(replicas=2, sp_size=2)
    trainer.count_generations()
    return trainer.args.generation_batch_size


def test_completions_of_a_step() -> None:
    assert count() == 12
    assert count(generation_batch_size=None) is None
    assert count(eval_strategy="steps", num_generations_eval=2) == 12
    with pytest.raises(SpError, match=r"SP837: generation_batch_size: .*num_generations=5.*\b12\b.*\b2\b"):
        count(num_generations=5)
    with pytest.raises(SpError, match=r"SP837: .*num_generations=4.*\b6\b"):
        count(eval_strategy="steps")
    with pytest.raises(SpError, match=r"SP837: .*num_generations_eval=5.*\b6\b"):
        count(eval_strategy="steps", num_generations_eval=5)


class CountingTrainer:
    """A Trainer, as of TRL, that reads the number of processes in methods that count replicas, and samples in one."""

    def compute_loss(self) -> Any:
        return self.accelerator.num_processes, self.accelerator.gather(1)

    def _generate_single_turn(self) -> Any:
        return self.model.generate()


def log_step(self: Any) -> Any:
    return [self.accelerator.num_processes for _ in "a"]


def fill_buffer(self: Any) -> Any:
    return self.model.generate()


def log_rewards(self: Any) -> Any:
    return gather(self.rewards)


def test_trainers_that_count_processes_elsewhere_are_refused() -> None:
    pytest.importorskip("trl")

    def trainer(*methods: Any, module: str = "trl.trainer") -> type:
        return type("Trainer", (CountingTrainer,), {"__module__": module, **{one.__name__: one for one in methods}})

    check_trainer(trainer())
    check_trainer(trainer(log_step, module="user"))
    for method, name in ((log_step, "num_processes"), (fill_buffer, "generate"), (log_rewards, "gather")):
        with pytest.raises(SpError, match=rf"SP839: .*{method.__name__}.*'{name}'.*trl \d"):
            check_trainer(type("User", (trainer(method),), {}))


def test_trainers_of_trl_are_known() -> None:
    trl = pytest.importorskip("trl")
    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation"):
        check_trainer(getattr(trl, f"{name}Trainer"))


@pytest.mark.parametrize(
    ("owner", "method", "package"),
    [
        ("Trainer", "_get_num_items_in_batch", "transformers"),
        ("Trainer", "_get_train_sampler", "transformers"),
        ("GRPOTrainer", "_generate_single_turn", "trl"),
        ("GRPOTrainer", "_generate", "trl"),
        ("GRPOTrainer", "_calculate_rewards", "trl"),
        ("RLOOTrainer", "_generate_and_score_completions", "trl"),
    ],
)
def test_a_private_method_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: str, method: str, package: str
) -> None:
    pytest.importorskip("trl")
    cls = getattr(importlib.import_module(package), owner)
    monkeypatch.setattr(cls, f"{method}_of_other_version", getattr(cls, method), raising=False)
    monkeypatch.delattr(cls, method)
    with pytest.raises(SpError, match=rf"SP839: {owner}: .*{method}, .*{package} \d"):
        check_trainer(cls)


def test_a_given_number_of_completions_is_kept() -> None:
    pytest.importorskip("trl")
    assert counted() == [(32, 8), (16, 4), (4, 1), (8, 2)]


def counted() -> list[tuple[int, int]]:
    """Return the completions and the steps of a generation on 2 ranks of a replica, for several configurations."""
    from trl import GRPOConfig

    import sp_compile.integrations.transformers  # noqa: F401

    found = []
    with mock.patch.object(GRPOConfig, "world_size", 2):
        for given in (
            {"generation_batch_size": 32},
            {"steps_per_generation": 4},
            {},
            {"gradient_accumulation_steps": 2},
        ):
            trainer: Any = object.__new__(SampleSharer)
            sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1, **given}
            trainer.args = GRPOConfig(use_cpu=True, bf16=False, report_to=[], **sizes)
            trainer.accelerator = SimpleNamespace(replicas=1, sp_size=2)
            trainer.count_generations()
            found.append((trainer.args.generation_batch_size, trainer.args.steps_per_generation))
    return found


def test_a_number_that_is_not_known_to_be_given_is_refused() -> None:
    with pytest.raises(SpError, match=r"SP840: .*generation_batch_size=24.*steps_per_generation=3"):
        count(gradient_accumulation_steps=1)
