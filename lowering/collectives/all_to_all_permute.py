"""Move the sharded dim of a tensor to another dim that n divides with ``sp::all_to_all_permute``.

    x       (..., g, ..., A, ...)            the gather dim is sharded in equal shares, the scatter dim is full
    result  (..., n * g, ..., A / n, ...)    rank r's rows from r * g on; this rank's block of the scatter dim

The first row of `PERMUTE_KERNELS` that fits runs it:

- "torch": torch's all_to_all_nd, from torch 2.14 on, for eager matrices on CUDA in declared symmetric memory.
- "packed": the exchange of ``all_to_all.py``: one copy into the send buffer, all_to_all_single, a view. If the scatter
  dim is the first one, the copy follows the collective instead. Inside torch.compile the compiler fuses it into the
  kernel that computes x, or into the one that reads the result.

Symmetric memory is memory of all ranks that each can read and write directly, here one buffer per group. The collective
``sp_compile.declare_symmetric_memory`` declares it once on all ranks, before programs run. An exchange copies its
operand there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering import triton
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import is_known
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.comm.communicator import FunctionalCommunicator, current_communicator
from sp_compile.lowering.torch_compat import symmetric_all_to_all

from .all_to_all import Reshard, exchange


@dataclass(frozen=True)
class SymmetricBuffer:
    """Symmetric memory of a group, into which exchanges copy their operands."""

    memory: Tensor  # uint8 (bytes,), this rank's memory
    barrier: Callable[[], None]  # waits, on the current stream, for all ranks

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the first bytes of the memory as a contiguous tensor, for the operand of an exchange."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[:size].view(dtype).view(shape)


BUFFERS: dict[str, SymmetricBuffer] = {}  # declared buffers by group, on all of its ranks or on none


class PermuteProblem(NamedTuple):
    """Arguments of one exchange. The dims are not negative and not equal."""

    x: Tensor  # any shape and dtype
    scatter_dim: int  # dim that becomes sharded
    gather_dim: int  # dim that becomes full
    n: int  # number of ranks
    group: str  # name of the process group

    @property
    def shape(self) -> list[int]:
        """Return the shape of the result."""
        shape = list(self.x.shape)
        shape[self.scatter_dim] //= self.n
        shape[self.gather_dim] *= self.n
        return shape

    @property
    def buffer(self) -> SymmetricBuffer | None:
        """Return the symmetric memory that this exchange may use, or None. The result is equal on all ranks.

        None if no memory is declared or it is too small, in a compiled or traced program, and in a simulation of ranks.
        """
        buffer, x = BUFFERS.get(self.group), self.x
        is_eager = triton.is_plain_memory(x) and x.numel() > 0 and not torch.compiler.is_compiling()
        is_simulated = not isinstance(current_communicator(), FunctionalCommunicator)
        if buffer is None or not is_eager or is_simulated:
            return None
        fits = x.device == buffer.memory.device and x.nbytes <= buffer.memory.numel()
        return buffer if fits else None


def _can_run_torch(problem: PermuteProblem) -> bool:
    """Return True if torch's exchange of matrices in symmetric memory supports the problem."""
    return problem.x.ndim == 2 and symmetric_all_to_all() is not None and problem.buffer is not None


def _torch_exchange(problem: PermuteProblem) -> Tensor:
    """Copy x to symmetric memory and run torch's exchange, between two barriers of all ranks."""
    buffer, all_to_all, x = problem.buffer, symmetric_all_to_all(), problem.x
    assert buffer is not None and all_to_all is not None  # noqa: PT018 (see `_can_run_torch`)
    shared, out = buffer.view(x.shape, x.dtype), x.new_empty(problem.shape)
    triton.copy_tensor(shared, x)
    buffer.barrier()  # every rank has written its operand
    all_to_all(shared, out, problem.scatter_dim, problem.gather_dim, group=problem.group)
    buffer.barrier()  # every rank has read the operands: the next exchange may overwrite them
    return out


