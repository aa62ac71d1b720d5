"""Check and report the sequences and placements of a graph before and after demands are met.

The passes of this module change no value. `FindSequences` runs before placements are chosen and stops for a model
without a sequence; `PlaceOutputs` runs when no demand remains and explains why results are gathered.

A fragment is a graph between graph breaks, a part of a model. A refusal (`context.refusal`) ends the passes; the caller
changes the inputs of the graph and runs them again, or raises it as an error. Aligned groups of the program's own
collectives have the same rows of the sequence on all their ranks.
"""

from __future__ import annotations

from itertools import chain, islice

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node, node_line
from sp_compile.lowering.torch_compat import argument_name, is_known_process_group, size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.loops.reroll import RerollLoops
from sp_compile.passes.context import Note, NoteKind, PassContext, Refusal, RefusalKind
from sp_compile.passes.cost.group_names import named_groups
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import Size, as_size, is_divisor, is_same_size
from sp_compile.passes.sharding.attention_axes import ATTENTION
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.find_sequences import sequence_candidates
from sp_compile.passes.sharding.output_rules import GATHER_REASON, LARGE_OUTPUT, gather_reason, output_options
from sp_compile.passes.sharding.placement import PlacementPlan, Shard
from sp_compile.passes.sharding.sharded_work import SequenceCandidate, count_work

FRAGMENT_TEXT = "a graph between graph breaks without a sequence; every rank runs it unsplit"
INPUTS_WITHOUT_SEQUENCE = (
    "its inputs are full tensors, so it has no sequence; every rank runs it unsplit. If they are results of a compiled "
    f"model smaller than {LARGE_OUTPUT >> 20} MiB, which it gathers, nothing needs to change. Otherwise eager code has "
    "gathered them: move that code into the compiled function."
)
# names of ops with function arguments, and the reason why these do not define a sequence dim
NO_SEQUENCE_REASONS = {
    "while_loop": "whose effect on its values is not known",
    "map_impl": "which treats all rows equally, so its dim is not known",
    "cond": "whose branches are not analyzed",
}


