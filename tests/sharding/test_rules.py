"""Sharding rules: each is run on sharded operands; none accepts a wrong factor, and few reject a correct one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import brute, opinfo, samples
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import FloorDiv
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import assume_large
from sp_compile.passes.sharding import rule as rules
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.placement import Frame, Shard
from sp_compile.passes.sharding.reshape import reshape_rule
from sp_compile.passes.sharding.rule import POINTWISE, BoundRule, RulePattern, lookup_rule, rule
from sp_compile.passes.sharding.rules.pointwise import SMOOTH_OPS, is_smooth

aten = torch.ops.aten
RUNS = ("pass", "sum", "mean", "total")
# What sp::ring_attention and its like do with shards is no rule's business: tests/attention/test_sharded_attention.py.
# Collectives over other ranks need those: tests/tensor_parallel/test_tensor_parallel.py.
# What is in the order of sorted keys is right where it is put back: tests/models/test_experts.py.
# Quantized weights need packages: tests/models/test_low_precision.py, test_frozen_base.py.
sp = torch.ops.sp
ELSEWHERE = (
    *(sp.reduce_pair.default, sp.sort_rows.default, sp.to_sorted.default, sp.from_sorted.default),
    *(sp.scaled_linear.default, sp.subclass_linear.default, sp.packed_linear.default, sp.extreme.default),
)
RULES = {
    op: function
    for op, function in rules.RULES.items()
    if op not in (POINTWISE, *ELSEWHERE) and not op_strategy(op) and op.namespace != "_c10d_functional"
}
OWN = samples.build()
TABLE = Path(__file__).with_name("rules_table.txt")

NOTHING_TO_SHARD = {aten.scalar_tensor.default: "a 0-d result"}
TIMID_ON_PURPOSE = {
    aten.feature_alpha_dropout.default: "random: only shapes are compared",
    aten.feature_dropout.default: "random: only shapes are compared",
    aten.new_full.default: "the operand's values do not matter, but it has no factor to go on with",
    aten.new_ones.default: "as new_full",
    aten.new_zeros.default: "as new_full",
    aten.squeeze.default: "only a rank with one position drops the dim; see squeeze.dim",
    aten.to.other: "as new_full",
    aten.type_as.default: "as new_full",
}


def is_pointwise(op: Any) -> bool:
    return RULES.get(op) is rules.RULES[POINTWISE]


def samples_of(op: Any) -> list[samples.Sample]:
    return OWN.get(op) or (samples.of_pointwise(op) if is_pointwise(op) else [])


@pytest.mark.parametrize("op", RULES, ids=str)
def test_shards_equal_the_full_result(op: Any) -> None:
    outcomes = [o for args, kwargs in samples_of(op) for o in brute.outcomes(op, args, kwargs)]
    assert outcomes or op in NOTHING_TO_SHARD, "no sample in tests/support/samples shards this op"
    wrong = [o for o in outcomes if o.kind in RUNS and o.error]
    assert not wrong
    refused = [o for o in outcomes if o.kind not in RUNS]
    timid = bool(refused) and all(o.error is None for o in refused)
    assert timid == (op in TIMID_ON_PURPOSE), f"{refused}: sharding them never goes wrong"


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 30.0, None])
@pytest.mark.parametrize("op", SMOOTH_OPS, ids=str)
def test_smooth_ops_are_finite_with_finite_derivatives(op: Any, value: float | None) -> None:
    """Constant operands, and operands with zeros, as in padded rows that are not restored."""
    checked = 0
    losses = aten.cross_entropy_loss.default, aten.nll_loss_nd.default
    for args, kwargs in samples_of(op) or samples.of_pointwise(op):

        def filled(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            return (x.tanh().round() * x if value is None else torch.full_like(x, value)).requires_grad_()

        given = 2 if op in losses else len(args)  # and no weights of classes
        args, kwargs = (*tree_map(filled, args[:given]), *args[given:]), tree_map(filled, kwargs)
        node, operands = brute.node_of(op, args, kwargs)
        results = [x for x in OpCall(node).results() if x.requires_grad]
        if not is_smooth(node) or not results:
            continue
        trained = [x for x in operands if x.requires_grad]
        for cotangent in (torch.zeros_like, torch.ones_like):
            given = [cotangent(x) for x in results]
            grads = torch.autograd.grad(results, trained, given, retain_graph=True, allow_unused=True)
            assert all(x.isfinite().all() for x in (*results, *(g for g in grads if g is not None)))
        checked += 1
    assert checked


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor], ids=str)
def test_infinite_constants_are_not_smooth(op: Any) -> None:
    x = torch.ones(2)
    assert is_smooth(brute.node_of(op, (x, 3.0), {})[0])
    assert not is_smooth(brute.node_of(op, (x, torch.inf), {})[0])


def test_shards_equal_the_full_result_on_torch_samples() -> None:
    ops, wrong = set(), []
    for op, (args, kwargs) in opinfo.samples():
        for outcome in brute.outcomes(op, args, kwargs):
            ops.add(op)
            if outcome.kind in RUNS and outcome.error:
                wrong.append((op, args, kwargs, outcome))
    assert not wrong
    assert len(ops) > 300


def test_the_check_finds_wrong_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules that look right: causal attention by its queries alone, and a bias beside a sum."""
    table = copy.copy(rules.RULES)
    monkeypatch.setattr(rules, "RULES", table)
    rule(aten.scaled_dot_product_attention.default, "b h q d, b h k d, b h k e -> b h q e", attend="k", replicate="d")
    rule(aten.linear.default, "... i, o i, o -> ... o", sum="i")
    rule(aten.mse_loss.default, "..., ... -> ", sum="...")
    q = samples.f(2, 4, 6, 4)
    calls = [
        (aten.scaled_dot_product_attention.default, (q, q, q), {"is_causal": True}, "q"),
        (aten.linear.default, (samples.f(2, 6), samples.f(4, 6), samples.f(4)), {}, "i"),
        (aten.mse_loss.default, (samples.f(6), samples.f(6), 1), {}, "~0"),
    ]
    for op, args, kwargs, factor in calls:
        assert {o.factor for o in brute.outcomes(op, args, kwargs) if o.kind in RUNS and o.error} == {factor}


