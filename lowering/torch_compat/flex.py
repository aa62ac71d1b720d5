"""Call torch's flex_attention below its public API, for blocks with log-sum-exps of all keys.

Ring attention computes one block at a time: all queries of a rank with the keys of one rank. The public function
differentiates only its own result, but the backward of a block requires the output and the log-sum-exps over the keys
of all ranks. `score_mod` and `mask_mod` are the functions of flex_attention; the tensors that they read are passed as
`reads`. A tile is the square of rows and keys that flex_attention computes or skips together; the block tables are the
tensors of a BlockMask, which list the tiles to compute. Log-sum-exps are those of a row of scores, natural logarithms.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

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
from .shared_compiles import compile_in_one_process

LN2 = math.log(2)  # flex_attention returns log-sum-exps to base 2
# Template options that the public function sets.
_TEMPLATE_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}

ModFunction = Callable[..., Tensor]


def flex_on_any_device() -> AbstractContextManager[Any]:
    """Return a context without the device check of flex_attention, for dry runs on meta or a CPU.

    torch 2.11 to 2.15 reject training on a CPU, and any call on the meta device, only by this function. On a CPU the
    eager form has gradients, and a dry run does not run a kernel.
    """
    return mock.patch.object(public, "_validate_device", _accept_devices)


def _accept_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Accept operands on any device, in place of torch's check."""


class FlexSetup(NamedTuple):
    """Functions and settings of one call of flex_attention."""

    score_mod: ModFunction  # function of a score, its indices and `reads`
    mask_mod: ModFunction  # function of indices and `reads`
    tables: Sequence[Tensor]  # block tables in the order of BlockMask
    tile: int  # rows and keys of a tile
    scale: float  # factor of the scores
    options: Mapping[str, int]  # kernel options
    reads: tuple[Tensor, ...]  # captured tensors of both functions

    def arguments(self, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        """Return the arguments of the higher-order ops after the score functions, for the lengths of q and k.

        Captured tensors are passed twice: those of score_mod, then those of mask_mod.
        """
        mask = BlockMask((q.shape[2], k.shape[2]), *self.tables, (self.tile, self.tile), self.mask_mod)
        return mask.as_tuple(), self.scale, _kernel_options(self.options), self.reads, self.reads


def flex_forward(q: Tensor, k: Tensor, v: Tensor, call: FlexSetup) -> tuple[Tensor, Tensor]:
    """Run flex_attention on one block, and return out (B, Hq, Q, E) and the log-sum-exps (B, Hq, Q).

    The caller merges the results of blocks by their log-sum-exps.

    Args:
        q: (B, Hq, Q, D), any floating dtype.
        k: (B, Hkv, K, D).
        v: (B, Hkv, K, E).
        call: The functions and settings.
    """
    out, lse, *_ = torch.ops.higher_order.flex_attention(q, k, v, call.score_mod, *call.arguments(q, k))
    return out, lse * LN2  # flex_attention's log-sum-exp is to base 2


def flex_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: FlexSetup, learned: Collection[int]
) -> tuple[Tensor, ...]:
    """Return the gradients dq, dk, dv of one block, then those of the captured tensors in `learned`.

    Args:
        grad: (B, Hq, Q, E), gradient of out.
        q: (B, Hq, Q, D), any floating dtype.
        k: (B, Hkv, K, D).
        v: (B, Hkv, K, E).
        out: (B, Hq, Q, E), over all keys.
        lse: (B, Hq, Q), natural, over all keys.
        call: The functions and settings; the function of the score is differentiated.
        learned: Indices of the captured tensors whose gradients are returned, in ascending order.
    """
    with torch.enable_grad():
        # Trace score_mod and its gradient on an example score, with example indices of batch, head, query and key.
        indices = [q.new_zeros((), dtype=torch.int32) for _ in range(4)]
        example = q.new_zeros((), requires_grad=True), *indices
        leaves = tuple(x.detach().requires_grad_() if i in learned else x for i, x in enumerate(call.reads))
        forward, joint = create_fw_bw_graph(call.score_mod, example, leaves)
    base2_lse = lse / LN2
    lse_grad = None  # only out has a gradient
    operands = q, k, v, out, base2_lse, grad, lse_grad
    results = torch.ops.higher_order.flex_attention_backward(*operands, forward, joint, *call.arguments(q, k))
    dq, dk, dv, read_grads = results
    return dq, dk, dv, *(read_grads[i] for i in sorted(learned))


