"""Small models, the prediction of `explain` for a rank's training step, and the measured memory of that step.

The other ranks are those of torch's "fake" group. Exchanges move no data, but allocate their memory: a sent tensor
is kept until its wait. Offloaded values are in memory that is not torch's.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models import DecoderLM
from peak_memory import peak_activation_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile

LENGTH, VOCAB = 2048, 512
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
MORE = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}


@dataclass(frozen=True)
class Case:
    """make: the model. labeled: does it take labels, and give a loss? options: of the backend. ranks: of how many."""

    make: Callable[[], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    labeled: bool = True
    length: int = LENGTH
    ranks: int = 4

    def step(self, model: nn.Module, run: Callable[..., Any]) -> None:
        out = run(*self.inputs(), **self.named())
        getattr(out, "loss", out).backward()

    def inputs(self) -> tuple[Tensor, ...]:
        ids = torch.randint(VOCAB, (1, self.length), generator=torch.Generator().manual_seed(0))
        return (ids,) if self.labeled else (ids, ids)

    def named(self) -> dict[str, Any]:
        return {"labels": self.inputs()[0]} if self.labeled else {}


def decoder() -> nn.Module:
    return DecoderLM(vocab=VOCAB, dim=64, layers=2, heads=4)


class Checkpointed(nn.Module):
    """The decoder, its blocks computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DecoderLM(vocab=VOCAB, dim=64, layers=4, heads=4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.inner.head(self.inner.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Recurrent(nn.Module):
    """Gated linear recurrences between MLPs, as Mamba's blocks are."""

    def __init__(self, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.inner = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 4, groups=dim, padding=3) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for inner, conv, outer in zip(self.inner, self.convs, self.outer):
            y, gate, decay, value = inner(F.rms_norm(x, x.shape[-1:])).chunk(4, -1)
            y = F.silu(conv(y.mT)[..., : x.shape[1]].mT)
            h = sp_compile.linear_scan(torch.sigmoid(decay), value * y, dim=1)
            x = x + outer(h * F.silu(gate))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_transformers(name: str, kind: str = "ForCausalLM", again: bool = False, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of transformers. again: recompute its blocks in the backward."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}{kind}")(config)
        if again:
            model.gradient_checkpointing_enable()
        return model

    return make


GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "use_cache": False}
T5 = {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "use_cache": False}
BERT = {**SIZES, "intermediate_size": 128, "max_position_embeddings": LENGTH}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 64}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT_WITHOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA, AGAIN = (of_transformers("Llama", again=n > 2, **{**MORE, "num_hidden_layers": n}) for n in (2, 4))
TILES, HOST = {"tiles": 4}, {"offload": 1.0}
CASES = {
    **{f"decoder, {way}": Case(decoder, {"attention": way}, False) for way in ("ulysses", "ring", "hybrid", "gather")},
    "decoder, checkpointed blocks": Case(Checkpointed, {"attention": "ulysses"}, False),
    "recurrences and convolutions": Case(Recurrent, {}, False),
    "Llama": Case(LLAMA),
    "Gemma 2, windows": Case(of_transformers("Gemma2", **MORE, sliding_window=256, head_dim=16)),
    "GPT-2": Case(of_transformers("GPT2", "LMHeadModel", **GPT2, **WITHOUT_DROPOUT)),
    "Mixtral": Case(of_transformers("Mixtral", **MORE, num_local_experts=4, **EXPERTS)),
    "T5": Case(
        of_transformers("T5", "ForConditionalGeneration", **T5, decoder_start_token_id=0, dropout_rate=0.0), length=512
    ),
    "BERT, masked tokens": Case(of_transformers("Bert", "ForMaskedLM", **BERT, **BERT_WITHOUT)),
    "Mamba 2": Case(of_transformers("Mamba2", **{**SIZES, **MAMBA2})),
    "gpt-oss, sinks, windows and experts": Case(
        of_transformers("GptOss", **MORE, **EXPERTS, head_dim=16, num_local_experts=4, sliding_window=256)
    ),
    "Llama on one rank": Case(LLAMA, ranks=1),
    "Llama on two": Case(LLAMA, ranks=2),
    "Llama, head and MLPs in 4 tiles": Case(LLAMA, TILES),
    "Llama on one rank, head and MLPs in 4 tiles": Case(LLAMA, TILES, ranks=1),
    "Llama, half of what is kept on the host": Case(LLAMA, {"offload": 0.5}),
    "Llama, checkpointed blocks": Case(AGAIN, ranks=2),
    "Llama, checkpointed blocks, all that is kept on the host": Case(AGAIN, HOST, ranks=2),
    "Llama, the same in 4 tiles": Case(AGAIN, {**TILES, **HOST}, ranks=2),
    "decoder, checkpointed blocks, a ring, 4 tiles, all that is kept on the host": Case(
        Checkpointed, {"attention": "ring", **TILES, **HOST}, False
    ),
}


