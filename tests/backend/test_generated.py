"""Collectives in AOTAutograd's graphs and Inductor's code: number, size and order, equal on all ranks."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support import ranks as worker
from support.parity import Outcome, against_eager, build, check, sp, text
from support.ranks import Ranks
from support.recording import Recorder
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_compile.runtime.guard import GuardedProgram


def recorded(layers: int, seq: int, batch: int) -> dict[str, Any]:
    recorder = Recorder()
    model = build(layers=layers)
    check([against_eager(model, *text(seq, batch), mesh=worker.mesh(), compiler=recorder)])
    return {
        "text": recorder.text(),
        "sent": [recorder.sent("forward"), recorder.sent("backward")],
        "others": [
            [
                (str(n.target).split(".")[1], n.args[0].meta["val"].numel())
                for n in recorder.collectives(name)
                if "all_to_all" not in str(n.target)
            ]
            for name in ("forward", "backward")
        ],
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_of_a_decoder(ranks: Ranks, n: int) -> None:
    layers, batch, seq, heads, width = 2, 2, 16, 4, 4
    first, *others = ranks.run(n, recorded, layers, seq, batch)
    assert all(other == first for other in others), "the graphs differ between ranks"
    head = batch * seq // n * width * 8  # bytes of one head of the local shard
    forward, backward = first["sent"]
    assert forward == [3 * heads * head, heads * head] * layers
    assert backward == [heads * head, 3 * heads * head] * layers
    in_forward, in_backward = first["others"]
    assert all(op == "all_reduce" and numel <= 2 for op, numel in in_forward), in_forward
    assert in_backward == [("all_reduce", first["parameters"])]


def with_inductor() -> tuple[Outcome, list[str]]:
    model = build(layers=1)
    run = sp(model, mesh=worker.mesh(), compiler="inductor")
    with config.patch(force_disable_caches=True):
        return run_and_get_code(lambda: against_eager(model, *text(13), run=run))


@pytest.mark.slow
def test_inductor_generates_the_same_code_on_all_ranks(ranks: Ranks) -> None:
    (first, code), (second, same_code) = ranks.run(2, with_inductor)
    check([first, second])
    assert len(code) == 2
    assert [without_paths(one) for one in code] == [without_paths(one) for one in same_code]


def without_paths(code: str) -> str:
    """Generated code names the files of its kernels, and in a comment the process that wrote it."""
    return "\n".join(line for line in code.splitlines() if not line.startswith("#") and "/tmp" not in line)


STRATEGIES = {"ring": "all_to_all_single", "gather": "", "hybrid": "all_to_all_single"}


def strategy(attention: str, layout: str, seq: int) -> dict[str, Any]:
    recorder = Recorder()
    how = {"attention": attention, "layout": layout, "mesh": worker.mesh(), "compiler": recorder}
    outcome = against_eager(build(layers=1), *text(seq), **how)
    return {"outcome": outcome, "text": recorder.text(), "calls": [calls(recorder, n) for n in ("forward", "backward")]}


def kept(recorder: Recorder) -> int:
    """Bytes of activations that the forward keeps for the backward: all that is neither a parameter nor an input."""
    nodes = recorder.graphs["forward"].graph.output_node().args[0]
    made = {n for n in nodes if isinstance(n, Node) and n.op != "placeholder"}
    values = [n.meta["val"] for n in made if isinstance(n.meta.get("val"), Tensor)]
    return sum(v.numel() * v.element_size() for v in values)


def kept_by(attention: str, seq: int, n: int) -> int:
    """Return bytes that the program of one of n simulated ranks keeps."""
    recorder = Recorder()
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        with mock.patch.object(GuardedProgram, "_agree"):
            sp(build(layers=1), compiler=recorder, attention=attention)(*text(seq))
    finally:
        dist.destroy_process_group()
    return kept(recorder)


def calls(recorder: Recorder, name: str) -> list[str]:
    """Collectives of attention, by op and by route."""
    found = [(str(n.target).split(".")[1], str(n.args[-1]).partition("/")[2]) for n in recorder.collectives(name)]
    return [route.split(":")[0] or op for op, route in found if op != "all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 2, 4])
def test_rounds_of_a_ring(ranks: Ranks, n: int) -> None:
    first, *others = ranks.run(n, strategy, "ring", "zigzag", 13)
    check([first["outcome"], *(o["outcome"] for o in others)])
    assert all(other["text"] == first["text"] for other in others), "the graphs differ between ranks"
    forward, backward = first["calls"]
    assert forward == ["shift"] * (n - 1)
    assert backward == ["shift"] * (2 * n - 1) or backward == ["shift"] * (n - 1) + ["across"]


@pytest.mark.slow
def test_rounds_of_a_hybrid(ranks: Ranks) -> None:
    first, *others = ranks.run(4, strategy, "hybrid", "zigzag", 13)
    check([first["outcome"], *(o["outcome"] for o in others)])
    assert all(other["text"] == first["text"] for other in others)
    forward, backward = first["calls"]
    assert forward == ["among", "shift", "among"]
    traveling, sent_home = ["shift"] * 3, ["across", "shift"]
    assert sorted(backward) in (sorted([*traveling, "among", "among"]), sorted([*sent_home, "among", "among"]))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", ["ring", "gather", "ulysses"])
def test_memory_falls_with_the_ranks(attention: str) -> None:
    """No rank keeps received keys; only views of weights do not shrink."""
    two, four = (kept_by(attention, 512, n) for n in (2, 4))
    assert 0 < four <= 0.52 * two


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "stretches"), [("contiguous", 1), ("zigzag", 2)])
def test_gathered_keys_are_gathered_again(ranks: Ranks, layout: str, stretches: int) -> None:
    """In zigzag order gather the first chunks of all ranks, then the second ones, without a copy that reorders them."""
    first, *others = ranks.run(3, strategy, "gather", layout, 13)
    check([first["outcome"], *(o["outcome"] for o in others)])
    assert all(other["text"] == first["text"] for other in others)
    gather = ["all_gather_into_tensor"]
    assert first["calls"] == [gather * stretches, [*gather, "all_to_all_single"] * stretches], (
        "Gloo's reduce-scatter is an all-to-all and a sum"
    )


def with_ring() -> tuple[Outcome, list[str]]:
    model = build(layers=1)
    run = sp(model, mesh=worker.mesh(), compiler="inductor", attention="ring")
    with config.patch(force_disable_caches=True):
        return run_and_get_code(lambda: against_eager(model, *text(13), run=run))


@pytest.mark.slow
def test_the_next_keys_are_sent_while_a_block_computes(ranks: Ranks) -> None:
    n = 3
    (first, code), *others = ranks.run(n, with_ring)
    check([first, *(o for o, _ in others)])
    assert all([without_paths(c) for c in code] == [without_paths(c) for c in other] for _, other in others)
    for one, block, steps in zip(code, ("sp.attend.", "sp.attend_backward."), (n, n)):
        assert overlaps(one, block) == ["send", "block", "wait"] * (steps - 1) + ["block"]


def overlaps(code: str, block: str) -> list[str]:
    """Return the order in which one rank's code sends keys, computes blocks and waits for received keys."""
    out, keys = [], set()
    for line in code.splitlines():
        result = line.strip().partition(" = ")[0]
        if "all_to_all_single.default(" in line and "shift:1:" in line and "sp.pack" not in line:
            out.append(f"send {result}")
        elif f"torch.ops.{block}default(" in line:
            out.append("block")
            keys.add(line)
        elif "wait_tensor.default(" in line:
            out.append("wait " + line.partition("wait_tensor.default(")[2].rstrip(") "))
    used = [o.split()[1] for o in out if o.startswith("send") and any(f"{o.split()[1]}," in k for k in keys)]
    kept = [o for o in out if o == "block" or o.split()[1] in used]
    return [o.split()[0] for o in kept]
