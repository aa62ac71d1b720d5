"""What torch keeps to itself about tensors, fake tensors and symbolic sizes."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import numpy
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

get_data = torch._C._autograd._get_data_attr  # what `x.data` is in Dynamo's graphs
no_torch_function = torch._C._disabled_torch_function_impl  # of a subclass whose results are plain tensors
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor


def is_in_backward() -> bool:
    """Does this thread run a backward just now? Autograd has threads of its own for those of a device."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def pause_gc() -> Iterator[None]:
    """Read the frames of other threads: each that is looked at is allocated, and a collection that this would begin may
    run Python code, and so the other thread, which leaves the frame (CPython 3.11 ends with a segmentation fault then).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def backward_threads() -> list[int]:
    """The threads that have called a backward which runs now."""
    with pause_gc():
        return [thread for thread, frame in sys._current_frames().items() if _calls_backward(frame)]


def _calls_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not torch.autograd.graph._engine_run_backward.__code__:
        frame = frame.f_back
    return frame is not None


def is_in_transform() -> bool:
    """Is one of torch.func's transforms at work?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def enable_autograd() -> Iterator[None]:
    """Autograd records inside, also in the body of an operator below it, and below a mode of torch_dispatch."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


is_batch = torch._C._functorch.is_legacy_batchedtensor  # of gradients: is_grads_batched has a vmap of its own


def storage_of(x: torch.Tensor) -> int:
    """The identity of the memory that a strided tensor lies in, fake ones too."""
    return x.untyped_storage()._cdata


def tensor_versions(xs: Sequence[torch.Tensor]) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    """How often each was changed in place; 0 of inference tensors, whose changes nobody counts."""
    try:
        return numpy.fromiter(map(_get_version, xs), numpy.int64, len(xs))
    except RuntimeError:
        return numpy.array([0 if x.is_inference() else x._version for x in xs], numpy.int64)


_get_version = attrgetter("_version")


@dataclass(frozen=True)
class _ElementAddresses:
    """Where the elements of a strided tensor are, for numpy, which does not read them."""

    of: torch.Tensor

    @property
    def __array_interface__(self) -> dict[str, Any]:
        size = self.of.element_size()
        strides = tuple(stride * size for stride in self.of.stride())
        place = {"data": (self.of.data_ptr(), True), "shape": tuple(self.of.shape), "strides": strides}
        return {"version": 3, "typestr": f"|V{size}", **place}


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Have two strided tensors an element in common? Also where that is too hard to find out."""
    one, other = (numpy.asarray(_ElementAddresses(x)) for x in (a, b))
    return bool(numpy.may_share_memory(one, other, max_work=10_000))  # type: ignore[arg-type]


def follows_from_guards(mode: FakeTensorMode | None, fact: Any) -> bool:
    """Does the fact (a sympy relation) follow from guards that the program already has?

    Adds none.
    """
    env = mode.shape_env if mode is not None else None
    return env is not None and bool(env._maybe_evaluate_static(fact) == True)  # noqa: E712  (None: not known)


def length_guards(mode: FakeTensorMode) -> list[sympy.Basic]:
    """What is assumed so far of the sizes that are symbols."""
    env = mode.shape_env
    return [guard.expr for guard in env.guards] if env is not None else []


def unify_symbols(mode: FakeTensorMode, fact: Any) -> Any:
    """A fact about sizes, where symbols that were found to be equal are one."""
    return mode.shape_env.replace(fact) if mode.shape_env is not None else fact


def assume_fact(mode: FakeTensorMode, fact: Any) -> bool:
    """Does a fact about sizes hold in this compilation? If so, it becomes a guard."""
    return mode.shape_env is not None and bool(mode.shape_env.evaluate_expr(fact))


WIDE_RANGE = 1 << 21
"""`single_value` checks at most this many numbers."""


def single_value(size: torch.SymInt) -> int | None:
    """The number that a symbol is, where the guards of the program admit no other; None where they do. Adds no guard.

    A tree of every second row has a guard for each bit of its length. None of a wide range, too.
    """
    symbol, hint, env = size.node.expr, size.node.hint, size.node.shape_env
    if symbol.is_Integer:  # in the meantime
        return int(symbol)
    bounds = env.var_to_range.get(symbol)
    if hint is None or bounds is None or not bounds.upper.is_finite or bounds.upper - bounds.lower > WIDE_RANGE:
        return None
    checks = _symbol_checks(size)

    def admitted(numbers: numpy.ndarray) -> bool:
        left = numbers[(numbers != hint) & (numbers >= int(bounds.lower)) & (numbers <= int(bounds.upper))]
        for check in checks:
            left = left[_check_holds(check, str(symbol), left)]
        return left.size > 0

    every = numpy.array(range(int(bounds.lower), int(bounds.upper) + 1), dtype=object)
    near = hint + numpy.array(
        [sign * (1 << k) for k in range(WIDE_RANGE.bit_length()) for sign in (1, -1)], dtype=object
    )
    return None if admitted(near) or admitted(every) else int(hint)


