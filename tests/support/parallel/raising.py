"""Inject exceptions at a random op of a random rank, forward or backward; check the errors of all ranks.

PYTHONPATH=tests python -m support.parallel.raising     writes benchmarks/results/checks/raised.md
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

TIMEOUT = 120.0  # seconds of a group; no rank may reach it
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
    """One injected exception."""

    model: str
    compiler: str
    n: int
    odd: int  # the rank that raises
    half: str  # "forward" or "backward"
    place: float  # of the op in the half, from 0 to 1
    error: int  # index of ERRORS

    @classmethod
    def of(cls, seed: int, compiler: str = "aot_eager") -> Injected:
        random = Random(seed)
        n = random.choice([2, 3, 4])
        half = random.choice(["forward", "backward"])
        kind = random.randrange(len(ERRORS))
        return cls(random.choice([*MODELS]), compiler, n, random.randrange(n), half, random.random(), kind)


@dataclass
class RankErrors:
    """Errors of one rank, "" if none."""

    kind: str  # class of the error of the step
    words: str  # its message
    seconds: float
    then: str  # error of the next step
    then_seconds: float
    line: str  # of the op, on the odd rank


@dataclass
class Counter:
    """Counter of the ops in half a step. at: number of the op that raises `error`; raised: its line."""

    count: int = 0
    at: int = -1
    error: type[BaseException] = RuntimeError
    raised: str = ""


_ops = Counter()


def reach(line: str = "") -> None:
    """Count an op of a compiled program, and raise the error at its number."""
    _ops.count += 1
    if _ops.count - 1 == _ops.at:
        _ops.at, _ops.raised = -1, line
        raise _ops.error(CAUSE)


def inject_nodes(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """Compile a graph unmodified, with a call of `reach` before each op."""
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
    """Return Inductor's code with a call of `reach` after each op."""
    head, call, body = source.partition("\nclass Runner" if "\nclass Runner" in source else "\ndef call(")
    return f"{head}\nfrom {__name__} import reach\n{call}{OP.sub(CALLED, body)}" if call else source


@contextmanager
def injecting() -> Iterator[None]:
    """Insert calls of `reach` in programs that are compiled within the context."""
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
    """Run a step; return the number of ops of each half. half, at, error: the op that raises, and its error."""
    net.zero_grad()
    _ops.count, _ops.at, _ops.error, _ops.raised = 0, at if half == "forward" else -1, error, ""
    loss = run(*given)
    found = {"forward": _ops.count}
    _ops.count, _ops.at = 0, at if half == "backward" else -1
    loss.backward()
    return {**found, "backward": _ops.count}


def small_group(n: int, name: str) -> DeviceMesh | None:
    """Return a mesh ("sp",) of the first n ranks with a new group, which an error may end; None on other ranks."""
    group = dist.new_group(range(n), timeout=timedelta(seconds=TIMEOUT), group_desc=name)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",)) if dist.get_rank() < n else None


def raises(one: Injected, stays_away: float = 0.0) -> RankErrors | None:
    """Return the errors of this rank, None outside of the group.

    Args:
        one: The injected exception.
        stays_away: Seconds by which the odd rank delays the next step.

    Raises:
        AssertionError: If a step without a fault is wrong.
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
    return RankErrors(kind, words, seconds, then, then_seconds, line)


def raised(act: Callable[[], object]) -> tuple[str, str, float]:
    """Return the class and message of the error of a call, "" if none, and the seconds until then."""
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
    """Yield the file (with its folder) and number of each line of a model's modules."""
    for cls in {type(module) for module in model.modules() if type(module).__module__.startswith("support.")}:
        code, first = inspect.getsourcelines(cls)
        path = Path(inspect.getsourcefile(cls) or "")
        yield from ((f"{path.parent.name}/{path.name}", first + i) for i in range(len(code)))


def problems(one: Injected, errors: list[RankErrors]) -> list[str]:
    """Return a text for each violated requirement."""
    out = []
    odd, name = errors[one.odd], ERRORS[one.error].__name__
    if odd.kind != name or f"rank {one.odd} raised this" not in odd.words or odd.line not in odd.words:
        out.append(f"rank {one.odd}, whose op at {odd.line} raised: {odd.kind}: {odd.words}")
    known = {f"{where}:{n}" for where, n in lines_of(MODELS[one.model][0]())}
    if not all(known & {*LINE.findall(x.words)} for x in errors if x.kind):
        out.append(f"no line of the model: {[x.words for x in errors]}")
    unaware = [r for r, x in enumerate(errors) if r != one.odd and not x.kind]
    for rank, x in enumerate(errors):
        if max(x.seconds, x.then_seconds) > SOON:
            out.append(f"rank {rank} took {x.seconds:.1f} and {x.then_seconds:.1f} s")
        if rank == one.odd or rank in unaware:
            continue
        if x.kind != "SpError" or f"rank {one.odd} raised {name}: {CAUSE}" not in x.words or odd.line not in x.words:
            out.append(f"rank {rank}, of an op at {odd.line}: {x.kind}: {x.words}")
    then = {x.then for x in errors}
    works = then == {""}
    reports = all("cannot be used any more" in words for words in then)
    if not (works or reports):
        out.append(f"afterwards: {[x.then for x in errors]}")
    if unaware and not (works and one.half == "backward"):
        out.append(f"ranks {unaware} raised nothing")
    return out


def main() -> None:
    """Inject all exceptions, and write a table."""
    pool, rows = Ranks(), []
    for seed, compiler in SEEDS.items():
        one = Injected.of(seed, compiler)
        errors = [x for x in pool.run(4, raises, one, timeout=300) if x is not None]
        others = [x for rank, x in enumerate(errors) if rank != one.odd]
        where = errors[one.odd].line.partition(": ")[0] or "of no line, or of a kernel"
        slowest = max([x.seconds for x in others if x.kind], default=0.0)
        after = "works" if not any(x.then for x in errors) else "reports that it ended"
        verdict = "; ".join(problems(one, errors)) or (
            "yes" if any(x.kind for x in others) else "yes: after the last exchange"
        )
        cells = [seed, one.model, compiler, one.n, one.odd, one.half, ERRORS[one.error].__name__, where]
        cells += [
            sum(bool(x.kind) for x in others),
            f"{slowest:.1f}",
            after,
            f"{max(x.then_seconds for x in errors):.1f}",
            verdict,
        ]
        rows.append("| " + " | ".join(map(str, cells)).replace("\n", " ") + " |")
    pool.close()
    RESULTS.write_text("\n".join([HEAD, *rows, ""]))


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "checks" / "raised.md"
HEAD = f"""# Exceptions on one rank

`PYTHONPATH=tests python -m support.parallel.raising` writes this table. It raises an exception at a random op of the
forward or backward of a random rank, on real ranks over Gloo with a timeout of {TIMEOUT:.0f} s. torch {torch.__version__}.
The other ranks raise in that step; the table has their number and the seconds of the slowest one. They do not raise if
the op follows the last exchange of the step; then the group works. Required: every rank raises within {SOON:.0f} s with
rank, line and cause. Afterwards the group works on every rank, or every rank reports that it ended.

| seed | model | compiler | ranks | odd rank | half | raises | line of the op | others that raise | s | the group afterwards | s | required |
|---:|---|---|---:|---:|---|---|---|---:|---:|---|---:|---|"""

if __name__ == "__main__":
    from support.parallel import raising  # the name in the ranks

    raising.main()
