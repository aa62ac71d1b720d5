"""Trains a byte-level language model on the source of the Python standard library, at a sequence of 8192 bytes.

    python examples/train_lm.py                           compares one device with 2 ranks of this machine, end to end
    torchrun --nproc-per-node 8 examples/train_lm.py      trains on 8 ranks: NCCL on 8 GPUs, Gloo without
    python examples/train_lm.py --alone                   trains on one device

`train` is the training script of an ordinary user: the only trace of parallelism is the name of the backend, and the
arguments are the whole sequence on every rank.
"""

import argparse
import os
import re
import shutil
import sysconfig
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from models import IGNORE, DecoderLM
from peak_memory import peak_activation_bytes
from torch import Tensor


def stdlib_text(size: int) -> bytes:
    """The first `size` bytes of the standard library's modules, in order of name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            return bytes(text[:size])
    raise ValueError(f"the standard library has {len(text)} bytes of source, fewer than the {size} asked for")


def batches(steps: int, seq: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels) a step, each (1, seq) int64. The labels of comments are ignored: we want code, not prose."""
    text = stdlib_text(steps * seq)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    labels = ids.clone()
    for comment in re.finditer(rb"#[^\n]*", text):
        labels[comment.start() : comment.end()] = IGNORE
    return [(i.to(device), t.to(device)) for i, t in zip(ids.view(steps, 1, seq), labels.view(steps, 1, seq), strict=True)]


def build_model(args: argparse.Namespace, device: torch.device) -> DecoderLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    model = DecoderLM(
        dim=args.dim, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads, tie=args.tie
    )
    return model.to(device)


def compile_options(backend: str) -> dict[str, str]:
    """Inductor needs a C++ compiler for CPU code; without one the same graphs run uncompiled."""
    has_compiler = any(shutil.which(c) for c in (os.environ.get("CXX") or "g++", "g++", "clang++"))
    return {"compiler": "aot_eager"} if backend == "sp" and not has_compiler else {}


def train(args: argparse.Namespace, device: torch.device) -> dict:
    """Trains and returns what the comparison needs: losses, the first step's gradients, peak memory, seconds."""
    model = build_model(args, device)
    compiled = torch.compile(model, backend=args.backend, options=compile_options(args.backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    record: dict = {"losses": [], "seconds": []}
    for step, (ids, labels) in enumerate(batches(args.steps, args.seq, device), start=1):
        start = time.perf_counter()

        def forward_backward(ids: Tensor = ids, labels: Tensor = labels) -> None:
            loss = compiled(ids, labels)
            loss.backward()
            record["losses"].append(loss.item())

        if step == 2:  # compiled by now, so that only the step's own tensors are counted
            record["peak_bytes"] = peak_activation_bytes(forward_backward, model.parameters())
        else:
            forward_backward()
        if step == 1:
            record["gradients"] = {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        record["seconds"].append(time.perf_counter() - start)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}/{args.steps}  loss {record['losses'][-1]:.4f}  {record['seconds'][-1]:.1f} s", flush=True)
    return record
