"""Describe how the inputs and programs of the ranks of a group differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from sp_compile.lowering.base.errors import SpError
from sp_compile.runtime.control.message import InputRecord, Message

from .agreement import describe_field_mismatch, format_mismatch, format_rank_rows
from .input_checks import ComparedInputs

OTHER_VALUES = "the ranks of this group were given different batches"
SAME_INPUTS = "the same inputs as the others"  # the line of a rank without a difference
SAMPLED_FIX = (
    "The integration passes the same batches to these ranks, so they have computed other values themselves, such as "
    "sampled tokens (generate, GRPO) or random masks. Sample on one rank and broadcast, or give these ranks one seed."
)
ASSUMED_EQUAL_CAUSE = (
    "They were equal when the program was compiled, and ranks with equal values share work. If they are meant to "
    "differ, compile the program with different values, or with sequence_parallel_linear='never'."
)


def find_input_mismatch(
    messages: Sequence[Message], lines: Sequence[str], compared: ComparedInputs, has_shards: bool
) -> SpError | None:
    """Return the error of ranks whose programs or inputs differ, or None.

    Differences are reported in this order: missing arguments, dtypes, gradients, sizes, programs, values, samples.

    Args:
        messages: Message of each rank about its call.
        lines: A line of each rank at the first difference of their programs, from `ProgramDigest.first_difference`.
        compared: The inputs that the ranks compare.
        has_shards: True if each rank passes its rows of some inputs.
    """
    inputs = _comparable_inputs(messages)  # for each rank the records of its inputs, by name
    common = [name for name in inputs[0] if all(name in records for records in inputs)]
    # If a rank has only the common inputs, only these are compared. The additional inputs of other ranks are due to
    # different programs, which `lines` report.
    if len(common) == min(map(len, inputs)):
        inputs = [{name: records[name] for name in common} for records in inputs]
    first = inputs[0]
    # The inputs that differ. If the ranks have different names (after the step above), every rank has an input that
    # another one lacks, so the names of two ranks are enough to report a difference.
    names = [name for name in {**first, **inputs[-1]} if _is_different([records.get(name) for records in inputs])]
    names.sort(key=lambda name: name in first and first[name].is_scalar)  # tensors before numbers
    mismatch = _find_missing_arguments(messages) or _find_dtype_mismatch([x.program.dtypes for x in messages])
    if mismatch is None and not names:
        mismatch = _find_gradient_mismatch([message.program.trained for message in messages])
    if mismatch is not None:
        return mismatch
    # The report has a row for each rank, with its inputs that differ. If names and sizes agree but programs differ, the
    # row starts with the first line of the rank's program that differs.
    texts = [{name: str(record) for name, record in records.items()} for records in inputs]
    rows = format_rank_rows(texts, names)
    is_same_program = len({message.program.digest for message in messages}) == 1
    same_names = all(records.keys() == first.keys() for records in inputs)
    sizes_differ = same_names and len({tuple(records[name].size for name in common) for records in inputs}) > 1
    heading, summary = "What differs", f"the {len(inputs)} ranks of this group were given"
    if same_names and not sizes_differ and not is_same_program and lines:
        heading = "What differs first"
        rows = [line + (f"; {row}" if row else "") for line, row in zip(lines, rows)]
    has_reason = is_same_program or names or lines  # else only the digests of the programs differ
    # A row without a difference is empty.
    rows = [row or (SAME_INPUTS if has_reason else "another graph") for row in rows]
    # The error of the first difference: sizes, programs, values, samples of values.
    if sizes_differ:
        are_numbers = bool(names) and first[names[0]].is_scalar
        difference = "different numbers" if are_numbers else "inputs of different sizes"
        return SpError("SP632", format_mismatch(f"{summary} {difference}", rows))
    # "" if all ranks are in the same mode, train or eval.
    training = describe_by_rank([message.program.training for message in messages])
    if not is_same_program and training:
        return SpError("SP641", format_mismatch(training, rows, heading))
    if not same_names or not is_same_program:
        return SpError("SP631", format_mismatch(f"{summary} different programs", rows, heading))
    if names:
        is_later = messages[0].number > 1  # not the first call of the program
        return _value_error(is_later, names, rows, compared, has_shards)
    samples = [{f"part of {name}": x.sample for name, x in records.items() if x.sample} for records in inputs]
    cause = describe_field_mismatch(samples, OTHER_VALUES)
    return _data_error(cause, has_shards) if cause else None


def _value_error(
    is_later: bool, names: Sequence[str], rows: Sequence[str], compared: ComparedInputs, has_shards: bool
) -> SpError:
    """Return the error of ranks whose inputs have different values: batches, weights and buffers, or both.

    Args:
        is_later: True if this is not the first call.
        names: The names of these inputs.
        rows: The line of each rank.
        compared: The inputs that the ranks compare.
        has_shards: True if each rank passes its rows of some inputs.
    """
    differing, summary = set(names), f"the {len(rows)} ranks of this group were given different"
    # Of the compared inputs, these are compared on the first call and every few calls only.
    weights = compared.equal - compared.arguments - compared.always
    if differing <= compared.arguments:
        error = _data_error(format_mismatch(f"{summary} batches ({_shorten_names(names)})", rows), has_shards)
    elif differing <= weights:
        # Unequal at the first call: other seeds or checkpoints. Later: the ranks have trained differently.
        reason = "" if is_later else ", as with another seed on each"
        cause = format_mismatch(f"weights or buffers differ between ranks{reason} ({_shorten_names(names)})", rows)
        error = SpError("SP635", cause) if is_later else SpError("SP642", cause)
    else:
        error = SpError("SP633", format_mismatch(f"{summary} values", rows))
    if not compared.is_assumed:
        return error
    # The values were equal at compilation, and the program relies on it, though the user did not state it.
    return SpError(error.code, error.cause, f"{error.fix} {ASSUMED_EQUAL_CAUSE}")


def describe_by_rank(texts: Sequence[str]) -> str:
    """Return the ranks with each text: "rank 0, 2 is in eval(), rank 1 is in train()"; "" if the texts are equal."""
    if len(set(texts)) <= 1:
        return ""
    ranks_by_text: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(str(rank))
    return ", ".join(f"rank {', '.join(ranks)} {text}" for text, ranks in ranks_by_text.items())


def _find_dtype_mismatch(dtypes: Sequence[Mapping[str, str]]) -> SpError | None:
    """Return the error of ranks whose inputs have different dtypes, or None.

    Args:
        dtypes: For each rank the dtype of each input, by name. An input that a rank lacks is no difference.
    """
    names = [name for name in dtypes[0] if len({rank.get(name, dtypes[0][name]) for rank in dtypes}) > 1]
    if not names:
        return None
    distinct = [dict.fromkeys(rank[name] for name in names if name in rank) for rank in dtypes]  # dtypes of each rank
    by_rank = describe_by_rank([f"is {' and '.join(rank_dtypes)}" for rank_dtypes in distinct])
    rows = format_rank_rows(dtypes, names)
    return SpError("SP640", format_mismatch(f"{by_rank} ({_shorten_names(names)})", rows))


def _find_missing_arguments(messages: Sequence[Message]) -> SpError | None:
    """Return the error of ranks in the same mode that pass arguments which others do not pass, such as labels."""
    arguments = [{name: str(x) for name, x in message.inputs.items() if not x.weight} for message in messages]
    names = sorted(set().union(*arguments) - set(arguments[0]).intersection(*arguments))
    if not names or len({message.program.training for message in messages}) > 1:
        return None
    passed = [[name for name in names if name in rank] for rank in arguments]
    by_rank = [f"passes {_shorten_names(rank)}" if rank else f"passes no {names[0]}" for rank in passed]
    return SpError("SP631", format_mismatch(describe_by_rank(by_rank), format_rank_rows(arguments, names)))


def _shorten_names(names: Sequence[str]) -> str:
    """Return the first of the names and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _data_error(cause: str, has_shards: bool) -> SpError:
    """Return the error of ranks with different batches; its fix depends on how the batches are loaded.

    Args:
        cause: The cause of the error.
        has_shards: True if each rank passes its rows of some inputs. The inputs that differ may then be shards, too,
            which were not detected as such.
    """
    if has_shards:
        return SpError("SP636", cause)
    has_integration = any(f"sp_compile.integrations.{name}" in sys.modules for name in ("transformers", "accelerate"))
    return SpError("SP634", cause, SAMPLED_FIX if has_integration else None)