class MarkUserCollectives(Pass):
    """Marking of the program's own collectives that need replicated values."""

    provides = frozenset({"marked collectives"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark collectives between ranks with different rows of the sequence; return 0, as no op is changed.

        Propagation does not apply the sharding rule of a marked node (`no_rule`), so its operands are gathered.
        """
        if context.aligned is None:  # the groups whose ranks have the same rows; None for all
            return 0
        # A group that is no process group here, as in a simulation, is not marked.
        for node in gm.graph.nodes:
            if any(is_known_process_group(group) and group not in context.aligned for group in named_groups(node)):
                set_node_info(node, no_rule="it exchanges with ranks that have other rows of the sequence")
        context.invalidate()
        return 0


class FindSequences(Pass):
    """Search for the sequences of the inputs.

    For a complete model without a sequence, the pass sets the context's refusal (SP301). It raises SpError if the
    sequence of local inputs is unknown (SP306, SP307), or if fallback='error' and no op can start on shards (SP304).
    """

    requires = frozenset({"canonical", "marked collectives", "sharded inputs"})
    provides = frozenset({"sequences"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Set `sequence_inputs` and `candidates` of the context; return True if a symbolic size became constant.

        Lengths that do not exceed the number of ranks are made constant, see `_fix_short_lengths`, and so are sizes of
        heads, see `_fix_head_sizes`. `sequence_inputs`
        has the sequence dims of each input that has any. Set `context.refusal` or raise SpError if the graph cannot run
        on shards, and must not run replicated. On one rank nothing is sharded, so nothing is refused.
        """
        fixed = _fix_short_lengths(gm, context.axes(gm), context.ranks.n)
        fixed |= context.ranks.n > 1 and _fix_head_sizes(gm, context.axes(gm))
        if fixed:
            context.invalidate()
        axes = context.axes(gm)
        inputs = [node for node in gm.graph.find_nodes(op="placeholder") if not node_info(node).parameter]
        sequence_dims = {node: axes.sequence_dims(node) for node in inputs}
        context.sequence_inputs = {argument_name(node): dims for node, dims in sequence_dims.items() if dims}
        context.candidates = sequence_candidates(gm, axes, _named_dims(inputs, context))
        if context.ranks.n == 1:
            return fixed
        # With inputs="local", inputs have the rows of a rank. If `seq_dims` does not name their sequence dims, those in
        # `context.inputs` were guessed before the capture; they are compared with the ones found here.
        if context.options.inputs == "local" and context.seq_dims is None and axes.sequences:
            _check_local_inputs(sequence_dims, context)
        if not axes.sequences:
            self._refuse_or_replicate(gm, inputs, context)
        elif not any(isinstance(placement, Shard) for placement in chain(*context.plan(gm).placements.values())):
            self._note_nothing_sharded(inputs, context)
        return fixed

    def _refuse_or_replicate(self, gm: GraphModule, inputs: list[Node], context: PassContext) -> None:
        """Set `context.refusal` for a complete model without a sequence; otherwise note that the graph runs replicated.

        It runs replicated if it is a fragment (`context.fragment`), or if it is called after a graph with sharded
        outputs (`has_sharded_peer`): eager code between them may have gathered its inputs.
        With fallback="error", a graph of the second kind is refused, too.
        """
        names = [argument_name(node) for node in inputs if is_tensor(node)]
        fix = f"Name the sequence: options={{'seq_dims': {{'<input>': <dim>}}}} with an input out of {names}."
        if not context.fragment and (not context.has_sharded_peer or context.options.fallback == "error"):
            loops = _describe_loops(gm, context)
            text = f"the model has no attention or scan whose dim could be traced to an input{loops}"
            context.refusal = Refusal(RefusalKind.NO_SEQUENCE, "SP301", "no sequence found", text, fix)
            return
        if context.fragment:
            kind, text = NoteKind.REPLICATED, FRAGMENT_TEXT
        else:
            kind, text = NoteKind.SEQUENCE_LOST, f"{INPUTS_WITHOUT_SEQUENCE} {fix}"
        where = next((node_line(node) for node in gm.graph.nodes if node.op == "call_function"), "the graph")
        self.notes.append(Note(kind, self.name, text, where=where))

    def _note_nothing_sharded(self, inputs: list[Node], context: PassContext) -> None:
        """Note that a graph with a sequence runs replicated; raise SpError if fallback='error'."""
        why = "every rank runs the unsplit graph, as no op has the sequence as a separate dim to shard"
        if context.seq_dims:
            why += f". seq_dims={_named_dims(inputs, context)} may name several sequences"
        if context.options.fallback == "error":
            fix = "Pass seq_dims with the dims of one sequence, or use fallback='gather'." if context.seq_dims else None
            raise SpError("SP304", f"fallback='error': {why}.", fix)
        self.notes.append(Note(NoteKind.REPLICATED, self.name, why))


def _named_dims(inputs: list[Node], context: PassContext) -> dict[str, int]:
    """Return the sequence dims that the user names, by the names of the inputs."""
    dims = context.seq_dims or {}
    return {argument_name(node): dims[node.name] for node in inputs if node.name in dims}


def _check_local_inputs(sequence_dims: dict[Node, list[int]], context: PassContext) -> None:
    """Raise SpError for inputs='local' unless every input with a sequence was captured with the rows of a rank.

    `context.inputs` has the inputs that were captured with these rows. An input with a sequence is missing there if
    its length sets the number of steps of the program (SP306). `context.inputs` is empty if the sequence is unknown
    (SP307).

    Args:
        sequence_dims: The dims of each input along the sequence.
        context: The context.
    """
    for node, dims in sequence_dims.items():
        if dims and node.name not in context.inputs:
            raise SpError(
                "SP306",
                f"inputs='local': dim {dims[0]} of {argument_name(node)!r} is a sequence whose length sets the number "
                "of steps of the program (a loop, a scan in rounds or as a tree, torch.scan).",
            )
    if not context.inputs:
        names = [argument_name(node) for node in sequence_dims if is_tensor(node)]
        raise SpError(
            "SP307",
            f"inputs='local': no dim of the inputs {names} is known to be the sequence. The sequence may be no dim "
            "of its own there: batch and sequence are flattened, or parts are concatenated, padded or split into "
            "patches later.",
        )


def _describe_loops(gm: GraphModule, context: PassContext) -> str:
    """Return the part of the text of SP301 on loops and scans that do not show which dim is the sequence.

    Return "" if the graph has no such loop or scan. The first Python loop that `RerollLoops` has refused is included.

    An example is " (there is while_loop at <the user's line>, whose effect on its values is not known)".
    """
    reasons: dict[str, str] = {}  # by op and line
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        # `scanned` marks the values of a scan or loop with the dim that it runs along.
        if name in NO_SEQUENCE_REASONS or node_info(node).scanned is not None:
            why = NO_SEQUENCE_REASONS.get(name, "whose dim is created inside the model")
            reasons.setdefault(f"{name} at {node_line(node)}", why)
    declined = (x for x in context.notes if x.kind is NoteKind.DECLINED and x.subject == RerollLoops.name)
    reasons.update((f"a loop at {note.where}", f"whose {note.text}") for note in islice(declined, 1))
    loops = "; ".join(f"{op}, {why}" for op, why in reasons.items())
    return f" (there is {loops})" if loops else ""


class PlaceOutputs(Pass):
    """Report of the placements of sequences and heads, and of the reasons to gather results.

    The pass raises SpError (SP308) for outputs='local' if the shard of a rank contains padding.
    """

    name = "outputs"
    requires = frozenset({"planned"})
    provides = frozenset({"checked"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Add notes to the report on gathered results and replicated work; return 0.

        Set `constraints`, `candidates` and `work` of the context, for the report, too.
        """
        plan = context.plan(gm)
        _check_local_outputs(gm, plan, context)
        for node, options in output_options(gm.graph.output_node(), context.outputs).items():
            if node.target is not torch.ops.sp.unshard.default:
                continue
            source = node.all_input_nodes[0]  # gathered, if it is sharded
            why = gather_reason(source.meta["val"], options) if isinstance(plan.of(source), Shard) else ""
            if why not in ("", GATHER_REASON):  # the user has not requested it by outputs='gather'
                self.note(source, why, source.name, NoteKind.UNSHARDED)
        context.constraints = _plan_constraints(gm, context.axes(gm), plan, context.ranks.n)
        context.candidates = _mark_split(context.candidates, gm, plan)
        context.work = count_work(gm, plan, differentiable_nodes(gm), context.times, context.ranks.n)
        has_shards = context.ranks.n > 1 and context.work.sharded_flops
        # Lines of the program that compute a large part of all FLOPs on every rank.
        for line, share in context.work.large_replicated_lines() if has_shards else ():
            text = f"it runs unsharded on every rank: {share:.0%} of the FLOPs"
            self.notes.append(Note(NoteKind.REPLICATED_WORK, self.name, text, where=line))
        return 0


def _fix_short_lengths(gm: GraphModule, axes: Axes, n: int) -> bool:
    """Make symbolic lengths of sequences constant if they are at most n; return True if there are any.

    A rank then has at most one row, and fake tensors treat a dim of one row as a constant.
    """
    fixed = False
    for node in gm.graph.find_nodes(op="placeholder"):
        for dim in axes.sequence_dims(node):
            extent = node.meta["val"].shape[dim]
            if n > 1 and isinstance(extent, torch.SymInt) and size_hint(extent) <= n:
                int(extent)  # a guard: another length is recompiled
                fixed = True
    return fixed


def _fix_head_sizes(gm: GraphModule, axes: Axes) -> bool:
    """Make symbolic sizes constant on which the numbers of heads depend; return True if there are any.

    Layers that share their code may have heads of different sizes, so that Dynamo makes the size symbolic. The numbers
    of heads are then expressions, such as 64 // size and 2 * (32 // size), which are not comparable. With a guard for
    the size they are numbers: another size is recompiled. Lengths of sequences stay symbolic.
    """
    calls = [OpCall(node) for node in gm.graph.nodes if node.target in ATTENTION]
    counts = {call.shape(i)[-3] for call in calls for i in range(3) if call.ndim(i) > 2}
    symbols = {symbol for count in counts if not isinstance(count, int) for symbol in count.free_symbols}
    sizes = []  # those of the inputs, without lengths of sequences
    for node in gm.graph.find_nodes(op="placeholder") if symbols else ():
        value, lengths = node.meta["val"], axes.sequence_dims(node) if is_tensor(node) else []
        given = [*value.shape] if is_tensor(node) else [value]
        symbols -= {as_size(given[dim]) for dim in lengths}
        sizes += [size for size in given if isinstance(size, torch.SymInt)]
    fixed = [int(size) for size in sizes if as_size(size) in symbols]
    return bool(fixed)


def _check_local_outputs(gm: GraphModule, plan: PlacementPlan, context: PassContext) -> None:
    """Raise SpError if an output with outputs='local', returned as a rank's rows, has padding on some rank."""
    n, options_of_node = context.ranks.n, output_options(gm.graph.output_node(), context.outputs)
    for node, options in options_of_node.items():
        have = plan.of(node)
        if "local" not in options or not isinstance(have, Shard):
            continue
        if not have.frame.is_exact(n) and not _guard_divisible(node, have, n):
            raise SpError(
                "SP308",
                f"outputs='local': expected a length that {n} ranks divide, got {have.frame.length} positions of a "
                f"sequence of {have.frame.size} in {describe_node(node)}: the rows of some rank contain padding.",
            )


def _guard_divisible(node: Node, have: Shard, n: int) -> bool:
    """Return True if n divides the symbolic length of a sharded value in this call, and add a guard.

    With the guard, the program is compiled again for a length that n does not divide. Returns False for a window of
    the sequence and for a flattened dim, whose lengths are not that of the sequence.
    """
    length = node.meta["val"].shape[have.dim]
    is_full_sequence = is_same_size(have.frame.start, 0) and is_same_size(have.frame.length, have.frame.size)
    return isinstance(length, torch.SymInt) and is_full_sequence and have.is_only_factor and bool(length % n == 0)


def _mark_split(candidates: list[SequenceCandidate], gm: GraphModule, plan: PlacementPlan) -> list[SequenceCandidate]:
    """Return the candidates with `is_split` set: True if a value is sharded along a sequence, or a side region."""
    # Candidates and shards are matched by size: of the full sequence, or of the window that a value has of it. If a
    # sequence was reshaped to (chunks, block), the frame of its first dim counts chunks.
    sizes: dict[bool, set[Size]] = {True: set(), False: set()}  # by True for side regions
    for node in gm.graph.nodes:
        frames = [p.frame for p in plan.placements.get(node, ()) if isinstance(p, Shard)]
        split = {size * frame.block for frame in frames for size in (frame.size, frame.length)}
        sizes[node_info(node).side is not None] |= split
    split_sizes = {True: sizes[True] | sizes[False], False: sizes[True]}  # by `is_chosen`
    return [c._replace(is_split=c.size in split_sizes[c.is_chosen]) for c in candidates]


def _plan_constraints(gm: GraphModule, axes: Axes, plan: PlacementPlan, n: int) -> list[str]:
    """Return sentences for the report: how sequences are split, and which other sizes the ranks divide.

    Examples are "sequence of 7: 2 positions a rank, padded to 4 * 2" and "4 ranks divide the 8 heads (dim 1)".
    """
    constraints: dict[str, None] = {}  # an ordered set
    for node in gm.graph.nodes:
        have = plan.of(node)
        if isinstance(have, Shard) and have.dim in axes.sequence_dims(node):
            size, local = have.frame.size, have.frame.local_length(n)
            padded = "" if is_divisor(n, size) else f", padded to {n} * {local}"
            constraints[f"sequence of {size}: {local} positions a rank{padded}"] = None
        elif isinstance(have, Shard) and node_info(node).side is not None:
            local = have.frame.local_length(n)
            constraints[f"{have.frame.length} rows of a region without a sequence: {local} rows a rank"] = None
        # Another sharded dim is a dim of heads (all-to-all), or counts windows, which the sequence above describes.
        elif isinstance(have, Shard) and not _has_windows(axes, node, have.dim):
            constraints[f"{n} ranks divide the {have.frame.size} heads (dim {have.dim})"] = None
    return list(constraints)


def _has_windows(axes: Axes, node: Node, dim: int) -> bool:
    """Return True if a dim counts windows or chunks of a sequence, whose rows are another constraint."""
    atoms = axes.dims[node, 0][dim]  # of result 0, the factors of the dim
    return any(axes.find(atom.name) in axes.blocks for atom in atoms)
