"""Run installed kernels of linear attention on the rows of a rank, as opaque operators.

``register_kernel`` adds a function of a package, such as `chunk_gated_delta_rule` of flash-linear-attention; it is used
on its devices. `KERNELS` has the call of each, by name. A kernel returns its result and the state after it, and is
differentiated by its own autograd: the backward runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.torch_compat import size_hint

sp = torch.ops.sp
KERNEL_CHUNK = 64  # tokens of a chunk of fla's kernels, by default


class KernelFunction(NamedTuple):
    """A function of a package that is installed."""

    function: Callable[..., Any]  # with the arguments of `KERNELS`
    devices: frozenset[str]  # types of devices on which it is used


class TokenRows(NamedTuple):
    """Operands with a row for each token, (B, S, H, ...), or (B, H, N, T, ...) in N chunks of T tokens."""

    q: Tensor  # (..., K)
    k: Tensor  # (..., K)
    v: Tensor  # (..., V)
    decay: Tensor  # (..., 1) or (..., K), the logarithm of the factor of the state
    beta: Tensor | None  # (..., 1)
    a: Tensor | None  # (..., K); with b, a transition of rank one of the state, as in RWKV-7
    b: Tensor | None  # (..., K)
    starts: Tensor | None  # bool (..., 1), of one head, True for the first token of a document
    opened: Tensor | None = None  # int64 (..., 1), of one head, numbers of documents with states of their own
    closed: Tensor | None = None  # int64 (..., 1), of one head, the same at the last tokens

    def map(self, function: Any) -> TokenRows:
        """Apply a function to each operand that is not None."""
        return TokenRows(*(None if x is None else function(x) for x in self))


KernelCall = Callable[[TokenRows], tuple[Tensor, ...]]
# For each kernel, its positional arguments. All have scale, initial_state, output_final_state and cu_seqlens.
KERNELS: Table[KernelCall] = Table("kernels of linear attention")
FUNCTIONS: dict[str, KernelFunction] = {}

KERNELS["chunk_gated_delta_rule"] = lambda x: (x.q, x.k, x.v, x.decay.squeeze(-1), _heads(x.beta))
KERNELS["chunk_kda"] = lambda x: (x.q, x.k, x.v, x.decay, _heads(x.beta))
KERNELS["chunk_delta_rule"] = lambda x: (x.q, x.k, x.v, _heads(x.beta))
KERNELS["chunk_simple_gla"] = lambda x: (x.q, x.k, x.v, x.decay.squeeze(-1))
KERNELS["chunk_gla"] = lambda x: (x.q, x.k, x.v, x.decay)
KERNELS["chunk_rwkv7"] = lambda x: (x.q, x.decay, x.k, x.v, *(y for y in (x.a, x.b) if y is not None))


def _heads(x: Tensor | None) -> Tensor:
    """Return beta as kernels take it, (B, S, H), from (B, S, H, 1)."""
    assert x is not None, "this kernel needs beta"
    return x.squeeze(-1)


def register_kernel(name: str, function: Callable[..., Any], *devices: str) -> None:
    """Use a function as the kernel of this name on some types of devices."""
    FUNCTIONS[name] = KernelFunction(function, frozenset(devices))


def has_kernel(name: str, device: torch.device) -> bool:
    """Return True if a kernel of this name runs on the device."""
    return name in FUNCTIONS and device.type in FUNCTIONS[name].devices


KERNEL_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? a, Tensor? b, Tensor? starts, "
    "Tensor? initial, float scale, str kernel"
)


def _new_results(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty results of a kernel, for fake tensors: (B, S, H, V) and the state (B, H, K, V)."""
    shape = v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]
    return v.new_empty(v.shape), v.new_empty(shape, dtype=accumulation_dtype(v.dtype))


@opaque(f"local_attention_kernel({KERNEL_OPERANDS}) -> (Tensor, Tensor)", _new_results, replays=False)
def local_attention_kernel(*operands: Any) -> tuple[Tensor, Tensor]:
    """Run a kernel and return its result and the state after it.

    Shapes: those of ``sp::linear_attention``; beta (B, S, H, 1), starts (B, S, 1, 1).
    """
    out, state = _call_kernel(*operands)
    return out.contiguous(), state.contiguous()


@opaque(
    f"local_attention_kernel_backward(Tensor? grad_out, Tensor? grad_state, {KERNEL_OPERANDS}) -> Tensor[]",
    lambda grad_out, grad_state, *operands: [x.new_empty(x.shape) for x in _differentiable(operands)],
    replays=False,
)
def local_attention_kernel_backward(grad_out: Tensor | None, grad_state: Tensor | None, *operands: Any) -> list[Tensor]:
    """Return the gradients of the operands that are floating-point tensors, by running the kernel with autograd.

    grad_out and grad_state are the gradients of the two results, None for a result that is not used.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() if _is_differentiable(x) else x for x in operands]
        results = _call_kernel(*leaves)
    used = [(y, grad) for y, grad in zip(results, (grad_out, grad_state)) if grad is not None and y.requires_grad]
    inputs = _differentiable(leaves)
    grads = torch.autograd.grad([y for y, _ in used], inputs, [grad for _, grad in used], allow_unused=True)
    return [
        torch.zeros_like(x) if grad is None else grad.to(x.dtype).clone(memory_format=torch.contiguous_format)
        for x, grad in zip(inputs, grads, strict=True)
    ]


def _is_differentiable(x: Any) -> bool:
    """Return True for a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _differentiable(operands: Any) -> list[Tensor]:
    """Return the operands that are floating-point tensors."""
    return [x for x in operands if _is_differentiable(x)]