def _symbol_checks(size: torch.SymInt) -> list[CodeType]:
    """What the program asks of a symbol alone, as expressions of Python."""
    facts = [guard.expr for guard in size.node.shape_env.guards if guard.expr.free_symbols == {size.node.expr}]
    return [compile(PythonPrinter().doprint(fact), "guard", "eval") for fact in facts]


def depends_on_size(size: torch.SymInt) -> bool:
    """Has the program asked for a size what other numbers answer otherwise? Also one that has become a number since."""
    symbol, hint = size.node.expr, size.node.hint
    if symbol.is_Integer or hint is None or not symbol.is_Symbol:
        return bool(symbol.is_Integer)
    others = numpy.array(
        [2, 3, *(max(n, 2) for k in range(20) for n in (hint >> k, hint << k, hint + k))], dtype=object
    )
    return not all(_check_holds(check, str(symbol), others).all() for check in _symbol_checks(size))


def _check_holds(check: CodeType, symbol: str, numbers: numpy.ndarray) -> numpy.ndarray:
    """Of which of Python's numbers, which never overflow, may an expression be true? All at once, if it has no `and`.

    Of all where it calls what has another name here.
    """
    names = {"math": math, "torch": torch}
    try:
        found = eval(check, names, {symbol: numbers})
    except Exception:
        try:
            found = [eval(check, names, {symbol: n}) for n in numbers.tolist()]
        except Exception:
            found = True
    return numpy.broadcast_to(numpy.asarray(found, dtype=bool), numbers.shape)


def is_symbolic(x: torch.Tensor) -> bool:
    """Is a size of a fake tensor a symbol?"""
    return any(isinstance(extent, torch.SymInt) for extent in x.shape)


SYMBOLIC_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Does a graph compiled with a symbol for a size, outside of Dynamo, take others? 2.11 writes the first down."""


def check_guards(fakes: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Does what was assumed of symbolic sizes, in a shape environment of their own, hold for those of real tensors?"""
    symbolic = next(extent for x in fakes for extent in x.shape if isinstance(extent, torch.SymInt))
    return bool(symbolic.node.shape_env.evaluate_guards_for_args(list(fakes), list(given)))


def make_symbolic_mode(*hints: int) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    """A fake mode of its own, and symbols of it, two or more, which are these in this call."""
    env = ShapeEnv()
    sources = [ConstantSource(f"size{i}") for i in range(len(hints))]
    symbols = [env.create_symbol(x, at, dynamic_dim=DimDynamic.DYNAMIC) for x, at in zip(hints, sources, strict=True)]
    made = [env.create_symintnode(one, hint=x, source=at) for one, x, at in zip(symbols, hints, sources, strict=True)]
    return FakeTensorMode(shape_env=env), made


def size_hint(size: int | torch.SymInt) -> int:
    """What a size is in the call that is being compiled: to weigh costs, never to prove anything. Adds no guard."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def end_of_view(size: torch.SymInt) -> int | torch.SymInt:
    """The number, where a symbol stands for the end of `x[:, 1:]` or `x[:, :-1]`.

    So it does where torch 2.13 repeats a view of a wrapper for Dynamo, which can write no guard on such a symbol.
    """
    hint = size.node.hint  # None: known when the program runs
    if hint is None or 0 <= hint < sys.maxsize:
        return size
    sources = size.node.shape_env.var_to_sources.get(size.node.expr, ())
    return int(hint) if any(source.is_ephemeral() for source in sources) else size


def evaluate_expr(expr: sympy.Expr, values: Mapping[sympy.Symbol, int | torch.SymInt]) -> int | torch.SymInt:
    """What an expression of sizes is where its symbols are these, which may be symbols of another program."""
    found: int | torch.SymInt = sympy_interp(PythonReferenceAnalysis, dict(values), expr)
    return found


class _WaitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:
        return x.trigger_wait().detach()  # of its own, which autograd may mark

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def wait_async_tensor(x: AsyncCollectiveTensor) -> torch.Tensor:
    """What a collective that is on its way brings, differentiable: AOTAutograd of torch 2.13 drops the gradient."""
    found: torch.Tensor = _WaitFunction.apply(x)
    return found


def is_wrapper(x: Any) -> bool:
    """Is it a tensor without memory of its own, whose values other tensors hold: one of a wrapper subclass?"""
    return is_traceable_wrapper_subclass(x)


def to_plain_tensor(x: torch.Tensor) -> torch.Tensor:
    """The values that a tensor holds, as one with memory: of several in a wrapper their bytes, one behind the other.

    A collective that is still on its way is waited for.
    """
    if isinstance(x, AsyncCollectiveTensor):
        return x.trigger_wait()
    if not is_wrapper(x):
        return x
    names, _ = x.__tensor_flatten__()
    inner = (to_plain_tensor(getattr(x, name)) for name in names)
    return torch.cat([one.detach().contiguous().view(-1).view(torch.uint8) for one in inner])


def make_wrapper(cls: type, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor) -> Any:
    """A tensor without memory, of a subclass that says itself what ops do with it."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=like.dtype, device=like.device)
