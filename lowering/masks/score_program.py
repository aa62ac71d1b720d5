"""Parse, run and differentiate score programs: the operations of a user's score function as text.

    t0 = aten.sub.Tensor(k, q); t1 = aten.add.Tensor(t0, 12); t2 = aten.index.Tensor(table0, [head0, t1])
    aten.add.Tensor(s, t2)                          (lines are separated by "; ", the last one is the result)

Names: ``s``, the score; ``b``, ``q`` and ``k``, the indices of the batch entry, the query and the key; ``head<i>``,
``row<i>`` and ``col<i>``, a vector's value at the query head, the query and the key; ``table<i>``, a tensor that is
indexed by any of these, or one number. Values are elements of all pairs at once, or of one pair; every operation is
pointwise or indexes a table, and rounds as on a single device. A program may come from a file, so no other code is ever
executed.

The prefix "fills; " means that results may be large and finite in place of -inf (`sharding/attention.py`). The
log-sum-exp of a row of fills does not encode the number of its keys, so each row is computed with all keys at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import MIN_FILL
from sp_compile.lowering.torch_compat import OpOverload, enable_autograd, schema_of

from .mask_text import SHOWN_CHARACTERS

aten = torch.ops.aten
TableLookup = Callable[[Tensor, list[Tensor]], Tensor]
"""A function from a table and its indices to elements of the table."""
_NAME_PATTERN = re.compile(r"s|b|q|k|(head|row|col|table|t)\d+")
_FACTORY_OPS = re.compile(r"t\d+")
_FLOAT_TYPES = {"inf": float("inf"), "nan": float("nan")}
_PROGRAM_OPS = ("Tensor", "Scalar")
_OTHER_OPS = {
    aten.index.Tensor, aten.full_like.default, aten.to.dtype, aten._to_copy.default, aten.clone.default,
    aten.detach.default, aten.floor_divide.default, aten.floor_divide.Scalar, aten.masked_fill.Tensor,
    *(getattr(aten.where, kind) for kind in ("self", "Scalar", "ScalarSelf", "ScalarOther")),
    *(getattr(op, kind) for op in (aten.__and__, aten.__or__, aten.__xor__) for kind in _PROGRAM_OPS),
}  # fmt: skip
_FILL_OPS = "fills; "
_COMPARISON_OPS = {getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class ProgramLine(NamedTuple):
    """A line ``name = op(*args, **kwargs)``.

    Without an op it is the constant args[0] of dtype args[1]. Names among the arguments are `Name`.
    """

    name: str
    """Name of the value."""
    op: Any
    """The aten operator; None for a constant."""
    args: list[Any]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""


class Name(str):
    """Name of a value among arguments."""


def is_program(text: str) -> bool:
    """Return True if the text is a program, False if it is an expression (`score.py`)."""
    return "aten." in text


def is_known_op(op: Any) -> bool:
    """Return True if a program may call the op."""
    if not isinstance(op, OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return op in _OTHER_OPS or (torch.Tag.pointwise in op.tags and not draws and not schema_of(op).is_mutable)


@lru_cache(maxsize=1024)
def parse_program(text: str) -> tuple[ProgramLine, ...]:
    """Parse the lines of a program without executing it.

    Raises:
        ValueError: If the text is not a program.
    """
    try:
        body = ast.parse(text.removeprefix(_FILL_OPS).replace("; ", "\n")).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:SHOWN_CHARACTERS]!r}: {error}") from error
    lines: list[ProgramLine] = []
    known: set[str] = set()
    for i, statement in enumerate(body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if (
                i < len(body) - 1 and _FACTORY_OPS.fullmatch(name) and name not in known
            ):
                lines.append(_parse_line(name, call, known))
            case ast.Expr(value=ast.Call() as call) if i == len(body) - 1:
                lines.append(_parse_line("result", call, known))
            case _:
                raise ValueError(f"{ast.unparse(statement)[:SHOWN_CHARACTERS]!r} is no line of a program")
        known.add(lines[-1].name)
    if not lines:
        raise ValueError("a program without lines")
    return tuple(lines)


def _parse_line(name: str, call: ast.Call, known: set[str]) -> ProgramLine:
    path, args = ast.unparse(call.func).split("."), [_parse_argument(x, known) for x in call.args]
    kwargs = {str(x.arg): _parse_argument(x.value, known) for x in call.keywords}
    if path == ["constant"] and len(args) == 2 and isinstance(args[1], torch.dtype):
        return ProgramLine(name, None, args, {})
    packet = getattr(aten, path[1], None) if len(path) == 3 and path[0] == "aten" else None
    op = getattr(packet, path[2], None) if packet is not None and path[2] in packet.overloads() else None
    if not is_known_op(op):
        raise ValueError(f"no program calls {'.'.join(path)}")
    return ProgramLine(name, op, args, kwargs)


def _parse_argument(node: ast.AST, known: set[str]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=one):
            value = _parse_argument(one, known)
            if isinstance(value, int | float):
                return -value
        case ast.Name(id=name) if name in _FLOAT_TYPES:
            return _FLOAT_TYPES[name]
        case ast.Name(id=name) if _NAME_PATTERN.fullmatch(name) and (name in known or not _FACTORY_OPS.fullmatch(name)):
            return Name(name)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(getattr(torch, name, 0), torch.dtype):
            return getattr(torch, name)
        case ast.List(elts=elements):
            return [_parse_argument(x, known) for x in elements]
    raise ValueError(f"{ast.unparse(node)[:SHOWN_CHARACTERS]!r} is no argument in a program")


def call_text(op: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the text of a call in a line; names are `Name`."""
    return (
        f"{op}({', '.join([*map(_format_argument, args), *(f'{k}={_format_argument(v)}' for k, v in kwargs.items())])})"
    )


