"""Checks a sharding rule by doing what it says: shard every factor in turn, run the op per rank, put together, compare.

    for outcome in outcomes(op, args, kwargs): outcome.factor, outcome.kind, outcome.error

`error` is None where the parts agree with the whole. A rule is wrong if it lets a factor pass whose parts disagree, and
timid if it wants a factor whole whose parts always agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

import sp_compile.passes.sharding.rules  # noqa: F401
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import size_product
from sp_compile.passes.sharding.factors import BoundRule, Dims, dim_factors, flatten_dims
from sp_compile.passes.sharding.placement import Frame, Shard
from sp_compile.passes.sharding.rule import lookup_rule

RANKS = (2, 3, 5)
SUM = 2  # at::Reduction
UNDEFINED = ("empty", "new_empty", "empty_like")


@dataclass(frozen=True)
class Outcome:
    """One factor sharded over n ranks. error: difference of the parts from the full result, or None."""

    factor: str
    kind: str
    n: int
    error: str | None


def node_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Node, list[Tensor]]:
    """A call_function node of the op with real tensors as meta["val"], and its tensor operands."""
    graph = Graph()

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    lifted = pytree.tree_map(lift, (tuple(args), kwargs))
    node = graph.call_function(op, *lifted)
    node.meta["val"] = op(*args, **kwargs)
    return node, [o.meta["val"] for o in OpCall(node).operands]


def outcomes(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Outcome]:
    """Yield the outcome of every factor of the op's rule, for every number of ranks that divides it."""
    node, operands = node_of(op, args, kwargs)
    call, rule = lookup_rule(node)
    whole = [r.clone() for r in call.results()]
    check_ranks_of(call, rule)
    if rule is None:
        return
    yield from _factors(call, rule, operands, whole, is_random(op, args, kwargs))
    if rule.reshapes or rule.spans:
        yield from _movement(call, rule, operands, whole)


def check_ranks_of(call: OpCall, rule: BoundRule | None) -> None:
    """Check that the dims of a rule match the operands and results in number and size."""
    if rule is None:
        return
    shapes = [*map(call.shape, range(len(call.operands))), *call.result_shapes()]
    assert [len(dims) for dims in (*rule.operands, *rule.results)] == [*map(len, shapes)], rule
    assert len(rule.results) == len(call.results()), rule
    assert not rule.spans or len(rule.spans) == len(call.results()), rule
    for dims, shape in zip((*rule.operands, *rule.results), shapes, strict=True):
        assert len({*flatten_dims(dims)}) == len(flatten_dims(dims)), rule
        for dim, size in zip(dims, shape, strict=True):
            assert len(dim_factors(dim)) < 2 or size_product(rule.extents[f] for f in dim_factors(dim)) == size, rule


def _factors(
    call: OpCall, rule: BoundRule, operands: list[Tensor], whole: list[Tensor], loose: bool
) -> Iterator[Outcome]:
    extents: dict[str, set[int]] = {}
    for dims, value in [*zip(rule.operands, operands, strict=True), *zip(rule.results, whole, strict=True)]:
        for dim, size in zip(dims, value.shape, strict=True):
            for factor in dim_factors(dim):
                extents.setdefault(factor, set()).add(rule.extents[factor] if dim != factor else size)
    for (factor, sizes), n in itertools.product(extents.items(), RANKS):
        if rule.kind(factor) != "window" and all(size and size % n == 0 for size in sizes):
            yield Outcome(factor, rule.kind(factor), n, _try(call, rule, operands, whole, factor, n, loose))


def _try(
    call: OpCall, rule: BoundRule, operands: list[Tensor], whole: list[Tensor], factor: str, n: int, loose: bool
) -> str | None:
    """Run the ranks one by one; return the first difference of their results from the full ones, or None."""
    kind = rule.kind(factor)
    count = counted(call) if kind == "mean" and rule.pad else None
    changed = {"reduction": SUM} if count is not None else {}
    try:
        ranks = [_one_rank(call, rule, operands, whole, factor, n, rank, changed) for rank in range(n)]
        for i, (dims, expected) in enumerate(zip(rule.results, whole, strict=True)):
            made = [rank[i] for rank in ranks]
            combined = _combine(made, rule, dims, factor, kind if count is None else "sum")
            error = _compare(combined if count is None else combined / count, expected, loose)
            if error is not None:
                return f"result {i}: {error}"
    except (RuntimeError, IndexError, ValueError) as error:
        return f"a rank fails: {str(error).splitlines()[0]}"
    if kind == "sum" and not rule.extents:
        return _padded(call, rule, operands, whole, factor)
    in_all = all(factor in flatten_dims(dims) for dims in rule.results)
    if kind == "pass" and in_all and not (rule.extents or rule.reshapes or rule.spans or loose):
        return _repeated(call, rule, operands, whole, factor)
    return None


