"""Describe how the inputs and programs of the ranks of a group differ."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compile.lowering.base.errors import SpError
from sp_compile.runtime.control.message import InputRecord, Message

from .agreement import describe_field_mismatch, format_mismatch, format_rank_rows
from .input_checks import ComparedInputs

OTHER_VALUES = "the ranks of this group were given different values"
LATER_CAUSE = (
    "They were equal when the program was compiled, and ranks with equal values share work. If they are meant to "
    "differ, compile the program with different values, or with sequence_parallel_linear='never'."
)


def find_input_mismatch(
    everyone: Sequence[Message], lines: Sequence[str], compared: ComparedInputs, own: bool
) -> SpError | None:
    """Return the error of ranks whose programs or inputs differ, or None.

    Args:
        everyone: Message of each rank.
        lines: Lines of the ranks at the first difference of their programs.
        compared: The inputs that the ranks compare.
        own: True if other inputs are shards.
    """
    inputs = _common_inputs(everyone)
    known = [name for name in inputs[0] if all(name in one for one in inputs)]
    if len(known) == min(map(len, inputs)):  # additional inputs are shown by the lines of the program
        inputs = [{name: one[name] for name in known} for one in inputs]
    first = inputs[0]
    names = [name for name in {**first, **inputs[-1]} if _is_different([one.get(name) for one in inputs])]
    names.sort(key=lambda name: name in first and "(" not in first[name].size)  # tensors before symbols
    rows = format_rank_rows([{name: str(value) for name, value in one.items()} for one in inputs], names)
    same_program = len({one.program.digest for one in everyone}) == 1
    if not names and (mismatch := _find_gradient_mismatch([one.program.trained for one in everyone])):
        return mismatch
    heading, given = "What differs", f"the {len(inputs)} ranks of this group were given"
    same_names = all(one.keys() == first.keys() for one in inputs)
    sizes_differ = same_names and len({tuple(one[name].size for name in known) for one in inputs}) > 1
    if same_names and not sizes_differ and not same_program and lines:
        heading = "What differs first"
        rows = [line + (f"; {row}" if row else "") for line, row in zip(lines, rows)]
    rows = [row or "the same inputs as the others" for row in rows]
    if sizes_differ:
        numbers = bool(names) and "(" not in first[names[0]].size
        what = "different numbers" if numbers else "inputs of different sizes"
        return SpError("SP632", format_mismatch(f"{given} {what}", rows))
    if not same_names or not same_program:
        return SpError("SP631", format_mismatch(f"{given} different programs", rows, heading))
    if not names:
        samples = [{f"part of {name}": one.sample for name, one in each.items() if one.sample} for each in inputs]
        differ = describe_field_mismatch(samples, OTHER_VALUES)
        return _sharded_data_error(differ, own) if differ else None
    cause = format_mismatch(f"{given} different values", rows)
    found = SpError("SP633", cause)
    if compared.arguments >= set(names):
        found = _sharded_data_error(cause, own)
    elif everyone[0].number > 1 and compared.equal - compared.arguments - compared.always >= set(names):
        found = SpError("SP635", cause)  # they were equal at an earlier call
    assumed = compared.always | compared.equal if compared.is_assumed else set()
    return found if assumed.isdisjoint(names) else SpError(found.code, cause, f"{found.fix} {LATER_CAUSE}")


def _sharded_data_error(cause: str, own: bool) -> SpError:
    """Return the error of ranks that received different data and are otherwise equal.

    Args:
        cause: Text of the difference.
        own: True if each rank passes its rows of some inputs, so that sharding samplers are correct.
    """
    return SpError("SP636", cause) if own else SpError("SP634", cause)


def _find_gradient_mismatch(trained: Sequence[Sequence[str]]) -> SpError | None:
    """Return the error of ranks that require gradients of different inputs, or None."""
    names = dict.fromkeys(name for one in trained for name in one if not all(name in other for other in trained))
    if not names:
        return None
    rows = format_rank_rows([{name: f"requires_grad={name in one}" for name in names} for one in trained], list(names))
    return SpError("SP639", format_mismatch("the ranks of this group require gradients of different inputs", rows))


def _common_inputs(everyone: Sequence[Message]) -> list[dict[str, InputRecord]]:
    """Return the described inputs of each rank. Parameters are included if all ranks describe them."""
    common = set.intersection(*(set(one.inputs) for one in everyone))
    return [
        {name: record for name, record in one.inputs.items() if not record.weight or name in common} for one in everyone
    ]


def _is_different(records: Sequence[InputRecord | None]) -> bool:
    """Return True if the inputs differ. A missing checksum equals any checksum."""
    sums = {record.checksum for record in records if record and record.checksum}
    return len({record and record.size for record in records}) > 1 or len(sums) > 1
