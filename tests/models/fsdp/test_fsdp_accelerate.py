"""accelerate's FSDP2 on four real ranks: losses, weights and checkpoints of a Llama against a single device, and which graphs run on shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.parity import error_text
from support.ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

STEPS, ROWS, LENGTH, VOCABULARY = 10, 4, 13, 48  # a length that no number of ranks divides
LOSS = 2e-6  # transformers computes the loss in float32


@dataclass(frozen=True)
class Way:
    """Settings of a run. sizes: of ParallelismConfig. plugin: of FSDP. tied: embedding and head have one weight.

    differs: each rank creates other weights.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    shards: int = 4  # ranks among which a weight is divided
    precision: str = "no"
    differs: bool = False

    def __str__(self) -> str:
        given = {**self.sizes, **self.plugin} | ({"tied": True} if self.tied else {})
        return "-".join(f"{name} {value}" for name, value in given.items()) or self.precision


class Looking:
    """A compiler that lists the sp:: ops of each graph, and if an input is a parameter."""

    def __init__(self) -> None:
        self.graphs: list[tuple[set[str], bool]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        ops = {target.split(".")[1] for target in targets if target.startswith("sp.")}
        self.graphs.append((ops, any(isinstance(x, nn.Parameter) for x in inputs)))
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


@pytest.fixture
def accelerate() -> None:
    """Skip the test where accelerate or transformers is absent."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The environment of a rank, with states of accelerate of its own."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank = str(dist.get_rank())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, given))
        for one in (AcceleratorState, GradientState, PartialState):
            stack.enter_context(mock.patch.object(one, "_shared_state", {}))
        yield


def llama(tied: bool, seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=tied, use_cache=False, **sizes)
    return LlamaForCausalLM(config).double()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name.replace("_checkpoint_wrapped_module.", ""): p.detach() for name, p in full.items()}


def stored(tensors: list[Any]) -> float:
    """Return the part of the elements of DTensors that this rank stores."""
    return sum(x.to_local().numel() for x in tensors) / sum(x.numel() for x in tensors)


def prepared(way: Way, compiler: Any) -> tuple[Any, nn.Module, Any, Any]:
    """Return an Accelerator, a model, an optimizer and a loader."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from sp_compile.integrations.accelerate import ParallelismConfig, SequenceParallelAccelerator

    given = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **way.plugin}
    accelerator = SequenceParallelAccelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision=way.precision,
        parallelism_config=ParallelismConfig(**way.sizes) if way.sizes else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(**given),
        sp_options={"compiler": compiler, "cost": {}, "attention": "ulysses"},
    )
    model = llama(way.tied, dist.get_rank() if way.differs else 0)
    model = model if way.precision == "no" else model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(VOCABULARY, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(ids, ROWS // accelerator.replicas)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def trained(way: Way) -> dict[str, Any]:
    """Return the errors of losses and weights, the stored parts of weights and moments, and the graphs."""
    with as_torchrun():
        compiler = Looking()
        accelerator, model, optimizer, loader = prepared(way, compiler)
        alone = llama(way.tied)
        updates, losses, norms = torch.optim.AdamW(alone.parameters(), lr=1e-2), [], []
        batches = [accelerator.gather(ids) for ids in loader]  # of all replicas
        for ids, rows in zip(loader, batches, strict=True):
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
            right = alone(input_ids=rows, labels=rows).loss
            (right / 2).backward()
            losses.append(accelerator.gather_for_metrics(loss.detach()).double().mean().sub(right).abs().item())
            if accelerator.sync_gradients:
                norms[-1] = (norms[-1].full_tensor() - nn.utils.clip_grad_norm_(alone.parameters(), 0.5)).abs().item()
                updates.step()
                updates.zero_grad()
        expected = weights_of(alone)
        moved = [(weight - expected[name]).abs().max().item() for name, weight in weights_of(model).items()]
        moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, DTensor) and x.ndim]
        parts = stored([*model.parameters()]), stored(moments)
        return {
            "loss": max(losses),
            "norm": max(norms),
            "weight": max(moved),
            "parts": parts,
            "graphs": compiler.graphs,
        }


