"""Access torch's private state of tensors, fake tensors and symbolic sizes.

A symbolic size is a SymInt: an expression of symbols, with a hint (its value in the call that is traced) and a shape
environment, which records the guards: conditions on sizes under which the compiled program is valid. A call with other
sizes compiles the program again, so that functions which add a guard may cause this. A wrapper is a tensor of a
subclass that stores its values in other tensors, the inner ones.
"""

import gc
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy
import sympy
import torch
from torch._dynamo.source import ConstantSource, TensorPropertySource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    statically_known_true,
)
from torch.utils import _pytree as pytree

# True for wrapper subclasses, whose values are stored in other tensors.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

get_data = torch._C._autograd._get_data_attr  # `x.data` in Dynamo's graphs
no_torch_function = torch._C._disabled_torch_function_impl  # for subclasses whose ops return plain tensors
enable_torch_function = torch._C._EnableTorchFunction  # context in which subclasses handle calls, inside of their ops
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor


def is_in_backward() -> bool:
    """Return True if autograd runs a backward in this thread, which may be one that it has created for a device."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause garbage collection inside the block, to read the frames of other threads.

    Reading a frame allocates an object for it, which may start a collection. A collection can run Python code, during
    which the other thread may leave the frame that is being read: CPython 3.11 then crashes with a segmentation fault.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def backward_threads() -> list[int]:
    """Return the identifiers of the Python threads that have called a backward and wait for its end."""
    with pause_gc():
        return [thread for thread, frame in sys._current_frames().items() if _is_in_backward(frame)]


def _is_in_backward(frame: FrameType | None) -> bool:
    """Return True if the frame or one of its callers has called autograd's engine."""
    while frame is not None and frame.f_code is not torch.autograd.graph._engine_run_backward.__code__:
        frame = frame.f_back
    return frame is not None


def is_in_transform() -> bool:
    """Return True inside of a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def enable_autograd() -> Iterator[None]:
    """Enable autograd inside the block, for gradients that the kernel of an operator computes.

    Kernels run below autograd, which torch disables for them by excluded dispatch keys.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


is_batch = torch._C._functorch.is_legacy_batchedtensor  # batched gradients of is_grads_batched, which has its own vmap


def storage_of(x: torch.Tensor) -> int:
    """Return the identity of the storage of a strided tensor, real or fake; views share their base's."""
    return x.untyped_storage()._cdata


def tensor_versions(xs: Sequence[torch.Tensor]) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    """Return the version counter of each tensor, which changes when its memory is written to.

    Inference tensors have no counter: their result is 0.
    """
    try:
        return numpy.fromiter(map(_get_version, xs), numpy.int64, len(xs))
    except RuntimeError:  # one is an inference tensor
        return numpy.array([0 if x.is_inference() else x._version for x in xs], numpy.int64)


_get_version = attrgetter("_version")


@dataclass(frozen=True)
class _ElementAddresses:
    """Array of a tensor's elements for numpy, which compares their addresses and does not read them."""

    tensor: torch.Tensor  # a strided tensor on any device

    @property
    def __array_interface__(self) -> dict[str, Any]:
        element_size = self.tensor.element_size()  # bytes
        strides = tuple(stride * element_size for stride in self.tensor.stride())
        is_read_only = True
        return {
            "version": 3,  # of numpy's array interface
            "typestr": f"|V{element_size}",  # elements of this number of bytes, of no type
            "data": (self.tensor.data_ptr(), is_read_only),
            "shape": tuple(self.tensor.shape),
            "strides": strides,
        }


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two strided tensors may share an element of memory.

    Also True if this is too expensive to decide exactly.
    """
    x, y = (numpy.asarray(_ElementAddresses(tensor)) for tensor in (a, b))
    return bool(numpy.may_share_memory(x, y, max_work=10_000))  # type: ignore[arg-type]


def is_guaranteed(mode: FakeTensorMode | None, fact: Any) -> bool:
    """Return True if a sympy relation of sizes follows from the guards so far. Adds no guard."""
    env = mode.shape_env if mode is not None else None
    return env is not None and bool(env._maybe_evaluate_static(fact) == sympy.true)  # None: not known


def length_guards(mode: FakeTensorMode) -> list[sympy.Basic]:
    """Return the guards on symbolic sizes that the mode's compilation has recorded so far."""
    env = mode.shape_env
    return [guard.expr for guard in env.guards] if env is not None else []


def unify_symbols(mode: FakeTensorMode, fact: Any) -> Any:
    """Return an expression of sizes in which symbols that the guards equate are replaced by one of them."""
    return mode.shape_env.replace(fact) if mode.shape_env is not None else fact


def assume_fact(mode: FakeTensorMode, fact: Any) -> bool:
    """Return True if a sympy relation of sizes holds for the sizes of the traced call. The result becomes a guard."""
    return mode.shape_env is not None and bool(mode.shape_env.evaluate_expr(fact))


