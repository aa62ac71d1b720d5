"""The common interface of passes: their order, their rows in explain, and registration of a rewrite."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from support.parity import Decoder, build
from support.variants.toy_pass import Doubled
from torch import Tensor, nn

import sp_compile
from sp_compile import passes
from sp_compile.lowering.base.errors import SpError
from sp_compile.passes import PASSES, Pass, PassContext, check_pass_order, iterate_passes, register_pass
from sp_compile.passes.base import CAPTURED_PROPERTIES, CanonicalPass, CollectivePass, order_passes, registered_passes
from sp_compile.passes.boundary.add_tokens import LOCAL_PROPERTIES, BoundaryPasses
from sp_compile.passes.canonical import canonicalize
from sp_compile.passes.context import NoteKind, runs_by_pass
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.node_info import clear_node_info, node_info, set_node_info
from sp_compile.passes.joint.joint import JOINT_PROPERTIES, JointPasses
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.pipeline import Pipeline, strategy_passes

LATER_PASSES = {BoundaryPasses: LOCAL_PROPERTIES, JointPasses: JOINT_PROPERTIES, PartitionedPasses: CAPTURED_PROPERTIES}
"""Passes that run after the pipeline, and the properties that hold at their start."""


class Sums(nn.Module):
    """A sum along the sequence of x + x."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x).cumsum(1)


@pytest.fixture
def doubled() -> Iterator[None]:
    with PASSES.register(Doubled.name, Doubled):
        yield


def test_the_order_of_the_pipeline_has_its_reasons() -> None:
    check_pass_order(iterate_passes(Pipeline))
    check_pass_order(tuple(registered_passes(CollectivePass)))
    for kind, given in LATER_PASSES.items():
        check_pass_order(iterate_passes(kind), given)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("drop_overwrites", "mark_varying"),
        ("mark_varying", "draw_full_tensors"),
        ("draw_full_tensors", "scatter_reductions"),
        ("scatter_reductions", "revert_idle_scatters"),
        ("revert_idle_scatters", "discharge_demands"),
        ("bucket_reductions", "validate_shapes"),
        ("validate_shapes", "keep_dim_order"),
        ("sequence_parallel_linear", "lower_exchanges"),
        ("lower_exchanges", "merge_exchanges"),
        ("fuse_all_to_all_permutes", "merge_reductions"),
        ("merge_exchanges", "add_gradient_checks"),
        ("fuse_eager_attention", "rewrite_masks"),
        ("rewrite_masks", "group_key_heads"),
        ("group_key_heads", "normalize_repeats"),
        ("stack_written_rows", "reroll_loops"),
        ("rewrite_scan_idioms", "fold_paddings"),
        ("choose_attention", "ring"),
        ("split_nested_scans", "shard_scans"),
        ("mean", "reduce_partials"),
        ("exchange_halos", "gather_operands"),
        ("gather_operands", "draw"),
        ("apply_strategies", "localize"),
        ("use_fast_scans", "localize"),
        ("localize", "validate_shapes"),
        ("validate_shapes", "balance_layout"),
        ("balance_layout", "restore_strides"),
        ("restore_strides", "hoist_mask_tables"),
        ("hoist_mask_tables", "save_attention_outputs"),
        ("save_attention_outputs", "run_in_tiles"),
        ("return_permutation", "defer_outputs"),
        ("defer_outputs", "add_gradient_tokens"),
        ("overlap_collectives", "offload_values"),
    ],
)
def test_a_swapped_order_is_refused(first: str, second: str) -> None:
    every = {Pipeline: CAPTURED_PROPERTIES, **LATER_PASSES}
    kind = next(one for one in every if {first, second} <= {part.name for part in iterate_passes(one)})
    order = list(iterate_passes(kind))
    names = [one.name for one in order]
    i, j = names.index(first), names.index(second)
    assert i < j
    order[i], order[j] = order[j], order[i]
    with pytest.raises(SpError, match="SP909: "):
        check_pass_order(tuple(order), every[kind])


def test_rewrites_are_ordered_by_their_properties_alone() -> None:
    assert [one.name for one in registered_passes(CanonicalPass)] == [
        one.name for one in order_passes(tuple(reversed(registered_passes(CanonicalPass))))
    ]


