"""The registry of error codes: what each means, and what to do about it.

One file because it is the registry. `docs/errors.md` is generated from it by `python -m sp_compile.error_codes`.

Sections: SP1xx options, SP2xx capture, SP3xx sequence and sharding, SP4xx attention, SP5xx scans and collectives,
SP6xx ranks, SP7xx memory and cost, SP8xx data and integrations, SP9xx passes and rules of a contributor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorInfo:
    """One kind of error."""

    title: str  # what is wrong, without the values of one case
    fix: str  # what to do, as one or two sentences; it ends every message of this code


SECTIONS = {
    "1": "Options",
    "2": "Capture of the program",
    "3": "Sequence and sharding",
    "4": "Attention",
    "5": "Scans and collectives",
    "6": "Ranks and process groups",
    "7": "Memory and cost",
    "8": "Data and integrations",
    "9": "Passes and rules of a contributor",
}
"""Titles of the sections, by the first digit of a code."""

ERRORS: dict[str, ErrorInfo] = {
    # SP1xx: options
    # SP2xx: capture of the program
    # SP3xx: sequence and sharding
    "SP301": ErrorInfo(
        "A model in which no sequence is found", "Name the sequence: options={'seq_dims': {'<input>': <dim>}}."
    ),
    "SP302": ErrorInfo("A name in seq_dims that is no input", "Use the names of the arguments of forward."),
    "SP303": ErrorInfo(
        "A dim in seq_dims that does not exist", "Count dims from 0, or from the last one with negative numbers."
    ),
    "SP304": ErrorInfo(
        "A program of which nothing runs on shards, with fallback='error'",
        "Name the sequence with seq_dims, or use fallback='gather'.",
    ),
    "SP305": ErrorInfo(
        "An operator that cannot run on shards, with fallback='error'",
        "Use fallback='gather', or register a rule for the operator with sp_compile.sharding_rule.",
    ),
    "SP306": ErrorInfo(
        "Inputs in shards of a program with one step per position",
        "Pass the full inputs with inputs='global', or use one operator for the scan (cumsum, sp_compile.functional).",
    ),
    "SP307": ErrorInfo(
        "Inputs in shards whose sequence is not found", "Name all inputs that are passed in shards with seq_dims."
    ),
    "SP308": ErrorInfo(
        "Results in shards of unequal length", "Use a length that the number of ranks divides, or outputs='gather'."
    ),
    "SP309": ErrorInfo(
        "Rows in the order of a sort that are read by position",
        "Put the rows back into the order of the sequence first, as y[inverse] or index_add does.",
    ),
    "SP321": ErrorInfo(
        "A result that can no longer be computed when it is read",
        "Read it before the weights change, or use outputs='gather' or tiles='never'.",
    ),
    "SP322": ErrorInfo(
        "Other data assigned to a value in shards",
        "Assign data of the same shape, dtype and device, or bind the name to the new tensor (x = new).",
    ),
    "SP323": ErrorInfo(
        "A transform of torch.func over a compiled program",
        "Call the transform inside of what is compiled, request one gradient at a time (torch.autograd.grad in a "
        "loop), or do not compile this part.",
    ),
    # SP4xx: attention
    "SP401": ErrorInfo(
        "Heads that the strategy cannot split over the ranks",
        "Use attention='auto' or another strategy, or another mesh.",
    ),
    "SP402": ErrorInfo("Attention that Ulysses does not support", "Use attention='auto' or another strategy."),
    "SP403": ErrorInfo(
        "A layout that is not the one of an earlier graph", "Use layout='auto', or one layout for all compiled parts."
    ),
    "SP411": ErrorInfo("A program that does not support the balanced layout", "Use layout='auto'."),
    "SP412": ErrorInfo(
        "The balanced layout with inputs in shards", "Use inputs='global' and one graph, or layout='auto'."
    ),
    "SP413": ErrorInfo("The balanced layout with outputs='local'", "Use outputs='gather', or layout='auto'."),
    "SP414": ErrorInfo("A layout that is not the balanced one of an earlier graph", "Use layout='auto'."),
    "SP431": ErrorInfo(
        "Attention with dropout and without a seed", "Pass a seed, an int64 tensor of shape (), the same on every rank."
    ),
    "SP432": ErrorInfo(
        "flex_attention that cannot be compiled", "Install Triton and a C compiler, as Inductor needs them."
    ),
    "SP441": ErrorInfo(
        "A malformed mask predicate", "Compile the program again if a saved program has it, or correct the predicate."
    ),
    "SP442": ErrorInfo(
        "An unsupported function in a mask predicate",
        "Use comparisons, and, or, not, sums, products, Mod, Min, Max, Abs and floor.",
    ),
    "SP443": ErrorInfo("A symbol of a mask predicate without a value", "Pass the vector or the size that it names."),
    "SP444": ErrorInfo(
        "A malformed score text", "Compile the program again if a saved program has it, or correct the text."
    ),
    "SP445": ErrorInfo(
        "A score text without a derivative", "Use sums, products, powers, tanh, exp and Abs, which have derivatives."
    ),
    "SP446": ErrorInfo(
        "An unsupported function in a score text", "Use sums, products, powers, tanh, exp, Abs and sign."
    ),
    # SP5xx: scans and collectives
    "SP551": ErrorInfo("An unknown scan kernel", "Use one of the names that the message lists."),
    "SP561": ErrorInfo("An unknown reduction of a collective", "Use one of the reductions that the message lists."),
    "SP571": ErrorInfo(
        "Simulated ranks whose collectives differ",
        "Run the same operators in the same order on every rank. Report this if backend='sp' has made the program.",
    ),
    # SP6xx: ranks and process groups
    "SP611": ErrorInfo(
        "A process group that was not declared",
        "Call sp_compile.declare_groups(mesh) with the mesh of the group on every rank, before the graph is made.",
    ),
    "SP681": ErrorInfo(
        "The default process group changed",
        "Call torch.compiler.reset() after init_process_group and destroy_process_group, then call the model again.",
    ),
    # SP7xx: memory and cost
    # SP8xx: data and integrations
    # SP9xx: passes and rules of a contributor
    "SP901": ErrorInfo(
        "A name that is registered already",
        "Use another name, or register the first one in a with block, at whose end it is removed.",
    ),
    "SP902": ErrorInfo("An unknown name in a table", "Use one of the names that the message lists."),
    "SP903": ErrorInfo("A row of a table that does not support the call", "Select another row, or change the call."),
    "SP904": ErrorInfo("A strategy whose pass has another name", "Set both names to the same value."),
    "SP905": ErrorInfo("An unknown policy of a pass on reductions", "Use one of the policies that the message lists."),
    "SP906": ErrorInfo("A graph without shapes", "Run torch.fx.passes.fake_tensor_prop.FakeTensorProp on it first."),
    "SP907": ErrorInfo("A pass with another number of ranks than its group has", "Pass the size of the group."),
    "SP912": ErrorInfo(
        "A demand that no pass meets",
        "Report this with the program, or correct your own pass that leaves the demand: explain(passes=True) shows "
        "which passes ran.",
    ),
    "SP913": ErrorInfo(
        "Localize on a graph that has demands left", "Run a pass that meets the demand first, such as passes.Gather."
    ),
    "SP921": ErrorInfo("A node that is no operator", "Use ATen or sp:: operators in graphs."),
    "SP922": ErrorInfo("A result of an exchange that is read too early", "Insert wait_tensor before the reader."),
    "SP923": ErrorInfo(
        "An operator that does not declare its padded rows",
        "Register it with padded='nearest', 'finite' or 'as given' (lowering/library.py).",
    ),
    "SP924": ErrorInfo(
        "An operator that reads padded rows", "Report this with the program: sp::window has to restore them first."
    ),
    "SP925": ErrorInfo(
        "An operator that fails on a rank's shapes",
        "Correct the rule of the operator if it is yours. Otherwise report this with the program.",
    ),
    "SP926": ErrorInfo(
        "An operator whose local shape is not the one of its placement",
        "Correct the rule of the operator if it is yours. Otherwise report this with the program.",
    ),
    "SP931": ErrorInfo(
        "Malformed dims of a rule", "Write the dims as 'b (h d), d e -> b h e': docs/api.md describes the notation."
    ),
    "SP932": ErrorInfo("An unknown option of a rule", "Use one of the options that the message lists."),
    "SP933": ErrorInfo("A value of a rule's option that is no constant", "Write a Python constant, such as 1 or 0.0."),
    "SP934": ErrorInfo(
        "A classified factor that no operand has", "Name a factor of an operand, or remove it from the options."
    ),
    "SP935": ErrorInfo(
        "A factor that is in no result and not classified",
        "Classify it with one of the options that sp_compile.sharding.rule describes, such as sum= or whole=.",
    ),
    "SP936": ErrorInfo("A factor of unknown size", "Pass the sizes with sizes=."),
    "SP999": ErrorInfo("An error that has no code yet", ""),  # TODO: remove with the last call that passes a text alone
}
"""Every code of an `SpError`. A code keeps its meaning; the code of an error that is removed is not used again."""


def errors_page() -> str:
    """Return the text of `docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Every error of this package is an `SpError`, a `ValueError` with a `code`. Its message is the code, the cause",
        "and the fix. This page is generated from `sp_compile/error_codes.py`.",
    ]
    for digit, section in SECTIONS.items():
        rows = [(code, info) for code, info in sorted(ERRORS.items()) if code[2] == digit]
        if rows:
            lines += ["", f"## {section}", "", "| code | error | fix |", "|---|---|---|"]
            lines += [f"| `{code}` | {_cell(info.title)} | {_cell(info.fix)} |" for code, info in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(errors_page())
