"""Measure every case of sequence-parallel attention in turn on one rank of attention.py, by its CPU time."""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring.counting import Counts, count
from measuring.gloo_ranks import joined
from measuring.handwritten import UlyssesAttention, ZigzagRingAttention, zigzag
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], None]


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """x (B, S, heads * head_dim) -> a loss to which every position contributes. `attend` takes (B, S, H, D)."""

    def __init__(self, heads: int, head_dim: int, attend: Attend = whole_attention) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.attend = heads, attend
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (self.heads, -1)) for project in (self.q, self.k, self.v))
        return (x + self.out(self.attend(q, k, v).flatten(2))).square().mean()


@dataclass(frozen=True)
class Case:
    """A variant. what: "one device" or a strategy; how: "compiled", "op" (functional), or "handwritten"."""

    what: str
    how: str
    ranks: int


def cases(worlds: list[int], heads: int) -> list[Case]:
    out = [Case("one device", "compiled", 1)]
    for n in worlds:
        kinds = ["ulysses", "ring", "gather"] + (["hybrid"] if n > 3 and n % 2 == 0 else [])
        out += [Case(kind, "compiled", n) for kind in kinds if kind != "ulysses" or heads % n == 0]
        out += [Case(kind, how, n) for kind in ("ulysses", "ring") for how in ("op", "handwritten")]
    return out


def build(case: Case, args: argparse.Namespace, rank: int, group: dist.ProcessGroup) -> tuple[Block, Step]:
    """Return the model with its weights, and a function that runs one step of it on this rank."""
    torch.manual_seed(0)
    model = Block(args.heads, args.head_dim)
    x = torch.randn(1, args.seq, args.heads * args.head_dim)
    if case.what == "one device":
        return model, _step(torch.compile(model, backend="inductor"), x)
    if case.how == "compiled":
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",))
        options = {"attention": case.what, "mesh": mesh}
        return model, _step(torch.compile(model, backend="sp", options=options), x)
    model.attend = attention_on_shards(case, group)
    shard = zigzag(x, rank, case.ranks) if case.what == "ring" else x.chunk(case.ranks, 1)[rank].contiguous()
    return model, _local_step(model, shard, group)


def attention_on_shards(case: Case, group: dist.ProcessGroup) -> Attend:
    """Return the handwritten module or the operator of a case, for shards (B, s, H, D)."""
    if case.how == "handwritten":
        return UlyssesAttention(group) if case.what == "ulysses" else ZigzagRingAttention(group)
    from sp_compile.functional.attention_functions import ring_attention, ulysses_attention

    op, layout = (ulysses_attention, "contiguous") if case.what == "ulysses" else (ring_attention, "zigzag")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return op(q, k, v, mesh=group, layout=layout, is_causal=True, check=False).transpose(1, 2)

    return attend


def _step(model: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def _local_step(model: nn.Module, shard: Tensor, group: dist.ProcessGroup) -> Step:
    """A shard's part of the mean; loss and gradients summed over the ranks, the gradients as one tensor."""

    def step() -> None:
        model.zero_grad()
        loss = model(shard) / group.size()
        loss.backward()
        dist.all_reduce(loss.detach(), group=group)
        parameters = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = grad.view_as(p)

    return step


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Build every case on one rank, run the rounds, and save seconds, counts and errors."""
    # Kernels of Inductor are events of the profiler. Every case compiles the model once more.
    torch._inductor.config.cpp.enable_kernel_profile = True
    torch._dynamo.config.recompile_limit = 64
    with joined(rank, max(args.ranks), folder, timedelta(minutes=30)):
        groups = {n: dist.new_group(range(n)) for n in {1, *args.ranks}}
        steps: dict[Case, Step] = {}
        errors: dict[Case, float] = {}
        expected: list[Tensor] = []
        for case in args.cases:
            dist.barrier()
            if rank < case.ranks:
                model, steps[case] = build(case, args, rank, groups[case.ranks])
                steps[case]()
                grads = [p.grad.clone() for p in model.parameters()]
                expected = expected or grads
                errors[case] = max(_difference(a, b) for a, b in zip(expected, grads))
        seconds = [{case: _turn(steps.get(case)) for case in args.cases} for _ in range(args.rounds)]
        counts: dict[Case, Counts] = {}
        for case, step in steps.items():
            counts[case] = count(step) if rank == 0 else Counts(step() or {})
        torch.save({"seconds": seconds, "counts": counts, "errors": errors}, f"{folder}/rank{rank}.pt")


def _difference(expected: Tensor, found: Tensor) -> float:
    return ((expected - found).abs().max() / expected.abs().max()).item()


def _turn(step: Step | None) -> tuple[float, float]:
    """CPU seconds of this process in one step, all its threads, and those of them in the kernel (sockets, new pages).

    The other ranks have a turn of the same case, or wait.
    """
    dist.barrier()
    if step is None:
        return 0.0, 0.0
    start, before = time.process_time(), os.times().system
    step()
    return time.process_time() - start, os.times().system - before
