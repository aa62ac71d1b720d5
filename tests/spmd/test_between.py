"""Sharded values between graphs, on real ranks: single-device results, and an error if one rank reads alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from support import ranks as worker
from support.parity import VOCAB, Block, Outcome, build, check, difference, error_text, gradients, outcome, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sp_compile
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.context import NoteKind

Seen = list[tuple[str, str]]


class Chain(nn.Module):
    """Blocks that are compiled by themselves between an embedding and a loss that are not."""

    def __init__(self, layers: int = 3, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def chained(lengths: list[int], options: dict[str, Any], prints: bool) -> tuple[list[Outcome], Seen, int]:
    """Train the blocks; return their inputs and results, and the number of graphs."""
    model = build(Chain)
    alone, seen, graphs = copy.deepcopy(model), Seen(), list[int]()

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if any("atten" in str(n.target) for n in gm.graph.nodes):  # what a hook reads is a graph of its own
            graphs.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    def note(block: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        seen.append((type(args[0]).__name__, type(out).__name__))
        if prints:
            seen.append(("mean", f"{out.detach().mean():.3f}"))

    given = {"compiler": compiler, "cost": {}, "mesh": worker.mesh(), "outputs": "lazy", **options}
    for block in model.blocks:
        block.compile(backend="sp", options=given)
        block.register_forward_hook(note)
    outcomes = []
    for seed, length in enumerate(lengths):
        args = text(length, seed=seed)
        for one in (model, alone):
            one.zero_grad()
        loss, right = model(*args), alone(*args)
        loss.backward()
        right.backward()
        outcomes.append(outcome(loss, gradients(model), right, gradients(alone)))
    return outcomes, seen, len(graphs)


@pytest.mark.parametrize(
    ("n", "lengths", "options", "prints"),
    [
        (2, [9], {}, False),
        pytest.param(2, [9, 12], {}, False, marks=pytest.mark.slow),
        pytest.param(3, [10], {"layout": "zigzag", "attention": "ring"}, True, marks=pytest.mark.slow),
        pytest.param(2, [8], {"attention": "ring"}, True, marks=pytest.mark.slow),
    ],
)
def test_blocks_pass_on_shards(ranks: Ranks, n: int, lengths: list[int], options: dict[str, Any], prints: bool) -> None:
    """The first block has a graph for full inputs, and all others share one."""
    results = ranks.run(n, chained, lengths, options, prints)
    for outcomes in zip(*(steps for steps, _, _ in results)):
        check(outcomes)
    for _, seen, graphs in results:
        crossing = [one for one in seen if one[0] != "mean"]
        assert crossing == [("Tensor", "Sharded"), ("Sharded", "Sharded"), ("Sharded", "Sharded")] * len(lengths)
        assert graphs == 2 * len(lengths)  # another length is compiled once more, for all


class Two(nn.Module):
    """Loss and logits, as transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 16), Block(16, 4), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.block(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def compiled(outputs: Any = "lazy", length: int = 9) -> tuple[Any, Tensor, Tensor, nn.Module]:
    model = build(Two)
    return sp(model, mesh=worker.mesh(), outputs=outputs), *text(length), model


def both_results() -> tuple[Outcome, float, Any]:
    """Train with a full loss and logits that are read afterwards, both with gradients."""
    run, ids, labels, model = compiled()
    alone = copy.deepcopy(model)
    loss, logits = run(ids, labels)
    before = type(loss) is Tensor and isinstance(logits, Sharded) and not logits.is_gathered
    placed = logits.to_dtensor()
    total = loss + logits.pow(2).mean() + placed.to_local().exp().sum() * 0
    total.backward()
    right, whole = alone(ids, labels)
    (right + whole.pow(2).mean()).backward()
    assert tuple(placed.shape) == tuple(whole.shape)
    read = difference(logits.detach().full(), whole)
    return outcome(loss, gradients(model), right, gradients(alone)), read, before


@pytest.mark.as_users_run("slow")
def test_logits_are_read_afterwards(ranks: Ranks) -> None:
    results = ranks.run(2, both_results)
    check([found for found, _, _ in results])
    for _, read, before in results:
        assert read < 1e-9
        assert before


class Sums(nn.Module):
    """A backward that keeps nothing with a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * 2).cumsum(1) * 3
        return h.sum(), h


def through_a_backward() -> tuple[str, list[str], float]:
    """Return results of a second-order gradient of a sharded result, of several gradients at once, and of one after."""
    run = sp(Sums(), mesh=worker.mesh(), outputs="lazy", seq_dims={"x": 1})
    x = torch.linspace(0, 1, 10, dtype=torch.float64).reshape(1, 10).requires_grad_()
    total, h = run(x)
    assert isinstance(h, Sharded)

    def batched(y: Tensor) -> str:
        some = {"grad_outputs": torch.ones(3, *y.shape, dtype=y.dtype), "is_grads_batched": True, "retain_graph": True}
        return error_text(lambda: torch.autograd.grad(y, x, **some))

    at_once = [batched(h), batched(total), batched(h.pow(2).sum())]
    (grad,) = torch.autograd.grad(h.pow(2).sum(), x, create_graph=True)
    right = x.detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad(Sums()(right)[1].pow(2).sum(), right)
    try:
        grad.pow(2).sum().backward()
    except sp_compile.SpError as error:
        return error.code, at_once, difference(grad.detach(), wanted)
    return "", at_once, 0.0


def test_unsupported_backwards_on_shards(ranks: Ranks) -> None:
    for twice, at_once, error in ranks.run(2, through_a_backward):
        assert twice == "SP325"
        assert all("SP323" in words for words in at_once)
        assert error < 1e-12


def unread_logits(read: bool) -> tuple[list[Outcome], list[list[int]]]:
    """Three steps of a loss beside logits, and the shapes of the gradients that the backward takes.

    read: logits have a part in the second step's loss.
    """
    shapes: list[list[int]] = []

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
        shapes.extend(list(x.shape) for x in found)
        return make_boxed_func(gm.forward)

    halves = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward), bw_compiler=backward)
    model = build(Two)
    alone, run, outcomes = copy.deepcopy(model), sp(model, mesh=worker.mesh(), outputs="lazy", compiler=halves), []
    for step in range(3):
        ids, labels = text(9, seed=step)
        for one in (model, alone):
            one.zero_grad()
        found, right = (one(ids, labels) for one in (run, alone))
        reads = read and step == 1
        totals = [loss + logits.pow(2).mean() if reads else loss for loss, logits in (found, right)]
        for total in totals:
            total.backward()
        outcomes.append(outcome(totals[0], gradients(model), totals[1], gradients(alone)))
    return outcomes, shapes


@pytest.mark.as_users_run("slow", read=True)
@pytest.mark.parametrize("read", [False, True])
def test_unread_logits_have_no_gradient(ranks: Ranks, read: bool) -> None:
    """The backward takes a scalar in place of the gradient; results stay correct when logits are read."""
    results = ranks.run(2, unread_logits, read)
    for outcomes in zip(*(steps for steps, _ in results)):
        check(outcomes)
    for _, shapes in results:
        assert shapes == [[], [1]]


class Parts(Two):
    """Results whose sequence is a part of a dim, or a window of one."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.block(self.embed(ids))
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        heads = x.unflatten(-1, (4, -1)).flatten(1, 2)
        flat = logits.flatten(0, 1)
        return {"loss": loss, "flat": flat, "shifted": logits[:, :-1], "all": logits, "heads": heads, "x": x[:, 2:-1]}


def parts_of_dims(dynamic: bool) -> tuple[list[Outcome], list[str], float]:
    """Train with other batches and lengths; return lazy results, and errors of read values."""
    model = build(Parts)
    alone, run, outcomes, off = copy.deepcopy(model), sp(model, dynamic, mesh=worker.mesh(), outputs="lazy"), [], 0.0
    after = sp(lambda h: h.sin(), mesh=worker.mesh(), seq_dims={"h": 0})  # takes it whole
    for length, batch in ((9, 2), (14, 3)):
        ids, labels = text(length, batch)
        for one in (model, alone):
            one.zero_grad()
        found, right = run(ids, labels), alone(ids, labels)
        lazy = [name for name, x in found.items() if isinstance(x, Sharded) and x.shape == right[name].shape]
        totals = []
        for one, then in ((found, after), (right, torch.sin)):
            sums = [one[name].pow(2).mean() * (i + 1) for i, name in enumerate(("flat", "shifted", "heads", "x"))]
            totals.append(one["loss"] + sum(sums) + then(one["heads"]).mean())
        for total in totals:
            total.backward()
        outcomes.append(outcome(totals[0], gradients(model), totals[1], gradients(alone)))
        off = max([off, *(difference(found[name].detach().full(), right[name].detach()) for name in lazy)])
    return outcomes, lazy, off


@pytest.mark.as_users_run(n=2, dynamic=False)
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_results_along_a_part_of_a_dim(ranks: Ranks, n: int, dynamic: bool) -> None:
    results = ranks.run(n, parts_of_dims, dynamic)
    for outcomes in zip(*(steps for steps, _, _ in results)):
        check(outcomes)
    for _, lazy, off in results:
        assert lazy == ["flat", "shifted", "all", "heads", "x"]
        assert off < 1e-9


def one_local() -> Outcome:
    """Train with one local result by name, used in a loss of each rank's rows, and one gathered result."""
    run, ids, labels, model = compiled({"logits": "local"}, 10)
    alone, mine = copy.deepcopy(model), slice(5 * dist.get_rank(), 5 * dist.get_rank() + 5)
    loss, logits = run(ids, labels)
    (loss + logits.pow(2).sum()).backward()
    right, whole = alone(ids, labels)
    (right + whole.pow(2).sum()).backward()
    assert difference(logits.detach(), whole[:, mine].detach()) < 1e-9
    return outcome(loss, gradients(model), right, gradients(alone))


def test_one_result_by_its_rows(ranks: Ranks) -> None:
    check(ranks.run(2, one_local))


def one_reads(then: str) -> str:
    run, ids, labels, _ = compiled()
    loss, logits = run(ids, labels)
    if dist.get_rank() == 0:
        return error_text(lambda: logits.sum())
    if then == "calls":
        return error_text(lambda: run(ids, labels))
    if then == "goes back":
        return error_text(loss.backward)
    return error_text(lambda: logits.float().sum())


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("calls", r"rank 1 calls Two"),
        ("goes back", r"rank 1 runs .*backward .*Two"),
        ("reads another", r"rank 1 reads .*cast .*'logits' .*call 1"),
    ],
)
def test_a_rank_that_reads_alone(ranks: Ranks, then: str, words: str) -> None:
    """The error on all ranks names the result, its line, the action of each rank, and a fix."""
    messages = ranks.run(2, one_reads, then, timeout=60)
    assert len(set(messages)) == 1
    for each in (
        r"rank 0 reads .*'logits' .*call 1 of Two.* at .*test_between.py:\d+: logits = self.head",
        words,
        r"test_between.py:\d+: return error_text\(lambda: logits.sum",
        "SP604",
    ):
        assert re.search(each, messages[0]), messages[0]


