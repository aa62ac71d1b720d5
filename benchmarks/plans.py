"""Measure the CPU time of plans of packed documents: to find the pieces of a vector, and to plan from them.

    python benchmarks/plans.py [--tokens 1048576] [--documents 100 1000 10000] [--window 1024] [--ranks 8 64]
        [--output benchmarks/results/plans/packed_documents.md]
    python benchmarks/plans.py --models [Llama-8B ...] [--lengths 131072 ...] [--memory 80GB] to results/plans/plans.md:
        plans of `sp_compile.plan` for models on the meta device, and its CPU time
    python benchmarks/plans.py --explain [Llama-8B ...] [--ranks 8 64]    to results/plans/explain.md:
        the report of `sp_compile.explain` on training such a model at --tokens, and its CPU time

Documents have log-normal lengths. Times are the least CPU time of several calls on one thread. "steps" are the Python
calls of a plan divided by the number of documents, a measure of growth that does not depend on the machine. The last
tables compare how evenly layouts distribute the work of three kinds of documents over the ranks, and have the time that
layout="balanced" takes to find its order.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring.balance import balance, lengths_of, packed, pieces_of
from measuring.tables import commit, markdown, processor
from rich.console import Console
from rich.table import Table
from torch import nn

import sp_compile
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.spans import Segment
from sp_compile.planner.byte_sizes import parse_bytes

PREDICATES = {
    "documents": "Eq(row0, col0)",
    "causal by index": "Eq(row0, col0) & (k <= q)",
    "causal by position_ids": "Eq(row0, col0) & (col1 <= row1)",
    "and a window": "Eq(row0, col0) & (col1 <= row1) & (row1 - col1 < n0)",
}
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
    "gpt-oss-20b": (
        "GptOss",
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            **{"num_local_experts": 32},
        },
    ),
}
"""transformers' names, and sizes of the published models where they are not its defaults."""
RANKS = (8, 16, 64, 512)
MINUTE = 60.0
RESULTS = Path(__file__).parent / "results" / "plans" / "plans.md"
WORDS = """# Plans of models on the meta device

`python benchmarks/plans.py --models`: transformers' models in bfloat16 that return loss and logits, one sequence,
{memory} per rank. For each number of ranks, the fastest plan that fits: attention, checkpointed layers, tiles, share of
offloaded values; a rank's peak, and predicted seconds of a step on H100s. CPU s: time on one core of a plan for all
numbers of ranks in one call. From a minute up, the next column has the longest time of a plan for one of them.

"""

PACKED_WORDS = """# Plans of packed documents, and how evenly layouts share their work

`python benchmarks/plans.py --output benchmarks/results/plans/packed_documents.md`, {processor}, {commit}: least CPU ms
of several calls on one thread. "steps": Python calls per document; "packed calls": those for many documents + others.

"stretches": contiguous ranges of positions of a rank. "heap": MagiAttention's assignment of chunks, implemented in
`measuring/balance.py`. It has 8 chunks per rank by default, and chunks of 512 tokens in its examples. A third row has
the number of chunks of "balanced", if it divides the tokens; the two are then equal unless "balanced" exchanged chunks.
"ms" includes a plan of all pairs, which takes most of the time. "balanced" searches for the fewest chunks with which
the busiest rank has at most 1.05 times the mean. "needs": keys of other ranks that a rank's queries attend to; a ring,
or gathered keys, transfer all of them for every layout.
"""

EXPLAINED = RESULTS.with_name("explain.md")
EXPLAINED_MODELS = "Llama-8B", "Gemma-3-4B", "gpt-oss-20b"
EXPLAIN_WORDS = """# Reports of `explain` for models on the meta device at a million tokens

`python benchmarks/plans.py --explain`: transformers' models in bfloat16 that return loss and logits, one sequence of
{tokens:,} tokens, with common settings: each layer checkpointed, `tiles="auto"`, `offload="auto"`, parameters,
gradients and AdamW's state sharded (`state="sharded"`), {memory} per rank. Predicted for H100s from a few layers, which
represent all. CPU s: time on one core of a machine with other work. Attention: forward and backward of a step, and
bytes of one in addition to its shards. GB sent: by a rank in a step, without FSDP. Peak: of a rank, state included.
GB on the host: of values saved for the backward, and the time of their copies in each direction.

"""