def equate_factors(mode: FakeTensorMode) -> None:
    """Equate sizes whose products the guards equate, if they are equal in the traced call. The results become guards.

    Dynamo gives the dims of each input symbols of their own. Where a program reads `labels.view(-1)` next to rows of
    `input_ids`, a guard equates `b * s` of one input with that of the other, which determines neither b nor s.
    """
    env = mode.shape_env
    if env is None:
        return
    for guard in [*env.guards]:  # a copy, since `evaluate_expr` adds guards
        equation = env.replace(guard.expr)
        if not isinstance(equation, sympy.Eq):
            continue
        left, right = (_sort_factors(env, side) for side in equation.args)
        if len(left) > 1 and [factor.hint for factor in left] == [factor.hint for factor in right]:
            for factor, other in zip(left, right):
                env.evaluate_expr(sympy.Eq(factor.expr, other.expr))


class _SizeFactor(NamedTuple):
    """Factor of a product of sizes, such as b in `b * s`."""

    hint: int  # its value in the traced call
    dim: int  # the dim of an input for which its first symbol was created; -1 if not known
    num_symbols: int  # number of its symbols: 1 for `s`, 2 for `s + t`
    expr: sympy.Expr  # the factor


def _sort_factors(env: ShapeEnv, product: sympy.Expr) -> list[_SizeFactor]:
    """Return the factors of a product of sizes, except numbers, sorted by their hint, dim and number of symbols.

    For `b * s` of an input of shape (b, s), the factor b has dim 0, and s has dim 1.
    """
    factors = []
    for factor in sympy.Mul.make_args(product):
        symbols = sorted(factor.free_symbols, key=str)
        hint = factor.xreplace(env.backed_var_to_val)
        if symbols and hint.is_Integer:
            sources = env.var_to_sources.get(symbols[0], ())
            dim = next((source.idx for source in sources if isinstance(source, TensorPropertySource)), None)
            factors.append(_SizeFactor(int(hint), -1 if dim is None else dim, len(symbols), factor))
    return sorted(factors, key=lambda factor: (factor.hint, factor.dim, factor.num_symbols))


WIDE_RANGE = 1 << 21  # maximum difference of the bounds of a symbol whose values `single_value` checks


def single_value(size: torch.SymInt) -> int | None:
    """Return the value of a symbol if the guards admit no other, else None. Adds no guard.

    Such a symbol can be replaced by a constant. An example is a tree reduction over every second row, which has a guard
    for each bit of its length. Returns None for ranges wider than `WIDE_RANGE`, too.
    """
    symbol, hint, env = size.node.expr, size.node.hint, size.node.shape_env
    if symbol.is_Integer:  # the tracer has replaced the symbol by a constant
        return int(symbol)
    bounds = env.var_to_range.get(symbol)
    if hint is None or bounds is None or not bounds.upper.is_finite or bounds.upper - bounds.lower > WIDE_RANGE:
        return None
    lower, upper, checks = int(bounds.lower), int(bounds.upper), _symbol_checks(size)

    def has_other_value(numbers: numpy.ndarray) -> bool:
        """Return True if one of the numbers is not the hint, is within the bounds and satisfies all guards."""
        candidates = numbers[(numbers != hint) & (numbers >= lower) & (numbers <= upper)]
        for check in checks:
            candidates = candidates[_check_holds(check, str(symbol), candidates)]
        return candidates.size > 0

    # Most symbols admit another number at a distance of a power of two: trying these first is faster than trying all.
    powers = [1 << k for k in range(WIDE_RANGE.bit_length())]
    near_numbers = numpy.array([hint + step for power in powers for step in (power, -power)], dtype=object)
    all_numbers = numpy.array(range(lower, upper + 1), dtype=object)
    return None if has_other_value(near_numbers) or has_other_value(all_numbers) else int(hint)


def _symbol_checks(size: torch.SymInt) -> list[CodeType]:
    """Return the guards that contain only this symbol, as compiled Python expressions for `_check_holds`."""
    guards = [guard.expr for guard in size.node.shape_env.guards if guard.expr.free_symbols == {size.node.expr}]
    return [compile(PythonPrinter().doprint(expr), "guard", "eval") for expr in guards]


def is_specialized(size: torch.SymInt) -> bool:
    """Return True if the traced program depends on a size: a guard distinguishes values of it.

    A guard does so if it does not hold for one of about 60 other sizes, smaller and larger ones. The result is also
    True if the size has become a constant.
    """
    symbol, hint = size.node.expr, size.node.hint
    if symbol.is_Integer:
        return True
    if hint is None or not symbol.is_Symbol:  # only sizes that are a single symbol are examined
        return False
    # Sizes of at least 2: torch compiles programs for 0 and 1 separately, so that most guards exclude these.
    samples = [max(n, 2) for k in range(20) for n in (hint >> k, hint << k, hint + k)]
    other_sizes = numpy.array([2, 3, *samples], dtype=object)
    return not all(_check_holds(check, str(symbol), other_sizes).all() for check in _symbol_checks(size))


