"""Separately compiled blocks with FSDP2 around each, on real ranks: ten steps equal a single device's, equal blocks share a program, and the backward saves the same bytes as one graph."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support import ranks as worker
from support.parity import VOCAB, Block, Outcome, build, check, error_text, outcome, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.runtime.control import failures

Seen = list[tuple[str, str]]
STEPS = 10
ROWS = [("Tensor", "Sharded"), ("Sharded", "Sharded"), ("Sharded", "Sharded")]
CASTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


class Front(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class Tail(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels[:, 1:].flatten())


class Stack(nn.Module):
    """Blocks between an embedding and a loss, each a module of its own."""

    def __init__(self, layers: int = 3, dim: int = 16, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.front, self.tail = Front(dim), Tail(dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.front(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.tail(x, labels)


@dataclass(frozen=True)
class Way:
    """Settings of compiled and sharded blocks, on `sizes` ranks of replicas and of a sequence.

    over: ranks of FSDP, the "replicas" or "all"; "ddp" is DDP over all, without FSDP. grads: the option
    param_grads. gathers: again in the backward. fetches: each block prefetches its neighbors' weights, in both directions.
    """

    sizes: tuple[int, int]
    first: str = "compile"
    over: str = "replicas"
    grads: str = "reduce"
    mixed: bool = False
    gathers: bool = True
    checkpoints: bool = False
    fetches: bool = False

    def __str__(self) -> str:
        words = ["x".join(map(str, self.sizes)), self.first, self.over, self.grads]
        others = {
            "mixed": self.mixed,
            "kept": not self.gathers,
            "checkpoints": self.checkpoints,
            "fetches": self.fetches,
        }
        return "-".join([*words, *(word for word, said in others.items() if said)])

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if self.over == "ddp":
            return
        policy = {"mp_policy": CASTS} if self.mixed else {}
        fully_shard(module, mesh=mesh, reshard_after_forward=self.gathers, **policy)

    def wrap(self, model: Stack, compiler: Callable[..., Any], **others: Any) -> nn.Module:
        """Compile and shard the blocks of the model; return the callable for training."""
        sequence = worker.mesh2d(*self.sizes)
        mesh = sequence["dp"] if self.over == "replicas" else worker.mesh2d(4, 1)["dp"]
        options = {"compiler": compiler, "cost": {}, "mesh": sequence, "outputs": "lazy", "param_grads": self.grads}
        options |= others
        for block in model.blocks:
            if self.first == "compile":
                block.compile(backend="sp", options=options)
            self.shard(block, mesh)
            if self.first == "shard":
                block.compile(backend="sp", options=options)
        for part in (model.tail, model):
            self.shard(part, mesh)
        for before, after in pairwise([*model.blocks, model.tail]) if self.fetches else ():
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        return nn.parallel.DistributedDataParallel(model) if self.over == "ddp" else model

    def alone(self, model: Stack) -> Stack:
        """Return the single-device model; with casts, FSDP2 over a single rank, which defines their places."""
        single = copy.deepcopy(model)
        if self.mixed:
            mesh = worker.mesh2d(4, 1)["sp"]
            for part in (*single.blocks, single.tail, single):
                self.shard(part, mesh)
        return single


class Counting:
    """A compiler that counts graphs, and the programs that they become."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def compiled(which: str) -> Callable[..., Any]:
            def run(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
                self.found[which] += 1
                return make_boxed_func(gm.forward)

            return run

        self.found["graphs"] += 1
        halves = {"fw_compiler": compiled("forward"), "bw_compiler": compiled("backward")}
        return aot_autograd(**halves, partition_fn=min_cut_rematerialization_partition)(gm, inputs)


def optimizer(model: nn.Module, mixed: bool) -> torch.optim.Optimizer:
    """AdamW where rounding does not matter: a gradient of next to nothing moves a weight as far as any other."""
    if mixed:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gathered(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def trained(way: Way) -> tuple[float, float, Seen, Counter[str]]:
    """Compare ten steps with a single device: errors of losses, of weights relative to their change, and records."""
    model = build(Stack, checkpoints=way.checkpoints)
    model = model.float() if way.mixed else model
    begun, compiler, seen = [p.detach().clone() for p in model.parameters()], Counting(), Seen()
    alone = way.alone(model)
    called = way.wrap(model, compiler)
    for block in model.blocks:
        block.register_forward_hook(lambda _, x, y: seen.append((type(x[0]).__name__, type(y).__name__)))
    steps = [optimizer(one, way.mixed) for one in (model, alone)]
    mine, losses = worker.mesh2d(*way.sizes).get_local_rank("dp"), []
    for step in range(STEPS):
        batches = [text(9, seed=10 * step + row) for row in range(way.sizes[0])]
        loss, right = called(*batches[mine]), [alone(*batch) for batch in batches]
        loss.backward()
        (sum(right) / len(right)).backward()
        losses.append(abs(loss.item() / right[mine].item() - 1))
        for one in steps:
            one.step()
            one.zero_grad()
    ends = zip(begun, map(gathered, model.parameters()), map(gathered, alone.parameters()), strict=True)
    moved = [((found - right).norm() / (right - start).norm()).item() for start, found, right in ends]
    return max(losses), max(moved), seen[: 3 * STEPS], compiler.found


WAYS = [
    Way((1, 4), over="all", grads="partial"),  # FSDP's ranks are those of the sequence
    Way((1, 4), first="shard", over="all"),
    Way((1, 4), over="replicas", checkpoints=True),
    Way((2, 2), first="shard", gathers=False),
    Way((2, 2), checkpoints=True),
    Way((2, 2), over="all", grads="partial", gathers=False),
    Way((2, 2), mixed=True),
    Way((2, 2), first="shard", over="all", grads="partial", mixed=True, checkpoints=True),
    Way((1, 4), over="all", grads="partial", mixed=True, gathers=False),
    Way((2, 2), over="all", grads="partial", mixed=True, fetches=True),
    Way((2, 2), first="shard", checkpoints=True, fetches=True),
    Way((2, 2), over="ddp"),
    Way((1, 4), over="ddp", checkpoints=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ten_steps_of_fsdp_or_ddp_block_by_block(ranks: Ranks, way: Way) -> None:
    """Its hooks, casts and gathered weights pass rows on; one graph for the first block, and one for all others."""
    for losses, weights, seen, found in ranks.run(4, trained, way):
        assert losses < (1e-3 if way.mixed else 1e-9)
        assert weights < (3e-2 if way.mixed else 1e-8)
        assert seen == ROWS * STEPS
        assert found["graphs"] == 2


def partial_gradients_without_fsdp() -> str:
    """Gradients are left to FSDP, whose ranks are not those of the sequence."""
    way = Way((2, 2), grads="partial")
    model = build(Stack)
    way.wrap(model, Counting(), check_every=1)
    step = optimizer(model, mixed=False)

    def train() -> None:
        for seed in range(3):
            model(*text(9, seed=seed)).backward()
            step.step()
            step.zero_grad()

    return error_text(train)


@pytest.mark.slow
def test_gradients_that_are_not_summed(ranks: Ranks) -> None:
    for message in ranks.run(4, partial_gradients_without_fsdp):
        assert message.startswith("SP635: ")
        assert "param_grads" in message


class Adds(nn.Module):
    """A block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        x += self.inner(x.cumsum(1))
        return x.sin()


def in_place() -> tuple[Outcome, list[bool], str]:
    """Write in place to the first block's result between two uses, and to a value that is passed twice."""
    blocks = build(lambda: nn.ModuleList(Adds() for _ in range(2)))
    alone, whole = copy.deepcopy(blocks), list[bool]()
    options = {"compiler": "aot_eager", "mesh": worker.mesh(), "outputs": "lazy"}
    for block in blocks:
        block.compile(backend="sp", options=options)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(1, 10, 4).requires_grad_()

    def loss(first: nn.Module, second: nn.Module) -> Tensor:
        h = first(x * 2)
        alias, out = h.detach(), second(h)
        whole.extend(x.is_gathered for x in (h, alias) if isinstance(x, Sharded))
        return (out + h * 0.5 + alias).square().mean()

    found, right = loss(*blocks), loss(*alone)
    grads = [torch.autograd.grad(one, [x, *parts.parameters()]) for one, parts in ((found, blocks), (right, alone))]
    h, given = blocks[0](x.detach() * 2).detach(), torch.compile(adds_up, backend="sp", options=options)
    return outcome(found, grads[0], right, grads[1]), whole, error_text(lambda: given(h, h.detach()))


def adds_up(a: Tensor, b: Tensor) -> Tensor:
    return a.mul_(2).cumsum(1) + b


def test_blocks_that_change_their_inputs(ranks: Ranks) -> None:
    results = ranks.run(2, in_place)
    check([found for found, _, _ in results])
    for _, whole, message in results:
        assert whole == [False, False]
        assert re.match(r"SP221: .*\ba\b.*\bb\b", message)


def compile_parts(model: Stack, options: dict[str, Any]) -> None:
    model.front.compile(backend="sp", options={**options, "seq_dims": {"ids": 1}})
    for part in (*model.blocks, model.tail):
        part.compile(backend="sp", options=options)


def counts(layers: int) -> Counter[str]:
    model, compiler = build(Stack, layers=layers), Counting()
    compile_parts(model, {"compiler": compiler, "cost": {}, "mesh": worker.mesh(), "outputs": "lazy"})
    for seed in range(2):
        model(*text(9, seed=seed)).backward()
    return compiler.found


@pytest.mark.slow
def test_equal_blocks_are_one_program(ranks: Ranks) -> None:
    """With the embedding and the loss compiled too, the first block is as the others: three graphs, of any layers."""
    for few, many in zip(ranks.run(2, counts, 2), ranks.run(2, counts, 4), strict=True):
        assert few == many == {"graphs": 3, "forward": 3, "backward": 3}


@contextmanager
def keeping(model: nn.Module) -> Iterator[list[int]]:
    """Return the bytes that autograd saves without weights, each storage counted once."""
    held: dict[int, torch.UntypedStorage] = {}
    found: list[int] = []

    def pack(x: Tensor) -> Tensor:
        near = x.local if isinstance(x, Sharded) else x
        weights = {p.untyped_storage().data_ptr() for p in model.parameters() if not isinstance(p, DTensor)}
        storage = near.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
    found.append(sum(storage.nbytes() for storage in held.values()))


def kept(sizes: tuple[int, int], sharded: bool) -> tuple[int, int, int]:
    """Bytes kept by blocks, by one graph of the same model, and by one device."""
    model, args = build(Stack, layers=4, dim=32), text(256)
    alone, one = copy.deepcopy(model), copy.deepcopy(model)
    mesh = worker.mesh2d(*sizes)
    options = {"compiler": Counting(), "cost": {}, "mesh": mesh, "outputs": "lazy"}
    compile_parts(model, options)
    for part in (model.front, *model.blocks, model.tail) if sharded else ():
        fully_shard(part, mesh=mesh["dp"])
    out = []
    for built, run in ((model, model), (one, torch.compile(one, backend="sp", options=options)), (alone, alone)):
        with keeping(built) as found:
            loss = run(*args)
        loss.backward()
        out += found
    return tuple(out)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_blocks_save_the_bytes_of_one_graph(ranks: Ranks, sizes: tuple[int, int], sharded: bool) -> None:
    for blocks, one, alone in ranks.run(4, kept, sizes, sharded):
        assert blocks <= 1.05 * one, (blocks, one, alone)
        assert blocks < alone / sizes[1]


class PackedBlock(nn.Module):
    """Causal attention within documents, and for `shifts` a look at the token before."""

    def __init__(self, dim: int, heads: int, shifts: bool = False) -> None:
        super().__init__()
        self.heads, self.shifts = heads, shifts
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        place = torch.arange(x.shape[1], device=x.device)
        mask = (documents[:, :, None] == documents[:, None]) & (place[:, None] >= place)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2).flatten(2)
        return x + self.out(y) + (0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1] if self.shifts else 0)


class Packed(nn.Module):
    def __init__(self, shifts: bool, dim: int = 16) -> None:
        super().__init__()
        self.front, self.tail = Front(dim), Tail(dim)
        self.blocks = nn.ModuleList(PackedBlock(dim, 4, shifts and i == 1) for i in range(3))

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = self.front(ids)
        for block in self.blocks:
            x = block(x, documents)
        return self.tail(x, ids)


def documents(length: int, seed: int) -> Tensor:
    """Documents of a few tokens, long ones first."""
    starts = torch.rand(1, length, generator=torch.Generator().manual_seed(seed)) < torch.linspace(0, 0.6, length)
    return starts.cumsum(1)


def packed(attention: str, lengths: list[int], shifts: bool, layout: str) -> tuple[list[Outcome], Seen, Counter[str]]:
    """Train blocks with balanced rows; return the order of each block's input and result."""
    model, compiler, seen = build(Packed, shifts=shifts), Counting(), Seen()
    alone, outcomes = copy.deepcopy(model), []
    cost = {"flops": 1e4}  # so slow that balancing saves more than reordering the results of blocks
    options = {"compiler": compiler, "cost": cost, "mesh": worker.mesh(), "outputs": "lazy", "attention": attention}

    def order_of(x: Tensor) -> str:
        return (
            "whole"
            if not isinstance(x, Sharded) or x.is_gathered
            else "balanced"
            if x.sharding.is_balanced
            else "in order"
        )

    for block in model.blocks:
        block.compile(backend="sp", options={**options, "layout": "auto" if block.shifts else layout})
        block.register_forward_hook(torch.compiler.disable(lambda _, x, y: seen.append((order_of(x[0]), order_of(y)))))
    model.tail.compile(backend="sp", options=options)
    for seed, length in enumerate(lengths):
        args = text(length, seed=seed)[0], documents(length, seed)
        found, right = model(*args), alone(*args)
        grads = [torch.autograd.grad(one, [*m.parameters()]) for one, m in ((found, model), (right, alone))]
        outcomes.append(outcome(found, grads[0], right, grads[1]))
    return outcomes, seen, compiler.found


@pytest.mark.parametrize(
    ("n", "attention", "lengths", "shifts", "layout"),
    [
        pytest.param(2, "ring", [24], False, "auto", marks=pytest.mark.slow),
        pytest.param(2, "ring", [24], False, "balanced", marks=pytest.mark.slow),
        pytest.param(3, "gather", [23, 26, 24], False, "balanced", marks=pytest.mark.slow),
        pytest.param(3, "gather", [23, 26, 24], False, "auto", marks=pytest.mark.slow),
        pytest.param(4, "ring", [33, 32], False, "balanced", marks=pytest.mark.slow),
        pytest.param(2, "ring", [24, 27], True, "balanced", marks=pytest.mark.slow),
        pytest.param(3, "ring", [24, 27], True, "auto", marks=pytest.mark.slow),
        pytest.param(2, "ulysses", [9, 10, 12], False, "balanced", marks=pytest.mark.slow),  # has nothing to balance
    ],
)
def test_balanced_rows_stay_balanced(
    ranks: Ranks, n: int, attention: str, lengths: list[int], shifts: bool, layout: str
) -> None:
    """The first block balances rows; later ones, and the loss, use that order. A block with shifts gathers its input."""
    outcomes, seen, graphs = zip(*ranks.run(n, packed, attention, lengths, shifts, layout), strict=True)
    for of_length in zip(*outcomes, strict=True):
        check(of_length)
    keeps = "balanced" if attention != "ulysses" else "in order"
    passed_on = [
        ("whole" if shifts else keeps, keeps),
        (keeps, keeps),
    ]  # the block with shifts balances its result again
    assert seen[0] == [("whole", keeps), *passed_on] * len(lengths)
    if keeps == "balanced":
        assert graphs[0]["graphs"] == (3 if not shifts else 4) * min(2, len(lengths))


def _published_by_checkpoints() -> list[str]:
    """Return the exceptions that this rank publishes in two steps of checkpointed blocks that are compiled one by one."""
    model, published = build(Stack, checkpoints=True), []
    publish = failures._publish_exception
    for block in model.blocks:
        block.compile(backend="sp", options={"compiler": "aot_eager", "mesh": worker.mesh(), "outputs": "lazy"})

    def record(error: BaseException, *rest: Any) -> Any:
        published.append(type(error).__name__)
        return publish(error, *rest)

    with mock.patch.object(failures, "_publish_exception", record):
        for _ in range(2):
            model(*text(9)).backward()
    return published


@pytest.mark.slow
def test_the_end_of_a_recomputation_is_no_failure(ranks: Ranks) -> None:
    """torch ends the recomputation of a checkpoint by an exception, as soon as all saved values exist again."""
    assert ranks.run(2, _published_by_checkpoints) == [[], []]
