"""Report what `sp_compile.explain` finds in small models of the families of transformers and diffusers.

    python -m support.docs.families [--only Llama Wan ...] [--tables named causal multimodal ...] [--limit 300]
        [--missing] [--notes FILE] [--output docs/reference/families.md]

Each model is examined in its own process, with a limit of CPU time. The table is written after each model, and
CPU seconds to benchmarks/results/checks/families.md; rows of models that do not run again are kept.
"""

import argparse
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring.tables import commit

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "reference" / "families.md"
SECONDS = ROOT / "benchmarks" / "results" / "checks" / "families.md"  # CPU seconds of `explain`, and the commit
SECONDS_TITLE = "Seconds"
SECONDS_INTRODUCTION = "# Seconds to examine families of models\n\nCPU seconds of `explain(model, sp=2)` on one core."
HEADERS = ("family", "library", "on shards", "sequence", "attention", "gathered inside", "refused")
RANKS = 2
WAITS = 30  # limit of elapsed time, in limits of CPU time: other processes may share the cores
# modules that all processes share, since their import takes longer than most models
PRELOADED = [
    *("support.docs.family_lists", "sp_compile.planner.dry_run", "torch._dynamo", "torch._inductor.compile_fx"),
    *("transformers.modeling_utils", "diffusers.models.modeling_utils", "diffusers.models.attention_processor"),
]
MAX_TEXT = 110  # maximum number of characters of a reason
TITLES = {
    "named": "Families",
    "causal": "Causal language models of transformers",
    "masked": "Masked language models of transformers",
    "images": "Image models of transformers",
    "translation": "Encoders and decoders of transformers",
    "multimodal": "Language models of transformers with images or recordings",
    "audio": "Speech and audio models of transformers",
    "vision": "Models of videos, objects, segments, depth and points of transformers",
    "series": "Time series models of transformers",
    "others": "Other models of transformers",
    "diffusion": "Transformers of diffusers",
}
NOT_BUILT = "Not built"
INTRODUCTION = """# Families of models

What `explain(model, sp=2)` finds in small models with nothing annotated. They have two layers, or one of each type, four
heads, a batch of two, and mostly odd numbers of tokens. They use float32, no dropout, and the library's choice of the attention function.
Language models return a loss and logits, other models their hidden states. `python -m support.docs.families` writes this page. The
models are in `tests/support/docs/family_models.py`, the generic sizes in `family_sizes.py`, and inputs by the parameters of
`forward` in `family_inputs.py`.

- *sequence*: the inputs with their sequence dims; "not an input" first if the sequence with the most FLOPs is none.
- *attention*: the chosen strategies with their number of attentions. "gather" gathers keys and values, and keeps queries
  on shards. "-" if there is none, or only products with gathered keys that are not recognized as attention (GPT-Neo).
- *gathered inside*: the number of fallbacks, also of those after the last layer, with the most frequent reasons and their
  source lines; then graph breaks. Exchanges do not count: Flux and Qwen-Image gather the rows of a long text in each
  layer, CogVideoX sends them.
- *refused*: the code and the first words of the error. An exception that is not an `SpError` is shown with its type.

Why families have less than 95% on shards:

- JetMoE, HiDream, DBRX, LongCat-Flash: the program reads the tokens of each expert. Dynamo breaks the graph there.
- ProphetNet: one stream for the next token and streams for the tokens after it are joined along the sequence, and are
  split again in each layer.
- Reformer: seeds and reversible layers are between graph breaks. Attention is on tokens that are sorted by a hash.
- Longformer, LED, MRA, YOSO: attention is between graph breaks.
- Pegasus-X: short sequences; 98% for 320 tokens on 4 ranks.
- XLM: embeddings are between two graph breaks, in a graph without attention.
- Idefics3 and others with images after a graph break: hidden states below 1 MiB are gathered between two graphs, so
  the last layer and the loss run unsplit. With `outputs="lazy"`, Idefics3 has 99% in place of 89%.
- GLM-4V and others with image grids: the merge of patches, in the graph after a break, needs complete groups of rows.
- FastSpeech2: durations are read on the host; the vocoder has convolutions only. TimesFM: a graph after a break has no
  sequence. HiggsAudio: codebooks are written at a mask.
- Kandinsky 6 SR: a `BlockMask` is computed from the tokens.
- RWKV-4, FNet, FocalNet: no attention or scan. RWKV-4 is a loop with a running maximum, FNet a Fourier transform over the
  tokens, FocalNet convolutions. So are the other image models that are refused. `seq_dims={"pixel_values": 2}` shards
  the rows of their images.
"""


