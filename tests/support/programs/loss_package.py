"""Packages with fused losses of the names, signatures and structure of Liger-Kernel, TRL, fla and cut_cross_entropy.

They loop over chunks of rows, write into buffers, compute gradients explicitly, and Dynamo cannot trace their kernels, as in
the packages. They compute in the dtype of their operands.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CHUNK = 5  # rows
CALLS: list[str] = []  # names of the functions that ran


@torch.compiler.disable
def liger_kernel(z: Tensor, y: Tensor, weight: Tensor | None, count: int, total: float, options: dict[str, Any]) -> Any:
    """Return losses, z-losses and predicted tokens of rows, and write the gradients of the losses over the logits."""
    softcap, smoothing = options["softcap"], options["label_smoothing"]
    inner = z if softcap is None else softcap * torch.tanh(z / softcap)
    valid, vocab = y != options["ignore_index"], z.shape[1]
    target = torch.nn.functional.one_hot(y.where(valid, 0), vocab).to(z.dtype)
    weights = torch.ones(vocab, dtype=z.dtype) if weight is None else weight
    target = (1 - smoothing) * target * weights + smoothing / vocab * weights
    if smoothing == 0 or weight is None:
        mass = target.sum(-1)
    else:
        mass = (1 - smoothing) * weights[y.where(valid, 0)] + smoothing / vocab * weights.sum()
    lse = inner.logsumexp(-1)
    divisors = (total, count) if options["reduction"] == "mean" else (1, 1)
    loss = (lse * mass - (target * inner).sum(-1)) / divisors[0]
    z_loss = options["lse_square_scale"] * lse**2 / divisors[1]
    p = (inner - lse[:, None]).exp()
    grad = (p * mass[:, None] - target) / divisors[0]
    grad += 2 * options["lse_square_scale"] * lse[:, None] * p / divisors[1]
    if softcap is not None:
        grad *= 1 - (inner / softcap) ** 2
    z.copy_(grad * valid[:, None])
    return (loss + z_loss) * valid, z_loss * valid, inner.argmax(-1).where(valid, -1)


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
    ) -> Any:
        CALLS.append("LigerFusedLinearCrossEntropyFunction")
        names = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")
        options = dict(zip(names, (ignore_index, lse_square_scale, label_smoothing, reduction, softcap)))
        grad_input, grad_weight = torch.zeros_like(_input), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        losses, z_losses, right = (_input.new_zeros(len(target)) for _ in range(3))
        valid = target != ignore_index
        count = max(int(valid.sum().item()), 1)
        total = count if ce_weight is None else ce_weight[target[valid]].sum().item()
        for start in range(0, len(target), CHUNK):
            rows = slice(start, start + CHUNK)
            z = _input[rows] @ weight.t()
            if bias is not None:
                z = z + bias
            scales = torch.ones_like(losses[rows])
            if use_token_scaling:
                inner = z if softcap is None else softcap * torch.tanh(z / softcap)
                scales = inner.softmax(-1).gather(-1, target[rows].clamp(min=0)[:, None])[:, 0] * valid[rows]
            loss, z_loss, best = liger_kernel(z, target[rows], ce_weight, count, total, options)
            z *= scales[:, None]
            losses[rows], z_losses[rows] = loss * scales, z_loss * scales
            right[rows] = ((best == target[rows]) & valid[rows]).to(z.dtype)
            grad_input[rows] = z @ weight
            grad_weight += z.t() @ _input[rows]
            if grad_bias is not None:
                grad_bias += z.sum(0)
        ctx.save_for_backward(grad_input, grad_weight, grad_bias)
        accuracy = right.sum() / count if return_token_accuracy else None
        return losses.sum(), z_losses.sum() if return_z_loss else None, accuracy

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_output2: Any, grad_output3: Any) -> Any:
        grads = [None if x is None else x * grad_output for x in ctx.saved_tensors]
        return grads[0], grads[1], None, grads[2], *(None,) * 10


class LigerCrossEntropyFunction(torch.autograd.Function):
    """An early version: two results, and fewer arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        target: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        return_z_loss: bool = False,
    ) -> Any:
        CALLS.append("LigerCrossEntropyFunction")
        names = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")
        options = dict(zip(names, (ignore_index, lse_square_scale, label_smoothing, "mean", None)))
        count = max(int((target != ignore_index).sum().item()), 1)
        z = _input.detach().clone()
        loss, z_loss, _ = liger_kernel(z, target, None, count, count, options)
        ctx.save_for_backward(z)
        return loss.sum(), z_loss.sum() if return_z_loss else None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_output2: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_output, *(None,) * 5


class FusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        num_chunks: int = 8,
        reduction: str = "mean",
        use_l2warp: bool = False,
    ) -> Any:
        CALLS.append("FusedLinearCrossEntropyFunction")
        call = None, ignore_index, 0.0, label_smoothing, reduction
        with torch.enable_grad():
            leaves = [y.detach().requires_grad_() for y in (x, weight) + (() if bias is None else (bias,))]
            shift = None if bias is None else leaves[2] * logit_scale
            loss = LigerFusedLinearCrossEntropyFunction.apply(leaves[0] * logit_scale, leaves[1], target, shift, *call)[
                0
            ]
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        grads = [x * do for x in ctx.saved_tensors] + [None]
        return grads[0], None, grads[1], grads[2], *(None,) * 6


class FusedLinearCrossEntropyLoss(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return FusedLinearCrossEntropyFunction.apply(x.view(-1, x.shape[-1]), target.view(-1), weight, bias)


@torch.compiler.disable
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    filter_eps: float | str | None = "auto",
    impl: str = "cce",
) -> Tensor:
    CALLS.append("linear_cross_entropy")
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    z = torch.nn.functional.linear(e, c, bias).flatten(0, -2)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = torch.nn.functional.cross_entropy(z, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


class ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> Any:
        CALLS.append("ChunkedLogProbFunction")
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (hidden, weight, *([] if bias is None else [bias]))]
            parts = []
            for start in range(0, len(targets), CHUNK):
                z = torch.nn.functional.linear(leaves[0][start : start + CHUNK], *leaves[1:]).float() * logit_scale
                cap = final_logit_softcapping
                z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
                logs, y = z.log_softmax(-1), targets[start : start + CHUNK, None]
                p, chosen = logs.exp(), logs.gather(-1, y)[:, 0]
                others = (p * p).sum(-1).log().detach(), z.mean(-1).detach(), z.argmax(-1) == y[:, 0]
                parts.append((chosen, -(p * logs).sum(-1), *others))
            results = [torch.cat(part) for part in zip(*parts)]
        ctx.differentiated, ctx.leaves, ctx.has_bias = results[:2], leaves, bias is not None
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        returned = [results[0].detach(), *(x.detach() if n in outputs else None for n, x in zip(names, results[1:]))]
        ctx.mark_non_differentiable(*(x for x in returned[2:] if x is not None))
        ctx.set_materialize_grads(False)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> Any:
        pairs = [(x, g) for x, g in zip(ctx.differentiated, (grad_log_probs, grad_entropy)) if g is not None]
        grads = torch.autograd.grad([x for x, _ in pairs], ctx.leaves, [g for _, g in pairs])
        return grads[0], grads[1], grads[2] if ctx.has_bias else None, *(None,) * 6


MODULES = {  # names of packages with which their functions are found
    "liger_kernel_of_tests": (LigerFusedLinearCrossEntropyFunction, LigerCrossEntropyFunction),
    "fla_losses_of_tests": (FusedLinearCrossEntropyFunction, FusedLinearCrossEntropyLoss),
    "cut_cross_entropy_of_tests": (linear_cross_entropy,),
    "trl_of_tests": (ChunkedLogProbFunction,),
}


def install() -> None:
    """Add the functions to modules whose names are those of the packages."""
    for name, functions in MODULES.items():
        module = ModuleType(name)
        for function in functions:
            function.__module__ = name
            setattr(module, function.__name__, function)
        sys.modules[name] = module


install()
