"""Whole models on real ranks that share one GPU: loss and gradients against one device, memory, waits of the host.

    python benchmarks/gpu/gpu_models.py                                 2 ranks, every model and strategy
    python benchmarks/gpu/gpu_models.py --ranks 4 --only "decoder.*"    those whose name matches
    python benchmarks/gpu/gpu_models.py --device cpu --small            the same code on a CPU, tiny
    python benchmarks/gpu/gpu_models.py --nccl                          ranks that exchange by NCCL
    python benchmarks/gpu/gpu_models.py --memory                        peaks for 1, 2 and 4 ranks of one long sequence

The ranks are processes; Gloo carries their tensors through the host's memory, or with --nccl NCCL over sockets, so the
time of a step means nothing for a network. Inductor and Triton compile each rank's program, forward and backward, as
where every rank has a GPU.

error   of the loss and of the worst gradient, over the largest entry of the true one: the model in float64 on one
        device. Beside it what one device makes of the same model in the same dtype, by Inductor as well
waits   how often the host waited for the device in a second step, all ranks together, by torch's own debug mode;
        without the exchanges, which go through the host here. Below the table, where
"""

import argparse
import copy
import faulthandler
import itertools
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from measuring.gloo_ranks import joined
from measuring.one_gpu import joined_nccl
from measuring.staged import stage
from measuring.tables import describe_run, markdown
from models import DecoderLM

RESULTS = Path(__file__).parents[1] / "results" / "gpu" / "models_gpu.md"
VOCAB = 512
ALLOWED = 3.0
"""Largest error as a multiple of the single-device error in the same dtype."""
FLOOR = {torch.float32: 2e-5, torch.bfloat16: 1e-3}
"""Errors that are always allowed, for cases in which a single device is nearly exact."""
PATIENCE = 150.0
"""Seconds for a case, after which every rank prints its traceback and exits."""


@dataclass(frozen=True)
class Sizes:
    tokens: int = 2045
    dim: int = 256
    heads: int = 8
    kv_heads: int = 4
    layers: int = 2
    long: int = 65536
    long_dim: int = 1024


SMALL = Sizes(tokens=61, dim=32, heads=4, kv_heads=2, layers=2, long=256, long_dim=32)
Inputs = dict[str, Any]
FULL = torch.float32


@dataclass(frozen=True)
class Case:
    """A model. make: returns it; more: inputs in addition to ids and labels; options: of the backend."""

    name: str
    make: Callable[[Sizes], nn.Module]
    dtype: torch.dtype = torch.bfloat16
    more: Callable[[Tensor], Inputs] = field(default=lambda ids: {})
    options: tuple[tuple[str, Any], ...] = ()
    least: int = 2
    """ranks that it takes"""
    most: int = 1 << 30
    """tokens: one device loops over them"""


def decoder(sizes: Sizes) -> nn.Module:
    return DecoderLM(vocab=VOCAB, dim=sizes.dim, layers=sizes.layers, heads=sizes.heads, kv_heads=sizes.kv_heads)


def hf(family: str, **more: Any) -> Callable[[Sizes], nn.Module]:
    """A decoder of transformers with random weights."""

    def make(sizes: Sizes) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        given = {
            "vocab_size": VOCAB, "hidden_size": sizes.dim, "intermediate_size": 2 * sizes.dim, "use_cache": False,
            "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "pad_token_id": 0,
            "num_key_value_heads": sizes.kv_heads, **more,
        }  # fmt: skip
        config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**given)
        if family not in ("Mamba", "Mamba2"):
            config._attn_implementation = more.get("attn_implementation", "sdpa")
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return make