def made(name: str) -> nn.Module:
    import transformers

    kind, sizes = SIZES[name]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    with torch.device("meta"):
        of = config(**sizes, max_position_embeddings=POSITIONS, use_cache=False)
        return getattr(transformers, f"{kind}ForCausalLM")(of).to(torch.bfloat16)


def planned(name: str, tokens: int, memory: str, ranks: Sequence[int]) -> tuple[float, sp_compile.StepPlan]:
    """Return the CPU seconds of a plan, and the plan."""
    model, ids = made(name), torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    begin = time.process_time()
    plan = sp_compile.plan(model, ids, kwargs={"labels": ids}, memory=memory, ranks=ranks)
    return time.process_time() - begin, plan


def cell(plan: sp_compile.StepPlan, ranks: int) -> str:
    """Return the best plan for a number of ranks as text."""
    best = plan.of(ranks)
    if best is None:
        return "-"
    words = [best.attention]
    words += ["checkpoints"] if best.checkpoint else []
    words += [f"{best.most_tiles} tiles"] if best.most_tiles else []
    words += [f"{best.offload:.0%} on the host"] if best.offload else []
    return f"{', '.join(words)}: {best.memory / 1e9:.0f} GB, {best.seconds:.3g} s"


def plans_of_models(
    names: Sequence[str], lengths: Sequence[int], memory: str, ranks: Sequence[int], done: Callable[[Table], None]
) -> None:
    """Add a row for each model and length as soon as it is computed."""
    console = Console(width=200)
    made = Table("model", "tokens", "CPU s", "for one", *(f"{n} ranks" for n in ranks))
    for name in names:
        for tokens in lengths:
            seconds, plan = planned(name, tokens, memory, ranks)
            one = max(planned(name, tokens, memory, [n])[0] for n in ranks) if seconds >= MINUTE else None
            alone = "" if one is None else f"{one:.0f}"
            row = name, f"{tokens:,}", f"{seconds:.0f}", alone, *(cell(plan, n) for n in ranks)
            console.print(*row, sep=" | ")
            made.add_row(*row)
            done(made)


def attentions(report: sp_compile.Report) -> str:
    """Return the strategy of each distinct attention, its predicted seconds in all layers of a step, and its bytes."""
    found = []
    for one in report.attention:
        seconds, gigabytes = one.nodes * one.chosen.seconds, one.chosen.memory / 1e9
        window = "" if one.shape.window is None else f", window {one.shape.window}"
        way = f"{one.chosen.kind} {one.chosen.layout}{'' if one.chosen.fits else ', too large'}"
        found.append(f"{one.nodes} x {way}{window}: {seconds:.4g} s, {gigabytes:.1f} GB")
    return "; ".join(found)


def explanations(
    names: Sequence[str], tokens: int, memory: str, ranks: Sequence[int], done: Callable[[Table], None]
) -> None:
    """Add rows with the CPU time of `explain`, its attention, exchanges and peak for each model and number of ranks."""
    split = "attention", "GB sent", "inputs that are gathered", "tiles"
    table = Table("model", "ranks", "CPU s", *split, "GB at the peak", "of", "GB on the host")
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    options = {"tiles": "auto", "offload": "auto", "state": "sharded", "param_grads": "partial"}
    for name in names:
        model = made(name).train()
        model.gradient_checkpointing_enable()
        for n in ranks:
            begin = time.process_time()
            device = {"memory": parse_bytes(memory)}
            report = sp_compile.explain(model, ids, labels=ids, sp=n, memory=True, cost=device, **options)
            seconds = time.process_time() - begin
            assert report.step is not None
            sent = f"{sum(float(one.forward + one.backward) for one in report.exchanges) / 1e9:.0f}"
            found = attentions(report), sent, str(len(report.fallbacks)), tiles_of(report)
            peak = max(report.step.points(), key=lambda point: report.step.sharded_bytes(point, n)).phase
            host = report.step.offloaded
            waits = f"{host.nbytes / 1e9:.0f}, {host.seconds:.2f} s" if host is not None and host.nbytes else "-"
            table.add_row(name, str(n), f"{seconds:.1f}", *found, f"{report.step.fsdp(n) / 1e9:.1f}", peak, waits)
            done(table)


