"""Exceptions injected at a random op of a random rank, forward or backward: what each rank raises, and how soon.

PYTHONPATH=tests python -m support.parallel.raising     writes benchmarks/results/raised.md
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch._dynamo.backends.debugging as debugging
import torch._inductor.codecache as codecache
import torch.distributed as dist
from support.parity import Decoder, Sums, build, difference, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile import SpError
from sp_compile.lowering.base.errors import UNKNOWN_LINE, source_line

TIMEOUT = 120.0  # seconds of a group: no rank may wait for it
SOON = 10.0  # seconds within which every rank raises
CAUSE = "injected"
ERRORS: list[type[BaseException]] = [
    *(IndexError, RuntimeError, ValueError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)
]


class Broken(nn.Module):
    """Two graphs, of which the first has no exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(16, 16), Sums()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.rest(x)


def numbers(seq: int) -> tuple[Tensor]:
    return (torch.randn(2, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "decoder": (lambda: Decoder(layers=1), text),
    "sums": (Sums, numbers),
    "broken": (Broken, numbers),
}


SEEDS = {**dict.fromkeys(range(40), "aot_eager"), **dict.fromkeys(range(40, 50), "inductor")}


@dataclass(frozen=True)
class Injected:
    """One exception. place: of the ops of a step's half, from 0 to 1."""

    model: str
    compiler: str
    n: int
    odd: int
    half: str
    place: float
    error: int

    @classmethod
    def of(cls, seed: int, compiler: str = "aot_eager") -> Injected:
        random = Random(seed)
        n = random.choice([2, 3, 4])
        half = random.choice(["forward", "backward"])
        kind = random.randrange(len(ERRORS))
        return cls(random.choice([*MODELS]), compiler, n, random.randrange(n), half, random.random(), kind)


@dataclass
class Told:
    """What a rank raised in the step, and in the one after it; "" if nothing. line: of the op, on the odd rank."""

    kind: str
    words: str
    seconds: float
    then: str
    then_seconds: float
    line: str


@dataclass
class Counter:
    """The ops of a half of a step so far. at: which raises `error`; raised: the line of the one that has."""

    count: int = 0
    at: int = -1
    error: type[BaseException] = RuntimeError
    raised: str = ""


_ops = Counter()


def reach(line: str = "") -> None:
    """An op of a compiled program runs here."""
    _ops.count += 1
    if _ops.count - 1 == _ops.at:
        _ops.at, _ops.raised = -1, line
        raise _ops.error(CAUSE)


def inject_nodes(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler that runs a graph as it is, with a call of `reach` before each op."""
    for node in [*gm.graph.nodes]:
        if node.op == "call_function":
            with gm.graph.inserting_before(node):
                line = source_line(node.meta.get("stack_trace") or "").removeprefix(UNKNOWN_LINE)
                added = gm.graph.call_function(reach, (line,))
            added.meta.update({k: v for k, v in node.meta.items() if k in ("stack_trace", "from_node")})
    gm.recompile()
    return NOP(gm, inputs)


NOP = debugging.boxed_nop
OP = re.compile(r"^( {8}(?:extern_kernels\.|cpp_fused|torch\.ops\.|buf\d+ = torch\.ops\.).*\))$", re.MULTILINE)
CALLED = r"\1; reach()"


def inject_code(source: str) -> str:
    """Inductor's code, with a call of `reach` after each op."""
    head, call, body = source.partition("\nclass Runner" if "\nclass Runner" in source else "\ndef call(")
    return f"{head}\nfrom {__name__} import reach\n{call}{OP.sub(CALLED, body)}" if call else source


@contextmanager
def injecting() -> Iterator[None]:
    """What is compiled inside calls `reach`."""
    write = codecache.PyCodeCache.write

    def changed(source: str, *args: Any, **kwargs: Any) -> Any:
        return write(inject_code(source), *args, **kwargs)

    with (
        mock.patch.object(debugging, "boxed_nop", inject_nodes),
        mock.patch.object(codecache.PyCodeCache, "write", changed),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


def step(
    run: Callable[..., Tensor],
    net: nn.Module,
    given: Sequence[Tensor],
    half: str = "",
    at: int = -1,
    error: type[BaseException] = RuntimeError,
) -> dict[str, int]:
    """A forward and a backward; how many ops each has. half, at, error: where it raises, and what."""
    net.zero_grad()
    _ops.count, _ops.at, _ops.error, _ops.raised = 0, at if half == "forward" else -1, error, ""
    loss = run(*given)
    found = {"forward": _ops.count}
    _ops.count, _ops.at = 0, at if half == "backward" else -1
    loss.backward()
    return {**found, "backward": _ops.count}


def small_group(n: int, name: str) -> DeviceMesh | None:
    """A mesh ("sp",) of the first n ranks, with a group of its own, which an error may end; None on other ranks."""
    group = dist.new_group(range(n), timeout=timedelta(seconds=TIMEOUT), group_desc=name)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",)) if dist.get_rank() < n else None


def raises(one: Injected, stays_away: float = 0.0) -> Told | None:
    """What this rank raises; None outside of the group. Raises AssertionError if a step without a fault is wrong.

    stays_away: so many seconds later the odd rank comes to the next step.
    """
    mesh = small_group(one.n, str(one))
    if mesh is None:
        return None
    model, inputs = MODELS[one.model]
    net, alone, given = build(model), build(model), inputs(7)
    torch._dynamo.reset()
    with injecting():
        run = sp(net, mesh=mesh, compiler=one.compiler)
        ops = step(run, net, given)[one.half]
        alone(*given).backward()
        for found, right in zip(net.parameters(), alone.parameters(), strict=True):
            assert difference(found.grad, right.grad) < 1e-9
        assert ops > 2
        at = int(one.place * ops) if dist.get_rank() == one.odd else -1
        dist.barrier(mesh.get_group())
        kind, words, seconds = raised(lambda: step(run, net, given, one.half, at, ERRORS[one.error]))
        line = _ops.raised
        if dist.get_rank() == one.odd:
            time.sleep(stays_away)
        _, then, then_seconds = raised(lambda: step(run, net, given))
    return Told(kind, words, seconds, then, then_seconds, line)


def raised(act: Callable[[], object]) -> tuple[str, str, float]:
    """Type and words of what it raises, and after how many seconds."""
    begun, kind, words = time.monotonic(), "", ""
    try:
        act()
    except BaseException as error:
        kind, words = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
        if isinstance(error, SpError):
            kind = "SpError"
    return kind, words, time.monotonic() - begun


LINE = re.compile(r"\b\w+/\w+\.py:\d+")


def lines_of(model: nn.Module) -> Iterator[tuple[str, int]]:
    """File, with its folder, and number of each line of a model's modules; a kernel is made of several of these."""
    for cls in {type(module) for module in model.modules() if type(module).__module__.startswith("support.")}:
        code, first = inspect.getsourcelines(cls)
        path = Path(inspect.getsourcefile(cls) or "")
        yield from ((f"{path.parent.name}/{path.name}", first + i) for i in range(len(code)))


def problems(one: Injected, told: list[Told]) -> list[str]:
    """What is not as it has to be."""
    out = []
    odd, name = told[one.odd], ERRORS[one.error].__name__
    if odd.kind != name or f"rank {one.odd} raised this" not in odd.words or odd.line not in odd.words:
        out.append(f"rank {one.odd}, whose op at {odd.line} raised: {odd.kind}: {odd.words}")
    known = {f"{where}:{n}" for where, n in lines_of(MODELS[one.model][0]())}
    if not all(known & {*LINE.findall(x.words)} for x in told if x.kind):
        out.append(f"no line of the model: {[x.words for x in told]}")
    unaware = [r for r, x in enumerate(told) if r != one.odd and not x.kind]
    for rank, x in enumerate(told):
        if max(x.seconds, x.then_seconds) > SOON:
            out.append(f"rank {rank} took {x.seconds:.1f} and {x.then_seconds:.1f} s")
        if rank == one.odd or rank in unaware:
            continue
        if x.kind != "SpError" or f"rank {one.odd} raised {name}: {CAUSE}" not in x.words or odd.line not in x.words:
            out.append(f"rank {rank}, of an op at {odd.line}: {x.kind}: {x.words}")
    then = {x.then for x in told}
    works = then == {""}
    says = all("cannot be used any more" in words for words in then)
    if not (works or says):
        out.append(f"afterwards: {[x.then for x in told]}")
    if unaware and not (works and one.half == "backward"):
        out.append(f"ranks {unaware} raised nothing")
    return out


def main() -> None:
    """All of them, as a table."""
    pool, rows = Ranks(), []
    for seed, compiler in SEEDS.items():
        one = Injected.of(seed, compiler)
        told = [x for x in pool.run(4, raises, one, timeout=300) if x is not None]
        others = [x for rank, x in enumerate(told) if rank != one.odd]
        where = told[one.odd].line.partition(": ")[0] or "of no line, or of a kernel"
        slowest = max([x.seconds for x in others if x.kind], default=0.0)
        after = "works" if not any(x.map_rows for x in told) else "says that it is ended"
        verdict = "; ".join(problems(one, told)) or (
            "yes" if any(x.kind for x in others) else "yes: after the last exchange"
        )
        cells = [seed, one.model, compiler, one.n, one.odd, one.half, ERRORS[one.error].__name__, where]
        cells += [
            sum(bool(x.kind) for x in others),
            f"{slowest:.1f}",
            after,
            f"{max(x.then_seconds for x in told):.1f}",
            verdict,
        ]
        rows.append("| " + " | ".join(map(str, cells)).replace("\n", " ") + " |")
    pool.close()
    RESULTS.write_text("\n".join([HEAD, *rows, ""]))


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "raised.md"
HEAD = f"""# Exceptions on one rank

Written by `PYTHONPATH=tests python -m support.parallel.raising`: an exception at a random op of a random rank's forward or
backward, on real ranks over Gloo with a timeout of {TIMEOUT:.0f} s. torch {torch.__version__}. The other ranks raise in that step (how many, and the slowest's
seconds), unless the op comes after the last exchange of the step; then the group works. As it has to be: every rank raises
within {SOON:.0f} s and names rank, line and cause, and afterwards the group works on every rank or says on every rank that it does not.

| seed | model | compiler | ranks | odd rank | half | raises | line of the op | others that raise | s | the group afterwards | s | as it has to be |
|---:|---|---|---:|---:|---|---|---|---:|---:|---|---:|---|"""

if __name__ == "__main__":
    from support.parallel import raising  # the ranks know it by that name

    raising.main()
