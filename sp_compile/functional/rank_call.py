"""Validate the call of a function on shards, and compare it between the ranks of its group.

Invalid calls are detected before the first exchange. The error is sent to the other ranks, and every rank raises it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import is_functorch_tensor
from sp_compile.runtime.agreement import require_agreement
from sp_compile.runtime.control.message import CALL_VERB, Message

# layouts of shards that exist before the call: those whose order does not depend on the batch
STATIC_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if not layout.is_balanced)


def require_on_all(
    name: str, problem: SpError | None, describe: Callable[[], str], ranks: Ranks | None, same: str = ""
) -> None:
    """Raise SpError on every rank if one has a problem, or if the calls of the ranks differ.

    Args:
        name: Name of the function, for messages.
        problem: The error of an invalid argument on this rank; None if its call is valid.
        describe: Returns the properties of a valid call that must be equal on all ranks, as text.
        ranks: The ranks to compare. None: only this rank is checked.
        same: These properties in general terms, for the fix of a mismatch: "all ranks pass shards of one shape".

    Returns:
        None.

    Raises:
        SpError: The problem of this or another rank, or SP508 if the calls differ.
    """
    error = None if problem is None else problem.with_context(f"{name}: ")
    if ranks is not None:
        message = Message(CALL_VERB, name, note="" if error else describe(), error=error)
        fix = f"Make the same call on every rank: {same}."
        require_agreement(ranks, message, SpError("SP508", f"{name}: the ranks' calls differ", fix))
    if error:
        raise error


@dataclass(frozen=True)
class RankCall(ABC):
    """Call of a function on this rank: `require` validates it before its subclass runs an exchange."""

    name: str  # name of the function
    check: bool  # True to compare the calls of all ranks

    # properties of a call that must be equal on all ranks, for error messages
    same: ClassVar[str] = "shards have equal lengths, options are equal"

    @abstractmethod
    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument.

        Only the first error is raised, so a check may assume that the earlier ones passed.

        Returns:
            The errors, in the order of the checks.
        """

    @abstractmethod
    def description(self) -> str:
        """Return the properties of a valid call that must be equal on all ranks.

        Returns:
            Text that the ranks compare and that the error shows.
        """

    @property
    @abstractmethod
    def group(self) -> Ranks | None:
        """Return the ranks that take part in the call; None if the operands are unsplit.

        Returns:
            The ranks, of which this process is one.
        """

    def is_traced(self) -> bool:
        """Return True if the call is traced into a program.

        Returns:
            True inside `torch.compile`.
        """
        return torch.compiler.is_compiling()

    def require(self) -> None:
        """Validate the call, on all ranks if `check` is set.

        Returns:
            None.

        Raises:
            SpError: The call is invalid on a rank, or the calls differ (SP508).
        """
        group = self.group
        is_compared = self.check and not self.is_traced() and group is not None and group.n > 1
        problem = next(self.errors(), None)
        require_on_all(self.name, problem, self.description, group if is_compared else None, self.same)


def shard_frame(rows: int, n: int, length: int | None, layout: str) -> list[int]:
    """Return the frame of a sequence dim: its valid rows and their order, see `lowering/base/frames.py`.

    Args:
        rows: Rows of each rank.
        n: Number of ranks.
        length: Rows of the sequence without padding. None: no row is padding.
        layout: Key of `LAYOUTS`.

    Returns:
        The frame argument.
    """
    total_rows, folds = rows * n, LAYOUTS[layout].folds
    frame = [1, total_rows, 0, total_rows if length is None else length]  # outer, size, first valid row, valid rows
    return [*frame, folds] if folds > 1 else frame


