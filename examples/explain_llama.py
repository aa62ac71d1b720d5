"""What sequence parallelism would do to a model that no one here wrote, and whether it is right.

    python examples/explain_llama.py [ranks]

Needs transformers; no processes, no GPU, no weights to download.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compile


def main(ranks: int = 4) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (2, 50))
    labels = ids.clone()
    labels[:, :20] = -100  # a prompt that is not learned
    report = sp_compile.verify(model, ids, sp=ranks, kwargs={"labels": labels})
    print(report)
    assert report.worst < 1e-3, "float32 rounding apart, loss and gradients are those of one device"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