def show(rule_: BoundRule | None) -> str:
    """The text, and the rows of windows, which are no part of it."""
    spans = ", ".join(f"{start}+{length}" for start, length in rule_.spans) if rule_ else ""
    return f"{rule_}; {spans}" if spans else str(rule_ or "none")


def test_table() -> None:
    """The rule of every op at its first sample. EXPECTTEST_ACCEPT=1 rewrites the file: review its diff."""
    lines = []
    for op in sorted(RULES, key=str):
        args, kwargs = samples_of(op)[0]
        lines.append(f"{op}: {show(lookup_rule(brute.node_of(op, args, kwargs)[0])[1])}\n")
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        TABLE.write_text("".join(lines))
    assert "".join(lines) == TABLE.read_text()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a b, b c -> a c", {}, r"SP935: .*\['b'\]"),
        ("a b -> a b", {"full": "b"}, r"SP932: .*sum, mean.*\['full'\]"),
        ("a b -> a", {"sum": "c"}, "SP934: .*'c'"),
        ("a b", {}, "SP931: .*'->'.*0"),
        ("a -> a -> a", {}, "SP931: .*'->'.*2"),
        ("a (b c -> a b c", {}, r"SP931: .*'a \(b c'"),
        ("a b) -> a b", {}, r"SP931: .*'a b\)'"),
        ("(a (b c)) -> a b c", {}, r"SP931: .*'\(a \(b c\)\)'"),
        ("a () -> a", {}, r"SP931: .*'a \(\)'"),
        ("(a ...) -> a ...", {}, r"SP931: .*'\(a \.\.\.\)'"),
        ("a (b 1) -> a b", {}, "SP931: .*'1'"),
        ("... a ... -> a", {}, r"SP931: .*'\.\.\. a \.\.\.' .*\['\.\.\.'\]"),
        ("a (b a) -> a b", {}, r"SP931: .*'a \(b a\)' .*\['a'\]"),
        ("a b* -> a b", {}, r"SP931: .*'\*'"),
        ("a 2b -> a 2b", {}, "SP931: .*'2b'"),
        ("a -> a; pad=first", {}, "SP933: .*pad: .*'first'"),
        ("(a b) -> (b a)", {}, r"SP936: .*\['a', 'b'\]"),
    ],
)
def test_refused_texts(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpError, match=message):
        rule(aten.mm.default, text, **options)