def _packed_exchange(problem: PermuteProblem) -> Tensor:
    """Run the exchange with one all_to_all_single and one copy: before it, or after it if the blocks are contiguous.

    The blocks along the scatter dim are contiguous if all dims before it have size 1.
    """
    x, scatter, gather, n, group = problem
    has_contiguous_blocks = all(is_known(size == 1) for size in x.shape[:scatter])
    if not has_contiguous_blocks:
        frame = (1, n, 0, n)  # n positions, one per rank; the length of a rank's share is the frame's inner factor
        return exchange([x], Reshard(scatter, frame, gather, frame, n, group))[0]
    # The blocks are sent without a copy, and the received ones are permuted.
    received = current_communicator().all_to_all(x.unflatten(scatter, (n, -1)).movedim(scatter, 0), n, group)
    blocks = received.movedim(0, gather)  # (..., n, g, ...)
    if not triton.can_use_triton(blocks):
        return blocks.flatten(gather, gather + 1)
    out = blocks.new_empty(problem.shape)
    triton.copy_tensor(out.unflatten(gather, (n, -1)), blocks)
    return out


class PermuteKernel(NamedTuple):
    """An implementation of the exchange."""

    can_run: Callable[[PermuteProblem], bool]  # returns True if it supports the problem
    run: Callable[[PermuteProblem], Tensor]  # runs the exchange


PERMUTE_KERNELS: Table[PermuteKernel] = Table("all_to_all_permute")
PERMUTE_KERNELS.register("torch", PermuteKernel(_can_run_torch, _torch_exchange))
PERMUTE_KERNELS.register("packed", PermuteKernel(lambda problem: True, _packed_exchange))


class _PermuteFunction(torch.autograd.Function):
    """Exchange of one tensor, whose backward is the inverse exchange, differentiable any number of times."""

    @staticmethod
    def forward(x: Tensor, scatter_dim: int, gather_dim: int, n: int, group: str) -> Tensor:
        """Run the exchange with the kernel that fits, and return a result that may be changed in place."""
        problem = PermuteProblem(x.resolve_conj().resolve_neg(), scatter_dim, gather_dim, n, group)
        result = PERMUTE_KERNELS[PERMUTE_KERNELS.choose(problem)].run(problem)
        # autograd would not permit changes of a view of the received tensor; `data` is no view for autograd.
        # Tensor subclasses, such as fake tensors, stay as they are.
        return result.data if triton.is_plain_memory(result) else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the dims and the ranks."""
        _, ctx.scatter_dim, ctx.gather_dim, *ctx.ranks = inputs

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Run the inverse exchange on the gradient."""
        return _PermuteFunction.apply(grad, ctx.gather_dim, ctx.scatter_dim, *ctx.ranks), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Run the same exchange on the tangent, since the function is linear."""
        return _PermuteFunction.apply(tangent, ctx.scatter_dim, ctx.gather_dim, *ctx.ranks)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, scatter: int, gather: int, *ranks: Any
    ) -> tuple[Tensor, int]:
        """Run the exchange with the batch dim first, the other dims shifted by 1; return (result, its batch dim)."""
        return _PermuteFunction.apply(x.movedim(in_dims[0], 0), scatter + 1, gather + 1, *ranks), 0


@composite("all_to_all_permute(Tensor x, int scatter_dim, int gather_dim, int n, str group) -> Tensor")
def all_to_all_permute(x: Tensor, scatter_dim: int, gather_dim: int, n: int, group: str) -> Tensor:
    """Convert Shard(gather_dim) to Shard(scatter_dim), on local shards of equal length.

    Bytes: (n - 1) / n of x, in one collective; in the backward the same. n divides the scatter dim.
    Errors: SpError if the dims are equal, or n is known not to divide.
    """
    scatter_dim, gather_dim = scatter_dim % x.ndim, gather_dim % x.ndim
    if scatter_dim == gather_dim:
        cause = f"sp::all_to_all_permute: expected two different dims, got {scatter_dim} as scatter and gather dim."
        raise SpError("SP542", cause)
    if is_known(x.shape[scatter_dim] % n != 0):
        cause = f"sp::all_to_all_permute: {n} ranks do not divide dim {scatter_dim} of shape {list(x.shape)}."
        raise SpError("SP543", cause)
    return x if n == 1 else _PermuteFunction.apply(x, scatter_dim, gather_dim, n, group)
