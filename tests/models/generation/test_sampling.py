"""Trainers that sample: one sample for the ranks of a sequence, and replicas in place of processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from sp_compile import SpError

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ParallelismConfig, gather, gather_object

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

    def _compute_loss(self) -> int:
        return self.accelerator.num_processes


class SharingSampler(SampleSharer, Sampler):
    pass


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
        return {**found, "next": torch.rand(()).item(), "loss": sampler._compute_loss(), "all": gather_object([1])}


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
    assert found[0]["samples"] != found[2]["samples"]


def count(**given: Any) -> int:
    """Return the number of completions of a step on two replicas of two ranks."""
    sizes = {"per_device_train_batch_size": 2, "steps_per_generation": 3, "num_generations": 4}
    evaluation = {"do_eval": True, "eval_strategy": "no", "per_device_eval_batch_size": 3}
    trainer: Any = object.__new__(SampleSharer)
    trainer.args = SimpleNamespace(**{"generation_batch_size": 24, **sizes, **evaluation, **given})
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
