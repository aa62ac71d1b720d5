"""Models that are too large to build, planned on the meta device: what fits, and the CPU time of saying so."""

import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sp_compile

POSITIONS = 1 << 22
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
SIZES = {
    "Llama-8B": ("Llama", {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}),
    "Llama-70B": (
        "Llama",
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "Mixtral-8x7B": ("Mixtral", {}),
    "Gemma-3-4B": (
        "Gemma3",
        {
            **{"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024},
        },
    ),
}
"""transformers' names, and sizes of the published models where they are not its defaults."""


def made(name: str) -> nn.Module:
    import transformers

    kind, sizes = SIZES[name]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    with torch.device("meta"):
        of = config(**sizes, max_position_embeddings=POSITIONS, use_cache=False)
        return getattr(transformers, f"{kind}ForCausalLM")(of).to(torch.bfloat16)


def planned(name: str, tokens: int, memory: str, ranks: Sequence[int]) -> tuple[float, sp_compile.StepPlan]:
    """Seconds of CPU, and the plan."""
    model, ids = made(name), torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    begin = time.process_time()
    plan = sp_compile.plan(model, ids, kwargs={"labels": ids}, memory=memory, ranks=ranks)
    return time.process_time() - begin, plan


def cell(plan: sp_compile.StepPlan, ranks: int) -> str:
    """The best way on so many ranks, in a few words."""
    best = plan.of(ranks)
    if best is None:
        return "-"
    words = [best.attention]
    words += ["checkpoints"] if best.checkpoint else []
    words += [f"{best.tiles} tiles"] if isinstance(best.tiles, int) else []
    words += [f"{best.offload:.0%} on the host"] if best.offload else []
    return f"{', '.join(words)}: {best.memory / 1e9:.0f} GB, {best.seconds:.3g} s"


def table(
    names: Sequence[str], lengths: Sequence[int], memory: str, ranks: Sequence[int], done: Callable[[Table], None]
) -> None:
    """A row for each model and length, when it is there."""
    console = Console(width=200)
    made = Table("model", "tokens", "CPU s", *(f"{n} ranks" for n in ranks))
    for name in names:
        for tokens in lengths:
            seconds, plan = planned(name, tokens, memory, ranks)
            row = name, f"{tokens:,}", f"{seconds:.0f}", *(cell(plan, n) for n in ranks)
            console.print(*row, sep=" | ")
            made.add_row(*row)
            done(made)