BY_LAYER = 4  # graphs of an embedding, a layer, the last norm, and the head with its loss
WAYS = [
    Way({"sp_size": 2}),
    Way({"dp_replicate_size": 2, "sp_size": 2}, shards=2),
    Way({"cp_size": 2}, tied=True),
    # Trained with the weights of rank 0, which `llama` creates for the single device.
    Way(plugin={"activation_checkpointing": True, "cpu_ram_efficient_loading": True}, differs=True),
    Way({"dp_shard_size": 2}, {"auto_wrap_policy": "NO_WRAP"}),
    Way({"dp_shard_size": 2}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}),
]


def check_way(ranks: Ranks, way: Way) -> None:
    for found in ranks.run(4, trained, way, timeout=300):
        assert found["loss"] < LOSS
        assert found["norm"] < 1e-9
        assert found["weight"] < 1e-9
        assert found["parts"] == (1 / way.shards, 1 / way.shards)
        on_shards = [ops for ops, has_weights in found["graphs"] if has_weights]
        assert all(on_shards)  # each graph with weights
        assert sum("all_to_all" in ops for ops in on_shards) == 1  # attention
        if way.plugin.get("auto_wrap_policy") == "NO_WRAP":
            assert len(found["graphs"]) == 1
        else:
            assert len(on_shards) >= BY_LAYER


@pytest.mark.slow
def test_sharded_weights_equal_one_device(accelerate: None, ranks: Ranks) -> None:
    check_way(ranks, WAYS[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_ways_of_sharding_equal_one_device(accelerate: None, ranks: Ranks, way: Way) -> None:
    check_way(ranks, way)


@pytest.mark.slow
def test_sharded_weights_in_bfloat16(accelerate: None, ranks: Ranks) -> None:
    for found in ranks.run(4, trained, Way(precision="bf16"), timeout=300):
        assert found["loss"] < 2e-2  # of a loss of 4, against float64
        assert found["parts"] == (0.25, 0.25)
        assert all(ops for ops, has_weights in found["graphs"] if has_weights)


def refused(way: Way) -> str:
    """Return the error of settings."""
    with as_torchrun():
        return error_text(lambda: prepared(way, "aot_eager"))


def test_checkpoints_without_layers(accelerate: None, ranks: Ranks) -> None:
    way = Way(plugin={"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"})
    assert all("SP834: activation_checkpointing" in text for text in ranks.run(4, refused, way))


def test_weights_that_differ_between_ranks(accelerate: None, ranks: Ranks) -> None:
    assert all("SP642" in text for text in ranks.run(4, refused, Way(differs=True)))


def saved(way: Way, folder: str, loads: bool) -> dict[str, torch.Tensor]:
    """Save an Accelerator's state after a step, or load it into one that made none; return weights and moments."""
    with as_torchrun():
        accelerator, model, optimizer, loader = prepared(way, "aot_eager")
        if loads:
            accelerator.load_state(folder)
        else:
            for ids in list(loader)[:2]:
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
                    optimizer.step()
            accelerator.save_state(folder)
            accelerator.save_model(model, f"{folder}/model")
        moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
        return {**weights_of(model), **{str(i): x for i, x in enumerate(moments)}}


@pytest.mark.slow
def test_full_states_are_loaded_for_other_sizes(accelerate: None, ranks: Ranks, tmp_path: Path) -> None:
    """test_fsdp_trainer.py saves shards, and trains after it."""
    from safetensors.torch import load_file

    plugin = {"state_dict_type": "FULL_STATE_DICT"}
    before, *_ = ranks.run(4, saved, Way({"sp_size": 2}, plugin), str(tmp_path / "state"), False, timeout=300)
    others = Way({"dp_replicate_size": 2, "sp_size": 2}, plugin)
    for after in ranks.run(4, saved, others, str(tmp_path / "state"), True, timeout=300):
        assert before.keys() == after.keys()
        assert all(x.equal(after[name]) for name, x in before.items())
    file = load_file(tmp_path / "state" / "model" / "model.safetensors")
    assert all(x.equal(before[name]) for name, x in file.items())
