"""Exchange the sharded dim of a tensor for another by one all-to-all.

`declare_symmetric_memory` allocates a buffer that the ranks of a group can read directly, for exchanges without a copy
to a send buffer.
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
from sp_compile.lowering.collectives.all_to_all_permute import BUFFERS, PERMUTE_KERNELS, PermuteProblem, SymmetricBuffer
from sp_compile.lowering.collectives.all_to_all_permute import all_to_all_permute as body
from sp_compile.lowering.torch_compat import FakeTensor
from sp_compile.runtime.agreement import all_gather_object
from sp_compile.runtime.control.message import CALL_VERB

from .rank_call import RankCall, check_dim, check_tensors, needs_gradient, op_or_body, require_on_all

sp = torch.ops.sp
SIZE_FIX = "Pass bytes as an int, such as 64 * 2**20."


def all_to_all_permute(
    x: Tensor, scatter_dim: int, gather_dim: int, group: Mesh = None, out: Tensor | None = None, *, check: bool = True
) -> Tensor:
    """Exchange a sharded dim for another: gather `gather_dim` and scatter `scatter_dim` over the ranks.

    Rank i returns `torch.cat([x_r.chunk(n, scatter_dim)[i] for r in range(n)], gather_dim)`, where x_r is x of rank r.
    One collective sends (n - 1) / n of the bytes of x. Its gradient is the reverse exchange, and can be differentiated
    again. The transforms grad, jvp and vmap of `torch.func` are supported.

    x is copied once, inside `torch.compile` by the kernel that computes it. The result is a strided view of the
    received buffer, in which rows of `gather_dim` are adjacent. If all dims before `scatter_dim` have size 1, x is sent
    without a copy, and the result is copied. If the result is to be flattened for a matmul, such as the heads before a
    projection, flatten the dims of x instead: the matmul then reads the result without a copy. Inside `torch.compile`,
    Dynamo rejects in-place changes of a result that requires a gradient; change a clone.

    Args:
        x: (..., g, ..., A, ...), two or more dims, any dtype and strides: `gather_dim` is sharded over the n ranks, and
            `scatter_dim` is complete. On "meta", the ranks compare their calls, and nothing is sent.
        scatter_dim: The dim of A, which n divides. Negative values count from the end.
        gather_dim: The dim of g; another one than `scatter_dim`.
        group: The ranks: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None selects the default
            process group.
        out: A tensor with the shape, dtype and device of the result, and strides without overlap. It is written and
            returned, without a gradient.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (..., n * g, ..., A / n, ...) with x's dtype. On one rank, x itself.

    Raises:
        SpError: An argument is invalid on a rank (SP502 to SP504, SP541 to SP545), the calls of the ranks differ
            (SP508), or the group does not define the ranks (SP111 to SP116).
    """
    call = PermuteCall(
        name="all_to_all_permute",
        check=check,
        x=x,
        scatter_dim=scatter_dim,
        gather_dim=gather_dim,
        ranks=ranks_of(group),
        out=out,
    )
    return call.run()


@dataclass(frozen=True)
class PermuteCall(RankCall):
    """Call of `all_to_all_permute` on this rank."""

    x: Tensor  # the shard of this rank
    scatter_dim: int  # dim of x that is split over the ranks; may be negative
    gather_dim: int  # dim of x that the result gathers; may be negative
    ranks: Ranks  # the ranks that exchange shards
    out: Tensor | None  # receives the result

    same = "all ranks pass shards of one shape and dtype, on one kind of device"

    def run(self) -> Tensor:
        """Validate the call and exchange.

        Returns:
            The result, or `out`.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        # The operator; under `torch.func`, which cannot transform it, its Python body.
        exchange = op_or_body(sp.all_to_all_permute, body, self.x)
        args = self.x, self.scatter_dim, self.gather_dim, self.ranks.n, self.ranks.group
        if self.out is None:
            return exchange(*args)
        with torch.no_grad():
            result = exchange(*args)
            # On one rank the result is x itself, and out may share its memory.
            return self.out.copy_(result.clone() if self.ranks.n == 1 else result)

    @property
    def group(self) -> Ranks:
        """Return the ranks whose calls `require` compares.

        Returns:
            The ranks that exchange shards.
        """
        return self.ranks

    def is_traced(self) -> bool:
        """Return True if the call is traced into a program.

        Returns:
            True inside `torch.compile`, and for a fake tensor.
        """
        return torch.compiler.is_compiling() or isinstance(self.x, FakeTensor)

    def description(self) -> str:
        """Return the shape, dtype, dims and algorithm of the call as text.

        Returns:
            Text that is equal on all ranks.
        """
        x, problem = self.x, self._make_problem()
        return (
            f"{self.name} of x {list(x.shape)} {x.dtype} on {x.device.type}, scatter_dim={problem.scatter_dim}, "
            f"gather_dim={problem.gather_dim}, gradient: {needs_gradient(x)}, {PERMUTE_KERNELS.choose(problem)}"
        )

    def _make_problem(self) -> PermuteProblem:
        """Return the exchange with non-negative dims, from which its algorithm and result shape follow."""
        ndim, ranks = self.x.ndim, self.ranks
        return PermuteProblem(self.x, self.scatter_dim % ndim, self.gather_dim % ndim, ranks.n, ranks.group)

    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument.

        Returns:
            SP502 to SP504, and SP541 to SP545.
        """
        yield from check_tensors(x=self.x)
        yield from self._wrong_dims()
        if isinstance(self.x, DTensor):
            yield SpError("SP541", "x: expected a plain tensor, got a DTensor.")
        yield from self._wrong_sizes()
        yield from self._wrong_out()

    def _wrong_dims(self) -> Iterator[SpError]:
        """Yield errors unless both dims are dims of x and differ."""
        ndim, shape = self.x.ndim, list(self.x.shape)
        for name in ("scatter_dim", "gather_dim"):
            yield from check_dim(shape, getattr(self, name), name)
        if ndim == 0:  # `check_dim` has accepted 0 and -1
            yield SpError("SP542", f"scatter_dim, gather_dim: expected two dims of x, got x of shape {shape}.")
        dims = [self.scatter_dim, self.gather_dim]
        if len({dim % ndim for dim in dims}) == 1:
            yield SpError("SP542", f"scatter_dim, gather_dim: both are dim {dims[0] % ndim} of x of shape {shape}.")

    def _wrong_sizes(self) -> Iterator[SpError]:
        """Yield an error, with the size to pad to, unless the ranks divide the scattered dim."""
        n, shape = self.ranks.n, list(self.x.shape)
        size = shape[self.scatter_dim]
        if size % n:
            global_shape = [*shape]
            global_shape[self.gather_dim] *= n
            padded_size = -(-size // n) * n
            yield SpError(
                "SP543",
                f"scatter_dim: dim {self.scatter_dim % len(shape)} of x has size {size}, which is not a multiple of "
                f"the {n} ranks (shape {shape} on each rank, {global_shape} over all ranks).",
                f"Pad that dim to {padded_size}, or use a number of ranks that divides it.",
            )

    def _wrong_out(self) -> Iterator[SpError]:
        """Yield errors unless `out` can receive the result and no gradient is required."""
        out, x = self.out, self.x
        if out is None:
            return
        yield from check_tensors(out=out)
        if not isinstance(out, Tensor):
            return
        shape = self._make_problem().shape  # of the result
        if (list(out.shape), out.dtype, out.device) != (shape, x.dtype, x.device):
            got = f"{list(out.shape)} {out.dtype} on {out.device}"
            fix = f"Omit out, or allocate it by torch.empty({shape}, dtype={x.dtype}, device='{x.device}')."
            yield SpError("SP504", f"out: expected {shape} {x.dtype} on {x.device}, got {got}.", fix)
        if _can_overlap(out):
            yield SpError("SP544", f"out: elements of shape {shape} overlap by strides {list(out.stride())}.")
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            name = "x" if x.requires_grad else "out"
            yield SpError("SP545", f"{name}: expected requires_grad=False with out=, got True.")


def _can_overlap(x: Tensor) -> bool:
    """Return True if two elements of x may share memory, so that a result cannot be written to x.

    They do not if each stride is larger than the offset of the last element of all dims with smaller strides.
    """
    last_offset = 0  # offset of the last element of the dims with smaller strides
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= last_offset:
            return x.numel() > 0
        last_offset += stride * (size - 1)
    return False


def declare_symmetric_memory(size: int, group: Mesh = None, device: torch.device | None = None) -> bool:
    """Allocate a symmetric buffer on every rank for eager calls of `all_to_all_permute` in a group.

    Every rank of the group must call it once, after the group is created. Matrices of at most `size` bytes are then
    copied there and exchanged by torch's all_to_all_nd. Other operands are exchanged as without a buffer.

    Args:
        size: Bytes of the buffer of each rank.
        group: The ranks: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None selects the default
            process group.
        device: The device of the buffer, a GPU of this rank. None selects the current CUDA device, or the CPU.

    Returns:
        True, on every rank, if the buffers exist. False if the GPUs cannot access each other's memory, the device is
        not a GPU, or torch lacks all_to_all_nd (before 2.14).

    Raises:
        SpError: On every rank, if a size is not a positive int (SP507), or if the sizes differ (SP508).
    """
    ranks = ranks_of(group)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    is_positive = isinstance(size, int) and size > 0
    problem = None if is_positive else SpError("SP507", f"size: expected a positive int, got {size!r}.", SIZE_FIX)
    compared_ranks = ranks if ranks.n > 1 else None  # None: only this rank is checked
    require_on_all("declare_symmetric_memory", problem, lambda: f"size={size}", compared_ranks, "the size is equal")
    if ranks.n == 1:
        return False
    is_supported = device.type == "cuda" and torch_compat.symmetric_all_to_all() is not None
    buffer = _make_buffer(size, ranks, device) if is_supported else None
    has_buffer = buffer is not None
    subject = "declare_symmetric_memory"  # for messages
    has_buffers = all(all_gather_object(ranks, verb=CALL_VERB, subject=subject, value=has_buffer))
    if buffer is not None and has_buffers:
        BUFFERS[ranks.group] = buffer
    return has_buffers


def _make_buffer(size: int, ranks: Ranks, device: torch.device) -> SymmetricBuffer | None:
    """Return a symmetric buffer of `size` bytes; None if torch raises an error for missing support."""
    try:
        memory, handle = torch_compat.symmetric_memory(size, device, ranks.group)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError):
        return None
    return SymmetricBuffer(memory, lambda: handle.barrier(channel=0))