def typed_constant(value: float, dtype: torch.dtype) -> str:
    """Return the text of a number that is promoted as a tensor of this dtype."""
    return f"constant({_format_argument(value)}, {dtype})"


def _format_argument(x: Any) -> str:
    if isinstance(x, Name):
        return str(x)
    return f"[{', '.join(map(_format_argument, x))}]" if isinstance(x, list | tuple) else str(x) if x != x else repr(x)


@lru_cache(maxsize=1024)
def program_names(text: str) -> frozenset[str]:
    """Return the names that a program reads, except the score."""
    lines = parse_program(text)
    return frozenset(str(x) for line in lines for x in _line_names(line)) - {line.name for line in lines} - {"s"}


def _line_names(line: ProgramLine) -> list[Name]:
    args = [*line.args, *line.kwargs.values()]
    flat = [y for x in args for y in (x if isinstance(x, list) else [x])]
    return [x for x in flat if isinstance(x, Name)]


def rename_program(text: str, names: Mapping[str, str]) -> str:
    """Rename the inputs of a program."""

    def new(x: Any) -> Any:
        """Replace the names in an argument."""
        if isinstance(x, list):
            return [new(y) for y in x]
        return Name(names.get(x, x)) if isinstance(x, Name) else x

    lines = []
    for name, op, args, kwargs in parse_program(text):
        line = typed_constant(*args) if op is None else call_text(op, new(args), {k: new(v) for k, v in kwargs.items()})
        lines.append(line if name == "result" else f"{name} = {line}")
    renamed = "; ".join(lines)
    return mark_fills(renamed) if may_have_fills(text) else renamed


def may_have_fills(text: str) -> bool:
    """Return True if the program is marked: its results may be fills, large and finite."""
    return text.startswith(_FILL_OPS)


def mark_fills(text: str) -> str:
    """Mark the program: its results may be fills."""
    return text if may_have_fills(text) else _FILL_OPS + text