def test_passes_that_require_each_other_are_refused() -> None:
    class A(Pass):
        name, requires, provides = "a", frozenset({"b"}), frozenset({"a"})

    class B(Pass):
        name, requires, provides = "b", frozenset({"a"}), frozenset({"b"})

    with pytest.raises(SpError, match=r"SP909: .*\ba -> b\b"):
        order_passes((A, B))
    with pytest.raises(SpError, match=r"SP909: .*\bb\b"):
        check_pass_order((A,))


def test_every_pass_is_described() -> None:
    for every in (iterate_passes(Pipeline), *map(iterate_passes, LATER_PASSES)):
        assert all(one.name and one.__doc__ for one in every)
        assert len({one.name for one in every}) == len(every)
    names = [one.name for one in iterate_passes(Pipeline)]
    assert {one.name for one in strategy_passes()} <= set(names)


def test_every_canonical_form_is_listed() -> None:
    modules = {one.__module__.rpartition(".")[2] for one in registered_passes(CanonicalPass)}
    listed = set(re.findall(r"^    (?:loops/)?(\w+)  *\S.*", str(canonicalize.__doc__), re.MULTILINE))
    assert modules <= listed, modules - listed


@pytest.mark.usefixtures("doubled")
def test_a_rewrite_registers_itself() -> None:
    x = torch.randn(1, 8, 4)
    report = sp_compile.explain(Sums(), x, passes=True, seq_dims={"x": 1})
    (lap,) = (lap for lap in report.passes if lap.name == "doubled")
    assert lap.changes == 1
    assert "twice the same" in str(report)
    assert "\nPasses" in str(report)
    assert re.search("^doubled ", str(report).rpartition("\nPasses")[2], re.MULTILINE)
    verified = sp_compile.verify(Sums(), x, seq_dims={"x": 1})
    assert "doubled" in [note.label for note in verified.notes]
    assert verified.worst < 1e-6
    names = [one.name for one in registered_passes(CanonicalPass)]
    assert names.index("normalize_ops") < names.index("doubled") < names.index("rewrite_masks")
    with pytest.raises(SpError, match="SP901"):
        register_pass(Doubled)


@pytest.mark.slow
def test_explain_shows_passes_after_the_pipeline() -> None:
    ids = torch.randint(0, 11, (2, 8))
    model = build(Decoder, layers=1)
    report = sp_compile.explain(model, ids, ids, passes=True, offload=1.0)
    ran = [lap.name for lap in runs_by_pass(report.passes)]
    later = [
        "return_permutation",
        "defer_outputs",
        "add_gradient_tokens",
        "annotate_backward_sources",
        "save_attention_in_checkpoints",
        "separate_result_storage",
        "overlap_collectives",
        "offload_values",
    ]
    assert ran[-len(later) :] == later
    assert all(f"\n{name} " in str(report) for name in later)
    changes = {lap.name: lap.changes for lap in runs_by_pass(report.passes)}
    assert changes["overlap_collectives"] > 0
    assert changes["offload_values"] > 0
    plain = sp_compile.explain(model, ids, ids)
    assert not {lap.name for lap in plain.passes} & set(later)


def test_without_it_nothing_is_left_of_it() -> None:
    report = sp_compile.explain(Sums(), torch.randn(1, 8, 4), seq_dims={"x": 1})
    assert "doubled" not in [lap.name for lap in report.passes]
    assert "\nPasses" not in str(report)
    assert list(report.seconds) == [one.name for one in iterate_passes(Pipeline) if one.name in report.seconds]


def test_graphs_go_to_tlparse_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    monkeypatch.setattr("sp_compile.passes.base.is_tracing_enabled", lambda: True)
    monkeypatch.setattr("sp_compile.passes.base.log_graph_text", lambda name, text: traced.append(name))
    Doubled()(captured(Sums(), torch.randn(1, 8, 4)))
    assert traced == ["sp_before_doubled", "sp_after_doubled"]


def test_nothing_is_printed_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch.__trace")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr("torch.fx.GraphModule.print_readable", lambda gm, **_: pytest.fail("printed"))
    assert Doubled()(captured(Sums(), torch.randn(1, 8, 4))).modified


def test_a_pass_runs_on_two_graphs() -> None:
    gm, again = (captured(Sums(), torch.randn(1, 8, 4)) for _ in range(2))
    gather = passes.GatherOperands(2, seq_dims={"x": 1})
    for graph in (gm, again):
        assert gather(graph).modified
        assert len(gather.notes) == 1
    assert not gather(gm).modified


