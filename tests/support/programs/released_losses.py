"""Compare the stand-ins of fused losses with the released packages: `python -m support.programs.released_losses liger`.

Kernels of Liger-Kernel run in Triton's interpreter, with TRITON_INTERPRET=1, on a CPU. cut_cross_entropy has an
implementation without kernels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_compile.passes.capture.stand_ins.loss_stand_ins import (
    _cross_entropy_of_logits,
    _cut_cross_entropy,
    _linear_cross_entropy,
)

ROWS, WIDTH, VOCAB = 6, 8, 11
TARGETS = torch.tensor([1, 2, -100, 4, 5, 10])
# The arguments of Liger's functions that follow the target, in their order.
DEFAULTS: dict[str, Any] = {
    **{"weight": None, "ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean"},
    **{"softcap": None, "return_z_loss": False, "return_token_accuracy": False, "return_predicted_tokens": False},
}
ALL_RETURNED = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
CASES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"lse_square_scale": 1e-2, "softcap": 3.0, **ALL_RETURNED},
    {"weight": torch.linspace(0.5, 1.5, VOCAB)},
    {"weight": torch.linspace(0.5, 1.5, VOCAB), "label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 3.0},
]


class Number(float):
    """A number that Triton's interpreter passes to kernels as it is, with the method `to` of Triton's scalars."""

    def to(self, dtype: Any) -> Number:
        return self


def item(x: Tensor, original: Callable[[Tensor], Any] = Tensor.item) -> Any:
    value = original(x)
    return Number(value) if isinstance(value, float) else value


def assert_equal_steps(
    found: Callable[..., Any], expected: Callable[..., Any], *shapes: tuple[int, ...], words: object
) -> None:
    """Compare results and gradients of two functions of tensors."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    steps = []
    for function in (found, expected):
        leaves = [x.clone().requires_grad_() for x in values]
        results = function(*(1 * leaf for leaf in leaves))  # a kernel may write to its operands
        results = results if isinstance(results, tuple) else (results,)
        steps.append([*results, *torch.autograd.grad(results[0].sum(), leaves)])
    for one, other in zip(*steps, strict=True):
        assert (one is None) == (other is None), words
        if one is not None:
            torch.testing.assert_close(one.float(), other.float().view(one.shape), rtol=1e-5, atol=1e-6, msg=str(words))


def compare_liger() -> None:
    import triton.language as tl
    from liger_kernel.ops import cross_entropy
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    for case in CASES:
        options = {**DEFAULTS, **case}
        as_numbers = {name: Number(x) if isinstance(x, float) else x for name, x in options.items()}

        def of_liger(logits: Tensor, values: Any = as_numbers) -> Any:
            return LigerCrossEntropyFunction.apply(logits, TARGETS, *values.values())

        def of_stand_in(logits: Tensor, options: Any = options) -> Any:
            return _cross_entropy_of_logits(logits, TARGETS, **options)

        # The interpreter has no tanh of CUDA's library, which `softcap` needs.
        tanh = mock.patch.object(cross_entropy, "tanh", lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
        with tanh, mock.patch.object(Tensor, "item", item):
            assert_equal_steps(of_stand_in, of_liger, (ROWS, VOCAB), words=case)

    def fused(h: Tensor, w: Tensor, b: Tensor) -> Any:
        return LigerFusedLinearCrossEntropyFunction.apply(h, w, TARGETS, b)

    def stand_in(h: Tensor, w: Tensor, b: Tensor) -> Any:
        return _linear_cross_entropy(h, w, TARGETS, b)

    assert_equal_steps(stand_in, fused, (ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,), words="fused")


def compare_cut() -> None:
    from cut_cross_entropy import linear_cross_entropy

    torch.compiler.set_stance("force_eager")
    targets = TARGETS.repeat(2, 1)
    for softcap, reduction, shift in itertools.product((None, 3.0), ("mean", "sum", "none"), (False, True)):
        options = {"softcap": softcap, "reduction": reduction, "shift": shift}

        def of_package(e: Tensor, c: Tensor, options: Any = options) -> Any:
            return linear_cross_entropy(e, c, targets, impl="torch_compile", **options)

        def of_stand_in(e: Tensor, c: Tensor, options: Any = options) -> Any:
            return _cut_cross_entropy(e, c, targets, **options)

        assert_equal_steps(of_stand_in, of_package, (2, ROWS, WIDTH), (VOCAB, WIDTH), words=options)


if __name__ == "__main__":
    {"liger": compare_liger, "cut": compare_cut}[sys.argv[1]]()
