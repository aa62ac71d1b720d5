"""Unmodified models of transformers with tiny random weights."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from models.hf.test_hf_scans import mamba, qwen3_moe
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, check, difference, gradients, outcome, sp
from support.ranks import Ranks

import sp_compile
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.context import NoteKind
from sp_compile.runtime.fingerprint import program_subject

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-6  # transformers computes the losses of decoders in float32 for every dtype of the model
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


def gpt_oss(experts: str = "batched_mm") -> torch.nn.Module:
    """Sinks, a window in every other layer, and experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    how = {**SMALL, "attn_implementation": "eager", "experts_implementation": experts}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **counts, **how))


def deepseek() -> torch.nn.Module:
    """Latent attention: keys are wider than values, and one rotary part of them is of all heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 8, "q_lora_rank": 12, "v_head_dim": 6}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**sizes, **heads, num_hidden_layers=2, first_k_dense_replace=2, **SMALL)
    return transformers.DeepseekV3ForCausalLM(config)


def deepseek_sparse(attention: str = "sdpa") -> torch.nn.Module:
    """Attention to the five keys of the highest score of an indexer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 8, "q_lora_rank": 12, "v_head_dim": 6}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    index = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 5, "layer_types": ["indexed_attention"] * 2}
    dense = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "mlp_layer_types": ["dense"] * 2}
    how = {**SMALL, "attn_implementation": attention}
    config = transformers.DeepseekV32Config(**sizes, **heads, **index, **dense, **how)
    return transformers.DeepseekV32ForCausalLM(config)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **COUNTS, **SMALL))


def gemma3() -> torch.nn.Module:
    """A window in all but every sixth layer."""
    config = transformers.Gemma3TextConfig(**SIZES, **COUNTS, **SMALL, sliding_window=8)
    return transformers.Gemma3ForCausalLM(config)


def t5() -> torch.nn.Module:
    """An encoder and a decoder, whose inputs are its labels, shifted."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(**sizes, vocab_size=VOCAB, pad_token_id=0)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


OTHERS = [qwen3, gemma3, gpt2, t5, partial(qwen3_moe, experts_implementation="batched_mm"), mamba]
NAMES = [getattr(make, "__name__", "qwen3_moe") for make in OTHERS]


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


@pytest.mark.slow
@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(("n", "padded"), [(2, True), (3, False)], ids=["padded", "not divisible"])
@pytest.mark.parametrize("model", [llama, gpt2, bert])
def test_training_step(ranks: Ranks, model: Any, n: int, padded: bool) -> None:
    check(ranks.run(n, one_step, model, 14, padded), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "padded"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("model", [llama, gpt2, bert, gpt_oss])
def test_training_step_of_other_sizes(ranks: Ranks, model: Any, n: int, padded: bool) -> None:
    check(ranks.run(n, one_step, model, 13, padded), TOLERANCE)


def sparse_step(attention: str, length: int) -> Outcome:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, length))
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return against_eager(deepseek_sparse(attention).double(), kwargs=kwargs, mesh=worker.mesh(), fallback="error")


SLOW = [(3, "sdpa"), (4, "sdpa"), (2, "eager"), (3, "eager")]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="an older transformers")
@pytest.mark.parametrize(
    ("n", "attention"), [(2, "sdpa"), *(pytest.param(n, how, marks=pytest.mark.slow) for n, how in SLOW)]
)
def test_indexed_attention_gathers_nothing(ranks: Ranks, n: int, attention: str) -> None:
    check(ranks.run(n, sparse_step, attention, 23), TOLERANCE)


def trained(model: torch.nn.Module, whole: bool) -> torch.nn.Module:
    """The model with labels: its loss alone, or all that it returns."""

    class Trained(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            found = self.model(input_ids=input_ids, labels=labels, use_cache=False)
            return found if whole else found.loss

    return Trained()


@pytest.mark.slow
@pytest.mark.sampled(every=26)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("sp", "attention"), [(4, "hybrid"), (1, "auto"), (2, "ring"), (3, "gather"), (4, "ulysses")])
@pytest.mark.parametrize("make", [deepseek, partial(gpt_oss, "grouped_mm")], ids=["deepseek", "gpt_oss"])
def test_gathers_nothing(make: Any, sp: int, attention: str, padded: bool) -> None:
    """Loss and every gradient equal a single device's on simulated ranks; experts sort the tokens of each rank."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(0, VOCAB, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    given = {"attention_mask": mask} if padded else {}
    report = sp_compile.verify(model, ids, labels=ids, use_cache=False, **given, sp=sp, attention=attention)
    assert not report.fallbacks, report
    assert report.worst < TOLERANCE


