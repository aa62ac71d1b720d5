"""Define ``sp::scaled_linear``, torchao's products in float8 and int8, and ``sp::extreme``, a maximum over all ranks.

    matmul_with_hp_or_float8_args.apply(x, w.t(), ...)   ->   scale = extreme(|x|);  scaled_linear(x, w.t(), scale)

torchao divides a tensor by its largest value before it casts it to float8 or int8: by that of the complete tensor
(tensorwise), or of each row or column (axiswise; always in int8). A maximum over rows is one over the rows of all
ranks. Those of x are ops of the graph; those of the gradient are in the backward of the product. Padded rows do not
change a maximum: they repeat valid rows, and those of a gradient are zero.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import torch_compat
from .base.frames import FrameArg
from .base.library import composite
from .base.registry import ProgramTable
from .comm.communicator import current_communicator


class Float8Config(NamedTuple):
    """Settings of a linear layer of torchao whose products are in float8."""

    products: Any  # LinearMMConfig
    casts: Any  # Float8LinearConfig

    def cast(
        self, x: Tensor, config: Any, role: Any, dim: int, scale: Tensor | None = None, n: int = 1, group: str = ""
    ) -> Any:
        """Return a matrix in float8 as torchao's tensor subclass, or x itself if its cast is disabled.

        Args:
            x: Matrix.
            config: torchao's CastConfig of x.
            role: torchao's GemmInputRole of x.
            dim: Dim over which axiswise scales take the maximum.
            scale: Scales; None to compute them.
            n: Number of ranks that share the rows: x has those of this rank.
            group: Name of their group.
        """
        from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        # FSDP may have cast the weight before it was gathered.
        if _is_disabled(config) or tensor_already_casted_to_fp8(x):
            return x
        axiswise_dim = get_maybe_axiswise_dim(dim, config.scaling_granularity)
        if scale is None:
            with torch.no_grad():
                largest = x.abs().amax() if axiswise_dim is None else x.abs().amax(axiswise_dim, keepdim=True)
                # -1: a maximum over each row, and a rank has complete rows. All others include rows of other ranks.
                if axiswise_dim != -1:
                    largest = _max_of_ranks(largest, n, group)
            scale = amax_to_scale(largest, config.target_dtype, self.casts.round_scales_to_power_of_2)
        return hp_tensor_and_scale_to_float8(x, scale, config.target_dtype, self.products, role, axiswise_dim)

    def multiply(self, x: Tensor, w_t: Tensor, scale: Tensor | None, n: int) -> Tensor:
        """Return the product of x (rows, K) and w_t (K, N), after casts; `scale` is that of x."""
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        config = self._with_padding(n)
        left = config.cast(x, self.casts.cast_config_input, Role.INPUT, dim=-1, scale=scale)
        right = config.cast(w_t, self.casts.cast_config_weight, Role.WEIGHT, dim=0)
        return torch.mm(left, right)

    def multiply_gradients(
        self, grad: Tensor, x: Tensor, w_t: Tensor, grad_scale: Tensor | None, needs: Sequence[bool], n: int, group: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of w_t, of which each rank has a summand; None for one that is not needed.

        The gradient of the result is cast twice: each product has its own settings, and sums over another dim.
        """
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        casts, cast = self.casts, self._with_padding(n).cast
        for_x = cast(grad, casts.cast_config_grad_output, Role.GRAD_OUTPUT, dim=-1, n=n, group=group)
        right = cast(w_t, casts.cast_config_weight_for_grad_input, Role.WEIGHT, dim=-1)
        x_grad = torch.mm(for_x, right.t())
        config_for_w = casts.cast_config_grad_output_for_grad_weight
        for_w = cast(grad, config_for_w, Role.GRAD_OUTPUT, dim=0, n=n, group=group)
        if grad_scale is not None and grad_scale.ndim:  # of each column
            grad_scale = grad_scale.unsqueeze(0)
        left = cast(x, casts.cast_config_input_for_grad_weight, Role.INPUT, dim=0, scale=grad_scale)
        return x_grad, torch.mm(for_w.t(), left).t()

    def _with_padding(self, n: int) -> "Float8Config":
        """Return settings for the rows of one of n ranks.

        Float8 products require an aligned inner dim. In the product for the gradient of w it is the dim of the rows,
        whose number may be unaligned on a rank although it is aligned in the full sequence.
        """
        if n == 1:
            return self
        padded = self.products.grad_weight._replace(pad_inner_dim=True)
        return self._replace(products=self.products._replace(grad_weight=padded))


