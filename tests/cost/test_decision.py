"""Text and merging of attention decisions."""

import re
from dataclasses import replace

import pytest
from cost.test_cost import candidate, of, shape
from support.attention import toy_strategy

from sp_compile import SPConfig, SpError
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.passes.cost.attention_cost import Strategy, all_candidates, choose_attention
from sp_compile.passes.cost.decision import Decision, candidate_table, describe_shape, merge_decisions
from sp_compile.passes.cost.machine import GPU
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.rule import RULES


def test_table() -> None:
    found = all_candidates(shape(4, 6, 2, order=LAYOUTS["contiguous"]), GPU)
    chosen = choose_attention(found)
    lines = candidate_table(found, chosen).splitlines()
    assert lines[0].split() == "attention U x R layout forward ms backward ms total ms memory MiB why".split()
    assert lines[2].startswith(chosen.kind)
    assert "chosen: " in lines[2]
    assert len(lines) == 2 + len(found)
    assert lines[-1].split("  ")[0] == "ulysses"
    assert lines[-1].endswith(of(found, "ulysses").refusal)
    assert "zigzag, moved" in candidate_table(found, chosen)
    other = next(c for c in found if c != chosen and c.refusal is None)
    assert "chosen: requested" in candidate_table(found, other)
    assert "chosen: requested" in candidate_table(found, chosen, requested=True)  # it may be the fastest, too
    tied = [candidate("ring", 1.0, 4), candidate("ulysses", 1.04)]
    assert re.search(r"chosen: .* 5 % of ring 1 x 4, same .*ulysses .* to ring", candidate_table(tied, tied[1]))
    tied = [candidate("ring", 1.0, 6), candidate("ulysses", 1.04)]
    assert re.search(r"chosen: .* 5 % of ring 1 x 4, 4 .* 6$", candidate_table(tied, tied[1]), re.MULTILINE)


def test_report() -> None:
    s = shape(2, 8, 8)
    found = all_candidates(s, GPU)
    one = Decision(s, found, choose_attention(found))
    assert [d.nodes for d in merge_decisions([one, one, one])] == [3]
    assert str(replace(one, requested=True)) != str(one)
    report, other = Report(n=2, attention=[one]), Report(n=2, attention=[one])
    report.merge(other)
    assert [d.nodes for d in report.attention] == [2]
    assert str(report.attention[0]) in str(report)


def test_the_text_of_a_shape_has_its_sizes() -> None:
    cross = replace(shape(2, 8, 2, causal=False, training=False, mask=True), kv_len=77, v_head_dim=64, window=9)
    text = describe_shape(cross)
    assert re.findall(r"\d+", text) == ["1", "8", "2", "128", "64", "2048", "77", "9"]
    flags = ({"causal": True}, {"documents": True}, {"mask": False}, {"training": True}, {"kernel": "dense"})
    assert len({text, *(describe_shape(replace(cross, **one)) for one in flags)}) == 1 + len(flags)


def test_a_scoped_strategy_is_gone_after_its_block() -> None:
    op, before = toy_strategy.AttendWithToy.op, dict(RULES)
    with toy_strategy.registered():
        assert SPConfig(attention="toy").attention == op_strategy(op).name
        assert RULES.keys() - before.keys() == {op}
        assert "toy" in {c.kind for c in all_candidates(shape(4), GPU)}
    assert op_strategy(op) is None
    assert before == RULES
    assert "toy" not in {c.kind for c in all_candidates(shape(4), GPU)}
    with pytest.raises(SpError, match="SP103: attention"):
        SPConfig(attention="toy")


def test_a_strategy_with_an_op_reports_its_bytes() -> None:
    ring = STRATEGIES["ring"]
    with pytest.raises(SpError, match=r"SP981.*'silent'"):
        Strategy(name="silent", preference=9, rewrite=ring.rewrite, candidates=ring.candidates)