def sent(make: Any, whole: bool, outputs: Any) -> tuple[list[int], list[str]]:
    """Return bytes of a training step, forward and backward, and its lazy results."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    ids = torch.randint(1, VOCAB, (2, 14))
    report = sp_compile.explain(trained(make(), whole), ids, ids, sp=2, outputs=outputs)
    bytes_each = [sum(getattr(e, way) for e in report.exchanges) for way in ("forward", "backward")]
    return bytes_each, report.sharded_outputs


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("outputs", ["lazy", {"logits": "lazy"}], ids=str)
def test_unread_logits_cost_nothing(outputs: Any) -> None:
    found, lazy = sent(llama, True, outputs)
    assert found == sent(llama, False, "gather")[0]
    assert lazy == ["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("make", OTHERS, ids=NAMES)
def test_logits_of_other_models_cost_nothing(make: Any) -> None:
    """Beside "gather" they would cost their bytes once. A graph that ends before the loss passes its rows on."""
    found, lazy = sent(make, True, "lazy")
    assert found == sent(make, False, "lazy")[0]
    assert {"logits", "lm_logits"} & set(lazy)
    forward, backward = sent(make, True, "gather")[0]
    assert forward >= found[0] + 2 * 7 * VOCAB * 4
    assert backward == found[1]


def logits_read(make: Any) -> tuple[Outcome, float]:
    """Return loss and logits of one call of the unmodified model, with logits read after the backward."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(0, VOCAB, (2, 13))
    alone = copy.deepcopy(model)
    found = sp(model, mesh=worker.mesh(), outputs="lazy")(input_ids=ids, labels=ids, use_cache=False)
    right = alone(input_ids=ids, labels=ids, use_cache=False)
    assert isinstance(found.logits, Sharded)
    found.loss.backward()
    right.loss.backward()
    assert not found.logits.is_gathered
    step = outcome(found.loss, gradients(model), right.loss, gradients(alone))
    return step, difference(found.logits.detach().full(), right.logits.detach())


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, *OTHERS], ids=["llama", *NAMES])
def test_logits_are_one_devices(ranks: Ranks, make: Any) -> None:
    results = ranks.run(2, logits_read, make)
    check([step for step, _ in results], TOLERANCE)
    for _, error in results:
        assert error < TOLERANCE


@pytest.mark.parametrize("attention", ["auto", pytest.param("ring", marks=pytest.mark.slow)])
def test_gemma_2_as_transformers_trains_it(attention: str) -> None:
    """Eager attention with soft-caps and windows is matched: nothing is gathered."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "sliding_window": 8}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**sizes, **counts, **{**SMALL, "attn_implementation": "eager"}, use_cache=False)
    )
    ids = torch.randint(0, VOCAB, (2, 29))
    report = sp_compile.verify(model, input_ids=ids, labels=ids, sp=3, attention=attention)
    assert not report.fallbacks
    assert not report.find_notes(NoteKind.DECLINED)
    assert report.worst < 1e-5


def test_a_plan_of_a_model_from_its_config_on_the_meta_device() -> None:
    """With its cache, as `from_config` leaves it; `torch.tensor([])` of the cache is no fake tensor there."""
    config = llama().config
    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    assert config.use_cache
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    plan = sp_compile.plan(model, {"input_ids": ids}, memory="80GB", ranks=2)
    assert plan.best.attention == "ulysses"
    assert "assumes H100 GPUs" in str(plan)


def test_a_model_is_called_by_its_class_in_messages() -> None:
    """Not by the decorators of its forward."""
    names: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        names.append(program_subject(gm))
        return gm.forward

    ids = torch.zeros(1, 8, dtype=torch.long)
    torch.compile(llama(), backend=backend)(input_ids=ids, labels=ids)
    assert names[0].startswith("LlamaForCausalLM at llama/modeling_llama.py:"), names