class Int8Config(NamedTuple):
    """Settings of a linear layer of torchao whose products are in int8, with a scale for each row and column."""

    output: bool  # True for a product in int8; False in the dtype of x
    grad_input: bool  # as `output`, for the gradient of x
    grad_weight: bool  # as `output`, for the gradient of the weight

    def multiply(self, x: Tensor, w_t: Tensor, scale: Tensor | None, n: int) -> Tensor:
        """Return the product of x (rows, K) and w_t (K, N); its scales are of rows and of the weight."""
        w_t = w_t.to(x.dtype)
        return _multiply_in_int8(x, w_t) if self.output else x @ w_t

    def multiply_gradients(
        self, grad: Tensor, x: Tensor, w_t: Tensor, grad_scale: Tensor | None, needs: Sequence[bool], n: int, group: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of w_t, of which each rank has a summand; None for one that is not needed.

        The gradient of w_t sums over rows: its scales are the largest values of each column in the rows of all ranks.
        Those of x are `grad_scale`, (K,).
        """
        from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

        x_grad = w_t_grad = None
        if needs[0]:
            w = w_t.to(x.dtype).t()
            x_grad = _multiply_in_int8(grad, w) if self.grad_input else grad @ w
        if needs[1] and self.grad_weight:
            assert grad_scale is not None  # `trace_int8_linear` computes it if the weight requires a gradient
            scales = [largest / 127 for largest in (grad_scale, _max_of_ranks(grad.abs().amax(0), n, group))]
            left, right = (_cast_columns(*pair) for pair in zip((x, grad), scales, strict=True))
            w_t_grad = scaled_int8_mm(left.t().contiguous(), right.t().contiguous().t(), *scales)
        elif needs[1]:
            w_t_grad = x.t() @ grad
        return x_grad, w_t_grad


def _multiply_in_int8(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of x (rows, K) and y (K, N) in int8, with scales of the rows of x and of the columns of y."""
    from torchao.prototype.quantized_training import quantize_int8_rowwise
    from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

    left, row_scales = quantize_int8_rowwise(x)
    right, column_scales = quantize_int8_rowwise(y.t())
    scales = row_scales.contiguous(), column_scales.contiguous()
    return scaled_int8_mm(left.contiguous(), right.contiguous().t(), *scales)


def _cast_columns(x: Tensor, scale: Tensor) -> Tensor:
    """Return x (rows, K) in int8, with a scale for each column, as torchao's `quantize_int8_rowwise` of x.t() does."""
    return (x.float() * (1.0 / scale.float().clip(1e-12))).round().clip(-128, 127).to(torch.int8)


CONFIGS: ProgramTable[Float8Config | Int8Config] = ProgramTable("linear layers in float8 and int8")


def register_config(config: Float8Config | Int8Config) -> str:
    """Register the settings of a linear layer, and return their name, which is equal in all processes."""
    return CONFIGS.register(str(tuple(config)), lambda name: config)


def _max_of_ranks(x: Tensor, n: int, group: str) -> Tensor:
    """Return the elementwise maximum of the tensors of the ranks."""
    return x if n == 1 else current_communicator().all_gather(x.unsqueeze(0), n, group).amax(0)


@composite(
    "extreme(Tensor x, int[] dims, bool keepdim, int dim, SymInt[]? frame, int n, str group) -> Tensor",
    moves=("all_gather", ""),
)
def extreme(x: Tensor, dims: list[int], keepdim: bool, dim: int, frame: FrameArg | None, n: int, group: str) -> Tensor:
    """Return the maximum over some dims, of which `dim` is sharded: Shard(dim) -> replicated.

    Shapes: any -> without the dims, or with size 1. Bytes: (n - 1) * bytes(result). Not differentiable. Only the
    sharding rule reads `dim` and `frame`.
    """
    with torch.no_grad():
        return _max_of_ranks(x.amax(dims, keepdim), n, group)


@composite(
    "scaled_linear(Tensor x, Tensor w_t, Tensor? scale, Tensor? grad_scale, str name, int n=1, str group='') -> Tensor",
    moves=("", "all_gather"),
    padded="as given",
)
def scaled_linear(
    x: Tensor, w_t: Tensor, scale: Tensor | None, grad_scale: Tensor | None, name: str, n: int = 1, group: str = ""
) -> Tensor:
    """Multiply x and w_t after a cast to float8, as torchao's `matmul_with_hp_or_float8_args` does, or to int8.

    Shapes: x (..., K), w_t (K, N) -> (..., N). Bytes: none. Backward: the products of torchao, whose gradients of w_t
    are of the rows of a rank; the scales of the gradient are maxima over all ranks.

    Args:
        x: Rows, of all ranks or of one.
        w_t: The weight, replicated; a plain tensor or one of a subclass of torchao.
        scale: Scale of x (); None for scales of rows, or if x is not cast.
        grad_scale: Scale of x for the gradient of w_t, (), or of each column (K); None if x is not cast. In int8 the
            largest values of the columns, of which scales are a fraction.
        name: Result of `register_config`.
        n: Number of ranks.
        group: Name of their group.
    """
    return _ScaledLinear.apply(x, w_t, scale, grad_scale, CONFIGS[name], n, group)


@composite("subclass_linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", padded="as given")
def subclass_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call a linear layer whose weight is a tensor subclass, such as a quantized one, by the method of its class.

    Shapes: x (..., K), w (N, K) -> (..., N). Bytes: none. Backward: that of the class.
    """
    with torch_compat.enable_torch_function():  # disabled inside of an op
        return torch.nn.functional.linear(x, w, bias)


class _ScaledLinear(torch.autograd.Function):
    """torchao's product, with given scales of x, and maxima over the ranks for those of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_t: Tensor, scale: Any, grad_scale: Any, config: Any, n: int, group: str
    ) -> Tensor:
        """Return the product of x and w_t."""
        if isinstance(config, Int8Config):
            w_t = getattr(w_t, "_data", w_t)  # torchao's subclass; here, so that autograd records the subclass
        ctx.save_for_backward(x, w_t, grad_scale)
        ctx.config, ctx.ranks = config, (n, group)
        return config.multiply(x.reshape(-1, x.shape[-1]), w_t, scale, n).reshape(*x.shape[:-1], w_t.shape[-1])

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of w_t, of which each rank has a summand."""
        x, w_t, grad_scale = ctx.saved_tensors
        rows, x_rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs = ctx.needs_input_grad[:2]
        x_grad, w_t_grad = ctx.config.multiply_gradients(rows, x_rows, w_t, grad_scale, needs, *ctx.ranks)
        x_grad = None if x_grad is None else x_grad.reshape(x.shape)
        return x_grad, w_t_grad, None, None, None, None, None  # the other arguments of `forward` have no gradient


def _is_disabled(config: Any) -> bool:
    """Return True if torchao's CastConfig leaves values in their dtype."""
    return config.scaling_type.name == "DISABLED"