def waits_for_a_missing_rank() -> str:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=4), group_desc="reads")
    if dist.get_rank() > 2:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",))
    _, logits = sp(build(Two), mesh=mesh, outputs="lazy")(*text(9))
    return error_text(lambda: logits.sum()) if dist.get_rank() < 2 else ""


@pytest.mark.slow
def test_ranks_that_read_and_wait(ranks: Ranks) -> None:
    """The error names the operation of this rank, the last call of each rank, and the rank that stopped waiting."""
    message, *_ = ranks.run(4, waits_for_a_missing_rank, timeout=60)
    assert re.match(r"SP622: .*rank 0 reads .*'logits' .* at .*test_between.py:\d+.* \d s\b", message), message
    assert re.search(r"\brank 0, 1, 2: calls Two", message), message


def result_types() -> list[list[str]]:
    found = []
    for outputs in [*ASKED, *(named for named, _ in NAMED)]:
        run, ids, labels, _ = compiled(outputs, 10)
        found.append([type(result).__name__ + str(tuple(result.shape)) for result in run(ids, labels)])
    return [*found, [error_text(lambda: compiled({"logit": "lazy"})[0](*text(9)))]]


LOGITS = f"Sharded(2, 10, {VOCAB})"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("outputs", "stays", "small"),
    [
        ("lazy", True, False),
        ({"logits": "lazy"}, True, False),
        ("auto", False, True),
        ({"logits": "gather"}, False, False),
    ],
)
def test_report_of_results(outputs: Any, stays: bool, small: bool) -> None:
    report = sp_compile.explain(build(Two), *text(9), sp=2, outputs=outputs)
    gathered = [e for e in report.exchanges if e.op == "unshard"]
    assert len(gathered) == (not stays)
    assert len(report.find_notes(NoteKind.UNSHARDED)) == small
    assert report.sharded_outputs == ["logits"] * stays