def adds_fills(text: str) -> bool:
    """Return True if constants of the program may be fills, except constants in indices or conditions."""
    wanted = {"result"}
    for name, op, args, kwargs in reversed(parse_program(text)):
        if name not in wanted or getattr(op, "overloadpacket", None) in _COMPARISON_OPS:
            continue
        packet = getattr(op, "overloadpacket", None)
        given = args[:1] if packet is aten.index else args[1:] if packet is aten.where else [*args, *kwargs.values()]
        if any(_is_fill(x) for x in given):
            return True
        wanted |= {str(x) for x in given if isinstance(x, Name)}
    return False


def _is_fill(x: Any) -> bool:
    return isinstance(x, int | float) and MIN_FILL <= abs(x) < float("inf")


def run_program(
    text: str, score: Tensor, values: Mapping[str, Tensor], lookup: TableLookup = aten.index.Tensor
) -> Tensor:
    """Evaluate a program.

    Args:
        text: The program.
        score: The scaled scores, any floating dtype.
        values: Values of the other names, which broadcast to the scores.
        lookup: A replacement of the table lookup.

    Returns:
        The modified scores, in the dtype and shape of ``score``.
    """
    # A 0-dim tensor would not promote larger tensors, although it promotes a single score.
    ones = (1,) * score.ndim
    known = {name: x.reshape(ones) if not x.ndim else x for name, x in values.items()} | {"s": score}

    def given(x: Any) -> Any:
        """Return an argument with names replaced by their values."""
        if isinstance(x, list):
            return [given(y) for y in x]
        return known[x] if isinstance(x, Name) else x

    for name, op, args, kwargs in parse_program(text):
        operands = [given(x) for x in args]
        if op is None:
            known[name] = torch.full(ones, operands[0], dtype=operands[1], device=score.device)
        elif op is aten.index.Tensor:
            known[name] = lookup(*operands)
        else:
            # A size that other calls may change was a number when the program was written, and is a tensor here.
            sized = any(isinstance(x, Name) and x.startswith("table") for x in args)
            call = op.overloadpacket if sized else op
            known[name] = call(*operands, **{k: given(v) for k, v in kwargs.items()})
    return known["result"].to(score.dtype).expand(score.shape)


def program_vjp(
    text: str, score: Tensor, values: Mapping[str, Tensor], grad: Tensor, totals: Mapping[str, Tensor]
) -> Tensor:
    """Return the gradient of the scaled scores, and add the gradients of tables to ``totals``.

    Args:
        text: The program.
        score: The scaled scores, any floating dtype.
        values: Values of the other names.
        grad: The gradient of the modified scores.
        totals: Tensors to which the gradients of tables are added, by name.
    """
    looked_up: list[tuple[str, list[Tensor], Tensor]] = []
    with enable_autograd():
        leaves = {name: values[name].detach().requires_grad_() for name in totals}
        of = {id(x): name for name, x in leaves.items()}

        def lookup(table: Tensor, indices: list[Tensor]) -> Tensor:
            """Look up a table, and record the lookup for the gradient of the table."""
            found = aten.index.Tensor(table.detach(), indices)
            if id(table) in of:
                looked_up.append((of[id(table)], indices, found.requires_grad_()))
            return found

        scaled = score.detach().requires_grad_()
        out = run_program(text, scaled, {**values, **leaves}, lookup)
        wanted = [scaled, *(found for *_, found in looked_up), *leaves.values()]
        grads = torch.autograd.grad(out, wanted, grad, allow_unused=True) if out.requires_grad else [None] * len(wanted)
    first, *others = grads
    for (name, indices, _), found in zip(looked_up, others):
        if found is not None:
            totals[name].index_put_(indices, found.to(totals[name].dtype), accumulate=True)
    for name, found in zip(leaves, others[len(looked_up) :]):
        if found is not None:
            totals[name].add_(found)
    return torch.zeros_like(score) if first is None else first
