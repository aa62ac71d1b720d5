"""Define what Dynamo traces in place of losses of packages that compute the head and the loss in chunks of rows.

    liger_fused_linear_cross_entropy(h, w, y)  ->  F.cross_entropy(F.linear(h, w), y)

The functions of TRL, Liger-Kernel, flash-linear-attention and cut_cross_entropy compute the same values as a linear
layer and a loss, without logits of all rows. Their loops write into buffers or call Triton kernels, which Dynamo does
not trace. The functions of this file are the linear layer and the loss in plain torch, whose rows are sharded. Their
linear layer is marked, so that tiles="auto" runs it in tiles, as the original runs it in chunks.

Statistics are computed in float32, or float64 for such logits, as in the kernels. Ranks divide the sum over all tokens
by the number of all tokens that are not ignored; without any, the loss is 0. A function returns NotImplemented for
options that it does not support: the package's function then runs instead, uncompiled (`kernel_stand_ins.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.traceback import annotate

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.passes.graph.node_info import IN_CHUNKS

from .kernel_stand_ins import STAND_INS, KernelStandIn

IGNORED = -100
LOSS_REDUCTIONS = ("none", "sum", "mean")


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits, by a linear layer that runs in tiles; the weight and the bias are cast to the hidden dtype."""
    with annotate({IN_CHUNKS: True}):
        return F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits if softcap is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _log_prob_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> Any:
    """Compute TRL's ChunkedLogProbFunction for hidden (N, H), weight (V, H) and targets (N); statistics are float32.

    Returns the log-probabilities of the targets, and entropy, log(sum p^2), the mean logit, and True where the target
    is the most likely token; each (N), and None if `outputs` does not contain it. Only the first two have gradients.
    """
    logits = _cap(_project(hidden, weight, bias).float() * logit_scale, final_logit_softcapping) / temperature
    log_z = logits.logsumexp(-1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_z
    entropy = squares = mean = is_top1 = None
    if "entropy" in outputs:
        entropy = log_z - ((logits - log_z.unsqueeze(-1)).exp() * logits).sum(-1)
    if "log_sum_sq_probs" in outputs:
        squares = ((2 * logits).logsumexp(-1) - 2 * log_z).detach()
    if "mean_logits" in outputs:
        mean = logits.mean(-1).detach()
    if "is_top1" in outputs:
        is_top1 = logits.argmax(-1) == targets
    return log_probs, entropy, squares, mean, is_top1


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    use_token_scaling: bool = False,
) -> Any:
    """Compute Liger's cross-entropy of logits (N, V) and targets (N), with a weight for each of V classes.

    Returns (loss, z-loss, accuracy, predicted tokens), numbers or (N) with reduction="none"; predicted tokens are (N).
    The loss includes the z-loss. An entry whose `return_...` is False is None.
    """
    if reduction not in LOSS_REDUCTIONS:
        return NotImplemented
    logits = _cap(logits.to(accumulation_dtype(logits.dtype)), softcap)
    is_valid = target != ignore_index
    num_valid = is_valid.sum()
    count = num_valid.clamp(min=1)  # without a valid target the loss is 0
    total_weight = count  # the divisor of a mean: the number of valid targets, or the sum of their classes' weights
    if weight is not None:
        total_weight = torch.where(num_valid > 0, (weight[target.where(is_valid, 0)] * is_valid).sum(), 1)
    losses = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    z_losses = lse_square_scale * logits.logsumexp(-1).square() * is_valid if lse_square_scale else None
    if use_token_scaling:  # by the probability of the target, as a constant
        scales = (-F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")).exp().detach()
        losses, z_losses = losses * scales, None if z_losses is None else z_losses * scales

    def reduce(rows: Tensor, divisor: Tensor) -> Tensor:
        """Return the rows, their sum, or their mean."""
        if reduction == "none":
            return rows
        return rows.sum() if reduction == "sum" else rows.sum() / divisor

    loss = reduce(losses, total_weight)
    z_loss = accuracy = predicted = None
    if z_losses is not None:
        z_loss = reduce(z_losses, count)
        loss = loss + z_loss
    if return_z_loss:
        z_loss = torch.zeros_like(loss) if z_loss is None else z_loss.detach()
    if return_token_accuracy or return_predicted_tokens:
        best = logits.argmax(-1)
        is_right = ((best == target) & is_valid).to(losses.dtype)
        accuracy = is_right if reduction == "none" else is_right.sum() / count
        predicted = best.where(is_valid, -1)
    returned = return_z_loss, return_token_accuracy, return_predicted_tokens
    others = (value if is_returned else None for value, is_returned in zip((z_loss, accuracy, predicted), returned))
    return loss, *others


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute Liger's fused head and cross-entropy; ce_weight is the weight of each class."""
    return _cross_entropy(_project(hidden, weight, bias), target, ce_weight, **options)


def _cross_entropy_of_logits(logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Compute Liger's cross-entropy, whose losses have the dtype of the logits."""
    results = _cross_entropy(logits, target, **options)
    if results is NotImplemented:
        return NotImplemented
    return tuple(x if x is None or not x.is_floating_point() else x.to(logits.dtype) for x in results)


def _linear_cross_entropy_of_fla(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 0.0,
) -> Any:
    """Compute flash-linear-attention's fused head and cross-entropy.

    Not supported: `use_l2warp`, a penalty that changes only the gradient, and unknown reductions.
    """
    if use_l2warp or reduction not in LOSS_REDUCTIONS:
        return NotImplemented
    logits = _project(hidden, weight, bias)
    logits = logits.to(accumulation_dtype(logits.dtype)) * logit_scale
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return _cross_entropy(logits, target, softcap=logit_softcapping, **options)[0]


def _cut_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
) -> Any:
    """Compute cut_cross_entropy's loss for e (..., H), c (V, H) and targets (...); row i has the target i + shift."""
    distance = int(shift)
    if distance < 0 or reduction not in LOSS_REDUCTIONS:
        return NotImplemented
    if distance:
        e, targets = e[..., :-distance, :], targets[..., distance:]
    logits = _project(e, c, bias).flatten(0, -2)
    options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction}
    loss = _cross_entropy(logits, targets.flatten(), **options)[0]
    return loss.view(targets.shape) if reduction == "none" else loss


def _selects_rows(device: torch.device) -> bool:
    """Return False in place of TRL's `_use_triton`, so that TRL scores all rows and masks those without a target.

    If it is True, TRL selects the rows with a target first, whose number depends on the data.
    """
    return False


CROSS_ENTROPY_OPTIONS = frozenset(
    "ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss return_token_accuracy "
    "return_predicted_tokens".split()
)

for _name, _compute, _options in (
    ("ChunkedLogProbFunction", _log_prob_statistics, frozenset[str]()),
    ("LigerFusedLinearCrossEntropyFunction", _linear_cross_entropy, CROSS_ENTROPY_OPTIONS | {"use_token_scaling"}),
    ("LigerCrossEntropyFunction", _cross_entropy_of_logits, CROSS_ENTROPY_OPTIONS | {"weight"}),
    ("FusedLinearCrossEntropyFunction", _linear_cross_entropy_of_fla, frozenset[str]()),
):
    STAND_INS.register(_name, KernelStandIn(_compute, _options, torch.autograd.Function))

STAND_INS.register("linear_cross_entropy", KernelStandIn(_cut_cross_entropy))
STAND_INS.register("_use_triton", KernelStandIn(_selects_rows))