def test_directly_built_factors_are_validated() -> None:
    with pytest.raises(SpError, match=r"SP935: .*\['i'\]"):
        BoundRule((("n", "i"),), (("n",),))
    with pytest.raises(SpError, match=r"SP932: .*'product'"):
        BoundRule((("n", "i"),), (("n",),), {"i": "product"})
    assert BoundRule((("n",),), (("n", "new"),)).kind("new") == "replicate"
    assert BoundRule((("n",),), (("n", "new"),), sizes="size").kind("new") == "pass"


def test_a_text_is_its_rule() -> None:
    """The text of a rule parses to the same rule for the same call, except for fields that depend on the call."""
    read = 0
    for op in RULES:
        for args, kwargs in samples_of(op):
            call, one = lookup_rule(brute.node_of(op, args, kwargs)[0])
            if one is None or one.operand_placements is not None:
                continue
            again = RulePattern.parse(str(one)).bind(call)
            call_fields = {"slides": one.slides, "spans": one.spans, "picks": one.picks, "normalizes": one.normalizes}
            assert again is not None, str(one)
            assert replace(again, **call_fields) == one, str(one)
            read += 1
    assert read > 500


@pytest.mark.parametrize("high", [-1e8, -0.5, 0.5, 7, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_bin_counts_the_padded_rows_of_histc(dtype: torch.dtype, high: float) -> None:
    low = high - 2 * abs(high)
    node, _ = brute.node_of(aten.histc.default, (torch.zeros(5, dtype=dtype), 4, low, high), {})
    operand, value = lookup_rule(node)[1].pad
    assert operand == 0
    assert not torch.histc(torch.full((3,), value, dtype=dtype), 4, low, high).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_padded_rows_of_histc_fit_the_dtype(dtype: torch.dtype) -> None:
    for high in (5, 5.5, torch.iinfo(torch.int8).max, torch.iinfo(torch.uint8).max):
        node, _ = brute.node_of(aten.histc.default, (torch.zeros(5, dtype=torch.float32), 4, 0, high), {})
        node.args[0].meta["val"] = node.args[0].meta["val"].to(dtype)  # torch has CUDA kernels only
        found = lookup_rule(node)[1]
        assert (found is None) == (high >= torch.iinfo(dtype).max), high
        assert found is None or high < torch.tensor(found.pad[1], dtype=dtype).item() == found.pad[1]


def test_groups_take_sizes_from_the_call() -> None:
    x = samples.f(6, 4)
    node, _ = brute.node_of(aten.view.default, (x, [2, 3, 4]), {})
    call = OpCall(node)
    found = RulePattern.parse("(b s) d -> b s d", lazy=True).bind(call)
    assert found.extents == {"b": 2, "s": 3}
    assert RulePattern.parse("a b c d -> (a b c) d").bind(call) is None, "another number of dims"
    assert RulePattern.parse("(b s) d -> b d s").bind(call) is None, "sizes of which the operand is no product"
    shard = Shard(0, Frame.full(3), outer=2)
    assert found.local_part(found.operands[0], shard) == ("s", Shard(0, Frame.full(3)))
    assert found.dim_shard("(b s)", "s", Shard(0, Frame.full(3))) == shard
    assert found.local_part(found.operands[0], Shard(0, Frame.full(6)))[0] == ""


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Atoms, and two ways to multiply neighbors together."""
    atoms = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        cuts = draw(st.lists(st.booleans(), min_size=len(atoms) - 1, max_size=len(atoms) - 1))
        out = [atoms[0]]
        for atom, cut in zip(atoms[1:], cuts, strict=True):
            if cut:
                out.append(atom)
            else:
                out[-1] *= atom
        return out

    return atoms, grouped(), grouped()


@settings(max_examples=75)
@given(regroupings())
def test_reshape_finds_a_sequence_again(case: tuple[list[int], list[int], list[int]]) -> None:
    atoms, before, after = case
    x = samples.f(*before)
    assert not [o for o in brute.outcomes(aten.reshape.default, (x, after), {}) if o.error]
    for at, length in enumerate(atoms):
        outer = torch.Size(atoms[:at]).numel()
        home = _home(before, outer, length)
        moved = brute.move(reshape_rule(tuple(before), tuple(after)), home) if length > 1 else ()
        assert moved is not None, f"{length} of {atoms} is whole in both {before} and {after}"


def test_reshape_to_heads_of_a_symbolic_size() -> None:
    """A model that views projections as heads of `head_dim` features, in layers with other values of it."""
    size = sympy.Symbol("s", integer=True, positive=True)
    heads = FloorDiv(sympy.Integer(16), size)
    dims = reshape_rule((2, 41, 16), (2, 41, heads, FloorDiv(sympy.Integer(16), heads))).results[0]
    assert dims[:2] == ("d0", "d1")
    other = sympy.Symbol("t", integer=True, positive=True)
    assert assume_large(other * FloorDiv(sympy.Integer(16), heads)) == 2**20 * 16
    assert assume_large(FloorDiv(8 * size, other - size)) == 8  # undefined for equal sizes


def _home(shape: list[int], outer: int, length: int) -> Shard:
    """Return the shard of the shape that contains the atom after `outer` rows."""
    for dim, extent in enumerate(shape):
        before = torch.Size(shape[:dim]).numel()
        if outer % before == 0 and before * extent % (outer * length) == 0 and before * extent >= outer * length:
            return Shard(dim, Frame.full(length), outer // before, before * extent // (outer * length))
    raise AssertionError(shape)


def nodes(function: Callable[..., Any], *args: Any) -> list[Node]:
    """The calls of the function's graph with symbolic sizes."""
    graph = make_fx(function, tracing_mode="symbolic")(*args).graph
    return [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor | list)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[:, 1:], "d0 d1 d2 -> d0 d1 d2; window=d1; lazy; 1+s1 - 1"),
        (lambda x: x[:, :-1], "d0 d1 d2 -> d0 d1 d2; window=d1; lazy; 0+s1 - 1"),
        (lambda x: x[:, 1:-2], "d0 d1 d2 -> d0 d1 d2; window=d1; lazy; 1+s1 - 3"),
        (lambda x: x[:, -3:], "d0 d1 d2 -> d0 d1 d2; window=d1; lazy; s1 - 3+3"),
        (lambda x: x[:, 2:5], "d0 d1 d2 -> d0 d1 d2; window=d1; lazy; 2+3"),
        (lambda x: x[:, ::2], "d0 d1 d2 -> d0 sliced1 d2; replicate=d1 sliced1; lazy"),
        (lambda x: x.reshape(-1, x.shape[2]), "d0 d1 d2 -> (d0 d1) d2; lazy; reshapes"),
        (lambda x: x[:, None].expand(-1, 7, -1, -1), "d0 1 d2 d3 -> d0 d1 d2 d3; sizes=size; lazy"),
        (lambda x: x.sum(1, keepdim=True), "d0 d1 d2 -> d0 1 d2; sum=d1"),
        (lambda x: x + x[:, :1], "~2 ~1 ~0, ~2 1 ~0 -> ~2 ~1 ~0"),
    ],
)
def test_symbolic_sizes(function: Callable[..., Any], expected: str) -> None:
    x = torch.randn(4, 11, 6)
    last = nodes(function, x)[-1]
    assert symbols_renamed(show(lookup_rule(last)[1]), nodes(lambda x: x + 1, x)[0]) == expected


def symbols_renamed(text: str, like: Node) -> str:
    for i, s in enumerate(like.meta["val"].shape):
        text = text.replace(str(s), f"s{i}")
    return text


@pytest.mark.parametrize(
    ("shard", "spans", "expected"),
    [
        (Shard(1, Frame.full(8)), ((1, 7),), (Frame(8, 1, 7),)),
        (Shard(1, Frame(8, 1, 7)), ((0, 6),), (Frame(8, 1, 6),)),
        (Shard(1, Frame.full(8)), ((0, 4), (4, 4)), (Frame(8, 0, 4), Frame(8, 4, 4))),
        (Shard(1, Frame.full(8)), ((0, 1),), None),
        (Shard(1, Frame.full(4), outer=2), ((0, 7),), None),
        (Shard(0, Frame.full(2)), ((0, 4), (4, 4)), (Frame.full(2), Frame.full(2))),
    ],
)
def test_windows(shard: Shard, spans: tuple[tuple[int, int], ...], expected: tuple[Frame, ...] | None) -> None:
    dims = ("a", "b")
    moved = brute.move(BoundRule((dims,), (dims,) * len(spans), {"b": "window"}, spans=spans), shard)
    assert (moved and tuple(m.frame for m in moved)) == expected
