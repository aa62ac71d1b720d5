"""Models that nobody here wrote, from transformers, with tiny random weights."""

from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, check
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-6  # transformers computes the losses of decoders in float32, whatever the model is in
SMALL = {"vocab_size": VOCAB, "attn_implementation": "sdpa"}


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **off, **SMALL)
    )


def bert() -> torch.nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **off, **SMALL
    )
    return transformers.BertForMaskedLM(config)


def one_step(make: Any, seq: int, padded: bool) -> Outcome:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = make().double()
    model.config.use_cache = False
    ids = torch.randint(0, VOCAB, (2, seq))
    labels = ids.clone()
    labels[:, : seq // 3] = -100
    kwargs = {"labels": labels}
    if padded:
        kwargs["attention_mask"] = torch.ones_like(ids)
        kwargs["attention_mask"][1, -4:] = 0
    return against_eager(model, ids, kwargs=kwargs, mesh=worker.mesh())


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("n", "padded"), [(2, True), (3, False)], ids=["padded", "not divisible"])
@pytest.mark.parametrize("model", [llama, gpt2, bert])
def test_training_step(ranks: Ranks, model: Any, n: int, padded: bool) -> None:
    check(ranks.run(n, one_step, model, 14, padded), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "padded"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("model", [llama, gpt2, bert])
def test_training_step_of_other_sizes(ranks: Ranks, model: Any, n: int, padded: bool) -> None:
    check(ranks.run(n, one_step, model, 13, padded), TOLERANCE)
