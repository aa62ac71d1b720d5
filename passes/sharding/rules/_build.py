"""Builders for rule files: factor names for dims, and rules from a text and a call.

A rule names each dim of the operands and results of one call; the names are its factors. A factor that an operand and a
result share passes: both may be sharded along it. A factor with a kind does not, such as "replicate", which is gathered
before the call. "" is a dim without a factor: it has size 1, or broadcasts. A rule function returns the rule of a call,
or None for arguments without one: the call then runs on gathered operands.

A rule with dims in variable number is built from names. `factor_names(3)` is ("d0", "d1", "d2"). With dim 1 replaced by
"new" (`replace_dims`) it is ("d0", "new1", "d2"), the dims of a result that does not share dim 1 with its operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sp_compile.passes.graph.call import OpCall, wrap_dim
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.rule import BoundRule, Dims, RuleFunction, RulePattern


def bind_rule(call: OpCall, text: str, **options: Any) -> BoundRule | None:
    """Return the rule of a call from a text such as "n i, i m -> n m", for functions that select it by the arguments.

    The result is None if the operands have another number of dims than the text. Options are those of `rule`.
    """
    return RulePattern.parse(text, **options).bind(call)


def factor_names(ndim: int, prefix: str = "d") -> Dims:
    """Return one factor name per dim: d0, d1, ..

    Operands and results share dims with equal names; another prefix names dims that they do not share.
    """
    return tuple(f"{prefix}{i}" for i in range(ndim))


def normalize_dims(value: Any, ndim: int) -> tuple[int, ...]:
    """Return an argument with one or more dims as non-negative dims; None and [] select all dims."""
    if value is None or (isinstance(value, Sequence) and not value):
        return tuple(range(ndim))
    return tuple(wrap_dim(d, ndim) for d in (value if isinstance(value, Sequence) else [value]))


def replace_dims(names: Dims, dims: Iterable[int], prefix: str) -> Dims:
    """Return the names of an operand's dims with new ones for `dims`, which the result does not share with the operand.

    For ("d0", "d1"), dim 1 and the prefix "new" they are ("d0", "new1"). With the prefix "" they are ("d0", ""), the
    name of a dim of size 1.
    """
    replaced = set(dims)
    new_names = [f"{prefix}{d}" if prefix else "" for d in range(len(names))]
    return tuple(new_names[d] if d in replaced else name for d, name in enumerate(names))


def align_names(shape: Sequence[Size], full_shape: Sequence[Size], names: Dims) -> Dims:
    """Return the names of the dims of an operand that broadcasts to a full shape, whose dims have these names.

    (1, 6) has the names ("", "d2") if (2, 4, 6) has ("d0", "d1", "d2"): shapes are aligned at the last dim, and a dim
    of size 1 that broadcasts has the name "", because it is never sharded.

    Args:
        shape: Shape of the operand.
        full_shape: Shape to which it broadcasts.
        names: Names of the dims of the full shape.
    """
    num_missing = len(full_shape) - len(shape)  # leading dims that the operand does not have
    sizes_and_names = zip(shape, full_shape[num_missing:], names[num_missing:], strict=True)
    return tuple("" if size == 1 and full_size != 1 else name for size, full_size, name in sizes_and_names)


def along_dims(
    call: OpCall, dims: Iterable[int], result: Dims | None = None, kind: str = "replicate", lazy: bool = False
) -> BoundRule:
    """Return the rule of an op with one operand that assigns a kind to some of its dims; the others pass.

    Args:
        call: Call of the op.
        dims: Dims with this kind.
        result: Names of the dims of each result; by default those of the operand, d0, d1, ...
        kind: Kind of the dims.
        lazy: True if the op only moves data, so that it is no reason to shard a replicated operand.
    """
    names = factor_names(call.ndim())
    results = tuple(names if result is None else result for _ in call.results())
    kinds = {names[d]: kind for d in dims if names}  # a tensor without dims has the dim 0 in torch, but no name
    return BoundRule((names,), results, kinds, lazy=lazy)


def gathered_dims(call: OpCall) -> BoundRule:
    """Return a rule that gathers the dims of the argument `dim`, for results of the operand's shape.

    This is the rule function of ops that read all of these dims for each element, such as sort.
    """
    return along_dims(call, normalize_dims(call["dim"], call.ndim()))


def resize_dims(argument: str = "", ndim: int = 0) -> RuleFunction:
    """Return a rule function that gathers dims whose size changes; the others pass.

    Args:
        argument: Schema argument with these dims, such as the `dim` of topk.
        ndim: Number of these dims if there is no such argument: the last ones, as in pooling.
    """

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call that changes the size of these dims, or None if it changes their number."""
        operand_ndim = call.ndim()
        if any(len(shape) != operand_ndim for shape in call.result_shapes()):
            return None
        last_dims = range(operand_ndim - ndim, operand_ndim)
        dims = normalize_dims(call[argument], operand_ndim) if argument else last_dims
        return along_dims(call, dims, replace_dims(factor_names(operand_ndim), dims, "new"))

    return instantiate
