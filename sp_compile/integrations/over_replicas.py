"""Gather and reduce the values of replicas, each of which counts once.

A replica is a group of ranks that share each sequence. The functions take a process group of one rank of each replica.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.torch_compat import is_lost_connection
from sp_compile.runtime.agreement import all_gather_object, format_mismatch
from sp_compile.runtime.control.channel import channel_of
from sp_compile.runtime.control.message import Message

# announcement of a gather to the ranks of a group, which names it in errors
GATHER_METHODS = Message("gathers", "the arguments of a metric")


def sum_over_replicas(x: torch.Tensor, replicas: dist.ProcessGroup, sequence: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of x over replicas. Integers, such as counts, have to be equal on ranks that share a sequence.

    Args:
        x: The value of this rank.
        replicas: One rank of each replica.
        sequence: The ranks of this replica.

    Returns:
        A tensor with the shape and dtype of x.

    Raises:
        SpError: On every rank, if integers differ on the ranks that share a sequence (SP828).
    """
    total = x.clone()
    dist.all_reduce(total, group=replicas)
    if has_gradient_dtype(total):
        return total
    minimum, maximum = total.clone(), total.clone()
    dist.all_reduce(minimum, dist.ReduceOp.MIN, sequence)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, sequence)
    if not torch.equal(minimum, maximum):
        expected = f"the same integers on the {sequence.size()} ranks that share a sequence"
        raise SpError("SP828", f"reduce: expected {expected}, got different ones.")
    return total


def gather_over_replicas(data: Any, group: dist.ProcessGroup, as_objects: bool = False) -> Any:
    """Gather data over a group of one rank of each replica.

    The ranks first compare dtypes and shapes by messages, so that a mismatch or a missing rank raises instead of
    hanging.

    Args:
        data: Tensors in nested lists, tuples and dicts, or a list of objects.
        group: The group.
        as_objects: If True, gather tensors as objects.

    Returns:
        The same structure with tensors concatenated along the first dim, or one list of all objects.

    Raises:
        SpError: The ranks pass different shapes or types (SP829), or a rank does not arrive.
        RuntimeError: A collective fails.
    """
    ranks, tensors = ranks_of(group), None if as_objects else collect_tensors(data)
    # Exchange the kind of the data: "values" of any type, or the dtypes and shapes of tensors.
    own_kind = "tensors " + ", ".join(f"{x.dtype} {[*x.shape]}" for x in tensors) if tensors else "values"
    kinds = all_gather_object(ranks, GATHER_METHODS.verb, GATHER_METHODS.subject, own_kind)
    if len({*kinds}) > 1:
        summary = "gather, gather_for_metrics: the replicas pass values of different types or shapes"
        raise SpError("SP829", format_mismatch(summary, kinds, member="replica"))
    channel, start = channel_of(ranks), time.monotonic()
    try:
        if tensors:
            return recursively_apply(lambda x: _concat_over_replicas(x, group), data, error_on_other_type=True)
        by_rank: list[Any] = [None] * ranks.n
        dist.all_gather_object(by_rank, data, group)
    except RuntimeError as error:
        if channel is None or not is_lost_connection(error):
            raise
        raise channel.fail_timeout(GATHER_METHODS, time.monotonic() - start, error) from error
    return [x for objects in by_rank for x in objects]


def _concat_over_replicas(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dim; scalars become vectors."""
    x = (x[None] if x.ndim == 0 else x).contiguous()
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(out, x, group)
    return torch.cat(out)


def collect_tensors(data: Any) -> list[torch.Tensor] | None:
    """Return the tensors in a structure; None if it contains objects that require pickling.

    Args:
        data: Nested lists, tuples and dicts.

    Returns:
        The tensors, or None.
    """
    tensors: list[torch.Tensor] = []
    try:  # `recursively_apply` calls `append` with each tensor, and raises TypeError for other objects
        recursively_apply(tensors.append, data, error_on_other_type=True)
    except TypeError:
        return None
    return tensors