def flex_lookup(table: Tensor, indices: list[Tensor]) -> Tensor:
    """Return `table[indices]` inside of a score_mod, such that flex_attention's kernels accumulate its gradient.

    It replaces aten.index, whose gradient they do not support.

    Args:
        table: A captured tensor.
        indices: An integer tensor for each dim.
    """
    return mod_index(table, indices)


def _kernel_options(options: Mapping[str, int]) -> dict[str, Any]:
    """Return the options of a kernel call: torch's own, one that excludes flex decoding, and the caller's.

    Flex decoding is the kernel for few queries, which returns no log-sum-exps of blocks. The option that excludes it is
    BACKEND in newer versions of torch, and FORCE_USE_FLEX_ATTENTION in older ones; 2.11 to 2.15 have one of them.
    """
    known_options = getattr(public, "FlexKernelOptions", None)
    has_backend_option = "BACKEND" in getattr(known_options, "__annotations__", {})
    backend = {"BACKEND": "TRITON"} if has_backend_option else {"FORCE_USE_FLEX_ATTENTION": True}
    return _TEMPLATE_OPTIONS | backend | dict(options)


class FlexProgram:
    """Compiled program of a function of tensors, with static or dynamic lengths.

    A caller stores several programs of a function, and runs the first one whose `can_run` accepts the tensors.

    Args:
        fn: The function.
        xs: Example tensors.
        dynamic: Dims of each tensor whose sizes may differ in other calls.
        compile_graph: Called with the graph of ATen ops, without decompositions, and its fake inputs; returns the
            compiled graph. None: Inductor compiles it.
    """

    def __init__(
        self, fn: Callable[..., Any], xs: Sequence[Tensor], dynamic: Sequence[Sequence[int]], compile_graph: Any = None
    ) -> None:
        self._shape_env, self._has_dynamic_dims = ShapeEnv(duck_shape=False), any(dynamic)
        mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        # The program is stored, so it must not depend on the modes of the call that compiles it.
        with torch.inference_mode(False), torch.autocast(xs[0].device.type, enabled=False):
            self._fakes = [_make_fake(mode, x.detach(), dims) for x, dims in zip(xs, dynamic)]
            with tracing(TracingContext(mode)), torch.no_grad():
                decompositions = None if compile_graph else inductor_decompositions()
                with mode:
                    graph = make_fx(fn, decomposition_table=decompositions)(*self._fakes)
                compiler = compile_graph or _compile_fx
                self._run: Callable[[list[Tensor]], Sequence[Tensor]] = compiler(graph, self._fakes)

    def can_run(self, xs: Sequence[Tensor]) -> bool:
        """Return True if the guards on lengths hold for these tensors, so that the program may run on them."""
        return not self._has_dynamic_dims or bool(self._shape_env.evaluate_guards_for_args(self._fakes, list(xs)))

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the program on tensors of sizes that `can_run` accepts."""
        return self._run(list(xs))


def _compile_fx(graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Any:
    """Compile a decomposed graph with Inductor.

    Strides are not padded, since padded ones may give wrong results (see `compile_with_inductor`).
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch(comprehensive_padding=False):
        return compile_in_one_process(compile_fx_inner)(graph, list(fakes))


def _make_fake(mode: FakeTensorMode, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a fake tensor of x with symbolic sizes in `dims` and constant ones in the others."""
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(x.ndim)]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
