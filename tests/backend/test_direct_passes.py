"""Passes run one by one: identities in the global view, and together the program of the pipeline."""

import pytest
import torch
from support.decoders import Decoder
from support.golden import captured

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.strategies.attention.ulysses_strategy import AttendWithUlysses
from sp_compile.passes.strategies.gather_demands import GatherOperands
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials

TWO = Ranks(2, SIMULATED_GROUP)
SEQUENCE = {"seq_dims": {"x": 1}}


class GlobalView(torch.fx.Interpreter):
    """Runs a rewritten graph that is not local yet: there, every exchange is the identity."""

    def call_function(self, target, args, kwargs):
        if getattr(target, "namespace", "") == "sp":
            return args[0]
        return super().call_function(target, args, kwargs)


def test_rewrites_are_identities_in_the_global_view():
    model, x = Decoder(), torch.randn(1, 8, 16)
    gm = sp_compile.capture_export(torch.export.export(model, (x,)))
    for rewrite in (
        Canonicalize(),
        DecomposeMeans(TWO),
        AttendWithUlysses(TWO),
        ReducePartials(TWO),
        GatherOperands(TWO),
    ):
        rewrite(gm)
        torch.testing.assert_close(GlobalView(gm).run(x), model(x))


def test_single_passes_make_the_program_of_the_pipeline():
    model, x = Decoder().double(), torch.randn(1, 9, 16).double()
    gm = sp_compile.capture_export(torch.export.export(model, (x,)))
    for rewrite in (
        Canonicalize(),
        DecomposeMeans(TWO),
        AttendWithUlysses(TWO),
        ReducePartials(TWO),
        GatherOperands(TWO),
    ):
        rewrite(gm)
    local = Localize(TWO)(gm).graph_module
    whole = sp_compile.parallelize(torch.export.export(model, (x,)), sp=2)
    assert [n.target for n in local.graph.nodes if n.op == "call_function"] == [
        n.target for n in whole.graph.nodes if n.op == "call_function"
    ]
    for found in run_ranks(2, lambda rank: local(x)):
        torch.testing.assert_close(found, model(x))


def test_localize_refuses_open_demands():
    gm = captured(lambda x: (x * 2).cumsum(1) + 1, torch.randn(1, 8, 4))
    with pytest.raises(sp_compile.SpError, match=r"SP913.*cumsum.*Gather"):
        Localize(TWO, **SEQUENCE)(gm)
