"""Trace linear layers whose weights are tensor subclasses, such as quantized weights of torchao.

    F.linear(x, w)  with w of a tensor subclass  ->  sp.subclass_linear(x, w)

The inner tensors of a subclass are no inputs of the trace: its fake is a plain tensor of its shape, with a mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import CaptureError
from sp_compile.lowering.scaled_linear import trace_int8_linear
from sp_compile.lowering.torch_compat import pytree

MARK = "sp_subclass"  # attribute of the plain fake of an input of a tensor subclass: a Subclass
NO_WEIGHT = "a tensor subclass, which is supported as the weight of a linear layer only"
# Linear layers whose gradients are quantized with scales of all rows, by the name of the weight's class.
SCALED_LINEARS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Any], Any]] = {
    "Int8MixedPrecisionTrainingLinearWeight": trace_int8_linear
}
CAST_WEIGHT = "Float8TrainingTensor"  # the class of a weight that FSDP has cast to float8 before gathering it
# Classes of weights, by package, whose linear layer computes each row of its result, and of the gradient of its input,
# from the same row alone; the gradient of the weight is a sum over rows. Settings of `_is_scaled_by_all_rows` except
# some weights. The method of any other class may read all rows, for a scale or a statistic, so it runs unsplit.
ROW_LINEARS: dict[str, frozenset[str]] = {
    "torchao": frozenset(
        f"""
        {CAST_WEIGHT} Int8QuantizedTrainingLinearWeight Int8MixedPrecisionTrainingLinearWeight
        BitNetTrainingLinearWeight BitNetPacked2bitLinearWeight
        AffineQuantizedTensor NF4Tensor Float8Tensor MXTensor NVFP4Tensor Int8Tensor IntxUnpackedToInt8Tensor
        Int4Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4TilePackedTo4dTensor Int4OpaqueTensor
        """.split()
    )
}


class Subclass(NamedTuple):
    """Properties of an input of a tensor subclass."""

    name: str  # of the class
    config: Any = None  # settings of a layer of `SCALED_LINEARS`
    has_row_linear: bool = False  # the class is one of `ROW_LINEARS`
    is_scaled_by_all_rows: bool = False  # see `_is_scaled_by_all_rows`
    has_views: bool = True  # False if sums of the gradient over ranks are impossible, see `_has_views`


def mark_subclass(fake: Tensor, x: Tensor) -> Tensor:
    """Mark the fake of an input as that of a tensor subclass, such as a quantized weight; return it."""
    config = x.config if _has_scaled_linear(type(x)) else None
    package, name = type(x).__module__.split(".")[0], type(x).__name__
    has_row_linear = name in ROW_LINEARS.get(package, ())
    setattr(fake, MARK, Subclass(name, config, has_row_linear, _is_scaled_by_all_rows(x), _has_views(x)))
    return fake


def _has_views(x: Tensor) -> bool:
    """Return False if the class of a tensor with a gradient implements no views of the same shape.

    An op that sums the gradient over the ranks returns such a view.
    """
    if not x.requires_grad:
        return True
    try:
        with torch.no_grad():
            x.view_as(x)
    except NotImplementedError:
        return False
    return True


def reads_cast_weight(subclass: Subclass, args: tuple[Any, ...]) -> bool:
    """Return True if the operand of a subclass is a weight in float8, and the first argument a plain tensor."""
    return subclass.name == CAST_WEIGHT and not hasattr(args[0], MARK)


def _has_scaled_linear(cls: type) -> bool:
    """Return True if a class of `SCALED_LINEARS` implements F.linear.

    That of torchao 0.18 does not: it is not in its table of functions, and the layer computes in the weight's dtype.
    """
    functions = getattr(cls, "_TORCH_FN_TABLE", None)
    return cls.__name__ in SCALED_LINEARS and (
        functions is None or torch.nn.functional.linear in functions.get(cls, ())
    )


def _is_scaled_by_all_rows(x: Tensor) -> bool:
    """Return True for a weight whose linear layer casts its input with scales that several rows share.

    A rank has some of the rows. torchao computes the scale in each call (`act_quant_kwargs`), unless the weight stores
    a fixed one (`act_quant_scale`).
    """
    settings = getattr(x, "act_quant_kwargs", None)
    if settings is None or getattr(x, "act_quant_scale", None) is not None:
        return False
    if getattr(settings, "use_dynamic_per_tensor_scale", False):  # float4
        return True
    granularity: Any = getattr(settings, "granularity", None)
    if type(granularity).__name__ == "PerBlock":
        return any(size != 1 for size in granularity.block_size[:-1])
    if type(granularity).__name__ == "PerRow":  # `dim` is the dim that shares a scale
        return bool(getattr(granularity, "dim", -1) != -1)
    return granularity is not None and type(granularity).__name__ not in ("PerToken", "PerGroup")


def find_subclass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subclass | None:
    """Return the mark of the first argument of a tensor subclass; None without one."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next((getattr(x, MARK) for x in leaves if hasattr(x, MARK)), None)


def call_with_subclass(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], subclass: Subclass) -> Any:
    """Run a call with an operand of a tensor subclass: a linear layer whose rows are independent of each other.

    Args:
        target: The function.
        args: Its arguments; operands of a subclass are plain fakes.
        kwargs: Its keyword arguments.
        subclass: The mark of the operand.

    Raises:
        CaptureError: It is another call, which may depend on how the class stores its values, or the layer reads all
            rows, or may do so.
    """
    if target == "t" and subclass.name == CAST_WEIGHT:
        transposed = args[0].t()
        setattr(transposed, MARK, subclass)
        return transposed
    is_linear = target in (
        torch.nn.functional.linear, torch.ops.sp.subclass_linear, torch.ops.sp.subclass_linear.default
    )  # fmt: skip
    if is_linear:  # F.linear names its arguments input and weight, sp.subclass_linear names them x and w
        names = {"input": "x", "weight": "w"}
        kwargs = {names.get(name, name): x for name, x in kwargs.items()}
    is_weight = is_linear and not hasattr(args[0] if args else kwargs["x"], MARK)  # the input is a plain tensor
    if is_weight and subclass.config is not None:
        return _call_scaled_linear(subclass, *args, **kwargs)
    has_independent_rows = subclass.has_row_linear and not subclass.is_scaled_by_all_rows
    if is_weight and subclass.has_views and has_independent_rows:
        return torch.ops.sp.subclass_linear(*args, **kwargs)
    reason, fix = _describe_refusal(subclass) if is_weight else (NO_WEIGHT, None)
    raise CaptureError("SP229", f"{getattr(target, '__name__', target)} reads a {subclass.name}, {reason}.", fix)


def _describe_refusal(subclass: Subclass) -> tuple[str, str]:
    """Return why a linear layer with a weight of a subclass runs unsplit, and what to change."""
    if not subclass.has_row_linear:
        return (
            "a weight of a class whose linear layer may read all rows, of which a rank has only some",
            "Use one of the quantizations of docs/tiles.md, or dequantize the weight before the compiled model.",
        )
    if not subclass.has_views:
        return (
            "a weight with a gradient, whose class implements no views",
            "Dequantize the weight before the compiled model.",
        )
    return (
        "a weight with which inputs are cast by scales of several rows, of which a rank has only some",
        "Quantize with a scale for each row (granularity=PerRow()), or dequantize the weight.",
    )


def _call_scaled_linear(subclass: Subclass, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Any:
    """Run a layer of `SCALED_LINEARS`; under autocast of a GPU, its class casts all operands."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, w, bias = x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
    return SCALED_LINEARS[subclass.name](x, w, bias, subclass.config)