def packed(ids: Tensor) -> Inputs:
    """Positions of three documents."""
    ends = [0, ids.shape[1] // 5, ids.shape[1] // 2, ids.shape[1]]
    positions = torch.cat([torch.arange(b - a, device=ids.device) for a, b in itertools.pairwise(ends)])
    return {"position_ids": positions.expand(ids.shape)}


def padded(ids: Tensor) -> Inputs:
    mask = torch.ones_like(ids)
    mask[:, -(ids.shape[1] // 6) :] = 0
    return {"attention_mask": mask}


EVERY_SECOND = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"head_dim": 32, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
WAYS = ("auto", "ulysses", "ring", "gather")


def each(name: str, make: Callable[[Sizes], nn.Module], ways: tuple[str, ...] = WAYS, **fields: Any) -> list[Case]:
    """A case for each strategy of attention."""
    return [Case(f"{name}, {way}", make, options=(("attention", way),), **fields) for way in ways]


CASES = [
    *each("decoder", decoder),
    *each("decoder", decoder, ("hybrid",), least=4),
    *each("decoder, float32", decoder, ("ulysses", "ring"), dtype=FULL),
    Case("llama", hf("Llama")),
    Case("llama, padded", hf("Llama"), more=padded),
    *each("llama, packed", hf("Llama"), more=packed),
    *each("gemma3", hf("Gemma3", head_dim=32, **EVERY_SECOND), ("auto", "ring")),
    Case("mistral, packed", hf("Mistral", sliding_window=100), more=packed),
    Case("gpt_oss", hf("GptOss", num_local_experts=4, attn_implementation="eager", **EXPERTS, **EVERY_SECOND), FULL),
    Case("mamba", hf("Mamba", state_size=8, time_step_rank=4), FULL, most=61),
    Case("qwen3_moe", hf("Qwen3Moe", num_experts=4, moe_intermediate_size=64, **EXPERTS), FULL),
]


def inputs_of(case: Case, tokens: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (1, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 4] = -100
    ids, labels = ids.to(device), labels.to(device)
    if case.make is decoder:
        return {"ids": ids, "labels": labels}
    return {"input_ids": ids, "labels": labels, **case.more(ids)}


def built(case: Case, sizes: Sizes, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return case.make(sizes).to(device=device, dtype=case.dtype)


def step(run: Callable[..., Any], model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The loss, and the gradients of all parameters that have one."""
    model.zero_grad()
    out = run(**inputs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def errors(true: list[Tensor], found: list[Tensor]) -> tuple[float, float]:
    """Return the relative error of the loss, and the largest one of a gradient."""
    assert len(true) == len(found), f"{len(true) - 1} gradients, found {len(found) - 1}"
    worst = [((t - f.double()).abs().max() / t.abs().max().clamp_min(1e-30)).item() for t, f in zip(true, found)]
    return worst[0], max(worst[1:])


@dataclass
class Seen:
    """Measurements of a case on one rank."""

    name: str
    alone: tuple[float, float] = (0.0, 0.0)
    ours: tuple[float, float] = (0.0, 0.0)
    waits: Counter[str] = field(default_factory=Counter)
    compiled: float = 0.0
    seconds: float = 0.0
    failed: str = ""


def measure_case(case: Case, sizes: Sizes, device: torch.device, compiler: str) -> Seen:
    seen = Seen(case.name)
    inputs = inputs_of(case, min(sizes.tokens, case.most), device)
    model = built(case, sizes, device)
    oracle = copy.deepcopy(model).double()
    true = step(oracle, oracle, inputs)
    del oracle
    seen.alone = errors(true, step(torch.compile(model), model, inputs))
    torch._dynamo.reset()
    run = torch.compile(model, backend="sp", options={**dict(case.options), "compiler": compiler})
    begun = time.monotonic()
    seen.ours = errors(true, step(run, model, inputs))
    seen.compiled = time.monotonic() - begun
    with waits(device) as seen.waits:
        begun = time.monotonic()
        step(run, model, inputs)
        seen.seconds = time.monotonic() - begun
    again = errors(true, step(run, model, inputs))
    seen.ours = max(seen.ours[0], again[0]), max(seen.ours[1], again[1])
    return seen


@contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts where the host waits for the device, by torch's debug mode: file, line and code, of ours where it is."""
    found: Counter[str] = Counter()

    def seen(message: Any, *rest: Any) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-1] if Path(frame.filename).name != "warnings.py"]
        if "synchroniz" in str(message) and not any(Path(frame.filename).name == "staged.py" for frame in frames):
            ours = [f for f in frames if "sp_compile" in f.filename or "lowering" in f.filename]
            inner = (ours or frames)[-1]
            found[f"{'/'.join(Path(inner.filename).parts[-3:])}:{inner.lineno} {inner.line}"] += 1

    if device.type != "cuda":
        yield found
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def rank_of_many(rank: int, given: argparse.Namespace, folder: str, results: Any) -> None:
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    with (joined_nccl if given.nccl else joined)(rank, given.ranks, folder):
        if not given.gloo and not given.nccl:
            stage(dist.group.WORLD)
        work = peaks if given.memory else every_case
        sizes = SMALL if given.small else Sizes()
        sizes = replace(sizes, tokens=given.tokens or sizes.tokens)
        work(given, sizes, device, lambda seen: results.put((rank, seen)))


def every_case(given: argparse.Namespace, sizes: Sizes, device: torch.device, submit: Callable[[Seen], None]) -> None:
    for case in chosen(given):
        print(f"rank {dist.get_rank()}: {case.name}", flush=True)
        torch._dynamo.reset()
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            seen = measure_case(case, sizes, device, given.compiler)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            seen = Seen(case.name, failed=f"{type(error).__name__}: {lines[0][:300]}")
        submit(seen)
        failed = torch.tensor(float(bool(seen.failed)), device=device if given.nccl else None)
        dist.all_reduce(failed)  # an error on some ranks only leaves the group unusable


def peaks(given: argparse.Namespace, sizes: Sizes, device: torch.device, submit: Callable[[Any], None]) -> None:
    """Bytes at the peak of a second step, beyond weights and gradients."""
    torch.manual_seed(0)  # one model and one batch on all ranks
    model = DecoderLM(vocab=given.vocab, dim=sizes.long_dim, layers=4, heads=8, kv_heads=8).to(device, torch.bfloat16)
    inputs = {name: torch.randint(given.vocab, (1, sizes.long), device=device) for name in ("ids", "labels")}
    ways: dict[str, dict[str, Any]] = {way: {"attention": way} for way in ("ulysses", "ring", "gather")}
    if given.tiles:
        ways = {
            f"ulysses, tiles={tiles}": {"attention": "ulysses", "tiles": int(tiles) if tiles.isdigit() else tiles}
            for tiles in given.tiles
        }
    for way, options in ways.items() if given.ranks > 1 or given.tiles else [("inductor", {})]:
        torch._dynamo.reset()
        run = torch.compile(model, **({"backend": "sp", "options": options} if options else {}))
        step(run, model, inputs)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        run(**inputs).backward()
        torch.cuda.synchronize()
        submit((way, torch.cuda.max_memory_allocated() - held, time.monotonic() - begun))


def chosen(given: argparse.Namespace) -> list[Case]:
    return [case for case in CASES if case.least <= given.ranks and re.search(given.only, case.name)]


def run_ranks(given: argparse.Namespace) -> list[tuple[int, Any]]:
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        world = mp.spawn(rank_of_many, (given, folder, results), nprocs=given.ranks, join=False)
        found = []
        while not world.join(timeout=1):
            while not results.empty():
                found.append(results.get())
                if found[-1][0] == 0:
                    print(found[-1][1], flush=True)
        while not results.empty():
            found.append(results.get())
    return found


def report(found: list[tuple[int, Seen]], ranks: int) -> tuple[Table, list[str]]:
    """Return the largest errors of all ranks, and the cases that exceed the limits."""
    title = f"{ranks} ranks"
    table = Table(
        "", "one device: loss", "gradient", "ours: loss", "gradient", "waits", "compile, s", "a step, s", title=title
    )
    wrong = []
    for case in CASES:
        seen = [s for _, s in found if s.name == case.name]
        if not seen:
            continue
        failed = next((s.failed for s in seen if s.failed), "")
        alone, ours = seen[0].alone, tuple(max(s.ours[i] for s in seen) for i in (0, 1))
        allowed = [max(ALLOWED * a, FLOOR[case.dtype]) for a in alone]
        if failed or not all(o <= a for o, a in zip(ours, allowed)):
            wrong.append(f"{case.name}: {failed or ours}")
        count = sum(sum(s.waits.values()) for s in seen)
        numbers = [f"{e:.1e}" for e in (*alone, *ours)]
        table.add_row(case.name, *numbers, str(count), f"{seen[0].compiled:.0f}", f"{seen[0].seconds:.2f}")
    return table, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="of the model whose memory is measured")
    parser.add_argument("--tiles", nargs="*", help="numbers of tiles, auto or never, in place of ways of attention")
    parser.add_argument("--nccl", action="store_true", help="exchange by NCCL, over sockets")
    parser.add_argument("--gloo", action="store_true", help="exchange tensors of a GPU by Gloo")
    parser.add_argument("--compiler", default="inductor", help="of the ranks' graphs")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--output", type=Path, help=f"of the report, as in {RESULTS.name}")
    given = parser.parse_args()
    console = Console(width=160)
    found = run_ranks(given)
    if given.memory:
        table = Table("ranks", "", "peak of a step above its start, MB", "s")
        for rank, (way, peak, seconds) in found:
            if rank == 0:
                table.add_row(str(given.ranks), way, f"{peak / 1e6:.0f}", f"{seconds:.2f}")
        wrong = []
    else:
        table, wrong = report(found, given.ranks)
    console.print(table)
    every = sum((s.waits for _, s in found if isinstance(s, Seen)), Counter())
    for place, count in every.most_common(20):
        console.print(f"  waits {count:4} {place}", markup=False)
    if given.output:
        about = describe_run(given.device)
        with given.output.open("a") as out:
            out.write(
                f"{about}\n- `python benchmarks/gpu/gpu_models.py {' '.join(sys.argv[1:])}`\n\n{markdown(table)}\n\n"
            )
    if wrong:
        raise SystemExit("errors above the limits:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