class _KernelFunction(Function):
    """Kernel whose backward is an operator, too."""

    @staticmethod
    def forward(*operands: Any) -> Any:
        """Run the kernel."""
        return sp.local_attention_kernel(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the operands."""
        *tensors, ctx.scale, ctx.kernel = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands; None for those that are not floating-point, and scale and kernel."""
        tensors = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (len(tensors) + 2)
        # A gradient for each floating-point operand; None for the others, and for scale and kernel.
        operand_grads = iter(sp.local_attention_kernel_backward(*grads, *tensors, ctx.scale, ctx.kernel))
        return (*(next(operand_grads) if _is_differentiable(x) else None for x in tensors), None, None)


def run_attention_kernel(*operands: Any) -> tuple[Tensor, Tensor]:
    """Run a kernel, differentiably: the result (B, S, H, V) and the state after it, (B, H, K, V), float32."""
    return _KernelFunction.apply(*operands)


def _call_kernel(*operands: Any) -> tuple[Tensor, Tensor]:
    """Call a kernel with `KERNEL_OPERANDS`, and return its result and the state after the last token of each batch row.

    Kernels support documents as sequences of variable length: with starts, the batch rows are joined to one row, whose
    documents are passed by their bounds, `cu_seqlens`. Batch rows of 3 tokens with starts [0 0 1] and [0 1 0] have the
    bounds 0, 2, 3, 4, 6.
    """
    *rows, initial, scale, kernel = operands
    x = TokenRows(*rows)
    function, options = FUNCTIONS[kernel].function, {"scale": scale, "output_final_state": True}
    if x.starts is None:  # `KERNELS[kernel]` returns the arguments of the kernel's function
        out, state = function(*KERNELS[kernel](x), initial_state=initial, **options)
        return out, state
    batch, length = x.v.shape[:2]
    is_first = x.starts.reshape(batch, length).clone()
    continues = ~is_first[:, 0]  # the first document of a batch row has the initial state, unless it starts there
    is_first[:, 0] = True
    first_tokens = is_first.flatten().nonzero().flatten()  # 0, 2, 3, 4 in the example
    end = is_first.new_full((1,), batch * length, dtype=torch.int64)
    bounds = torch.cat([first_tokens, end])
    counts = is_first.sum(1).cumsum(0)  # number of documents in each batch row and all rows before: 2, 4 in the example
    firsts = torch.cat([counts.new_zeros(1), counts[:-1]])  # the first document of each batch row: 0, 2 in the example
    lasts = counts - 1  # the last document of each batch row: 1, 3 in the example
    state = None
    if initial is not None:
        state = initial.new_zeros((len(bounds) - 1, *initial.shape[1:]))  # of each document
        state = state.index_add(0, firsts, initial * continues.view(-1, 1, 1, 1))
    joined = x.map(lambda y: y.flatten(0, 1).unsqueeze(0))
    out, ends = function(*KERNELS[kernel](joined), initial_state=state, cu_seqlens=bounds, **options)
    return out.view(x.v.shape), ends.index_select(0, lasts)


@register_flop_formula(torch.ops.sp.local_attention_kernel, get_raw=True)
def attention_kernel_flops(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, a: Tensor | None, *_: Any, **_meta: Any
) -> int:
    """Return the FLOPs of ``sp::local_attention_kernel``: the products of chunks of C tokens.

    A token and head have scores and their products with values, C (K + V), and read and write a state, 2 K V. With the
    delta rule, there are C K products of keys, a solve with K + V columns, and a read of K V; a transition of rank one
    has C (2 K + 2 V) + K V more, for its second pair of vectors.
    """
    rows, keys, columns = map(size_hint, (v.numel() // v.shape[-1], k.shape[-1], v.shape[-1]))
    products = KERNEL_CHUNK * (keys + columns) + 2 * keys * columns
    if beta is not None or a is not None:
        products += KERNEL_CHUNK * (2 * keys + columns) + keys * columns
    if a is not None:
        products += KERNEL_CHUNK * (2 * keys + 2 * columns) + keys * columns
    return 2 * rows * products


@register_flop_formula(torch.ops.sp.local_attention_kernel_backward, get_raw=True)
def attention_kernel_backward_flops(grad_out: Any, grad_state: Any, *operands: Any, **_meta: Any) -> int:
    """Return the FLOPs of ``sp::local_attention_kernel_backward``: the forward again, and two products for each."""
    return 3 * attention_kernel_flops(*operands)