def compare(name: str, compiler: str) -> tuple[int, int]:
    """Bytes of tensors that a step makes, gradients included: (predicted, measured).

    The larger of the first and the last rank counts: their queries attend to other keys.
    """
    case = CASES[name]
    options: dict[str, Any] = {"compiler": compiler, "cost": {}, **case.options}
    torch.manual_seed(0)
    model = case.make().train()
    found = sp_compile.explain(model, *case.inputs(), sp=case.ranks, memory=True, kwargs=case.named(), **options).step
    return found.values, max(_measured(case, model, options, rank) for rank in {0, case.ranks - 1})


def _measured(case: Case, model: nn.Module, options: Mapping[str, Any], rank: int) -> int:
    import torch.distributed as dist

    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=dist.HashStore())
    _held = sent_until_it_has_arrived(), on_a_host()
    try:
        torch.compiler.reset()
        run = torch.compile(model, backend="sp", options=options, dynamic=False)
        for _ in range(2):
            model.zero_grad()
            case.step(model, run)
        gc.collect()
        return peak_activation_bytes(lambda: case.step(model, run), model.parameters(), gradients=True)
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


def sent_until_it_has_arrived() -> torch.library.Library:
    """While this is held, what an exchange sends stays until it is waited for, as Gloo's and NCCL's works keep it.

    The "fake" group's work is done, and lets go of it, at once. Values are those of this rank, again and again.
    """
    sent: dict[int, Tensor] = {}

    def keep(out: Tensor, x: Tensor) -> Tensor:
        sent[out.untyped_storage().data_ptr()] = x
        return out

    def filled(x: Tensor, rows: int) -> Tensor:
        out = x.new_empty((rows, *x.shape[1:]))
        for part in out.split(max(1, len(x))):
            part.copy_(x[: len(part)])
        return keep(out, x)

    def wait_tensor(x: Tensor) -> Tensor:
        sent.pop(x.untyped_storage().data_ptr(), None)
        return x

    kernels: dict[str, Callable[..., Tensor]] = {
        "all_to_all_single": lambda x, there, here, group: filled(x, sum(there)),
        "all_gather_into_tensor": lambda x, n, group: filled(x, n * len(x)),
        "reduce_scatter_tensor": lambda x, op, n, group: filled(x, len(x) // n),
        "all_reduce": lambda x, op, group: filled(x, len(x)) if x.dim() else keep(x.clone(), x),
        "wait_tensor": wait_tensor,
    }
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU", allow_override=True)
    return library


def on_a_host() -> torch.library.Library:
    """Offload values to memory that a profiler of torch's allocations does not see, until the result is freed."""

    def offload(x: Tensor) -> Tensor:
        nbytes = x.untyped_storage().nbytes()
        return torch.frombuffer(bytearray(nbytes), dtype=x.dtype).as_strided(x.shape, x.stride()).copy_(x)

    library = torch.library.Library("sp", "IMPL")
    library.impl("offload", offload, "CPU", allow_override=True)
    return library