def tiles_of(report: sp_compile.Report) -> str:
    """Return the number of regions for each number of tiles as text."""
    found = Counter(one.tiles for one in report.tiled)
    return "; ".join(f"{count} x {tiles}" for tiles, count in sorted(found.items())) or "-"


def milliseconds(run: Callable[[], Any], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def steps(run: Callable[[], Any]) -> int:
    """Return the number of Python calls of a run."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--models", nargs="*", choices=[*SIZES], help="all, if none is named")
    parser.add_argument("--explain", nargs="*", choices=[*SIZES], help="three, if none is named")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << 17, 1 << 20, 1 << 22])
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--output", type=Path, help="a file for the tables of packed documents, as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.models is not None:
        words = WORDS.format(memory=args.memory)
        write = lambda made: RESULTS.write_text(words + markdown(made) + "\n")  # noqa: E731
        plans_of_models(args.models or [*SIZES], args.lengths, args.memory, RANKS, write)
        return
    if args.explain is not None:
        words = EXPLAIN_WORDS.format(memory=args.memory, tokens=args.tokens)
        write = lambda made: EXPLAINED.write_text(words + markdown(made) + "\n")  # noqa: E731
        explanations(args.explain or EXPLAINED_MODELS, args.tokens, args.memory, args.ranks, write)
        return
    console = Console(width=120)
    pieces = Table("vector", "ms", "pieces", title=f"pieces of {args.tokens} values")
    number, position = packed(args.tokens, lengths_of("log-normal", args.documents[0]))
    noise = torch.randint(1 << 20, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    vectors = {"arange": torch.arange(args.tokens)[None], "documents": number, "position_ids": position, "noise": noise}
    for name, x in vectors.items():
        pieces.add_row(name, f"{milliseconds(lambda x=x: pieces_of(x)):.2f}", str(len(pieces_of(x).starts)))
    plans = Table(
        "mask",
        "documents",
        "ms",
        "steps",
        "packed calls",
        "blocks",
        "ms with them",
        title="plans of all queries and keys",
    )
    rows = (Segment(0, 0, args.tokens),)
    for documents in args.documents:
        found = tuple(pieces_of(x) for x in packed(args.tokens, lengths_of("log-normal", documents)))
        for name, predicate in PREDICATES.items():

            def run(predicate: str = predicate, found: Any = found) -> Any:
                plan_blocks.cache_clear()
                return plan_blocks(predicate, rows, rows, (args.window,), found, found)

            made = run()
            calls = f"{len(made.packed)} + {len(made.others)}"
            each = f"{steps(run) / documents:.0f}"
            blocks, both = len(made.blocks), milliseconds(lambda run=run: run().blocks)
            plans.add_row(name, str(documents), f"{milliseconds(run):.1f}", each, calls, str(blocks), f"{both:.1f}")
    tables = [pieces, plans, *(balance(args.tokens, documents, args.ranks) for documents in args.documents[:2])]
    console.print(*tables)
    if args.output:
        sections = [f"## {table.title}\n\n{markdown(table)}\n" for table in tables]
        args.output.write_text("\n".join([PACKED_WORDS.format(processor=processor(), commit=commit()), *sections]))


if __name__ == "__main__":
    main()
