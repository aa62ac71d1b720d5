"""Compare sequence-parallel attention of this and of other packages on a CPU: errors, exchanges and CPU time.

    python benchmarks/peers.py [--ranks 2] [--tokens 2048 8192] [--only "ours|deepspeed"] [--parts]

A step is a forward and a backward of causal attention with 8 heads of 64, in float32 if the package supports it. Ranks
are Gloo processes of one thread. In every repeat, a single device and all variants run in turn. CPU seconds are the sum
over the ranks, exchanges included. The ratio is the median over the repeats of the CPU time of a variant divided by
that of the single device in the same repeat. The last column is this ratio for Gloo's threads alone. If a package is
not installed or does not support the case, the table has the reason. --parts adds a table of the CPU time of the
calling threads by kind of operator, also divided by that of the single device. It does not include the rest of a step
(autograd, Python, the checks before a call). To install the packages:

    DS_BUILD_OPS=0 pip install --no-deps deepspeed==0.19.8 yunchang==0.6.4 diffusers==0.42.1 && \\
        pip install py-cpuinfo hjson msgpack einops requests

With --write, the tables of all numbers of tokens are written to benchmarks/results/peers_<ranks>.md.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from measuring.gloo_ranks import joined
from measuring.handwritten import UlyssesAttention, ZigzagRingAttention, zigzag
from measuring.tables import commit, markdown, processor

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH = 8, 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a rank, from local q, k and v of shape (B, s, H, D) to the local result."""


@dataclass(frozen=True)
class Way:
    """Variant of attention: `make(n)` creates it on each of n ranks; the other fields describe its shards."""

    name: str
    make: Callable[[int], Attention]
    layout: str = "contiguous"
    causal: bool = True
    dtype: torch.dtype = torch.float32


def ours(kind: str, layout: str = "contiguous", causal: bool = True) -> Callable[[int], Attention]:
    def make(n: int) -> Attention:
        import sp_compile

        op, ranks = getattr(sp_compile, f"{kind}_attention"), dist.group.WORLD
        back = lambda x: x.transpose(1, 2)  # noqa: E731
        return lambda q, k, v: back(op(back(q), back(k), back(v), mesh=ranks, is_causal=causal, layout=layout))

    return make


def handwritten(module: type[UlyssesAttention] | type[ZigzagRingAttention]) -> Callable[[int], Attention]:
    return lambda n: module(dist.group.WORLD)


def deepspeed(n: int) -> Attention:
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    class Local(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
            return one_device(q, k, v, True)

    split = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: split(q, k, v, 0)


def diffusers(n: int) -> Attention:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from torch.distributed.device_mesh import init_device_mesh

    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=n))
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), n, torch.device("cpu"), mesh=mesh)
    return lambda q, k, v: dispatch_attention_fn(q, k, v, is_causal=False, backend="native", parallel_config=config)


def yunchang(ulysses: bool) -> Callable[[int], Attention]:
    """Return yunchang's attention with torch's CPU kernels in place of its GPU kernels."""

    def make(n: int) -> Attention:
        import yunchang.ring.ring_flash_attn as ring
        import yunchang.ring.zigzag_ring_flash_attn as zigzag_ring
        from yunchang import LongContextAttention, set_seq_parallel_pg
        from yunchang.kernels import AttnType

        def kernel(impl: Any, stage: str = "fwd-bwd", attn_processor: Any = None) -> Callable[..., Any]:
            return _lent_forward if stage == "fwd-only" else _lent_backward

        ring.select_flash_attn_impl = zigzag_ring.select_flash_attn_impl = kernel
        set_seq_parallel_pg(n if ulysses else 1, 1 if ulysses else n, dist.get_rank(), n)
        split = LongContextAttention(ring_impl_type="basic" if ulysses else "zigzag", attn_type=AttnType.FA)
        return lambda q, k, v: split(q, k, v, causal=True, softmax_scale=WIDTH**-0.5)

    return make


