"""all_to_all_permute by hand: the function, what does not fit, and whether all ranks made the same call.

declare_symmetric_memory: memory that ranks read from each other, for exchanges without a send buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Mesh, Ranks, ranks_of
from sp_compile.lowering.collectives.all_to_all_permute import BUFFERS, PermuteProblem, SymmetricBuffer, choose_permute
from sp_compile.lowering.collectives.all_to_all_permute import all_to_all_permute as body
from sp_compile.lowering.torch_compat import FakeTensor
from sp_compile.runtime.agreement import all_gather_object
from sp_compile.runtime.control.message import CALL_VERB

from .rank_call import RankCall, check_dim, check_tensors, needs_gradient, op_or_body, require_on_all

sp = torch.ops.sp


def all_to_all_permute(
    x: Tensor, scatter_dim: int, gather_dim: int, group: Mesh = None, out: Tensor | None = None, *, check: bool = True
) -> Tensor:
    """Exchange a split dim for another: all ranks' rows of gather_dim, of this rank's block of scatter_dim.

        x       (..., g, ..., A, ...)           gather_dim is split over n ranks in equal shares, scatter_dim is whole
        result  (..., n * g, ..., A / n, ...)   torch.cat([x of rank r .chunk(n, scatter_dim)[this rank] for all r],
                                                gather_dim)

    x           of any rank from 2 on, any dtype and strides; the two dims differ, negative ones count from the last.
                On "meta", ranks compare their calls, and nothing is sent
    group       None: the default process group; a ProcessGroup; a DeviceMesh of one axis or with an axis "sp"
    out         a tensor like the result, of any strides that give each element a place of its own; it is written and
                returned. Not differentiable
    check       compare the call over the ranks first (24 bytes a rank, on the CPU), so that calls which do not fit
                raise on every rank instead of hanging. Not done inside torch.compile

    On one rank it is x itself. Bytes: (n - 1) / n of x sent, in one collective. The gradient is the exchange along the
    way back, one collective as well, and differentiable again; torch.func's grad, jvp and vmap know it too. x is copied
    once, inside torch.compile by the kernel that makes x, and the result is a strided view of what arrived, in which
    rows of gather_dim lie one after the other. Where scatter_dim leads (all dims before it are of size 1), x is sent as
    it lies, and the copy follows the collective. Dims behind gather_dim that are to be flattened with it (heads, for a
    projection) are best flattened in x: then a matmul reads the result without a copy. Inside torch.compile, Dynamo
    refuses to change a result in place that needs a gradient: change a clone of it.

    Raises SpError for dims that are equal or out of range, a scatter_dim that n does not divide, an out that is unlike
    the result or part of a differentiation, a DTensor, this rank outside the group, and calls that differ between the
    ranks.
    """
    return PermuteCall("all_to_all_permute", check, x, scatter_dim, gather_dim, ranks_of(group), out).run()


@dataclass(frozen=True)
class PermuteCall(RankCall):
    """This rank's call of all_to_all_permute."""

    x: Tensor
    scatter_dim: int
    gather_dim: int
    ranks: Ranks
    out: Tensor | None

    same = "all ranks pass shards of one shape and dtype, on one kind of device"

    def run(self) -> Tensor:
        """The exchange. Raises SpError for a call that does not fit."""
        self.require()
        exchange = op_or_body(sp.all_to_all_permute, body, self.x)
        args = self.x, self.scatter_dim, self.gather_dim, self.ranks.n, self.ranks.group
        if self.out is None:
            return exchange(*args)
        with torch.no_grad():
            result = exchange(*args)
            # On one rank the result is x itself, and out may lie across it.
            return self.out.copy_(result.clone() if self.ranks.n == 1 else result)

    @property
    def group(self) -> Ranks:
        return self.ranks

    def is_traced(self) -> bool:
        return torch.compiler.is_compiling() or isinstance(self.x, FakeTensor)

    def description(self) -> str:
        x, problem = self.x, self._first_error()
        return (
            f"{self.name} of x {list(x.shape)} {x.dtype} on {x.device.type}, scatter_dim={problem.scatter_dim}, "
            f"gather_dim={problem.gather_dim}, gradient: {needs_gradient(x)}, {choose_permute(problem)}"
        )

    def _first_error(self) -> PermuteProblem:
        ndim, ranks = self.x.ndim, self.ranks
        return PermuteProblem(self.x, self.scatter_dim % ndim, self.gather_dim % ndim, ranks.n, ranks.group)

    def errors(self) -> Iterator[SpError]:
        yield from check_tensors(x=self.x)
        yield from self._wrong_dims()
        if isinstance(self.x, DTensor):
            yield SpError("SP541", "x: expected a plain tensor, got a DTensor.")
        yield from self._wrong_sizes()
        yield from self._wrong_out()

    def _wrong_dims(self) -> Iterator[SpError]:
        ndim, shape = self.x.ndim, list(self.x.shape)
        for name in ("scatter_dim", "gather_dim"):
            yield from check_dim(shape, getattr(self, name), name)
        dims = [self.scatter_dim, self.gather_dim]
        if ndim and all(isinstance(dim, int) for dim in dims) and len({dim % ndim for dim in dims}) == 1:
            yield SpError("SP542", f"scatter_dim, gather_dim: both are dim {dims[0] % ndim} of x of shape {shape}.")

    def _wrong_sizes(self) -> Iterator[SpError]:
        n, shape = self.ranks.n, list(self.x.shape)
        size = shape[self.scatter_dim]
        if size % n:
            global_shape = [*shape]
            global_shape[self.gather_dim] *= n
            more = -(-size // n) * n
            yield SpError(
                "SP543",
                f"scatter_dim: {n} ranks do not divide the {size} of dim {self.scatter_dim % len(shape)} of x, of "
                f"shape {shape} on each rank and {global_shape} over all ranks.",
                f"Pad that dim to {more}, or use a number of ranks that divides it.",
            )

    def _wrong_out(self) -> Iterator[SpError]:
        out, x = self.out, self.x
        if out is None:
            return
        yield from check_tensors(out=out)
        if not isinstance(out, Tensor):
            return
        shape = self._first_error().shape
        if (list(out.shape), out.dtype, out.device) != (shape, x.dtype, x.device):
            got = f"{list(out.shape)} {out.dtype} on {out.device}"
            yield SpError("SP504", f"out: expected {shape} {x.dtype} on {x.device}, got {got}.")
        if _can_overlap(out):
            yield SpError("SP544", f"out: elements of shape {shape} overlap by strides {list(out.stride())}.")
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            yield SpError("SP545", "out: a gradient is not supported with out=.")


def _can_overlap(x: Tensor) -> bool:
    """Could two elements be in one place? Not if every stride passes over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def declare_symmetric_memory(size: int, group: Mesh = None, device: torch.device | None = None) -> bool:
    """Give the group's eager all_to_all_permute a buffer of `size` bytes on every rank, on a GPU of its own.

    Every rank of the group calls it, once, when the group is made. Operands of at most `size` bytes are put there, and
    torch's all_to_all_nd exchanges those that are matrices; others and larger ones are exchanged as before. Returns
    False, on every rank, where the GPUs cannot reach each other or this torch has no all_to_all_nd (2.14).

    Raises SpError, on every rank, for a size that is not positive or differs between the ranks.
    """
    ranks = ranks_of(group)
    device = _group_device(device)
    fits = isinstance(size, int) and size > 0
    problem = None if fits else SpError("SP507", f"size: expected a positive number of bytes, got {size!r}.")
    compared = ranks if ranks.n > 1 else None
    require_on_all("declare_symmetric_memory", problem, lambda: f"size={size}", compared, "the size is equal")
    able = ranks.n > 1 and device.type == "cuda" and torch_compat.symmetric_all_to_all() is not None
    buffer = _make_buffer(size, ranks, device) if able else None
    able = ranks.n > 1 and all(all_gather_object(ranks, CALL_VERB, "declare_symmetric_memory", buffer is not None))
    if buffer is not None and able:
        BUFFERS[ranks.group] = buffer
    return able


def _group_device(device: torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _make_buffer(size: int, ranks: Ranks, device: torch.device) -> SymmetricBuffer | None:
    """None where this machine cannot: what torch raises then is many things."""
    try:
        memory, handle = torch_compat.symmetric_memory(size, device, ranks.group)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError):
        return None
    return SymmetricBuffer(memory, lambda: handle.barrier(channel=0))
