"""Models with recurrences and packed documents: equal to each document by itself, on ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support.parity import VOCAB, Outcome, check, outcome, sp, train_step
from support.ranks import Ranks, mesh
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def qwen3_next() -> nn.Module:
    """The gated delta rule and short convolutions, then attention."""
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**SIZES, **EXPERTS, experts_implementation="batched_mm")
    )


def qwen3_5() -> nn.Module:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))


MAMBA = {"mamba_d_head": 8, "mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_chunk_size": 4}
ATTENTION_SIZES = {name: value for name, value in SIZES.items() if not name.startswith(("linear_", "layer_"))}


class Mamba2(nn.Module):
    """Mamba2ForCausalLM, which does not pass seq_idx to its layers, with all arguments passed."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.Mamba2ForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
        states = self.model.backbone(input_ids, **options).last_hidden_state
        loss = self.model.loss_function(self.model.lm_head(states), labels, VOCAB)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def mamba2() -> nn.Module:
    """Convolutions and scans of mamba_ssm, whose documents are the argument seq_idx."""
    sizes = {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
    return Mamba2(transformers.Mamba2Config(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, **sizes))


def bamba() -> nn.Module:
    return transformers.BambaForCausalLM(transformers.BambaConfig(**ATTENTION_SIZES, **MAMBA, attn_layer_indices=[1]))


def falcon_h1() -> nn.Module:
    """Attention and a scan of the same tokens in each layer."""
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**ATTENTION_SIZES, **MAMBA, mamba_d_ssm=32))


def nemotron_h() -> nn.Module:
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 2, "chunk_size": 4}
    sizes = {name: value for name, value in ATTENTION_SIZES.items() if name != "num_hidden_layers"}
    layers = ["linear_attention", "full_attention", "mlp"]
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes, **mamba, layers_block_type=layers))


def granite_hybrid() -> nn.Module:
    """Scans only: attention of this model reads other documents, unless it is FlashAttention."""
    sizes = {**ATTENTION_SIZES, "shared_intermediate_size": 24, "num_local_experts": 0}
    sizes["layer_types"] = ["linear_attention", "linear_attention"]
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**sizes, **MAMBA))


MODELS = {
    **{"qwen3_next": qwen3_next, "qwen3_5": qwen3_5, "mamba2": mamba2, "bamba": bamba, "falcon_h1": falcon_h1},
    **{"nemotron_h": nemotron_h, "granite_hybrid": granite_hybrid},
}


@contextmanager
def without_float32() -> Iterator[None]:
    """Make casts to float32 casts to float64: gates and the delta rule of these models are float32 for every dtype."""
    cast = Tensor.to

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        return cast(x, *wide, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    with mock.patch.object(Tensor, "float", Tensor.double), mock.patch.object(Tensor, "to", to):
        yield


class ByDocument(nn.Module):
    """The mean loss of documents that a model reads one by one."""

    def __init__(self, model: nn.Module, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.lengths = model, lengths

    def forward(self, ids: Tensor) -> Tensor:
        losses = [
            self.model(input_ids=document, labels=document, use_cache=False).loss * (document.shape[1] - 1)
            for document in ids.split(self.lengths, 1)
            if document.shape[1] > 1  # one token predicts nothing
        ]
        return torch.stack(losses).sum() / sum(length - 1 for length in self.lengths)


def packed_inputs(ids: Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a packed batch, as transformers' collator without padding makes them."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    labels = ids.clone()
    labels[0, ends[:-1]] = -100  # the first token of a document is not predicted
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    marks = {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int(), "seq_idx": numbers.int()}
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False, **marks}


def packed_step(name: str, lengths: tuple[int, ...]) -> Outcome:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = MODELS[name]().double()
    ids = torch.randint(VOCAB, (1, sum(lengths)))
    alone = ByDocument(copy.deepcopy(model), lengths)
    with without_float32():
        loss, gradients = train_step(alone, alone, (ids,))
    found = train_step(sp(model, mesh=mesh()), model, (), **packed_inputs(ids, lengths))
    return outcome(*found, loss.to(found[0].dtype), gradients)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(7, 1, 6), (9, 20, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_separate(ranks: Ranks, name: str, n: int, lengths: tuple[int, ...]) -> None:
    """Documents end exactly at a cut (14 tokens, 2 ranks), have one token, or span three ranks (20 of 36, 4 ranks)."""
    check(ranks.run(n, packed_step, name, lengths), 2e-5)  # float32 against float64


def test_documents_without_the_packages_of_kernels() -> None:
    """transformers refuses seq_idx without mamba_ssm; Dynamo traces stand-ins, which support it, for all backends."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, lengths = mamba2().double(), (7, 1, 6)
    ids = torch.randint(VOCAB, (1, sum(lengths)))
    with without_float32():
        expected = ByDocument(model, lengths)(ids)
    found = torch.compile(model, backend="eager")(**packed_inputs(ids, lengths)).loss
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
