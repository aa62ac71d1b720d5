"""Functional attention on simulated ranks whose blocks run as on the absent GPU; exchanges and merges use the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from support.attention.functional_cases import Case, dense, simulated
from support.cuda.borrowed import Seen, Watch, borrow, give_back
from torch import Tensor

from sp_compile.lowering.attention import attend as bodies
from sp_compile.lowering.attention.attend_parts import attend_backward_parts
from sp_compile.lowering.attention.op_args import LocalArgs

Body = Callable[..., tuple[Tensor, ...]]


@contextmanager
def blocks_on_gpu() -> Iterator[list[Seen]]:
    """Run the blocks of `LocalArgs` on borrowed tensors, and yield the recorded operations of each block."""
    seen: list[Seen] = []

    def run(body: Body, args: LocalArgs, *given: Any) -> tuple[Tensor, ...]:
        held = args.with_tensors([borrow(x) for x in args.tensors()])
        held = replace(held, pieces=args.make_pieces())  # of the host
        operands = [borrow(x) for x in given if isinstance(x, Tensor)]
        rest = [x for x in given if not isinstance(x, Tensor)]
        with Watch() as watch:
            out = body(*operands, *held.to_flat(), *rest)
        seen.append(watch.seen)
        return tuple(map(give_back, out))

    def attend(
        self: LocalArgs, q: Tensor, k: Tensor, v: Tensor, k_span: Any, after: Any = None, filled: bool = True
    ) -> Any:
        return run(bodies.attend, replace(self, k_span=k_span), q, k, v, None, filled)

    def grads(
        self: LocalArgs, given: Any, q: Tensor, k: Tensor, v: Tensor, k_span: Any, mask_grad: bool, after: Any = None,
        packed: str = "",
    ) -> Any:  # fmt: skip
        grad, out, lse = given
        return run(
            bodies.attend_backward, replace(self, k_span=k_span), grad, q, k, v, out, lse, mask_grad, None, packed
        )

    def grad_parts(
        self: LocalArgs, given: Any, q: Tensor, k: Tensor, v: Tensor, k_span: Any, mask_grad: bool, narrow: bool,
        after: Any = None,
    ) -> Any:  # fmt: skip
        grad, out, lse = given
        return run(attend_backward_parts, replace(self, k_span=k_span), grad, q, k, v, out, lse, mask_grad, narrow)

    with (
        mock.patch.object(LocalArgs, "attend", attend),
        mock.patch.object(LocalArgs, "grads", grads),
        mock.patch.object(LocalArgs, "grad_parts", grad_parts),
    ):
        yield seen


def simulated_on_gpu(op: str, case: Case, n: int) -> tuple[list[Tensor], list[Tensor], set[str], int]:
    """Return the results of n ranks and of a single device in float64, the kernels that ran, and other products."""
    with blocks_on_gpu() as seen:
        found = simulated(op, case, n)
    return found, dense(case), {name for one in seen for name in one.kernels}, sum(one.products for one in seen)
