"""Compile tensor-parallel linears and an expert-parallel MoE in one program with its own collectives.

    torchrun --nproc-per-node 2 examples/expert_parallel.py      one tensor-parallel group, experts over the same ranks
    torchrun --nproc-per-node 4 examples/expert_parallel.py      2 x 2: experts over all ranks, linears over pairs

Every rank computes the dense MLP with its columns and rows of the weights, followed by an all_reduce. The MoE takes the
rank's share of the tokens, sends each token to the rank of its expert, and gathers the results. The share is a slice at
the rank's index, so the programs of the ranks differ, and each rank's collectives are not rewritten.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compile  # noqa: F401  (registers the backend where the package is not installed)

WIDTH, HIDDEN, EXPERTS, LAYERS = 16, 32, 8, 2


class Copy(torch.autograd.Function):
    """The input of a column-parallel linear: the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Sum the gradients of all ranks."""
        return funcol.all_reduce(grad, "sum", ctx.group), None


class Reduce(torch.autograd.Function):
    """The output of a row-parallel linear: the forward sums the ranks' parts."""

    @staticmethod
    def forward(ctx, x, group):
        """Sum the parts of all ranks."""
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient."""
        return grad, None


class Cut(torch.autograd.Function):
    """This rank's share of the tokens."""

    @staticmethod
    def forward(ctx, x, rank, n, group):
        """Return this rank's chunk."""
        ctx.group = group
        return x.chunk(n)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        """Gather the gradients of all chunks."""
        return funcol.all_gather_tensor(grad.contiguous(), 0, ctx.group), None, None, None


class Join(torch.autograd.Function):
    """The tokens of all ranks."""

    @staticmethod
    def forward(ctx, x, rank, n, group):
        """Gather the chunks of all ranks."""
        ctx.where = rank, n
        return funcol.all_gather_tensor(x.contiguous(), 0, group)

    @staticmethod
    def backward(ctx, grad):
        """Return this rank's chunk of the gradient."""
        rank, n = ctx.where
        return grad.chunk(n)[rank].clone(), None, None, None


class MLP(nn.Module):
    """A single-device MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual sum."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MoE(nn.Module):
    """A single-device MoE: every token is sent to its best expert, scaled by the router's probability."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual sum."""
        tokens = self.norm(x).flatten(0, 1)
        weight, expert = (tokens @ self.router).softmax(-1).max(-1)
        sent = F.one_hot(expert, EXPERTS).to(x.dtype)  # (token, expert): a slot for every token and expert
        given = torch.einsum("te,td->etd", sent, tokens)
        made = torch.bmm(F.silu(torch.bmm(given, self.up)), self.down)
        return x + (torch.einsum("te,etd->td", sent, made) * weight[:, None]).view_as(x)


class ParallelMLP(nn.Module):
    """A tensor-parallel MLP."""

    def __init__(self, whole: MLP, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.norm = group, whole.norm
        self.up_weight = nn.Parameter(whole.up.weight.detach().chunk(n, 0)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(n, 0)[rank].clone())
        self.down_weight = nn.Parameter(whole.down.weight.detach().chunk(n, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual sum."""
        h = F.gelu(F.linear(Copy.apply(self.norm(x), self.group), self.up_weight, self.up_bias))
        return x + Reduce.apply(F.linear(h, self.down_weight), self.group)


class ParallelMoE(nn.Module):
    """An expert-parallel MoE. `tp`: ranks with the same tokens. `ep`: all ranks that share the experts."""

    def __init__(self, whole: MoE, tp: dist.ProcessGroup, ep: dist.ProcessGroup) -> None:
        super().__init__()
        rank, n = dist.get_rank(ep), dist.get_world_size(ep)
        self.tp, self.ep, self.norm, self.router = tp, ep, whole.norm, whole.router
        self.rank, self.n, self.ranks = dist.get_rank(tp), dist.get_world_size(tp), n
        self.up = nn.Parameter(whole.up.detach().chunk(n)[rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(n)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual sum."""
        mine = Cut.apply(self.norm(x).flatten(0, 1), self.rank, self.n, self.tp)
        weight, expert = (mine @ Copy.apply(self.router, self.tp)).softmax(-1).max(-1)
        sent = F.one_hot(expert, EXPERTS).to(x.dtype)
        given = self.exchange(torch.einsum("te,td->etd", sent, mine))  # (ranks, local experts, token, d)
        experts = given.transpose(0, 1).flatten(1, 2)
        made = torch.bmm(F.silu(torch.bmm(experts, self.up)), self.down)
        back = self.exchange(made.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1)).flatten(0, 1)
        rows = torch.einsum("te,etd->td", sent, back) * weight[:, None]
        return x + Join.apply(rows, self.rank, self.n, self.tp).view_as(x)

    def exchange(self, x: Tensor) -> Tensor:
        """Send (experts, ...) to the experts' ranks. Returns (ranks, local experts, ...)."""
        return funcol.all_to_all_single_autograd(x.contiguous(), None, None, self.ep).unflatten(0, (self.ranks, -1))


def main() -> None:
    """Compare outputs and gradients with a single device."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    whole = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (MLP(), MoE())), MLP())
    tp, everyone = mesh["tp"].get_group(), dist.group.WORLD
    parts = (ParallelMLP(m, tp) if isinstance(m, MLP) else ParallelMoE(m, tp, everyone) for m in copy.deepcopy(whole))
    model = nn.Sequential(*parts)
    x = torch.randn(world // 2 * 4, 6, WIDTH)
    mine = x.chunk(world // 2)[mesh.get_local_rank("dp")]

    expected = whole(x)
    expected.square().sum().backward()
    run = torch.compile(model, backend="sp", options={"compiler": os.environ.get("COMPILER", "aot_eager")})
    found = run(mine)
    found.square().sum().backward()

    errors = [relative(found, expected.chunk(world // 2)[mesh.get_local_rank("dp")])]
    for ours, theirs in zip(model, whole, strict=True):
        grad = ours.norm.weight.grad.clone()
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        errors.append(relative(grad, theirs.norm.weight.grad))
        if isinstance(theirs, MoE):
            errors.append(relative(ours.up.grad, theirs.up.grad.chunk(world)[dist.get_rank()]))
    if dist.get_rank() == 0:
        print(f"{world} ranks: largest relative error against one device: {max(errors):.1e}")
    dist.destroy_process_group()
    assert max(errors) < 1e-9


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest relative error."""
    return ((a - b).abs().max() / b.abs().max()).item()


if __name__ == "__main__":
    main()
