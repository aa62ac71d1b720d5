"""fully_shard_and_compile on real ranks: losses, gradients and stored parts of models of torch and transformers."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.parity import error_text, worst_gradient
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import sp_compile
from sp_compile.data import Replica
from sp_compile.integrations.fsdp import _modules_of_torch, compile_under_fsdp
from sp_compile.integrations.shard_layers import _weight_mesh, find_layers, find_shared_units
from sp_compile.runtime.weights import require_equal_weights

LENGTH, VOCABULARY = 13, 64  # a length that no number of ranks divides
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
LOSS, GRADIENT = 2e-6, 1e-9  # transformers computes losses in float32


class Encoder(nn.Module):
    """Layers of torch itself, between an embedding and a head with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(self.embed(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Looped(nn.Module):
    """The modules and the forward of torchtitan's models: Dynamo runs it eagerly, as layers in a loop end graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        layer = functools.partial(nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleDict({str(i): layer() for i in range(2)})
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for layer in self.layers.values():
            h = layer(h)
        return self.head(self.norm(h))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LoopInMethod(Looped):
    """The loop is in a method of its own, so that Dynamo compiles the forward."""

    def run_layers(self, h: Tensor) -> Tensor:
        for layer in self.layers.values():
            h = layer(h)
        return h

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": cross_entropy(self.head(self.norm(self.run_layers(self.embed(input_ids)))), labels)}


class WithLoss(nn.Module):
    """A model, and a loss that is a function of its own."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model(input_ids), labels)}


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{"num_hidden_layers": 3, "num_key_value_heads": 2, **SIZES, **options}))


def tied_llama(**options: Any) -> nn.Module:
    return llama(tie_word_embeddings=True, **options)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))


def gpt_neo() -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 64}
    kinds = {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 5}
    dropout = {"embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds, **dropout))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=3, num_labels=3, **SIZES, **dropout))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


def llama_classifier() -> nn.Module:
    """The logits of the last token that is not padding."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(num_hidden_layers=3, num_labels=3, pad_token_id=0, **SIZES))


def adapted_llama() -> nn.Module:
    """All weights but those of adapters are frozen."""
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


OF_TRANSFORMERS = [llama, tied_llama, gpt2, gpt_neo, bert, t5, llama_classifier, adapted_llama]
CLASSIFIERS = "BertForSequenceClassification", "LlamaForSequenceClassification"


def inputs_of(model: nn.Module, replicas: int) -> dict[str, Tensor]:
    """Return a batch of two sequences for each replica; in the first one, three tokens are padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2 * replicas, LENGTH), generator=generator)
    if isinstance(model, Encoder | LoopInMethod | Repeated | WithLoss):
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = ids[:, 0] % 3 if type(model).__name__ in CLASSIFIERS else ids
    return {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask, "labels": labels}


