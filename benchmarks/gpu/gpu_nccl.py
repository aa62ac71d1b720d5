"""NCCL between ranks that share one GPU: values of collectives, routes, checks between ranks, and FSDP2 by layer.

    python benchmarks/gpu/gpu_nccl.py --ranks 2
    python benchmarks/gpu/gpu_nccl.py --ranks 2 --device cpu     the same code over Gloo

Each part prints a line; a part that fails prints its error, and the next one runs. Traffic goes over sockets (see
`measuring/one_gpu.py`): values and order count, times mean nothing. Models are in `gpu_models.py --nccl`.
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from measuring.gloo_ranks import joined
from measuring.one_gpu import joined_nccl
from measuring.tables import describe_run
from models import DecoderLM

import sp_compile
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator

SENT = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32]
SUMMED = [torch.int32, torch.bfloat16, torch.float32]
TIMEOUT = timedelta(minutes=2)


def of_rank(rank: int, dtype: torch.dtype, device: torch.device, rows: int) -> Tensor:
    """Return the operand of a rank, which every rank can compute."""
    values = torch.arange(rows * 1000, device=device).view(rows, 1000) % 7 + 3 * rank
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def collectives(n: int, device: torch.device, compiler: str) -> str:
    """Compare each primitive of the communicator with its definition, for each dtype."""
    group, rank, communicator = dist.group.WORLD.group_name, dist.get_rank(), current_communicator()
    for dtype in [*SENT, torch.complex64]:
        operands = [of_rank(r, dtype, device, n) for r in range(n)]
        x = operands[rank]
        assert torch.equal(communicator.all_gather(x, n, group), torch.cat(operands)), ("all_gather", dtype)
        found = communicator.all_to_all(x, n, group)
        assert torch.equal(found, torch.stack([y[rank] for y in operands])), ("all_to_all", dtype)
        assert torch.equal(communicator.broadcast(x, group), operands[0]), ("broadcast", dtype)
        if dtype.is_floating_point:  # what rings send
            found = communicator.wait(communicator.start_shift(x, routes.shift_route(group, 1)))
            assert torch.equal(found, operands[(rank - 1) % n]), ("shift", dtype)
    for dtype in SUMMED:
        operands = [of_rank(r, dtype, device, n) for r in range(n)]
        total = torch.stack(operands).sum(0, dtype=dtype)
        assert torch.equal(communicator.all_reduce(operands[rank], n, group), total), ("all_reduce", dtype)
        for plain in (False, True):
            found = communicator.reduce_scatter(operands[rank], n, group, plain)
            assert torch.equal(found, total[rank : rank + 1]), ("reduce_scatter", dtype, plain)
    return f"{len(SENT) + 1} dtypes sent, {len(SUMMED)} summed"


def uneven_splits(n: int, device: torch.device, compiler: str) -> str:
    """Exchange splits of other sizes for each pair of ranks, some of them zero."""
    rank, counts = dist.get_rank(), lambda source, target: (source + 2 * target) % 3
    sent = torch.cat([torch.full((counts(rank, t), 5), 10.0 * rank + t, device=device) for t in range(n)])
    given, taken = [counts(rank, t) for t in range(n)], [counts(s, rank) for s in range(n)]
    ops = torch.ops._c10d_functional
    found = ops.wait_tensor(ops.all_to_all_single(sent, taken, given, dist.group.WORLD.group_name))
    expected = torch.cat([torch.full((counts(s, rank), 5), 10.0 * s + rank, device=device) for s in range(n)])
    assert torch.equal(found, expected), found
    return f"{sum(given)} rows sent, {sum(taken)} received"


def shifts_beside_kernels(n: int, device: torch.device, compiler: str) -> str:
    """Start a shift, compute on other memory, wait, and overwrite the send buffer: twenty times."""
    group, rank, communicator = dist.group.WORLD.group_name, dist.get_rank(), current_communicator()
    route = routes.shift_route(group, 1)
    big = torch.arange(1 << (22 if device.type == "cuda" else 12), device=device, dtype=torch.float32)
    for step in range(20):
        sent = big + rank + step
        coming = communicator.start_shift(sent, route)
        (big.sin() * 2).cos().sum()  # work on other memory
        found = communicator.wait(coming)
        sent.zero_()
        assert torch.equal(found, big + (rank - 1) % n + step), step
    return "20 shifts"


def inductor_over_routes(n: int, device: torch.device, compiler: str) -> str:
    """Compile a shift between two kernels with Inductor."""
    route, rank = routes.ensure_route(routes.shift_route(dist.group.WORLD.group_name, 1)), dist.get_rank()
    ops = torch.ops._c10d_functional
    run = torch.compile(
        lambda x: ops.wait_tensor(ops.all_to_all_single(x * 3, [len(x)], [len(x)], route)) + 1, fullgraph=True
    )
    x = torch.arange(4096.0, device=device)
    for _ in range(3):
        torch.testing.assert_close(run(x + rank), (x + (rank - 1) % n) * 3 + 1)
    return "3 calls"


def checks_between_ranks(n: int, device: torch.device, compiler: str) -> str:
    """Pass batches that differ: every rank raises, and the group works afterwards."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    run = torch.compile(lambda x: model(x.cumsum(1)).mean(), backend="sp", options={"compiler": compiler})
    x = torch.ones(2, 13, 8, device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    try:
        run(x + dist.get_rank())
    except sp_compile.SpError as error:
        code = error.code
    else:
        raise AssertionError("other values on each rank were not noticed")
    torch.testing.assert_close(run(x), model(x.cumsum(1)).mean())
    return f"{code} on every rank, then a step"


def decoder_on(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = DecoderLM(vocab=64, dim=32, layers=2, heads=4).to(device)
    return model, torch.randint(64, (1, 61)).to(device)


def sharded_layers(n: int, device: torch.device, compiler: str) -> str:
    """Train with FSDP2 on each layer, and compare the loss and every gradient with a single device."""
    model, ids = decoder_on(device)
    model(ids, ids).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model, ids = decoder_on(device)
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("sp",))
    run = sp_compile.fully_shard_and_compile(model, mesh, layers=list(model.blocks), compiler=compiler)
    run(ids, ids).backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        error = (parameter.grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max()
        worst = max(worst, float(error))
    assert worst < 1e-4, worst
    return f"largest relative error of a gradient {worst:.1e}"


def strategies(n: int, device: torch.device, compiler: str) -> str:
    """Compare the loss and the gradients of each attention strategy with a single device."""
    model, ids = decoder_on(device)
    model(ids, ids).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    worst = {}
    for attention in ("ulysses", "ring", "gather", *(["hybrid"] if n == 4 else [])):
        torch.compiler.reset()
        model.zero_grad()
        torch.compile(model, backend="sp", options={"attention": attention, "compiler": compiler})(ids, ids).backward()
        errors = [(p.grad - expected[m]).abs().max() / expected[m].abs().max() for m, p in model.named_parameters()]
        worst[attention] = float(torch.stack(errors).max())
        assert worst[attention] < 1e-4, worst
    return ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())


PARTS: list[Callable[[int, torch.device, str], str]] = [
    collectives, uneven_splits, shifts_beside_kernels, inductor_over_routes, checks_between_ranks, strategies,
    sharded_layers,
]  # fmt: skip


def run_rank(rank: int, given: argparse.Namespace, folder: str, results: Any) -> None:
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    with (joined_nccl if given.device == "cuda" else joined)(rank, given.ranks, folder, TIMEOUT):
        for part in PARTS:
            if given.only and part.__name__ not in given.only:
                continue
            torch.compiler.reset()
            try:
                text, is_right = part(given.ranks, device, given.compiler), True
            except Exception as error:
                traceback.print_exc()
                text, is_right = f"{type(error).__name__}: {str(error)[:300]}", False
            results.put((rank, part.__name__, is_right, text))
            if rank == 0:
                print(f"{part.__name__}: {'right' if is_right else 'WRONG'}, {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiler", default="inductor", help="of the ranks' graphs")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--output", type=Path, help="a Markdown file to append to")
    given = parser.parse_args()
    results = mp.get_context("spawn").Manager().Queue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run_rank, (given, folder, results), given.ranks)
        finally:
            found = [results.get() for _ in range(results.qsize())]
            lines = [f"| {name} | {rank} | {is_right} | {text} |" for rank, name, is_right, text in sorted(found)]
            if given.output:
                head = f"{describe_run(given.device)}\n- `gpu_nccl.py --ranks {given.ranks}`\n"
                table = ["| part | rank | right | |", "| --- | --- | --- | --- |", *lines]
                with given.output.open("a") as out:
                    out.write("\n".join([head, *table, "", ""]))
    if not all(is_right for _, _, is_right, _ in found):
        raise SystemExit("parts with wrong values or errors")


if __name__ == "__main__":
    main()