@pytest.mark.slow
def test_report_of_the_next_graph() -> None:
    """explain crosses a graph break as real ranks do: nothing is gathered between two graphs."""

    class Broken(Two):
        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x = self.block(self.embed(ids))
            torch._dynamo.graph_break()
            return super().forward(ids, labels)[0] + x.mean(), self.block(x)

    report = sp_compile.explain(Broken(), *text(9), sp=2, outputs="lazy")
    assert [note.where for note in report.find_notes(NoteKind.KEPT_SHARDED)] == ["input x"]
    assert not [e for e in report.exchanges if e.op == "unshard"]


WHOLE = f"Tensor(2, 10, {VOCAB})"
ASKED: dict[Any, list[str]] = {
    "lazy": ["Tensor()", LOGITS],
    "auto": ["Tensor()", WHOLE],
    "gather": ["Tensor()", WHOLE],
    "local": ["Tensor()", f"Tensor(2, 5, {VOCAB})"],
}
NAMED = [({"logits": "lazy"}, ASKED["lazy"]), ({1: "lazy"}, ASKED["lazy"]), ({"logits": "local"}, ASKED["local"])]


@pytest.mark.slow
def test_each_result_as_requested(ranks: Ranks) -> None:
    for *found, refusal in ranks.run(2, result_types):
        assert found == [each for _, each in [*ASKED.items(), *NAMED]]
        assert re.match("SP237: .*outputs: ", refusal[0])
        assert "'logits'" in refusal[0]