class RecordRows:
    """A compiler that records the sizes of results that are computed from weights and other values."""

    def __init__(self) -> None:
        self.results: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        weights = {node for node, x in zip(placeholders, inputs, strict=True) if isinstance(x, nn.Parameter)}
        for node in gm.graph.nodes:
            args = {*node.all_input_nodes}
            if args and args <= weights:  # a cast or view of weights
                weights.add(node)
            elif args & weights and isinstance(node.meta.get("val"), Tensor):
                self.results.append((str(node.target), tuple(node.meta["val"].shape)))
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    def check(self, n: int, outputs: int) -> None:
        """Check that each result of weights has the rows of one of n ranks, with embeddings and a head of `outputs`.

        Eager code is not recorded, so that both have to be in graphs. Embeddings of positions, without a batch dim, are
        added to those of ids by eager code (GPT-2).
        """
        part = -(-LENGTH // n)
        assert any("embedding" in op for op, _ in self.results)
        assert any(shape[-1:] == (outputs,) for _, shape in self.results)
        for op, shape in self.results:
            if "embedding" in op and shape[0] == 1:
                continue
            assert not {LENGTH, 2 * LENGTH}.intersection(shape) or {part, 2 * part}.intersection(shape), (op, shape)


Made = nn.Module | tuple[nn.Module, dict[str, Any]]  # a model, or a model and its batch


def train(
    make: Callable[[], Made],
    names: tuple[str, ...] = (),
    apply: Callable[..., nn.Module] = sp_compile.fully_shard_and_compile,
    **options: Any,
) -> Any:
    """Return the errors of the loss and of the worst gradient, and the stored part of the weights.

    Every graph with weights has to be on shards.

    With names, 4 ranks are 2 replicas of 2; without, all ranks of the call share a sequence.
    """
    torch.manual_seed(0)
    made = make()
    single, given = made if isinstance(made, tuple) else (made, None)
    single.double()
    compiler = RecordRows()
    model = apply(
        copy.deepcopy(single),
        of_all := dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if names else mesh(),
        compiler=compiler,
        cost={},
        **options,
    )
    replica = Replica(of_all.get_local_rank(names[0]), 2) if names else Replica(0, 1)
    batch = given or inputs_of(single, replica.n)
    of_replicas = [{name: x[2 * i : 2 * i + 2] for name, x in batch.items()} for i in range(replica.n)]
    of_replicas = [given] if given else of_replicas
    expected = [single(**rows)["loss"] for rows in of_replicas]
    torch.stack(expected).mean().backward()
    loss = model(**of_replicas[replica.rank])["loss"]
    loss.backward()
    if given is None:
        compiler.check(of_all.size() // replica.n, 3 if type(single).__name__ in CLASSIFIERS else VOCABULARY)
    weights = [p for p in model.parameters() if isinstance(p, DTensor)]
    part = sum(p.to_local().numel() for p in weights) / sum(p.numel() for p in single.parameters())
    return float((loss - expected[replica.rank]).detach().abs()), worst_gradient(model, single), part


def _train_checkpointed(make: Callable[[], nn.Module]) -> Any:
    return train(make, checkpoint=True)


def check(outcomes: list[Any], shards: int) -> None:
    for loss, gradient, part in outcomes:
        assert loss < LOSS
        assert gradient < GRADIENT
        assert part < 1.2 / shards


def test_layers_of_torch(ranks: Ranks) -> None:
    check(ranks.run(2, train, Encoder), 2)


def _shard_checkpointed(model: Any, mesh: Any, **options: Any) -> nn.Module:
    """Apply checkpoints and `fully_shard` in the order of accelerate."""
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    return compile_under_fsdp(fully_shard(model, mesh=mesh), mesh, **options)


def _train_tied() -> Any:
    return train(functools.partial(tied_llama, num_hidden_layers=1), apply=_shard_checkpointed)


def test_a_tied_embedding_and_a_checkpointed_layer(ranks: Ranks) -> None:
    """The embedding runs on shards, although it is not sharded separately; the layer is compiled without the embedding's options."""
    pytest.importorskip("transformers")
    check(ranks.run(2, _train_tied), 2)


def _shard_as_torchtitan(of_step: Any, mesh: Any, **options: Any) -> nn.Module:
    model = of_step.model
    for unit in (model.embed, *model.layers.values(), [model.norm, model.head], model):
        fully_shard(unit, mesh=mesh)
    compile_under_fsdp(model, mesh, **options)
    return WithLoss(model, torch.compile(cross_entropy, backend="sp", options={"mesh": mesh, **options}))


def _train_looped(apply: Callable[..., nn.Module]) -> Any:
    return train(lambda: WithLoss(Looped()), apply=apply)


def _shard_root(of_step: Any, mesh: Any, **options: Any) -> nn.Module:
    model = sp_compile.fully_shard_and_compile(of_step.model, mesh, **options)
    return WithLoss(model, torch.compile(cross_entropy, backend="sp", options={"mesh": mesh, **options}))


@pytest.mark.parametrize("apply", [_shard_as_torchtitan, pytest.param(_shard_root, marks=pytest.mark.slow)])
def test_a_forward_with_a_loop_over_layers(ranks: Ranks, apply: Callable[..., nn.Module]) -> None:
    """The embedding, the norm, the head and the loss run on shards."""
    check(ranks.run(2, _train_looped, apply), 2)


@pytest.mark.slow
def test_a_loop_in_a_method(ranks: Ranks) -> None:
    """The head and the loss are one graph."""
    check(ranks.run(2, train, LoopInMethod), 2)


def _train_with_offload() -> tuple[float, float, set[Any]]:
    """Return the errors of losses and of weights after three steps, and the policies that `fully_shard` was given."""
    torch.manual_seed(0)
    single = Encoder().double()
    policy = CPUOffloadPolicy(pin_memory=False)
    with mock.patch("torch.distributed.fsdp.fully_shard", wraps=fully_shard) as apply:
        model = sp_compile.fully_shard_and_compile(
            copy.deepcopy(single), mesh(), compiler="aot_eager", cost={}, fsdp={"offload_policy": policy}
        )
    losses: list[list[Tensor]] = []
    for one in (single, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            losses[-1].append(one(**inputs_of(single, 1))["loss"])
            losses[-1][-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    errors = [
        float((p.full_tensor() - q).abs().max()) for p, q in zip(model.parameters(), single.parameters(), strict=True)
    ]
    loss = float((torch.stack(losses[0]) - torch.stack(losses[1])).abs().max())
    return loss, max(errors), {call.kwargs["offload_policy"] is policy for call in apply.call_args_list}


@pytest.mark.slow
def test_weights_offloaded_to_the_host(ranks: Ranks) -> None:
    """On CPUs, the path of torch without copies between devices: weights are on the host already."""
    for loss, weight, is_passed in ranks.run(2, _train_with_offload):
        assert loss < LOSS
        assert weight < 1e-8
        assert is_passed == {True}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("make", OF_TRANSFORMERS, ids=lambda make: make.__name__)
def test_models_of_transformers(ranks: Ranks, make: Callable[[], nn.Module], checkpoint: bool) -> None:
    pytest.importorskip("transformers")
    check(ranks.run(3, _train_checkpointed if checkpoint else train, make), 3)


WITH_IMAGES = "llava", "gemma3", "qwen25_vl"


def of_images(name: str) -> Made:
    """A model of test_multimodal.py and a batch with images."""
    from models.hf import test_multimodal

    test_multimodal.transformers.logging.set_verbosity_error()
    return getattr(test_multimodal, name)(True)


def _train_with_images(name: str) -> Any:
    return train(functools.partial(of_images, name))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_models_with_images(ranks: Ranks, name: str, n: int) -> None:
    """Layers of vision and of text are units."""
    pytest.importorskip("transformers")
    outcomes = ranks.run(n, _train_with_images, name, timeout=300)
    for loss, gradient, part in outcomes:
        assert loss < LOSS
        assert gradient < 1e-6  # rotary positions and norms are computed in float32
        assert part < 1.2 / n


def gemma3_text() -> nn.Module:
    """Rotary positions for each of a set of strings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **layers, num_key_value_heads=2, head_dim=8, pad_token_id=0))


def _train_in_order_of_rank() -> Any:
    """Train with sets whose order is another one on each rank, as that of strings is in processes."""
    from transformers.models.gemma3 import modeling_gemma3

    def in_order_of_rank(items: Iterable[str]) -> list[str]:
        return sorted({*items}, reverse=dist.get_rank() % 2 == 1)

    with mock.patch.object(modeling_gemma3, "set", in_order_of_rank, create=True):
        return train(gemma3_text)


@pytest.mark.slow
def test_sets_in_another_order_on_each_rank(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for loss, gradient, part in ranks.run(2, _train_in_order_of_rank):
        assert loss < LOSS
        assert gradient < 1e-6  # norms are computed in float32
        assert part < 1.2 / 2


def _train_in_bf16(make: Callable[[], nn.Module]) -> tuple[float, float, set[torch.dtype]]:
    """Return the errors of the loss and of the gradients, relative to their norm, against a model in bf16, and the dtypes of weights."""
    torch.manual_seed(0)
    single = make()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sp_compile.fully_shard_and_compile(
        copy.deepcopy(single), mesh(), compiler="aot_eager", fsdp={"mp_policy": policy}
    )
    batch = inputs_of(single, 1)
    expected = single.bfloat16()(**batch)["loss"]
    expected.backward()
    loss = model(**batch)["loss"]
    loss.backward()
    pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), single.parameters(), strict=True)]
    error, size = (
        torch.cat([x.flatten() for x in of]).norm() for of in ([p - q for p, q in pairs], [q for _, q in pairs])
    )
    return float((loss - expected).detach().abs()), float(error / size), {p.dtype for p in model.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_layers_gathered_in_bf16(ranks: Ranks, n: int) -> None:
    pytest.importorskip("transformers")
    for loss, gradient, dtypes in ranks.run(n, _train_in_bf16, llama):
        assert loss < 2e-2  # of a loss of 4
        assert gradient < 2e-2
        assert dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "shards"), [(("dp", "sp"), 4), (("dp_replicate", "sp"), 2)], ids=str)
@pytest.mark.parametrize("make", [Encoder, llama], ids=lambda make: make.__name__)
def test_replicas(ranks: Ranks, make: Callable[[], nn.Module], names: tuple[str, ...], shards: int) -> None:
    pytest.importorskip("transformers")
    check(ranks.run(4, train, make, names), shards)


class Repeated(nn.Module):
    """Two layers in three places, of which the layers share a weight."""

    def __init__(self, shares_weight: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        first, second = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        if shares_weight:
            second.linear1 = first.linear1
        self.layers = nn.ModuleList([first, second, first])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return {"loss": F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


@pytest.mark.slow
@pytest.mark.parametrize("shares_weight", [False, True])
def test_layers_in_several_places(ranks: Ranks, shares_weight: bool) -> None:
    check(ranks.run(2, _train_repeated, shares_weight), 2)


def test_layers_of_torch_outside_of_units(ranks: Ranks) -> None:
    """Two layers that share a weight are gathered with the model, and each is one graph, as its parts are not."""
    assert ranks.run(2, _find_modules_of_torch) == [["embed", "layers.0", "layers.1", "head"]] * 2


def _find_modules_of_torch() -> list[str]:
    model = Repeated(shares_weight=True)
    names = {module: name for name, module in model.named_modules()}
    for unit in (model.embed, model):
        fully_shard(unit, mesh=mesh())
    return [names[module] for module in _modules_of_torch(model)]


def _train_repeated(shares_weight: bool) -> Any:
    return train(functools.partial(Repeated, shares_weight), checkpoint=True)


def _generate() -> tuple[bool, int]:
    """Return whether the tokens of a rank, whose number differs, are right; and the graphs compiled for them."""
    torch.manual_seed(0)
    model = llama(pad_token_id=0, eos_token_id=1)
    alone, rank = copy.deepcopy(model).eval(), dist.get_rank()
    sp_compile.fully_shard_and_compile(model, mesh(), compiler="aot_eager")
    ids = torch.arange(2, 2 + LENGTH)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    ids, before = ids[:, : 3 + 2 * rank], counters["stats"]["unique_graphs"]
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False}
    found, expected = model.eval().generate(ids, **options), alone.generate(ids, **options)
    return found.equal(expected), counters["stats"]["unique_graphs"] - before


@pytest.mark.slow
def test_generation_of_sharded_weights(ranks: Ranks) -> None:
    """Each rank generates another number of tokens, while all of them gather the weights."""
    assert ranks.run(4, _generate) == [(True, 0)] * 4


def test_units_that_share_weights() -> None:
    model = Repeated(shares_weight=False)
    first, second, _ = model.layers
    assert find_shared_units(model, [model.embed, first, second]) == set()
    model.head.weight = model.embed.weight
    model.last = second.linear2
    assert find_shared_units(model, [model.embed, first, second]) == {model.embed, second}


def _errors_of_meshes() -> list[str]:
    """Return the errors of axes in the wrong order, of one axis of two, and of a model in DDP."""
    order = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp_replicate"))
    part = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))["sp"]
    in_ddp = nn.parallel.DistributedDataParallel(Encoder())
    calls = [(Encoder(), order), (Encoder(), part), (in_ddp, None)]
    return [error_text(functools.partial(sp_compile.fully_shard_and_compile, *args)) for args in calls]


def _weights_error(axes: int) -> str:
    """Compare NaN and weights that are empty, quantized or on "meta"; return the error of one that differs on a rank."""
    model, of_all = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), mesh()
    model[1].weight.data.fill_(torch.nan)
    model[1].bias = nn.Parameter(torch.empty(0))
    model.scale = nn.Parameter(torch.tensor(torch.nan))
    quantized = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    model.quantized = nn.Parameter(quantized, requires_grad=False)
    if axes == 2:
        of_all = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "sp"))
    require_equal_weights(model, of_all)
    if dist.get_rank() == 3:
        model[0].weight.data[3, 3] += 1
    return error_text(lambda: sp_compile.fully_shard_and_compile(model, of_all))


@pytest.mark.parametrize("axes", [1, 2])
def test_weights_that_differ_between_ranks(ranks: Ranks, axes: int) -> None:
    """An error on every rank, also of replicas, before the weights are sharded."""
    for message in ranks.run(4, _weights_error, axes):
        assert re.match(r"SP642: .*0\.weight", message, re.DOTALL)
        assert not re.search("1.weight|bias|scale|quantized", message)


def test_meshes_and_models_that_are_refused(ranks: Ranks) -> None:
    for order, part, in_ddp in ranks.run(4, _errors_of_meshes):
        assert re.match("SP115: mesh: .*dp_replicate", order)
        assert re.match("SP118: mesh: .*'dp', 'sp'", part)
        assert re.match("SP846: model: ", in_ddp)


def test_axes_of_other_weights_may_be_left_out(ranks: Ranks) -> None:
    assert ranks.run(4, _size_beside_pipelines) == [2] * 4


def _size_beside_pipelines() -> int:
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "sp"))["dp", "sp"]
    return _weight_mesh(mesh).size()


def test_layers_are_the_repeated_modules() -> None:
    model = Encoder()
    layers = [f"encoder.layers.{i}" for i in range(2)]
    assert find_layers(model) == layers
    assert find_layers(model, [nn.TransformerEncoderLayer]) == find_layers(model, ["TransformerEncoderLayer"]) == layers
    assert find_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert re.match(r"SP836: layers: .*\['Block'\]", error_text(lambda: find_layers(model, ["Block"])))
    assert re.match("SP836: layers: .*'Block'", error_text(lambda: find_layers(model, "Block")))


class Numbered(nn.Module):
    """Layers as attributes, without a list."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            setattr(self, f"block{i}", nn.TransformerEncoderLayer(8, 2, 8))
        self.head = nn.Linear(8, 8)


def test_layers_are_attributes(caplog: pytest.LogCaptureFixture) -> None:
    """The outermost modules of one class; a model without layers is reported."""
    assert find_layers(Numbered(3)) == [f"block{i}" for i in range(3)]
    assert find_layers(nn.Sequential(Numbered(2), nn.Linear(8, 8))) == ["0.block0", "0.block1"]
    for count in (1, 2):
        sp_compile.fully_shard_and_compile(Numbered(count), compiler="aot_eager", checkpoint=True)
        assert ("layers=" in caplog.text) == (count == 1)
        caplog.clear()


def test_without_a_process_group_the_model_is_compiled_only() -> None:
    model, single = Encoder(), Encoder()
    single.load_state_dict(model.state_dict())
    sp_compile.fully_shard_and_compile(model, compiler="aot_eager", checkpoint=True)
    batch = inputs_of(model, 1)
    torch.testing.assert_close(model(**batch)["loss"], single(**batch)["loss"])
    assert "SP831" in error_text(lambda: sp_compile.fully_shard_and_compile(model))
