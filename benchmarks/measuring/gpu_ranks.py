"""Processes that share one GPU exchange by symmetric memory: are the values right? For `gpu_collectives.py`."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sp_compile import all_to_all_permute, declare_symmetric_memory
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.collectives import all_to_all_permute as lowering

BF16 = torch.bfloat16


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * 50
    return x.to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise SystemExit(f"wrong values: {list(found.shape)} {found.dtype}")


def shared(count: int, folder: Path) -> str:
    """What came of it: the driver may not let processes reach each other's memory."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f".store-{os.getpid()}"
    answers = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(_rank, (count, str(store), answers), nprocs=count)
    except Exception as error:
        return f"{count} processes on one GPU: failed, {str(error).strip().splitlines()[-1]}"
    finally:
        store.unlink(missing_ok=True)
    return f"{count} processes on one GPU, by symmetric memory: {answers.get()}"


def _rank(rank: int, count: int, store: str, answers: "mp.SimpleQueue[str]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    ranks = ranks_of(None)
    told = "this machine does not let them"
    if declare_symmetric_memory(1 << 22, device=device):
        with lowering.using("symmetric"):
            for shape, scatter, gather in (((64, 8, 16), 1, 0), ((64, 8, 16), 0, 1), ((2, 8, 4, 33), 1, 3)):
                xs = [draw(shape, BF16, device, seed) for seed in range(count)]
                for _ in range(3):
                    found = all_to_all_permute(xs[rank], scatter, gather, ranks, check=False)
                    same(found, torch.cat([x.chunk(count, scatter)[rank] for x in xs], gather))
        told = "values are right"
    dist.barrier()
    if rank == 0:
        answers.put(told)
    dist.destroy_process_group()