def counted(call: OpCall) -> Tensor:
    """Return the divisor of a class-index loss with reduction "mean": the number or weight of counted targets."""
    target = call["target"].meta["val"]
    target = target[target != call["ignore_index"]]
    weight = call["weight"]
    return torch.tensor(target.numel()) if weight is None else weight.meta["val"][target].sum()


def _repeated(call: OpCall, rule: BoundRule, operands: list[Tensor], whole: list[Tensor], factor: str) -> str | None:
    """Padded rows that repeat a row of every operand come to the same row of every result.

    Grouped heads, of which operands have different numbers, are sharded where nothing is padded.
    """
    held = [(x, dims) for x, dims in zip(operands, rule.operands, strict=True) if factor in dims]
    if len({x.shape[dims.index(factor)] for x, dims in held}) > 1:
        return None

    def padded(x: Tensor, dims: Dims) -> Tensor:
        if factor not in dims:
            return x
        at = dims.index(factor)
        return x.index_select(at, torch.arange(-1, x.shape[at] + 2).clamp(0, x.shape[at] - 1))

    expected = [padded(x, dims) for x, dims in zip(whole, rule.results, strict=True)]
    changed = {rule.sizes: list(expected[0].shape)} if rule.sizes else {}
    args, kwargs = call.with_operands([padded(x, d) for x, d in zip(operands, rule.operands, strict=True)], **changed)
    made = [r for r in pytree.tree_leaves(call.node.target(*args, **kwargs)) if isinstance(r, Tensor)]
    errors = (_compare(m, e, False) for m, e in zip(made, expected, strict=True))
    return next((f"with repeated rows: {e}" for e in errors if e is not None), None)


def _padded(call: OpCall, rule: BoundRule, operands: list[Tensor], whole: list[Tensor], factor: str) -> str | None:
    """A sum does not change by infinite rows, once zero, or the fill of its `pad`, is selected in their place.

    With a `pad` all other operands hold copies of the last row there, as they do in a program.
    """
    longer = [
        torch.cat([x, x.narrow(dims.index(factor), -1, 1)], dims.index(factor)) if factor in dims else x
        for dims, x in zip(rule.operands, operands, strict=True)
    ]
    for at, fill in [rule.pad] if rule.pad else [(i, 0) for i, dims in enumerate(rule.operands) if factor in dims]:
        dim = rule.operands[at].index(factor)
        row = torch.tensor([longer[at].shape[dim] - 1])
        poison = float("inf") if longer[at].is_floating_point() or longer[at].is_complex() else 99
        longer[at] = longer[at].index_fill(dim, row, poison).index_fill(dim, row, fill)
    args, kwargs = call.with_operands(longer)
    made = [r for r in pytree.tree_leaves(call.node.target(*args, **kwargs)) if isinstance(r, Tensor)]
    errors = [
        _compare(m.narrow(dims.index(factor), 0, w.shape[dims.index(factor)]) if factor in dims else m, w, False)
        for m, w, dims in zip(made, whole, rule.results, strict=True)
    ]
    return next((f"with padding: {e}" for e in errors if e is not None), None)


def _one_rank(
    call: OpCall,
    rule: BoundRule,
    operands: list[Tensor],
    whole: list[Tensor],
    factor: str,
    n: int,
    rank: int,
    changed: dict[str, Any],
) -> list[Tensor]:
    local = [_part(x, rule, dims, factor, n, rank) for dims, x in zip(rule.operands, operands, strict=True)]
    shape = _part(whole[0], rule, rule.results[0], factor, n, rank).shape
    if rule.reshapes:
        return [local[0].reshape(shape)]
    if rule.sizes:
        changed = {**changed, rule.sizes: list(shape)}
    args, kwargs = call.with_operands(local, **changed)
    return [r for r in pytree.tree_leaves(call.node.target(*args, **kwargs)) if isinstance(r, Tensor)]


def _part(x: Tensor, rule: BoundRule, dims: Dims, factor: str, n: int, rank: int) -> Tensor:
    """Return a rank's part of a value if the factor is sharded."""
    if factor not in flatten_dims(dims):
        return x
    at, sizes = _around(rule, dims, factor)
    return x.unflatten(at, sizes).chunk(n, at + 1)[rank].flatten(at, at + 2).contiguous()


def _around(rule: BoundRule, dims: Dims, factor: str) -> tuple[int, tuple[int, int, int]]:
    """Return the dim of a factor, and its sizes before, in and after the factor."""
    at = next(d for d, dim in enumerate(dims) if factor in dim_factors(dim))
    group = dim_factors(dims[at])
    before, after = group[: group.index(factor)], group[group.index(factor) + 1 :]
    return at, (size_product(rule.extents[f] for f in before), -1, size_product(rule.extents[f] for f in after))


