"""Show how attention would be split over ranks, and verify every strategy against a single device.

    python examples/attention_strategies.py              a decoder, and a verified Llama of transformers
    python examples/attention_strategies.py --million    memory of an 8B Llama on 8 and 64 H100, with 1,048,576 tokens

Runs in one process, without a GPU. The times are the cost model's for the hardware of `COST`. Without `cost`, they are
those of the local device or measured ones (`sp_compile.passes.cost.machine`).
"""

import argparse
import time

import torch
from models import DecoderLM

import sp_compile

COST = {"flops": 6e14}  # FLOP/s of a rank's matrix units


def predicted(ranks: int) -> None:
    """Print the candidates for one attention shape, and the one that `attention="auto"` selects."""
    with torch.device("meta"):
        model, ids = (DecoderLM(dim=1024, layers=2, heads=16, kv_heads=4), torch.zeros(1, 32768, dtype=torch.int64))
    report = sp_compile.explain(model, ids, ids, sp=ranks, cost=COST)
    print(f"\n== {ranks} ranks")
    for decision in report.attention:
        print(decision)


def verified(ranks: int = 4) -> None:
    """Verify loss and gradients of every strategy on simulated ranks, with a model of transformers."""
    torch.manual_seed(0)
    model = llama(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    ids = torch.randint(0, 128, (2, 61))
    labels = ids.clone()
    labels[:, :20] = -100  # a prompt without loss
    for attention in ("ulysses", "ring", "hybrid", "gather", "auto"):
        report = sp_compile.verify(model, ids, sp=ranks, attention=attention, kwargs={"labels": labels})
        print(f"{attention:<8} on {ranks} ranks: largest relative error {report.worst:.1e}")
        assert report.worst < 1e-4, "loss and gradients differ from a single device by more than float32 rounding"


def llama(**sizes: int) -> torch.nn.Module:
    """Return a Llama with random weights; by default, two query heads share a key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_key_value_heads": sizes["num_attention_heads"] // 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa"))


def million(ranks: int, layers: int) -> None:
    """Print the candidates and a rank's memory for checkpointed layers of Llama 3 8B in bfloat16."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1 << 20}
    with torch.device("meta"):
        model, ids = llama(**sizes, **heads).bfloat16().train(), torch.zeros(1, 1 << 20, dtype=torch.int64)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    start = time.process_time()
    report = sp_compile.explain(model, ids, sp=ranks, outputs="local", kwargs={"labels": ids})
    print(f"\n== {layers} layers on {ranks} ranks, {time.process_time() - start:.0f} s of CPU time")
    print(*report.memory, *report.attention, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--million", action="store_true", help="8B at 1,048,576 tokens")
    parser.add_argument("--layers", type=int, default=32, help="with --million")
    args = parser.parse_args()
    for ranks in (8, 64):
        if args.million:
            million(ranks, args.layers)
        else:
            predicted(ranks)
    if not args.million:
        print()
        verified()