def _check_holds(check: CodeType, symbol: str, numbers: numpy.ndarray) -> numpy.ndarray:
    """Return a bool array: True for the numbers for which an expression may be true.

    Args:
        check: The compiled expression.
        symbol: Name of the symbol in the expression.
        numbers: Python integers (dtype object), which do not overflow.
    """
    modules = {"math": math, "torch": torch}
    try:
        holds = eval(check, modules, {symbol: numbers})
    except Exception:  # numpy cannot evaluate the expression for an array, as with `and`
        try:
            holds = [eval(check, modules, {symbol: n}) for n in numbers.tolist()]
        except Exception:  # nor for single numbers: it may be true for all
            holds = True
    return numpy.broadcast_to(numpy.asarray(holds, dtype=bool), numbers.shape)


def is_symbolic(x: torch.Tensor) -> bool:
    """Return True if a size of a fake tensor is symbolic."""
    return any(isinstance(extent, torch.SymInt) for extent in x.shape)


# True if graphs compiled with symbolic sizes outside of Dynamo accept other sizes. 2.11 specializes.
SYMBOLIC_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def are_guards_met(fakes: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Return True if the guards of fake tensors, in their own shape environment, hold for real tensors.

    At least one size of the fake tensors is symbolic.
    """
    symbolic = next(extent for x in fakes for extent in x.shape if isinstance(extent, torch.SymInt))
    return bool(symbolic.node.shape_env.evaluate_guards_for_args(list(fakes), list(values)))


def make_symbolic_mode(*hints: int) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    """Return a new fake mode, and one symbolic size of at least 2 for each hint."""
    env, sizes = ShapeEnv(), list[torch.SymInt]()
    for i, hint in enumerate(hints):
        source = ConstantSource(f"size{i}")
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=source))
    return FakeTensorMode(shape_env=env), sizes


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value of a size in the call that is traced, for estimates and messages. Adds no guard.

    Raises:
        GuardOnDataDependentSymNode: If the size depends on data, such as the length of x[mask].
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is None:
        raise GuardOnDataDependentSymNode(size.node.expr, f"the size {size} depends on data")
    return int(size.node.hint)


def end_of_view(size: torch.SymInt) -> int | torch.SymInt:
    """Return the end of a slice as an int if its symbol represents a constant; return other symbols unchanged.

    When Dynamo fakes a view of a wrapper, torch 2.13 repeats the view op with a new symbol for each of its constants:
    for the -1 of `x[:, :-1]` and the sys.maxsize of `x[:, 1:]`. Such a symbol has an ephemeral source, on which Dynamo
    cannot write guards. Symbols of other ends, such as a length that the program computes, must remain symbols.
    """
    hint = size.node.hint  # None for an unbacked symbol
    if hint is None or 0 <= hint < sys.maxsize:  # an end within the tensor, which may be symbolic in the program
        return size
    sources = size.node.shape_env.var_to_sources.get(size.node.expr, ())
    return int(hint) if any(source.is_ephemeral() for source in sources) else size


def evaluate_expr(expr: sympy.Expr, values: Mapping[sympy.Symbol, int | torch.SymInt]) -> int | torch.SymInt:
    """Evaluate an expression of sizes for these values of its symbols, which may be symbols, too."""
    return sympy_interp(PythonReferenceAnalysis, dict(values), expr)


class _WaitFunction(torch.autograd.Function):
    """Differentiable wait for an asynchronous collective."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:
        """Wait for the collective and return its result."""
        return x.trigger_wait().detach()  # a new tensor, which autograd may mark

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient unchanged."""
        return grads[0]


def wait_async_tensor(x: AsyncCollectiveTensor) -> torch.Tensor:
    """Wait for an asynchronous collective and return its result, with a gradient.

    AOTAutograd of torch 2.13 drops the gradient of AsyncCollectiveTensor's own wait.
    """
    return _WaitFunction.apply(x)


def to_plain_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as a plain tensor, to compare them between ranks.

    For a wrapper these are the concatenated bytes of its inner tensors. Waits for an asynchronous collective.
    """
    if isinstance(x, AsyncCollectiveTensor):
        return x.trigger_wait()
    if not is_wrapper(x):
        return x
    names, _ = x.__tensor_flatten__()
    inner_tensors = (to_plain_tensor(getattr(x, name)) for name in names)
    return torch.cat([inner.detach().contiguous().view(-1).view(torch.uint8) for inner in inner_tensors])


def make_wrapper(cls: type, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor) -> Any:
    """Create a tensor without memory, of a subclass that implements its own ops.

    Args:
        cls: The subclass.
        shape: Shape of the tensor.
        strides: Strides of the tensor, in elements.
        like: Tensor with its dtype and device.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=like.dtype, device=like.device)


def assert_at_run(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError with a text when a program runs, if a bool tensor without dims is False.

    Dynamo traces it into the graph. The host does not wait for the value.
    """
    torch._assert_async(condition, text)