def _combine(made: list[Tensor], rule: BoundRule, dims: Dims, factor: str, kind: str) -> Tensor | None:
    if factor in flatten_dims(dims):
        at, sizes = _around(rule, dims, factor)
        return torch.cat([x.unflatten(at, sizes) for x in made], at + 1).flatten(at, at + 2)
    if kind in ("sum", "total"):
        return sum(made[1:], made[0])
    if kind == "mean":
        return sum(made[1:], made[0]) / len(made)
    return made[0] if all(torch.equal(x, made[0]) for x in made) else None


def is_random(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if results are random. Attention is tagged random, but is not without dropout."""
    if op.overloadpacket.__name__ in UNDEFINED:
        return True
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    made = []
    for seed in range(4):
        torch.manual_seed(seed)
        made.append([r.clone() for r in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(r, Tensor)])
    return any(not torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))


def _compare(combined: Tensor | None, expected: Tensor, loose: bool) -> str | None:
    if combined is None:
        return "the ranks disagree"
    if combined.shape != expected.shape:
        return f"shape {list(combined.shape)}, not {list(expected.shape)}"
    if combined.dtype != expected.dtype:
        return f"dtype {combined.dtype}, not {expected.dtype}"
    if loose:
        return None
    close = torch.allclose(combined, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    return None if close else "other values"


def place(x: Tensor, shard: Shard, n: int, rank: int) -> Tensor:
    """Return a rank's part of a value whose frame needs no padding."""
    split = x.unflatten(shard.dim, (shard.outer, shard.frame.size, shard.inner))
    return split.chunk(n, shard.dim + 1)[rank].flatten(shard.dim, shard.dim + 2)


def _movement(call: OpCall, rule: BoundRule, operands: list[Tensor], whole: list[Tensor]) -> Iterator[Outcome]:
    """Yield the outcome of every view of a dim as outer * sequence * inner that the rule maps to results."""
    shape = operands[0].shape
    for dim, n in itertools.product(range(len(shape)), RANKS):
        for outer, length, inner in factorizations(shape[dim]):
            shard = Shard(dim, Frame.full(length), outer, inner)
            moved = move(rule, shard) if length % n == 0 and length > 1 else None
            if moved is not None:
                error = _moved(call, rule, shard, moved, operands, whole, n)
                yield Outcome(f"{dim}:{outer}*{length}*{inner}", "pass", n, error)


def move(rule: BoundRule, shard: Shard) -> tuple[Shard, ...] | None:
    """Return the shard of each result for a shard of the first operand by the rule; None if there is none."""
    factor, own = rule.local_part(rule.operands[0], shard)
    if rule.kind(factor) == "window":
        return rule.window_shard(shard)
    if not factor or rule.kind(factor) != "pass":
        return None
    places = [_around(rule, dims, factor)[0] for dims in rule.results]
    return tuple(
        rule.dim_shard(dims[at], factor, replace(own, dim=at)) for dims, at in zip(rule.results, places, strict=True)
    )


def factorizations(size: int) -> Iterator[tuple[int, int, int]]:
    for outer in range(1, size + 1):
        for inner in range(1, size // outer + 1):
            if size % (outer * inner) == 0:
                yield outer, size // (outer * inner), inner


def _moved(
    call: OpCall,
    rule: BoundRule,
    shard: Shard,
    moved: Sequence[Shard],
    operands: list[Tensor],
    whole: list[Tensor],
    n: int,
) -> str | None:
    if shard.dim == rule.window_dim:
        frames = [(m.frame.start, m.frame.length) for m in moved]
        pieces = [operands[0].narrow(shard.dim, start, length) for start, length in frames]
        same = all(torch.equal(p, w) for p, w in zip(pieces, whole, strict=True))
        return None if same else "other rows than the window's"
    for rank in range(n):
        local = place(operands[0], shard, n, rank)
        expected = [place(w, m, n, rank) for w, m in zip(whole, moved, strict=True)]
        if rule.reshapes:
            made = [local.reshape(expected[0].shape)]
        else:
            args, kwargs = call.with_operands([local, *operands[1:]])
            made = list(call.node.target(*args, **kwargs)) if len(whole) > 1 else [call.node.target(*args, **kwargs)]
            made = [r for r in pytree.tree_leaves(made) if isinstance(r, Tensor)]
        if not all(torch.equal(m, e) for m, e in zip(made, expected, strict=True)):
            return f"rank {rank} holds other values"
    return None
