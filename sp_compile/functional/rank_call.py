"""A call that every rank of a group makes by hand: what is wrong with it, and whether all ranks made the same.

Whatever is wrong on one rank is found before the first exchange, told to the others, and raised on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError, did_you_mean
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import is_functorch_tensor
from sp_compile.runtime.agreement import require_agreement
from sp_compile.runtime.control.message import CALL_VERB, Message

HOLDS_PATTERN = tuple(name for name, order in LAYOUTS.items() if not order.is_balanced)
"""The layouts of shards that are held by hand: somebody has cut them, before the call."""


def require_on_all(
    name: str, problem: SpError | None, describe: Callable[[], str], ranks: Ranks | None, same: str = ""
) -> None:
    """Raise SpError if there is a problem: on all `ranks` if on any, and there as well if their calls differ.

    describe: what must be the same on every rank, or exchanges would not meet; same: that in words. ranks: None of a
    call whose ranks are not compared.
    """
    error = None if problem is None else problem.with_context(f"{name}: ")
    if ranks is not None:
        mine = Message(CALL_VERB, name, note="" if error else describe(), error=error)
        fix = f"Make the same call on every rank: {same}."
        require_agreement(ranks, mine, SpError("SP508", f"{name}: the ranks' calls differ", fix))
    if error:
        raise error


@dataclass(frozen=True)
class RankCall(ABC):
    """This rank's call. name: of the function; check: compare the call over the ranks."""

    name: str
    check: bool

    same: ClassVar[str] = "shards are of equal length, options the same"
    """What must be the same on all ranks, in words."""

    @abstractmethod
    def errors(self) -> Iterator[SpError]:
        """Yield what is wrong with the call; each check may assume that those before it found nothing."""

    @abstractmethod
    def description(self) -> str:
        """What must be the same on every rank, or exchanges would not meet. Only asked if there is no problem."""

    @property
    @abstractmethod
    def group(self) -> Ranks | None:
        """The ranks that make the call together."""

    @property
    def compared_group(self) -> Ranks | None:
        """The group, if this rank can stop for what the others say: a traced program cannot."""
        group = self.group
        return group if self.check and group is not None and group.n > 1 and not self.is_traced() else None

    def is_traced(self) -> bool:
        """Is the call part of a program that is only made?"""
        return torch.compiler.is_compiling()

    def require(self) -> None:
        """Raise SpError on every rank if any has a problem, or if their calls differ."""
        require_on_all(self.name, next(self.errors(), None), self.description, self.compared_group, self.same)


def shard_frame(rows: int, n: int, length: int | None, layout: str) -> list[int]:
    """Where the n ranks' shards of `rows` rows lie; `length` None if no row is padding."""
    held, folds = rows * n, LAYOUTS[layout].folds
    return [1, held, 0, held if length is None else length, *([folds] if folds > 1 else [])]


def op_or_body(op: Callable[..., Any], body: Callable[..., Any], *xs: Tensor | None) -> Callable[..., Any]:
    """The operator; its body where one of these is inside torch.func, which does not see into operators.

    Dynamo leaves the body alone: a piece of it would be a program of its own, given what torch.func wraps.
    """
    wrapped = not torch.compiler.is_compiling() and any(is_functorch_tensor(x) for x in xs if x is not None)
    return torch.compiler.disable(body) if wrapped else op


def needs_gradient(x: Tensor | None) -> bool:
    """Will anybody ask for the gradient of x?"""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def check_tensors(**given: object) -> Iterator[SpError]:
    """Yield an error for each that is not a strided tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            yield SpError("SP502", f"{name}: expected a tensor, got {type(x).__name__}.")
        elif x.layout is not torch.strided:
            yield SpError("SP502", f"{name}: expected a strided tensor, got {x.layout}.")


def check_dtypes(**given: object) -> Iterator[SpError]:
    """Yield an error for each that is neither a dtype nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.dtype):
            yield SpError("SP502", f"{name}: expected a torch.dtype, got {value!r}.")


def check_flags(**given: object) -> Iterator[SpError]:
    """Yield an error for each that is not a bool."""
    for name, value in given.items():
        if not isinstance(value, bool):
            yield SpError("SP502", f"{name}: expected True or False, got {value!r}.")


def check_choice(name: str, value: object, known: Sequence[str]) -> Iterator[SpError]:
    """Yield an error if the value is not one of these."""
    if value not in known:
        yield SpError("SP507", f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}.")


def check_dim(shape: Sequence[int], dim: int, name: str = "dim") -> Iterator[SpError]:
    """Yield an error if the argument `name` is not a dim of the shape."""
    ndim = max(len(shape), 1)
    if not isinstance(dim, int) or isinstance(dim, bool):
        yield SpError("SP502", f"{name}: expected an int, got {dim!r}.")
    elif not -ndim <= dim < ndim:
        yield SpError("SP503", f"{name}: expected {-ndim} to {ndim - 1} for x of shape {list(shape)}, got {dim}.")


def unknown_word(kind: str, word: str, known: Iterable[str]) -> SpError:
    """Return the error of a word that is none of these."""
    guess = did_you_mean(word, known)
    return SpError("SP501", f"Unknown {kind} {word!r}{guess}, expected one of {', '.join(known)}.")
