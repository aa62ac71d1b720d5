"""Define what Dynamo traces in place of linear layers with quantized weights of torchao and bitsandbytes.

LinearNF4.apply(x, w)                        ->  sp.subclass_linear(x, w)
matmul_4bit(x, w, quant_state)               ->  sp.packed_linear(x, w, scales, ...)
Linear4bit.forward(module, x)                ->  the same, with casts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.packed_linear import NESTED_BLOCK
from sp_compile.lowering.scaled_linear import trace_int8_linear

from .kernel_stand_ins import STAND_INS, KernelStandIn


def _nf4_linear(x: Tensor, weight: Tensor) -> Any:
    """Compute torchao's LinearNF4, a linear layer whose weight is a tensor subclass, and is not differentiated."""
    return torch.ops.sp.subclass_linear(x, weight)


def _int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Any) -> Any:
    """Compute torchao's linear layer with products in int8, for a weight that is a plain tensor."""
    return trace_int8_linear(x, weight, bias, config)


def _compute_4bit(x: Tensor, w: Tensor, state: Any, bias: Tensor | None = None) -> Any:
    """Compute bitsandbytes' matmul_4bit, unless the weight is in its format for inference on a CPU."""
    nested = state.state2
    if getattr(state, "packing_format_for_cpu", False) or (nested is not None and nested.blocksize != NESTED_BLOCK):
        return NotImplemented
    scales = [state.absmax] if nested is None else [state.absmax, nested.absmax, nested.code, state.offset]
    shape = list(state.shape)
    return torch.ops.sp.packed_linear(x, w, scales, bias, shape, state.blocksize, state.quant_type, state.dtype)


def _forward_4bit(module: Any, x: Tensor) -> Any:
    """Compute the forward of bitsandbytes' Linear4bit, which may replace the weight, or write to `.data`.

    FSDP gathers a weight as a plain parameter. The package replaces it by one of its class with the state of the
    module. For inference on a CPU, it stores another format of the weight, with the same values.
    """
    weight, bias, dtype = module.weight, module.bias, x.dtype
    state = getattr(weight, "quant_state", None)
    if state is None:
        state = getattr(module, "quant_state", None)
    if state is None:
        return NotImplemented
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    x = x.to(module.compute_dtype or dtype)
    if bias is not None and bias.dtype != x.dtype:
        if bias.requires_grad:  # the package changes the dtype of the parameter
            return NotImplemented
        bias = bias.to(x.dtype)
    y = _compute_4bit(x, weight, state, bias)
    return y if y is NotImplemented else y.to(dtype)


STAND_INS.register("matmul_4bit", KernelStandIn(_compute_4bit))
STAND_INS.register("Linear4bit", KernelStandIn(_forward_4bit, kind=torch.nn.Module))
STAND_INS.register("LinearNF4", KernelStandIn(_nf4_linear, kind=torch.autograd.Function))
STAND_INS.register(
    "_Int8MixedPrecisionTrainingLinearFunction", KernelStandIn(_int8_linear, kind=torch.autograd.Function)
)
