"""Combine data and sequence parallelism: two samples on two ranks each.

    torchrun --nproc-per-node 4 examples/data_and_sequence.py ddp      parameters replicated
    torchrun --nproc-per-node 4 examples/data_and_sequence.py fsdp     parameters sharded over all four ranks (FSDP2)

Gradients are averaged over both axes. `param_grads="partial"` leaves the sum over the sequence to DDP or FSDP. Their
mean over all ranks is then the gradient of the mean loss of the samples: one reduction per step in place of two.
"""

import sys

import torch
import torch.distributed as dist
from models import DecoderLM
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def main(kind: str) -> None:
    """Compare the gradients of one step with a single device."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = "cuda" if cuda else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    model = DecoderLM(dim=64, layers=2, heads=4).to(device)
    reference = DecoderLM(dim=64, layers=2, heads=4).to(device)
    reference.load_state_dict(model.state_dict())
    samples = torch.randint(0, 256, (mesh["dp"].size(), 1, 257), device=device)

    options = {"mesh": mesh["sp"], "param_grads": "partial", "compiler": "inductor" if cuda else "aot_eager"}
    if kind == "ddp":
        step = DistributedDataParallel(torch.compile(model, backend="sp", options=options))
    else:
        fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        step = torch.compile(model, backend="sp", options=options)
    ids = samples[mesh["dp"].get_local_rank()]
    step(ids, ids).backward()

    torch.stack([reference(sample, sample) for sample in samples]).mean().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(error(p.grad, q.grad) for p, q in pairs)
    if dist.get_rank() == 0:
        print(f"{kind}: largest relative error of a gradient against one device: {worst:.1e}")
    assert worst < 1e-4
    dist.destroy_process_group()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a gradient."""
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return ((found - expected).abs().max() / expected.abs().max()).item()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["ddp"])