def test_every_name_is_there() -> None:
    every = {one.__name__ for kind in (CanonicalPass, CollectivePass) for one in registered_passes(kind)}
    in_order = [one for one in (*iterate_passes(Pipeline), *strategy_passes()) if one.__module__ != Pipeline.__module__]
    every |= {one.__name__ for one in in_order}
    assert every <= set(dir(passes))
    for name in every:
        assert getattr(passes, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        passes.Nothing  # noqa: B018


def test_a_record_is_not_shared_by_copies() -> None:
    gm = captured(Sums(), torch.randn(1, 8, 4))
    (node,) = gm.graph.find_nodes(op="placeholder")
    set_node_info(node, parameter=True)
    (copy,) = copy_graph(gm).graph.find_nodes(op="placeholder")
    set_node_info(copy, parameter=False, requires_grad=True)
    assert (node_info(node).parameter, node_info(node).requires_grad) == (True, None)
    assert (node_info(copy).parameter, node_info(copy).requires_grad) == (False, True)
    clear_node_info(copy)
    assert node_info(copy).parameter is None


def test_a_context_repeats_the_analysis_after_a_change() -> None:
    gm = captured(Sums(), torch.randn(1, 8, 4))
    context = PassContext.of(2, seq_dims={"x": 1})
    assert context.plan(gm) is context.plan(gm)
    before = context.plan(gm)
    passes.GatherOperands().run(gm, context)
    assert context.plan(gm) is not before
    assert [lap.name for lap in context.runs] == ["gather_operands"]


def step_by_step(step: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    def loop(x: Tensor) -> Tensor:
        h, out = x[:, 0] * 0, []
        for t in range(x.shape[1]):
            h = step(h, x[:, t], t)
            out.append(h)
        return torch.stack(out, 1)

    return loop


def attention(scored: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        return scored(x @ x.mT * 0.5) @ x

    return attend


def masked(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, mask(x))


def grid(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[-2])
    return at[:, None], at


def groups(x: Tensor) -> Tensor:
    """(B, S, 4) as (B, 4, S, 1), the first two of four heads."""
    return x.unflatten(-1, (4, 1)).transpose(1, 2)[:, :2]


def rows(x: Tensor, first: int = 0, twice: int = -1, read: bool = False) -> Tensor:
    """Write values row by row."""
    y, total = torch.zeros_like(x), torch.zeros(())
    for t in range(first, x.shape[1]):
        y[:, t] = x[:, t].sin()
        total = total + y.sum() if read else total
    if twice >= 0:
        y[:, twice] = 1.0
    return y * total


def convolved(x: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(x.mT, (2, 0))
    return F.conv1d(padded, torch.ones(4, 1, 3), groups=4), padded.mean()


OF_SEQUENCES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tanh": (step_by_step(lambda h, x, t: torch.tanh(h * x)), "reroll_loops: 8 .* affine .*aten.tanh"),
    "steps": (step_by_step(lambda h, x, t: h * x if t % 2 else h + x), "reroll_loops: 8 .* differ"),
    "flips of two dims": (lambda x: x.flip(1).cumsum(1).flip(1, 2), "rewrite_scan_idioms: .* dims than 1 "),
    "a scan read before it is flipped back": (
        lambda x: (s := x.flip(1).cumsum(1)).flip(1) + s,
        r"rewrite_scan_idioms: .*\(cumsum\)",
    ),
    "a recurrence read before it is flipped back": (
        lambda x: (h := step_by_step(lambda h, x, t: x.sigmoid() * h + x)(x.flip(1))).flip(1) + h,
        r"rewrite_scan_idioms: .*\(linear_scan_default\)",
    ),
    "a recurrence of flipped rows": (
        lambda x: step_by_step(lambda h, x, t: x.sigmoid() * h + x)(x.flip(1)).flip(1),
        "rewrite_scan_idioms: .* operand ",
    ),
    "a row written twice": (lambda x: rows(x, twice=3), "stack_written_rows: .* row 3 .*twice"),
    "rows never written": (lambda x: rows(x, first=2), "stack_written_rows: .* 2 rows of 8 "),
    "rows read in between": (lambda x: rows(x, read=True), "stack_written_rows: .* reads select_scatter_default_6 "),
    "tiled heads": (
        lambda x: F.scaled_dot_product_attention(groups(x).repeat(1, 2, 1, 1), *[groups(x).repeat(1, 2, 1, 1)] * 2),
        "group_key_heads: .* repeat_interleave",
    ),
    "repeated keys alone": (
        lambda x: F.scaled_dot_product_attention(
            *[groups(x).repeat_interleave(2, 1)] * 2, groups(x).repeat_interleave(2, 1) + 1
        ),
        "group_key_heads: .* only one ",
    ),
    "a window beside its padding": (convolved, "fold_paddings: .* reads pad "),
    "a flattened repetition": (lambda x: x.repeat_interleave(2), "normalize_repeats: .*dim="),
}
"""Of (2, 8, 4), along dim 1."""

REFUSED = {
    "sine": (attention(lambda s: s.sin().softmax(-1)), r"fuse_eager_attention: sin \(aten.sin.default\) "),
    "columns": (attention(lambda s: s.softmax(-2)), "fuse_eager_attention: .* dim 2, "),
    "read twice": (
        lambda x: (p := (x @ x.mT).softmax(-1)) @ x + p.sum(),
        "fuse_eager_attention: .* reads .*probabilities",
    ),
    "overflow": (
        attention(lambda s: (e := s.exp()) / e.sum(-1, keepdim=True)),
        "fuse_eager_attention: exp .* overflows ",
    ),
    "log-sum-exp": (
        lambda x: ((s := x @ x.mT).softmax(-1) @ x) * s.logsumexp(-1)[..., None],
        r"fuse_eager_attention: .*\(logsumexp\) ",
    ),
    "bias": (masked(lambda x: -grid(x)[1][None].float()), "rewrite_masks: .* bias .* than 0 "),
    "pairs": (masked(lambda x: x[0, 0] @ x[0, 0].T > 0), r"rewrite_masks: .*aten.matmul.* torch.float32 "),
    "op": (
        masked(lambda x: torch.arange(x.shape[-2])[:, None] ^ torch.arange(x.shape[-2]) > 1),
        r"rewrite_masks: .*\(aten.__xor__.Tensor\) .*bitwise ",
    ),
    "batches": (
        masked(lambda x: grid(x)[1] <= grid(x)[0] + (torch.arange(x.shape[0]) * x.shape[1])[:, None, None, None]),
        "rewrite_masks: .* heads or batches",
    ),
    "heads": (
        masked(lambda x: grid(x)[1] <= grid(x)[0] + torch.arange(x.shape[1])[:, None, None]),
        "rewrite_masks: .* heads ",
    ),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", {**REFUSED, **OF_SEQUENCES})
def test_a_refusal_has_a_reason(name: str) -> None:
    fn, why = {**REFUSED, **OF_SEQUENCES}[name]
    x = torch.randn(2, 8, 4) if name in OF_SEQUENCES else torch.randn(2, 2, 8, 4)
    report = sp_compile.explain(fn, x, seq_dims={"x": x.ndim - 2})
    (note,) = report.find_notes(NoteKind.DECLINED)
    assert re.match(why, f"{note.subject}: {note.text}"), note
    assert "test_pass_form.py" in note.where
    assert note.text.split(":")[0][:20] in str(report)


def test_only_near_misses_are_mentioned() -> None:
    def others(x: Tensor) -> Tensor:
        return torch.stack([x.softmax(-1), x + 1, (x * 2).sin()], 0).softmax(-1)

    report = sp_compile.explain(others, torch.randn(2, 8, 4), seq_dims={"x": 1})
    assert not report.find_notes(NoteKind.DECLINED)


NO_NEAR_MISSES: dict[str, Callable[[Tensor], Any]] = {
    "flips": lambda x: x.flip(1).cumsum(1) + x.flip(2).cumsum(1).flip(2),
    "neighbors": lambda x: torch.maximum(x[:, 1:], x[:, :-1])[:, 2:] + x[:, 3:],
    "two rows": lambda x: torch.select_scatter(torch.select_scatter(x, x[:, 1], 1, 0), x[:, 0], 1, 7),
    "padding alone": lambda x: (p := F.pad(x, (0, 0, 2, 0)))[:, :-2] + p.mean(),
    "attentions side by side": lambda x: torch.cat([F.scaled_dot_product_attention(x, x, x), x], -1),
    "one dim": lambda x: x[0, 0].repeat_interleave(2),
    "one key head": lambda x: F.scaled_dot_product_attention(groups(x), *[groups(x)[:, :1].repeat(1, 2, 1, 1)] * 2),
}


@pytest.mark.parametrize("name", NO_NEAR_MISSES)
def test_unrelated_patterns_are_not_refused(name: str) -> None:
    report = sp_compile.explain(NO_NEAR_MISSES[name], torch.randn(2, 8, 4), seq_dims={"x": 1})
    assert not report.find_notes(NoteKind.DECLINED)