def work_share(report: Any) -> str:
    """Return the share of the FLOPs that runs on shards, in percent; "-" if the FLOPs are not known.

    Args:
        report: The report.
    """
    return f"{report.work.flops_share:.0%}" if report.work.flops else "-"


def describe_report(report: Any) -> dict[str, str]:
    """Return the cells of a report.

    Args:
        report: The report.
    """
    from sp_compile.passes.context import NoteKind

    main = report.main_sequence
    is_hidden = not report.inputs or (main is not None and not main.is_input)
    located = [f"{name} {'/'.join(map(str, dims))}" for name, dims in report.inputs.items()]
    strategies: Counter[str] = Counter()
    for decision in report.attention:
        strategies[decision.chosen.kind] += decision.nodes
    reasons = Counter(f"{_shorten(note.text)} ({_last_line(note.where)})" for note in report.fallbacks)
    gathered = [str(len(report.fallbacks)), *(f"{n} x {text}" for text, n in reasons.most_common(2))]
    breaks = len(report.find_notes(NoteKind.GRAPH_BREAK))
    return {
        "on shards": work_share(report),
        "sequence": ", ".join(["not an input"] * is_hidden + located),
        "attention": ", ".join(f"{kind} x {n}" for kind, n in strategies.items()) or "-",
        "gathered inside": "; ".join(gathered) + (f"; {breaks} graph breaks" if breaks else ""),
    }


def describe_notes(report: Any) -> list[str]:
    """Return a line for each distinct fallback of a report: its count, kind, node, reason and source line.

    Args:
        report: The report.
    """
    ops = [x.node.rstrip("0123456789").rstrip("_") for x in report.fallbacks]
    lines = Counter(f"{x.label} {op}: {x.text} @ {x.where}" for op, x in zip(ops, report.fallbacks))
    return [f"{n} x {line}" for line, n in lines.most_common()]