def op_or_body(op: Callable[..., Any], body: Callable[..., Any], *xs: Tensor | None) -> Callable[..., Any]:
    """Return the operator; or its Python body, if an operand is in a transform of `torch.func`.

    `torch.func` cannot transform these operators, but it can transform their bodies.

    Args:
        op: The operator.
        body: Its implementation.
        *xs: The operands; None is skipped.

    Returns:
        The callable to run. Dynamo is disabled for the body, since a part of it would be compiled as a separate program
        on wrapped tensors.
    """
    is_transformed = not torch.compiler.is_compiling() and any(is_functorch_tensor(x) for x in xs if x is not None)
    return torch.compiler.disable(body) if is_transformed else op


def needs_gradient(x: Tensor | None) -> bool:
    """Return True if autograd records a gradient for x.

    Args:
        x: A tensor, or None.

    Returns:
        False for None.
    """
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def check_tensors(**values: object) -> Iterator[SpError]:
    """Yield an error for each argument that is not a strided tensor.

    Args:
        **values: The arguments by name.

    Returns:
        Errors SP502.
    """
    for name, x in values.items():
        if not isinstance(x, Tensor):
            yield SpError("SP502", f"{name}: expected a tensor, got {type(x).__name__}.")
        elif x.layout is not torch.strided:
            yield SpError("SP502", f"{name}: expected a strided tensor, got {x.layout}.")


def check_float_operands(**operands: Tensor | None) -> Iterator[SpError]:
    """Yield errors unless all operands are floating-point tensors and their devices are equal.

    Args:
        **operands: The operands by name; None is skipped.

    Returns:
        At most one error SP505 and one error SP506.
    """
    tensors = [x for x in operands.values() if x is not None]
    if not all(x.is_floating_point() for x in tensors):
        got = ", ".join(str(x.dtype) for x in tensors)
        yield SpError("SP505", f"{', '.join(operands)}: expected floating-point dtypes, got {got}.")
    if any(x.device != tensors[0].device for x in tensors):
        got = ", ".join(str(x.device) for x in tensors)
        yield SpError("SP506", f"{', '.join(operands)}: expected one device, got {got}.")


def can_broadcast_to(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Return True if a shape broadcasts to another one without changing it.

    Args:
        shape: The shape of an operand.
        expected: The shape of the result.

    Returns:
        False if `shape` has more dims, or a size that is neither 1 nor the expected one.
    """
    if len(shape) > len(expected):
        return False
    return all(size in (1, expected_size) for size, expected_size in zip(shape[::-1], expected[::-1]))


def check_dtypes(**values: object) -> Iterator[SpError]:
    """Yield an error for each argument that is neither a dtype nor None.

    Args:
        **values: The arguments by name.

    Returns:
        Errors SP502.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, torch.dtype):
            yield SpError("SP502", f"{name}: expected a torch.dtype, got {value!r}.")


def check_flags(**values: object) -> Iterator[SpError]:
    """Yield an error for each argument that is not a bool.

    Args:
        **values: The arguments by name.

    Returns:
        Errors SP502.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            yield SpError("SP502", f"{name}: expected True or False, got {value!r}.")


def check_choice(name: str, value: object, known: Sequence[str]) -> Iterator[SpError]:
    """Yield an error if an argument is not a known value.

    Args:
        name: Name of the argument.
        value: Its value.
        known: The valid values.

    Returns:
        At most one error, SP507.
    """
    if value not in known:
        yield SpError("SP507", f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}.")


def check_dim(shape: Sequence[int], dim: int, name: str = "dim") -> Iterator[SpError]:
    """Yield an error if an argument is not a dim of a shape.

    Args:
        shape: The shape of the operand.
        dim: The argument's value; negative values count from the end.
        name: Name of the argument.

    Returns:
        At most one error: SP502 for another type, SP503 for a dim out of range.
    """
    ndim = max(len(shape), 1)
    if not isinstance(dim, int) or isinstance(dim, bool):
        yield SpError("SP502", f"{name}: expected an int, got {dim!r}.")
    elif not -ndim <= dim < ndim:
        limits = f"{-ndim} to {ndim - 1} for a tensor of shape {list(shape)}"
        yield SpError("SP503", f"{name}: expected {limits}, got {dim}.")
