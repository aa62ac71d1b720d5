"""Build the kernels of the lowering table from any inclusive scan of states, such as `blocked.py`.

x is (outer, length, inner); starts is None or bool (outer|1, length, inner|1). All are contiguous, and every size may
be 0. Results are contiguous, and no views of operands or of each other.

A state is what a combine function combines: the sum of some rows, or the affine map of a recurrence. Rows of states are
pytrees of tensors that have one size in a common dim. `lift` converts rows of operands to states in the wider dtype in
which they are combined, `lower` converts states to the results. Starts mark rows at which a segment begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Combine, Pair, compose_affine, segment_combine, select_combine
from sp_compile.lowering.scan.scan_table import ScanProblem
from sp_compile.lowering.torch_compat import pytree

DIM = 1  # the dim of the rows
Map = Callable[[Any], Any]  # a function of a pytree of rows


@dataclass(frozen=True)
class GenericKernels:
    """Kernels of a scan algorithm over states.

    `lift` converts rows of states to the dtype that is combined, `lower` converts them to the dtype that is returned.
    An algorithm that processes its rows in parts never stores all of them in the wider dtype.
    """

    # inclusive(combine, states, dim, lift, lower) returns the results and the last state, one row
    inclusive: Callable[[Combine, Any, int, Map, Map], tuple[Any, Any]]

    def can_run(self, problem: ScanProblem) -> bool:
        """Return True: every problem is supported."""
        return True

    def scan(self, problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
        """Return the scan of x in problem.result, and the total of the last segment.

        The total is (outer, inner), in problem.accumulate.
        """
        monoid, dtype, accumulate = MONOIDS[problem.op], problem.result, problem.accumulate
        if not x.shape[DIM]:
            return x.new_empty(x.shape, dtype=dtype), _constant_row(x, monoid.identity(accumulate), accumulate)[:, 0]
        x, starts = _orient(problem.reverse, x, starts)
        out, total = self._scan(monoid.combine, x, starts, _cast_to(accumulate), _cast_to(dtype))
        if problem.exclusive:
            out = torch.cat((_constant_row(out, monoid.identity(dtype), dtype), out[:, :-1]), DIM)
            out = out if starts is None else out.masked_fill_(starts, monoid.identity(dtype))
        (out,) = _orient(problem.reverse, out)
        # The scan of one row may be the row itself, and the total a view of the last row.
        return _copy_if_operand(out, x), total[:, 0].clone()

    def extremes(self, problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
        """Return the running max or min, like x, and its index, int64."""
        index = torch.arange(x.shape[DIM], device=x.device)[:, None].expand_as(x)
        x, index, starts = _orient(problem.reverse, x, index, starts)
        (values, index), _ = self._scan(select_combine(problem.op), (x, index), starts, identity, identity)
        values, index = _orient(problem.reverse, values, index)
        return _copy_if_operand(values, x), index.contiguous()

    def linear(self, problem: ScanProblem, a: Tensor, b: Tensor, initial: Tensor | None) -> Tensor:
        """Return h in problem.result, with h_i = a_i * h_(i-1) + b_i.

        If lagged, h_i = s_(i-1) + b_i with s_i = a_i * h_i.
        """
        accumulate = problem.accumulate
        a, b = _orient(problem.reverse, a, b)
        if problem.lagged:
            # s_(i-1) is a_(i-1) * h_(i-1): the recurrence without lag, with the factors of the previous rows.
            a = torch.cat((_constant_row(a, 1, a.dtype), a), DIM)[:, :-1]
        if initial is not None:
            # The initial state is added to the first row. Adding it to the results would need the product of all
            # factors, which may overflow.
            first = a[:, :1].to(accumulate) * initial.to(accumulate).unsqueeze(DIM) + b[:, :1]
            b = torch.cat((first, b[:, 1:]), DIM)[:, : b.shape[DIM]]  # still no rows if b has none

        def lower(states: Pair) -> Tensor:
            """Return h, which is the constant of the affine map of all rows up to each."""
            return states[1].to(problem.result)

        h, _ = self.inclusive(compose_affine, (a, b), DIM, _cast_to(accumulate), lower)
        (h,) = _orient(problem.reverse, h)
        return _copy_if_operand(h, b)

    def linear_total(self, problem: ScanProblem, a: Tensor, b: Tensor) -> Pair:
        """Return the factor and the state of the recurrence as an affine map, (outer, inner) each.

        The recurrence maps an initial state h to factor * h + state. Its steps are a_i * h + b_i; if lagged, they are
        a_i * (h + b_i), which multiply after the addition.
        """
        accumulate = problem.accumulate
        if not a.shape[DIM]:
            return _constant_row(a, 1, accumulate)[:, 0], _constant_row(b, 0, accumulate)[:, 0]

        def lift(states: Pair) -> Pair:
            """Cast the operands; in a lagged recurrence, a * (h + b) is a * h + a * b."""
            a, b = _cast_to(accumulate)(states)
            return a, a * b if problem.lagged else b

        rows = _orient(problem.reverse, a, b)
        _, (factor, state) = self.inclusive(compose_affine, rows, DIM, lift, lambda states: ())  # stores no results
        return factor[:, 0].clone(), state[:, 0].clone()

    def _scan(self, combine: Combine, values: Any, starts: Tensor | None, lift: Map, lower: Map) -> tuple[Any, Any]:
        """Return the results and the last state of `self.inclusive`, with segments unless starts is None."""
        if starts is None:
            return self.inclusive(combine, values, DIM, lift, lower)

        def lift_values(state: Any) -> Any:
            """Lift the values of a state (start, values)."""
            start, values = state
            return start, lift(values)

        def lower_values(state: Any) -> Any:
            """Lower the values of a state (start, values), without the start."""
            return lower(state[1])

        join = segment_combine(combine)
        out, (_, last) = self.inclusive(join, (starts, values), DIM, lift_values, lower_values)
        return out, last


def _cast_to(dtype: torch.dtype) -> Map:
    """Return a function that casts all tensors of a pytree, as a `lift` or a `lower`."""
    return lambda states: pytree.tree_map(lambda leaf: leaf.to(dtype), states)


def identity(states: Any) -> Any:
    """Return the states unchanged, as a `lift` or a `lower` that converts nothing."""
    return states


def _orient(reverse: bool, *tensors: Any) -> tuple[Any, ...]:
    """Return the tensors with rows in scan order, flipped if reverse; a second call undoes it. None stays None."""
    return tuple(x if x is None or not reverse else x.flip(DIM) for x in tensors)


def _copy_if_operand(result: Tensor, operand: Tensor) -> Tensor:
    """Return a copy if the result is the operand's memory, as for one row, since operators return no views."""
    return result.clone() if result.data_ptr() == operand.data_ptr() else result


def _constant_row(x: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return one row (outer, 1, inner) that is filled with a value, such as the result before the first row of x."""
    return x.new_full((x.shape[0], 1, x.shape[2]), value, dtype=dtype)


def num_rows(states: Any, dim: int) -> int:
    """Return the number of rows of states: the common size of the pytree's tensors in dim."""
    return pytree.tree_leaves(states)[0].shape[dim]


def slice_rows(states: Any, dim: int, *bounds: int | None) -> Any:
    """Return views of the rows of states that `slice(*bounds)` selects in dim.

    The bounds are (stop), (start, stop) or (start, stop, step), as those of Python's slice.
    """

    def select(leaf: Tensor) -> Tensor:
        """Return the rows of one tensor."""
        all_dims_before = (slice(None),) * (dim % leaf.ndim)
        return leaf[(*all_dims_before, slice(*bounds))]

    return pytree.tree_map(select, states)


def concat_rows(first: Any, second: Any, dim: int) -> Any:
    """Concatenate the rows of both; return `first` itself if `second` has no rows."""
    if not num_rows(second, dim):
        return first
    return pytree.tree_map(lambda *leaves: torch.cat(leaves, dim), first, second)
