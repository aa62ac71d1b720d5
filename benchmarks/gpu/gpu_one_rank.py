"""One rank of several at full length: kernels, memory and host time over torch's "fake" group, which moves no bytes.

    python benchmarks/gpu/gpu_one_rank.py --tokens 1048576 --layers 1 2     Llama-8B's widths, one rank of 8
    python benchmarks/gpu/gpu_one_rank.py --device cpu --small              tiny sizes, to see that it runs

All layers are equal: the difference of two numbers of layers is one layer. Values mean nothing,
since operands of the other ranks do not arrive. "predicted" is the peak of `explain(memory=True)` for the same options.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from measuring.tables import describe_run, markdown

import sp_compile

COLUMNS = ("attention", "offload", "layers", "step, s", "host: forward, s", "backward, s", "peak, GB", "predicted, GB")


def make_llama(given: argparse.Namespace, layers: int, device: str) -> torch.nn.Module:
    """Return a Llama with the widths of the arguments, in bfloat16, with checkpointed layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.width,
        intermediate_size=given.width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.key_heads,
        max_position_embeddings=given.tokens,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def predicted_gigabytes(given: argparse.Namespace, layers: int, options: dict[str, Any]) -> float:
    """Return the predicted peak of a step beyond weights and inputs."""
    ids = torch.zeros(1, given.tokens, dtype=torch.int64, device="meta")
    model = make_llama(given, layers, "meta")
    report = sp_compile.explain(model, sp=given.ranks, memory=True, kwargs={"input_ids": ids, "labels": ids}, **options)
    return report.step.values / 1e9


def measure_steps(given: argparse.Namespace, layers: int, options: dict[str, Any]) -> list[float]:
    """Return seconds of a step, of the host's forward and backward, and the peak in GB: medians of warm steps."""
    is_cuda = given.device == "cuda"
    model = make_llama(given, layers, given.device)
    run = torch.compile(model, backend="sp", options={**options, "compiler": given.compiler}, dynamic=False)
    ids = torch.randint(given.vocabulary, (1, given.tokens), device=given.device)
    found = []
    for step in range(given.steps + 1):
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated() if is_cuda else 0
        begin = time.perf_counter()
        loss = run(input_ids=ids, labels=ids).loss
        forward = time.perf_counter() - begin
        loss.backward()
        backward = time.perf_counter() - begin - forward
        if is_cuda:
            torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - allocated) / 1e9 if is_cuda else float("nan")
        if step:
            found.append((time.perf_counter() - begin, forward, backward, peak))
        model.zero_grad()
        del loss
    return [statistics.median(column) for column in zip(*found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--attention", nargs="+", default=["ulysses"])
    parser.add_argument("--offload", nargs="+", default=["auto"], help="auto, never, or a share")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=2, help="warm steps")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, help="a Markdown file to append to")
    given = parser.parse_args()
    if given.small:
        given.tokens, given.width, given.heads, given.key_heads, given.vocabulary = 256, 64, 4, 2, 128
        given.ranks, given.steps = 4, 1
    dist.init_process_group("fake", rank=given.ranks - 1, world_size=given.ranks, store=dist.HashStore())
    table, console = Table(*COLUMNS, title=f"a rank of {given.ranks}, {given.tokens:,} tokens"), Console(width=160)
    for attention in given.attention:
        for offload in given.offload:
            for layers in given.layers:
                share = float(offload) if offload.replace(".", "").isdigit() else offload
                options = {
                    "attention": attention, "tiles": "auto", "offload": share, "state": "sharded",
                    "param_grads": "partial",
                }  # fmt: skip
                torch.compiler.reset()
                predicted = predicted_gigabytes(given, layers, options)
                torch.compiler.reset()
                numbers = measure_steps(given, layers, options)
                row = [attention, offload, str(layers), *(f"{x:.2f}" for x in (*numbers, predicted))]
                table.add_row(*row)
                print(" | ".join(row), flush=True)  # at once, since a time limit may end the next row
    console.print(table)
    if given.output:
        with given.output.open("a") as out:
            out.write(f"## {table.title}\n\n{describe_run(given.device)}\n\n{markdown(table)}\n\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
