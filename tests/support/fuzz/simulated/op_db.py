"""Run every op of torch's op_db after an attention, with torch's samples of its arguments.

The attention's result, zeros, is added to the sample's tensors: an op is called within its domain, on values that are
sharded along one of their dims. Each sample uses another dim, if possible of a size that the ranks do not divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from functools import cache, partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from support.fuzz.oracle import Case, can_run, outcome
from support.fuzz.outcomes import Result
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
VARIANTS = ("function", "inplace", "out")
RANKS = (2, 3)
AT_FIRST = 2  # samples of each op before the others
ALWAYS = 24  # samples of an op, at most
LARGEST = 20_000  # elements of a sample


@cache
def infos() -> dict[str, OpInfo]:
    return {info.formatted_name: info for info in op_db}


@cache
def samples(name: str) -> list[SampleInput]:
    """The first samples of an op that have a dim to split, always the same."""
    info = infos()[name]
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    found = info.sample_inputs(torch.device("cpu"), dtype, requires_grad=False)
    first = list(itertools.islice(filter(_is_splittable, found), ALWAYS))
    if isinstance(found, Generator):
        found.close()  # it switches gradients off, and back on when it ends, which may not be in the middle of a case
    return first


def _is_splittable(sample: SampleInput) -> bool:
    values = [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_value(x)]
    return bool(values) and max(values[0].shape, default=0) > 1 and sum(x.numel() for x in values) <= LARGEST


def has_variant(variant: str, name: str) -> bool:
    """Return True if an op has this variant."""
    info = infos()[name]
    return {"function": True, "inplace": info.inplace_variant is not None, "out": info.supports_out}[variant]


def cases(seed: int = 0) -> Iterator[str]:
    """Each op with its first samples, then with the others, then with the first ones and `out=`: an end.

    seed: of the order of the ops; 0 is that of their names.
    """
    names = sorted(infos())
    if seed:
        Random(seed).shuffle(names)
    first, others = range(AT_FIRST), range(AT_FIRST, ALWAYS)
    for numbers, variants in ((first, VARIANTS[:2]), (others, VARIANTS[:2]), (first, VARIANTS[2:])):
        for name in names:
            for number, variant in itertools.product(numbers, variants):
                if has_variant(variant, name) and number < len(samples(name)):
                    yield f"op_db:{name}:{variant}:{number}"


def run(name: str) -> Result:
    _, op, variant, number = name.split(":")
    made = case_after_attention(op, variant, int(number))
    result = outcome(made if variant != "out" and can_run(made) else made.without_gradients())
    if not result.outcome.is_bad:
        return result
    script = f'"""{result}"""\n\nfrom support.fuzz.simulated.op_db import run\n\nprint(run({name!r}))\n'
    return Result(result.outcome, result.words, script)


def case_after_attention(name: str, variant: str, number: int) -> Case:
    info, sample = infos()[name], samples(name)[number]
    given, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    places = [i for i, x in enumerate(given) if _is_value(x)]
    first = given[places[0]]
    dims = _dims(first)
    dim = dims[number % len(dims)]
    size = first.shape[dim]
    carrier = torch.randn(1, size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    everywhere = number % 2  # or the first tensor alone
    function = {"function": info.op, "inplace": info.inplace_variant, "out": partial(_into, info.op)}[variant]

    def model(carrier: Tensor, *tensors: Tensor) -> Any:
        rows = 0 * F.scaled_dot_product_attention(carrier, carrier, carrier)[0, :, 0]
        args = list(given)
        for i, x in zip(places, tensors):
            moves = i == places[0] or (everywhere and x.ndim > dim and x.shape[dim] == size)
            args[i] = _moved(x, rows.view([-1 if d == dim else 1 for d in range(x.ndim)])) if moves else x
        positional, named = pytree.tree_unflatten(args, spec)
        return function(*positional, **named), rows

    tensors = [_leaf(given[i], info) for i in places]
    return Case(model, (carrier.requires_grad_(), *tensors), RANKS, direct=True)


def _into(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result in `out=`, which was zeros before."""
    found = op(*args, **kwargs)
    out = pytree.tree_map_only(Tensor, torch.zeros_like, tuple(found) if isinstance(found, (list, tuple)) else found)
    op(*args, **kwargs, out=out)
    return out


def _dims(x: Tensor) -> list[int]:
    """Return the dims to shard, which the fewest of the numbers of ranks divide."""
    uneven = {d: sum(size % n > 0 for n in RANKS) for d, size in enumerate(x.shape) if size > 1}
    return [d for d in uneven if uneven[d] == max(uneven.values())]


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _moved(x: Tensor, rows: Tensor) -> Tensor:
    """Return x with the sharding of `rows`, which are zeros."""
    return x ^ (rows != 0) if x.dtype == torch.bool else x + rows.to(x.dtype)


def _leaf(x: Tensor, info: OpInfo) -> Tensor:
    x = x.detach().clone()
    return x.requires_grad_(info.supports_autograd and (x.is_floating_point() or x.is_complex()))