def rows_of_ranks() -> tuple[float, str]:
    """Compare gradients of a DTensor of uneven rows and of plain rows; then return the error of another placement."""
    whole = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh, weight = worker.mesh(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    placed = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    value = sp_compile.in_shards(placed)
    again = value.to_dtensor(mesh).full_tensor()
    ((value * weight).sin().sum() + again.pow(2).sum()).backward()
    right = whole.clone().requires_grad_()
    ((right * weight).sin().sum() + right.pow(2).sum()).backward()
    errors = [difference(placed.grad.full_tensor(), right.grad), difference(value.detach().full(), whole)]
    plain = sp_compile.in_shards(whole[:, :4].chunk(mesh.size(), 1)[mesh.get_rank()], 1, mesh)
    errors.append(difference(plain.full(), whole[:, :4]))
    refused = error_text(lambda: sp_compile.in_shards(distribute_tensor(whole, mesh, [Replicate()])))
    return max(errors), refused


@pytest.mark.parametrize("n", [2, 4])
def test_rows_that_ranks_have(ranks: Ranks, n: int) -> None:
    for error, refused in ranks.run(n, rows_of_ranks):
        assert error < 1e-12
        assert "SP547" in refused


def given_rows(length: int) -> tuple[list[str], Outcome]:
    """Train on tokens as a DTensor, as with inputs="local", and a loss of all tokens."""
    model = build(Two)
    alone, mesh = copy.deepcopy(model), worker.mesh()
    ids, labels = (sp_compile.in_shards(distribute_tensor(x, mesh, [Shard(1)])) for x in text(length))
    loss, logits = sp(model, mesh=mesh, outputs="lazy")(ids, labels)
    loss.backward()
    right, _ = alone(*text(length))
    right.backward()
    placements = [type(x).__name__ + str(x.is_gathered) for x in (ids, labels, logits)]
    return placements, outcome(loss, gradients(model), right, gradients(alone))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_tokens_in_shards(ranks: Ranks, n: int) -> None:
    results = ranks.run(n, given_rows, 10)
    check([step for _, step in results])
    for placements, _ in results:
        assert placements == ["ShardedFalse"] * 3


class Brought(torch.autograd.Function):
    """The sum over the ranks of equal values, as a collective without a wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", worker.group())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def given_wrappers(dynamic: bool, wraps: bool) -> tuple[list[Outcome], set[type]]:
    """Call a block with a pending collective's result, and with weights computed from other tensors."""
    block, seen, out = build(lambda: Block(16, 4)), set[type](), list[Outcome]()
    alone, n = copy.deepcopy(block), dist.get_world_size(worker.group())
    if wraps:
        for layer in (module for module in block.modules() if isinstance(module, nn.Linear)):
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    options = {"compiler": "aot_eager", "cost": {}, "mesh": worker.mesh()}
    run = torch.compile(block, backend="sp", dynamic=dynamic or None, options=options)
    for length in (9, 11) if dynamic else (9,):
        x = torch.linspace(-1, 1, 16 * length, dtype=torch.float64).reshape(1, length, 16).requires_grad_()
        sources = [(model, [x, *model.parameters()]) for model in (block, alone)]
        brought = Brought.apply(x * 1)
        seen |= {type(brought), *map(type, block.parameters())}
        losses = run(brought).square().mean(), alone(x * n).square().mean()
        grads = [torch.autograd.grad(loss, wanted) for loss, (_, wanted) in zip(losses, sources, strict=True)]
        found = [plain(one) for one in (losses[0], *grads[0])]
        right = [losses[1], grads[1][0] / n, *grads[1][1:]]
        out.append(outcome(found[0], found[1:], right[0], right[1:]))
    return out, seen


def plain(x: Tensor) -> Tensor:
    return x.a if isinstance(x, TwoTensor) else x


@pytest.mark.parametrize("wraps", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inputs_without_memory_of_their_own(ranks: Ranks, dynamic: bool, wraps: bool) -> None:
    outcomes, kinds = zip(*ranks.run(2, given_wrappers, dynamic, wraps), strict=True)
    for of_length in zip(*outcomes, strict=True):
        check(of_length)
    assert {AsyncCollectiveTensor, TwoTensor} - kinds[0] == (set() if wraps else {TwoTensor})