def examine(build: Callable[[], tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Build a model, examine it, and return the cells of its row, or the reason why it was not built.

    Args:
        build: The builder.
    """
    import torch

    import sp_compile

    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        model, inputs = build()
        model.eval()(**inputs)
    except Exception as error:
        return {NOT_BUILT: _describe_error(error)}
    start = time.process_time()
    try:
        report = sp_compile.explain(model, sp=RANKS, kwargs=inputs)
        cells: dict[str, Any] = {**describe_report(report), "notes": describe_notes(report)}
    except Exception as error:
        cells = {"refused": _describe_error(error)}
    return cells | {"seconds": f"{time.process_time() - start:.1f}"}


def run_apart(family: Any, limit: float) -> dict[str, Any]:
    """Return the cells of a family, which is examined in its own process.

    Args:
        family: The family: a table, and its name in it.
        limit: The limit of CPU time, in seconds.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_cells, args=(family, sender, int(limit)), daemon=True)
    process.start()
    sender.close()
    late = {"refused": f"no report within {limit:.0f} CPU seconds"}
    try:
        return receiver.recv() if receiver.poll(WAITS * limit) else late
    except EOFError:
        process.join()
        return late if process.exitcode == -signal.SIGXCPU else {"refused": "the process ended without a report"}
    finally:
        process.kill()
        process.join()


def read_rows(page: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Return the lines of the tables of a page, by their titles, and by family and library.

    Args:
        page: The page, which may not exist.
    """
    rows: dict[str, dict[tuple[str, str], str]] = {}
    title = ""
    for line in page.read_text().splitlines() if page.exists() else []:
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| ") and not line.startswith(("| ---", "| family")):
            family, library = line[2:].split(" | ")[:2]
            rows.setdefault(title, {})[family, library] = line
    return rows


def write_page(page: Path, rows: dict[str, dict[tuple[str, str], str]]) -> None:
    """Write the page with its tables, without figures of a machine.

    Args:
        page: The page.
        rows: The lines, by title.
    """
    sections = [INTRODUCTION.rstrip("\n")]
    for title in (*TITLES.values(), NOT_BUILT):
        headers = ("family", "library", "reason") if title == NOT_BUILT else HEADERS
        lines = [f"| {' | '.join(headers)} |", "|" + " --- |" * len(headers), *rows.get(title, {}).values()]
        sections += [f"## {title}\n\n" + "\n".join(lines)] if title in rows else []
    page.write_text("\n\n".join(sections) + "\n")


def write_seconds(page: Path, key: tuple[str, str], seconds: str) -> None:
    """Add the row of a family to the page of seconds, in place of an earlier one.

    Args:
        page: The page, which may not exist.
        key: The family and its library.
        seconds: CPU seconds of `explain`.
    """
    rows = read_rows(page).get(SECONDS_TITLE, {}) | {key: f"| {' | '.join([*key, seconds])} |"}
    lines = ["| family | library | seconds |", "| --- | --- | --- |", *rows.values()]
    sections = [SECONDS_INTRODUCTION, f"Measured at {commit()}.", f"## {SECONDS_TITLE}", "\n".join(lines)]
    page.write_text("\n\n".join(sections) + "\n")


def main() -> None:
    """Examine the families that the command names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="families; all by default")
    parser.add_argument("--tables", nargs="*", default=["named"], choices=TITLES)
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds for a model")
    parser.add_argument("--missing", action="store_true", help="skip families that have a row")
    parser.add_argument("--notes", type=Path, help="append all fallbacks to this file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=Path, default=SECONDS)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(PRELOADED)
    rows = read_rows(options.output)
    for table, name, library in _names(options.tables):
        title, key = TITLES[table], (name, library)
        known = key in rows.get(title, {}) or key in rows.get(NOT_BUILT, {})
        if (options.only and name not in options.only) or (options.missing and known):
            continue
        cells = run_apart((table, name), options.limit)
        notes = cells.pop("notes", [])
        if seconds := cells.pop("seconds", ""):
            write_seconds(options.seconds, key, seconds)
        if options.notes:
            with options.notes.open("a") as file:
                file.write("\n    ".join([f"{name}: {cells}", *notes]) + "\n")
        failed = NOT_BUILT in cells
        values = [name, library, *([cells[NOT_BUILT]] if failed else [cells.get(x, "") for x in HEADERS[2:]])]
        for other in (title, NOT_BUILT):
            rows.get(other, {}).pop(key, None) if other != (NOT_BUILT if failed else title) else None
        line = f"| {' | '.join(values)} |"
        rows.setdefault(NOT_BUILT if failed else title, {})[key] = line
        write_page(options.output, {title: lines for title, lines in rows.items() if lines})
        sys.stdout.write(f"{line}\n")


def _names(tables: list[str]) -> list[tuple[str, str, str]]:
    """Return table, name and library of the families of some tables; models are built in other processes."""
    from support.docs.family_lists import families

    return [(table, family.name, family.library) for table in tables for family in families(table)]


def _send_cells(family: tuple[str, str], sender: Connection, limit: int) -> None:
    """Examine a family of a table in this process and send its cells."""
    from support.docs.family_lists import families

    warnings.filterwarnings("ignore")
    table, name = family
    os.environ["TQDM_DISABLE"] = "1"
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    build = next(entry.build for entry in families(table) if entry.name == name)
    sender.send(examine(build))


def _describe_error(error: Exception) -> str:
    """Return the type of an error, or the code of an `SpError`, and its first words."""
    from sp_compile.lowering.base.errors import SpError

    text = str(error).strip()
    return _shorten(text if isinstance(error, SpError) else f"{type(error).__name__}: {text}")


def _last_line(where: str) -> str:
    """Return the file and the number of the innermost source line of a place, or the place if it is not a line."""
    found = re.findall(r"[\w.\-]+\.py:\d+", where)
    return found[-1] if found else _shorten(where)


def _shorten(text: str) -> str:
    """Return a text on one line of a table, shortened to `MAX_TEXT` characters."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."


if __name__ == "__main__":
    main()
