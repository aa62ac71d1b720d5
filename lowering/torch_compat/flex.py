"""torch's flex_attention below its public face: a block's attention given the log-sum-exps of all, compiled.

The public function has a backward of its own result only; a block of a ring needs that of the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import mod_index
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import flex_attention as public
from torch.nn.attention.flex_attention import BlockMask

from .compilers import inductor_decompositions

LN2 = math.log(2)
_NO_MASK = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""What the public function sets, of which templates make code."""

ModFunction = Callable[..., Tensor]


@contextmanager
def flex_on_any_device() -> Iterator[None]:
    """torch 2.11 to 2.15 refuse a flex_attention that trains on a CPU, and any on the meta device, by this function
    alone: on a CPU its eager form has gradients, and a look at a program runs no kernel of it.
    """
    refused = public._validate_device
    public._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        public._validate_device = refused


def flex_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ModFunction,
    mask_mod: ModFunction,
    tables: Sequence[Tensor],
    tile: int,
    scale: float,
    options: Mapping[str, int],
    reads: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """(B, Hq, Q, D), (B, Hkv, K, D), (B, Hkv, K, E) -> (B, Hq, Q, E) and its natural log-sum-exps (B, Hq, Q).

    tables: as BlockMask orders them. reads: what both functions take behind their indices.
    """
    mask = _make_block_mask(q, k, tables, tile, mask_mod)
    out, lse, *_ = torch.ops.higher_order.flex_attention(
        q, k, v, score_mod, mask, scale, _kernel_options(options), tuple(reads), tuple(reads)
    )
    return out, lse * LN2


def flex_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score_mod: ModFunction,
    mask_mod: ModFunction,
    tables: Sequence[Tensor],
    tile: int,
    scale: float,
    options: Mapping[str, int],
    reads: Sequence[Tensor],
    learned: Collection[int],
) -> tuple[Tensor, ...]:
    """dq, dk, dv of these keys, given out and lse over all of them; the function of the scores is differentiated.

    learned: which of what is read needs a gradient, too; these come behind, in order.
    """
    mask = _make_block_mask(q, k, tables, tile, mask_mod)
    with torch.enable_grad():
        places = [q.new_zeros((), dtype=torch.int32) for _ in range(4)]
        leaves = [x.detach().requires_grad_() if i in learned else x for i, x in enumerate(reads)]
        forward, joint = create_fw_bw_graph(score_mod, (q.new_zeros((), requires_grad=True), *places), tuple(leaves))
    dq, dk, dv, captured = torch.ops.higher_order.flex_attention_backward(
        q,
        k,
        v,
        out,
        lse / LN2,
        grad,
        None,
        forward,
        joint,
        mask,
        scale,
        _kernel_options(options),
        tuple(reads),
        tuple(reads),
    )
    return dq, dk, dv, *(captured[i] for i in sorted(learned))


def flex_lookup(table: Tensor, indices: list[Tensor]) -> Tensor:
    """Elements of a table inside of a score_mod, with the gradient that kernels of flex_attention add up."""
    return mod_index(table, indices)


def _make_block_mask(
    q: Tensor, k: Tensor, tables: Sequence[Tensor], tile: int, mask_mod: ModFunction
) -> tuple[Any, ...]:
    return BlockMask((q.shape[2], k.shape[2]), *tables, (tile, tile), mask_mod).as_tuple()


def _kernel_options(options: Mapping[str, int]) -> dict[str, Any]:
    """Never its kernel for a few queries, which has no log-sum-exps of blocks. Torch 2.11 to 2.15 have either name."""
    known = getattr(public, "FlexKernelOptions", None)
    named = "BACKEND" in getattr(known, "__annotations__", {})
    return _NO_MASK | ({"BACKEND": "TRITON"} if named else {"FORCE_USE_FLEX_ATTENTION": True}) | dict(options)


class FlexProgram:
    """A function of tensors as a graph, and what Inductor makes of it; equal lengths need not stay equal.

    dynamic: for each tensor, the dims whose extents may be others in other calls. compile_graph: takes the graph, of
    operators that are not decomposed, and its fake inputs, in the place of Inductor.
    """

    def __init__(
        self, fn: Callable[..., Any], xs: Sequence[Tensor], dynamic: Sequence[Sequence[int]], compile_graph: Any = None
    ) -> None:
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        self._env, self._dynamic = env, any(dynamic)
        with torch.inference_mode(False), torch.autocast(xs[0].device.type, enabled=False):
            self._fakes = [_make_fake(mode, x.detach(), dims) for x, dims in zip(xs, dynamic)]
            with tracing(TracingContext(mode)), torch.no_grad():
                table = None if compile_graph else inductor_decompositions()
                with mode:
                    graph = make_fx(fn, decomposition_table=table)(*self._fakes)
                self._run = (compile_graph or _compile_fx)(graph, self._fakes)

    def fits(self, xs: Sequence[Tensor]) -> bool:
        """Whether these may be given: what was found out about lengths holds for them."""
        return not self._dynamic or bool(self._env.evaluate_guards_for_args(self._fakes, list(xs)))

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._run(list(xs))
        return found


def _compile_fx(graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch(comprehensive_padding=False):
        run: Callable[[list[Tensor]], Sequence[Tensor]] = compile_fx_inner(graph, list(fakes))
    return run


def _make_fake(mode: FakeTensorMode, x: Tensor, dims: Sequence[int]) -> Tensor:
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(x.ndim)]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
