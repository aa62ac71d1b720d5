"""Make Dynamo mark the ops of each torch.associative_scan(combine_mode="generic").

Such a scan has no op: it is Python code, which Dynamo unrolls into a tree of combinations. With this stand-in the ops
are the same, for all backends, and `node.meta` has a mark of the call that they belong to (`find_scan_calls`).

torch's operator for combine_mode="pointwise" is no alternative: Dynamo raises an error for a combine function that is
not pointwise (a product of matrices), reads a parameter, or has a graph break.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from sp_compile.lowering import torch_compat
from sp_compile.lowering.torch_compat import generic_associative_scan, wrap_combine_fn_flat
from sp_compile.passes.graph.node_info import SCAN_CALL

# A copy of torch's function, in place of which Dynamo would trace `unroll_scan` again.
_unroll = FunctionType(
    generic_associative_scan.__code__,
    generic_associative_scan.__globals__,
    argdefs=generic_associative_scan.__defaults__,
)
_numbers = itertools.count()


@torch.compiler.assume_constant_result  # called while Dynamo traces
def _number_call() -> str:
    """Return a new mark of a call, a string because Dynamo makes symbols of integers that change."""
    return str(next(_numbers))


def unroll_scan(
    operator: Callable[..., Any], leaves: Sequence[Tensor], dim: int = 0, additional_inputs: Sequence[Any] = ()
) -> list[Tensor]:
    """Compute torch's generic_associative_scan; in calls of torch.associative_scan, with marked ops.

    There the operator maps the user's function over the rows by vmap, which hides the number of rows from it: all
    levels of the tree combine rows by the same ops.
    """
    if getattr(operator, "func", None) is not wrap_combine_fn_flat:  # not called by torch.associative_scan
        return _unroll(operator, leaves, dim, additional_inputs)
    with annotate({SCAN_CALL: _number_call()}):
        return _unroll(operator, leaves, dim, additional_inputs)


torch_compat.trace_in_place_of(generic_associative_scan, unroll_scan)
