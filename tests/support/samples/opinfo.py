"""Calls of ops with rules, from PyTorch's sample inputs (op_db), which include corner cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from support.samples.samples import Sample
from torch.testing._internal.common_methods_invocations import op_db

from sp_compile.passes.sharding.rule import has_rule

PER_OP = 4


def samples() -> Iterator[tuple[Any, Sample]]:
    """(op, sample) for each overload with a rule that takes an OpInfo's arguments as they are."""
    for info in op_db:
        name = info.name.rpartition(".")[2] if info.name.startswith("nn.functional") else info.name.replace(".", "_")
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or info.variant_test_name:
            continue
        ops = [op for o in packet.overloads() if _is_functional(op := getattr(packet, o)) and has_rule(op)]
        dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in info.dtypes), None)
        if not ops or dtype is None:
            continue
        torch.manual_seed(0)
        for given in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), PER_OP):
            args, kwargs = (given.input, *given.args), given.kwargs
            yield from ((op, (args, kwargs)) for op in ops if _accepts(op, args, kwargs))


def _is_functional(op: Any) -> bool:
    return not op._schema.is_mutable and not any(a.is_out for a in op._schema.arguments)


def _accepts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        op(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return False
    return True
