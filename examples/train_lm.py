"""Train a byte-level language model on 8192-byte sequences of the Python standard library's source.

    python examples/train_lm.py                         compares a single device with 2 ranks of this machine
    torchrun --nproc-per-node 8 examples/train_lm.py    8 ranks: NCCL with GPUs, Gloo without
    python examples/train_lm.py --alone                 a single device

`train` is single-device code: every rank passes the full sequence, and only the name of the backend is specific to
parallelism.
"""

import argparse
import os
import re
import shutil
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from models import IGNORE, DecoderLM
from peak_memory import peak_activation_bytes
from torch import Tensor


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192, help="bytes in the (global) sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="fewer than --heads for grouped-query attention")
    parser.add_argument("--tie", action="store_true", help="the output head shares the embedding's weight")
    parser.add_argument("--backend", default="sp", help="torch.compile backend")
    parser.add_argument("--alone", action="store_true", help="train in this process only")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to compare with one device")
    parser.add_argument("--chart", type=Path, default=Path("train_lm.png"), help="where the comparison is drawn")
    parser.add_argument("--save", type=Path, help="folder for rank<r>.pt: losses, first gradients, peak memory")
    return parser.parse_args()


def batches(steps: int, seq: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return (ids, labels), each (1, seq) int64, for every step. Labels of comments are ignored."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    if len(text) < steps * seq:
        raise ValueError(f"the standard library has {len(text)} bytes of source, {steps * seq} are asked for")
    text = text[: steps * seq]
    ids = torch.frombuffer(text, dtype=torch.uint8).to(device, torch.int64)
    labels = ids.clone()
    for comment in re.finditer(rb"#[^\n]*", text):
        labels[comment.start() : comment.end()] = IGNORE
    return list(zip(ids.view(steps, 1, seq), labels.view(steps, 1, seq), strict=True))


def build_model(args: argparse.Namespace) -> DecoderLM:
    """Return a model with the same weights in every process."""
    torch.manual_seed(0)
    return DecoderLM(dim=args.dim, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads, tie=args.tie)


def compile_model(model: DecoderLM, backend: str, device: torch.device) -> torch.nn.Module:
    """Compile the model; on a CPU without a C++ compiler, without code generation."""
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(c) for c in compilers):
        print_once("no C++ compiler here: running the graphs uncompiled (aot_eager)")
        if backend == "sp":
            return torch.compile(model, backend="sp", options={"compiler": "aot_eager"})
        return torch.compile(model, backend="aot_eager")
    return torch.compile(model, backend=backend)


def train(model: torch.nn.Module, data: list[tuple[Tensor, Tensor]], lr: float) -> dict:
    """Train one step per batch, and return the losses and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, gradients = [], {}
    for step, (ids, labels) in enumerate(data, start=1):
        start = time.perf_counter()
        loss = model(ids, labels)
        loss.backward()
        if step == 1:
            gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        note = "  with compilation" if step == 1 else ""
        print_once(f"step {step}/{len(data)}  loss {losses[-1]:.4f}  {time.perf_counter() - start:.1f} s{note}")
    return {"losses": losses, "gradients": gradients}


def measure(model: torch.nn.Module, ids: Tensor, labels: Tensor) -> int:
    """Return the peak bytes of activations in one forward and backward."""
    print_once("measuring the peak activation memory")
    repeats = 3 if dist.is_initialized() else 1
    return peak_activation_bytes(lambda: model(ids, labels).backward(), model.parameters(), repeats)


def print_once(message: str) -> None:
    """Print on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def main() -> None:
    """Train, or compare a single device with ranks."""
    args = parse_args()
    launched = "RANK" in os.environ  # by torchrun
    if not launched and not args.alone:
        from compare import compare

        return compare(args)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if launched:
        dist.init_process_group("nccl" if gpu else "gloo")
    data = batches(args.steps, args.seq, device)
    model = compile_model(build_model(args).to(device), args.backend, device)
    record = train(model, data, args.lr)
    if args.save:
        record["peak_bytes"] = measure(model, *data[0])
        torch.save(record, args.save / f"rank{os.environ.get('RANK', 0)}.pt")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