def _find_gradient_mismatch(trained: Sequence[Sequence[str]]) -> SpError | None:
    """Return the error of ranks that require gradients of different inputs, or None.

    Args:
        trained: The names of the inputs that require gradients, for each rank.
    """
    common = set.intersection(*map(set, trained))
    differing = dict.fromkeys(name for names in trained for name in names if name not in common)
    if not differing:
        return None
    fields = [{name: f"requires_grad={name in names}" for name in differing} for names in trained]
    rows = format_rank_rows(fields, list(differing))
    return SpError("SP639", format_mismatch("the ranks of this group require gradients of different inputs", rows))


def _comparable_inputs(messages: Sequence[Message]) -> list[dict[str, InputRecord]]:
    """Return for each rank the records of its inputs by name, without weights that only some ranks have compared."""
    common = set.intersection(*(set(message.inputs) for message in messages))
    return [
        {name: record for name, record in message.inputs.items() if not record.weight or name in common}
        for message in messages
    ]


def _is_different(records: Sequence[InputRecord | None]) -> bool:
    """Return True if the record of one input differs between ranks. A missing checksum equals any checksum."""
    sizes = {None if record is None else record.size for record in records}  # None for a rank without the input
    checksums = {record.checksum for record in records if record is not None and record.checksum}
    return len(sizes) > 1 or len(checksums) > 1
