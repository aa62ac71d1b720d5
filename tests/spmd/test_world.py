"""A model that was compiled for another default process group than there is now raises, until it is compiled again."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.parity import Sums, build, error_text, sp
from support.ranks import forkserver
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule, symbolic_trace

from sp_compile import SpError
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.rank_program import guard_program
from sp_compile.runtime import guard as check_run
from sp_compile.runtime.session import CompileSession


def _losses(rank: int, folder: str) -> None:
    """Train without processes, with two, with two others, without; after each change the error, then correct losses."""
    torch.set_num_threads(1)
    net, x, out = build(Sums, width=4), torch.ones(2, 8, 4, dtype=torch.float64), []
    run = sp(net, compiler=_noting)
    for number, connected in enumerate((False, True, True, False)):
        if connected:
            store = f"file://{folder}/store{number}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        refused = error_text(lambda: run(x)) if number else ""
        if number:
            torch.compiler.reset()
        net.zero_grad()
        loss = run(x)
        loss.backward()
        out.append((refused, loss.item(), net.inner.weight.grad.clone(), COMPILED[-1]))
        if connected:
            dist.destroy_process_group()
    torch.save(out, f"{folder}/{rank}.pt")


COMPILED: list[int] = []


def _noting(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Return a compiler that records the number of sequence rows of a rank in each graph."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    COMPILED.append(min(x.shape[1] for x in values if isinstance(x, Tensor) and x.ndim == 3))
    return lookup_backend("aot_eager")(gm, inputs)


def test_other_processes() -> None:
    net, x = build(Sums, width=4), torch.ones(2, 8, 4, dtype=torch.float64)
    net(x).backward()
    with tempfile.TemporaryDirectory() as folder:
        forkserver()
        mp.start_processes(_losses, (folder,), nprocs=2, start_method="forkserver")
        for out in (torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(2)):
            for refused, loss, gradient, _ in out:
                assert not refused or "SP681" in refused
                torch.testing.assert_close(loss, net(x).item())
                torch.testing.assert_close(gradient, net.inner.weight.grad)
            assert [bool(refused) for refused, *_ in out] == [False, True, True, True]
            assert [rows for *_, rows in out] == [8, 4, 4, 8]


def test_a_failed_compilation_belongs_to_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a process group, and after any failure."""
    x = torch.ones(2, 8, 4)
    gm = symbolic_trace(lambda x: torch.sin(x))
    session = CompileSession(gm, [x], {"mesh_dim": "sp"})
    assert isinstance(session.problem, SpError)
    run = guard_program(UserProgram.from_dynamo(gm, [x]), session, None, None, session.problem)
    with pytest.raises(SpError, match="SP116"):
        run(x)
    monkeypatch.setattr(check_run, "world", lambda: object())
    with pytest.raises(SpError, match="SP681"):
        run(x)