def trace_scaled_linear(x: Tensor, w_t: Tensor, products: Any, casts: Any) -> Any:
    """Compute the scales of x and call ``sp::scaled_linear``, in place of torchao's Function.

    Args:
        x: (..., K), no tensor subclass.
        w_t: (K, N), no tensor subclass.
        products: torchao's LinearMMConfig.
        casts: torchao's Float8LinearConfig.
    """
    from torchao.float8.float8_utils import amax_to_scale

    with torch.no_grad():
        magnitudes = x.detach().abs()

        def compute_scale(config: Any, by_column: bool) -> Tensor | None:
            """Return the scale of x, (), or of each of its columns, (K,).

            None without a cast, and if each row has its own scale: a rank computes the scales of its rows in the
            product.

            Args:
                config: torchao's CastConfig of x.
                by_column: True for the product that sums over rows, in which axiswise scales are those of columns.
            """
            is_axiswise = config.scaling_granularity.name == "AXISWISE"
            if _is_disabled(config) or (is_axiswise and not by_column):
                return None
            dims = [*range(x.ndim - 1)] if is_axiswise else [*range(x.ndim)]  # of the rows, or all
            largest = magnitudes.amax(dims)
            return amax_to_scale(largest, config.target_dtype, casts.round_scales_to_power_of_2)

        x_cast, grad_cast = casts.cast_config_input, casts.cast_config_input_for_grad_weight
        scale = compute_scale(x_cast, by_column=False)
        is_shared = scale is not None and x_cast == grad_cast  # one scale of all of x serves both products
        grad_scale = scale if is_shared else compute_scale(grad_cast, by_column=True)
    return torch.ops.sp.scaled_linear(x, w_t, scale, grad_scale, register_config(Float8Config(products, casts)))


@torch.compiler.assume_constant_result  # Dynamo traces the caller
def _register_int8(*settings: bool) -> str:
    """Register settings of `Int8Config`, and return their name."""
    return register_config(Int8Config(*settings))


def trace_int8_linear(x: Tensor, w: Tensor, bias: Tensor | None, config: Any) -> Any:
    """Call ``sp::scaled_linear`` for a linear layer whose products are in int8, in place of torchao's Function.

    Args:
        x: (..., K), no tensor subclass.
        w: (N, K).
        bias: (N), or None.
        config: torchao's Int8MixedPrecisionTrainingConfig.
    """
    largest = None
    if config.grad_weight and w.requires_grad and torch.is_grad_enabled():
        with torch.no_grad():
            magnitudes = x.detach().abs()
            largest = magnitudes.amax([*range(x.ndim - 1)]) if x.ndim > 1 else magnitudes
    name = _register_int8(config.output, config.grad_input, config.grad_weight)
    y = torch.ops.sp.scaled_linear(x, w.t(), None, largest, name)
    return y if bias is None else y + bias