def _lent_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:
    operands = (x.transpose(1, 2) for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(*operands, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def _lent_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, scale: float, causal: bool, *_: Any, **__: Any,
) -> None:  # fmt: skip
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = kernel(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)
    for given, gradient in zip((dq, dk, dv), found):
        given.copy_(gradient.transpose(1, 2))


def context_parallel(n: int) -> Attention:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as context

    mesh = init_device_mesh("cpu", (n,))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context(mesh, buffers=[torch.zeros(n * q.shape[1])], buffer_seq_dims=[0]):
            return one_device(q, k, v, True)

    return attention


BF16 = torch.bfloat16
WAYS = (
    Way("ours, Ulysses", ours("ulysses")),
    Way("ours, ring", ours("ring", "zigzag"), "zigzag"),
    Way("ours, gathered", ours("gathered", "zigzag"), "zigzag"),
    Way("handwritten, Ulysses", handwritten(UlyssesAttention)),
    Way("handwritten, ring", handwritten(ZigzagRingAttention), "zigzag"),
    Way("DeepSpeed, Ulysses", deepspeed),
    Way("torch, context_parallel", context_parallel),
    Way("ours, Ulysses, bfloat16", ours("ulysses"), dtype=BF16),
    Way("yunchang, Ulysses, bfloat16", yunchang(ulysses=True), dtype=BF16),
    Way("ours, ring, bfloat16", ours("ring", "zigzag"), "zigzag", dtype=BF16),
    Way("yunchang, ring, bfloat16", yunchang(ulysses=False), "zigzag", dtype=BF16),
    Way("ours, Ulysses, not causal", ours("ulysses", causal=False), causal=False),
    Way("diffusers, Ulysses, not causal", diffusers, causal=False),
)


def one_device(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def step(attention: Attention, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@dataclass
class Seen:
    """Measurements of one variant on one rank."""

    out: float = 0.0  # largest relative error
    gradient: float = 0.0  # largest relative error
    exchanges: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # CPU time of each repeat
    alone: list[float] = field(default_factory=list)  # CPU time of each repeat on a single device
    own: list[float] = field(default_factory=list)  # CPU time of the calling thread
    parts: dict[str, float] = field(default_factory=dict)  # of one step, by kinds of operators
    failed: str = ""


def rank_of_many(rank: int, given: argparse.Namespace, tokens: int, folder: str, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(given.ranks), LOCAL_SIZE=str(given.ranks),
        DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    with joined(rank, given.ranks, folder):
        results.put((rank, compared(rank, given, tokens)))


def compared(rank: int, given: argparse.Namespace, tokens: int) -> dict[str, Seen]:
    n, seen = given.ranks, {way.name: Seen() for way in WAYS if re.search(given.only, way.name)}
    torch.manual_seed(0)
    whole = [torch.randn(1, tokens, HEADS, WIDTH) for _ in range(4)]

    def shard(x: Tensor, layout: str) -> Tensor:
        return zigzag(x, rank, n) if layout == "zigzag" else x.chunk(n, 1)[rank].contiguous()

    jobs: dict[str, Callable[[], list[Tensor]]] = {}
    masks = {way.causal for way in WAYS if way.name in seen}
    references = {c: step(partial(one_device, causal=c), whole[:3], whole[3]) for c in masks}
    for way in WAYS:
        if way.name not in seen:
            continue
        *operands, grad = (shard(x, way.layout).to(way.dtype) for x in whole)
        mine = seen[way.name]
        try:
            attention = way.make(n)
            jobs[way.name] = lambda a=attention, o=operands, g=grad: step(a, o, g)
            found = jobs[way.name]()
            errors = [_error(shard(t, way.layout), f) for t, f in zip(references[way.causal], found)]
            mine.out, mine.gradient = errors[0], max(errors[1:])
            mine.exchanges = exchanges(jobs[way.name])
        except Exception as error:
            mine.failed = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"
        failed = torch.tensor(float(bool(mine.failed)))
        dist.all_reduce(failed)
        if failed:
            mine.failed = mine.failed or "failed on another rank"
            jobs.pop(way.name, None)
    for _ in range(given.repeats):
        for name, job in jobs.items():
            way = next(way for way in WAYS if way.name == name)
            dist.barrier()
            begun = time.thread_time()
            seen[name].seconds.append(cpu_seconds(job))
            seen[name].own.append(time.thread_time() - begun)
            operands = [x.to(way.dtype) for x in whole]
            if rank:
                continue
            alone = partial(one_device, causal=way.causal)
            seen[name].alone.append(cpu_seconds(partial(step, alone, operands[:3], operands[3])))
    for name, job in jobs.items() if given.parts else ():
        dist.barrier()
        with _Parts() as parts:
            job()
        seen[name].parts = dict(parts.seconds)
    return seen


KINDS = {
    "attention": r"attend|scaled_dot_product",
    "exchanges": r"c10d",
    "copies": r"clone|copy|cat\b|stack|pack|contiguous|reorder",
    "sums and merges": "",
}
"""Operators by their names: the first that fits."""


class _Parts(TorchDispatchMode):
    """CPU time of the calling thread by kinds of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        try:
            return op(*args, **kwargs or {})
        finally:
            kind = next(kind for kind, names in KINDS.items() if re.search(names, str(op)))
            self.seconds[kind] += time.thread_time() - begun


def _error(true: Tensor, found: Tensor) -> float:
    return ((true - found.float()).abs().max() / true.abs().max()).item()


def exchanges(job: Callable[[], object]) -> dict[str, int]:
    """Count the operations of Gloo in a step, by name."""
    with torch.profiler.profile() as profile:
        job()
    names = [event.name.partition(":")[2] for event in profile.events() if event.name.startswith("gloo:")]
    return dict(Counter(names))


def cpu_seconds(job: Callable[[], object]) -> float:
    """Return the CPU seconds of a job in all threads of this process."""
    begun = time.process_time()
    job()
    return time.process_time() - begun


def report(found: dict[int, dict[str, Seen]], ranks: int) -> Table:
    columns = "", "out", "gradients", "exchanges of a rank", "CPU s", "over one device", "Gloo's threads"
    table = Table(*columns, title=f"{ranks} ranks")
    for name in found[0]:
        seen = [found[rank][name] for rank in range(ranks)]
        if failed := next((s.failed for s in seen if s.failed), ""):
            table.add_row(name, failed, *[""] * 5)
            continue
        spent = [sum(each) for each in zip(*(s.seconds for s in seen))]
        own = [sum(each) for each in zip(*(s.own for s in seen))]
        ratio = statistics.median(s / a for s, a in zip(spent, seen[0].alone))
        others = statistics.median((s - o) / a for s, o, a in zip(spent, own, seen[0].alone))
        calls = ", ".join(f"{count} {what}" for what, count in sorted(seen[0].exchanges.items()))
        errors = [f"{max(getattr(s, part) for s in seen):.0e}" for part in ("out", "gradient")]
        table.add_row(name, *errors, calls, f"{statistics.median(spent):.3f}", f"{ratio:.3f}", f"{others:.3f}")
    return table


def parts_of(found: dict[int, dict[str, Seen]], ranks: int) -> Table:
    table = Table("", *KINDS, title="CPU time of the calling threads over one device, by operators")
    for name in found[0]:
        seen = [found[rank][name] for rank in range(ranks)]
        if all(one.parts for one in seen):
            alone = statistics.median(seen[0].alone)
            table.add_row(name, *(f"{sum(one.parts.get(kind, 0) for one in seen) / alone:.3f}" for kind in KINDS))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    written = [f"# Attention of this and of other packages, {given.ranks} ranks"]
    for tokens in given.tokens:
        found = measured(given, tokens)
        table = report(found, given.ranks)
        tables = [table, parts_of(found, given.ranks)] if given.parts else [table]
        for each in tables:
            Console(width=160).print(each)
        about = f"- {date.today()}, {commit()}, {processor()}, torch {torch.__version__}\n- `python benchmarks/peers.py"
        about += f" --ranks {given.ranks} --tokens {tokens}`: causal, {HEADS} heads of {WIDTH}, {given.repeats} repeats"
        about += f"\n- load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        written += [f"## {tokens:,} tokens", about, *map(markdown, tables)]
    if given.write:
        (RESULTS / f"peers_{given.ranks}.md").write_text("\n\n".join(written) + "\n")


def measured(given: argparse.Namespace, tokens: int) -> dict[int, dict[str, Seen]]:
    """Return the measurements of each rank, in separate processes."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        world = mp.spawn(rank_of_many, (given, tokens, folder, results), nprocs=given.ranks, join=False)
        found = dict(results.get() for _ in range(given.ranks))
        while not world.join():
            pass
    return found


if __name__ == "__main__":
    main()
