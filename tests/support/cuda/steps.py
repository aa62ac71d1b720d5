"""Run a training step of one rank of n on an absent GPU, compiled by `backend="sp"`, on fake tensors.

The forward and then the backward are Inductor's wrappers, called as by AOTAutograd's runtime: the backward frees the
values that the forward saved. The bodies of opaque operators are run, too: the tiles of a loop by the wrappers of its
parts. Attention kernels allocate the workspace of their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from support.cuda.tracing import Tracer, key_of
from support.cuda.wrappers import compiling, group_of, like, on_fake_tensors, traced_by
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx_inner
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from sp_compile.backend import lower
from sp_compile.lowering import torch_compat
from sp_compile.lowering.attention import attend, attend_parts
from sp_compile.lowering.attention import merge_blocks as merge
from sp_compile.lowering.tiles import tile_ops as tiles
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.passes.localize.tiles.run_in_tiles import programs_of
from sp_compile.runtime.session import CompileSession

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class Moments:
    """Memory of a graph as it runs."""

    peak: int = 0  # bytes of all values
    at: str = ""  # event of the peak
    alive: Mapping[str, int] = field(default_factory=dict)  # bytes at the peak by their producer
    values: int = 0  # peak without gradients of parameters, which FSDP frees layer by layer


@dataclass(frozen=True)
class Step:
    """Memory of a step of one rank."""

    forward: Moments
    backward: Moments
    kept: int  # bytes that the forward saves on the device
    host: int  # bytes that it saves on the host

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)

    @property
    def values(self) -> int:
        """Return the peak without gradients of parameters."""
        return max(self.forward.values, self.backward.values)


class _Ledger(Tracer):
    """Records the memory after each event; gradients are identified at the end."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, dict[int, int]]] = []
        self.labels: dict[int, str] = {}
        self.refs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # an operator that restores its random state
            with self:
                return args[0](*args[1:], **{k: v for k, v in (kwargs or {}).items() if k != "rng_state"})
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        work: list[Tensor] = []
        if func in WORKSPACES:
            with self:
                work = _workspace(*WORKSPACES[func], *args[1:4])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        work.clear()
        return result

    def _weigh(self, event: str) -> None:
        super()._weigh(event)
        for key, known in self._live.items():
            if key not in self.labels:
                self.refs.append(known.alive)  # a reference prevents the reuse of the address
            self.labels[key] = known.label
        self.rows.append((event, {key: known.size for key, known in self._live.items()}))

    def moments(self, rows: slice, gradients: Container[int]) -> Moments:
        """Return the memory of the rows of one graph."""
        event, sizes = max(self.rows[rows], key=lambda row: sum(row[1].values()), default=("", {}))
        alive: Counter[str] = Counter()
        for key, nbytes in sizes.items():
            alive[f"gradient {self.labels[key]}" if key in gradients else self.labels[key]] += nbytes
        values = (sum(n for key, n in row.items() if key not in gradients) for _, row in self.rows[rows])
        return Moments(sum(sizes.values()), event, dict(alive.most_common()), max(values, default=0))


BODIES: dict[Any, Callable[..., Any]] = {
    sp.attend.default: attend.attend,
    sp.attend_backward.default: attend.attend_backward,
    sp.attend_backward_parts.default: attend_parts.attend_backward_parts,
    sp.run_tiles.default: tiles.run_tiles,
}
"""Bodies that run in place of operators."""
WORKSPACES = {
    aten._scaled_dot_product_flash_attention_backward.default: (1, 2),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 2),
    aten._flash_attention_backward.default: (2, 1),
}
"""Backwards of attention that take memory for themselves: the dims of heads and of rows in an operand."""


def _workspace(heads: int, rows: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """For each query, in 128s, a sum and the gradient in float32; gradients of keys and values for every query head.

    The latter where several heads share one. Source: `mha_bwd` of ATen's flash_attn/flash_api.cpp. What cuDNN's takes
    is not in the open; the same is assumed.
    """
    shape = q.shape[0], q.shape[heads], -(-q.shape[rows] // 128) * 128
    work = [torch.empty(shape, device=q.device), torch.empty(*shape, q.shape[3], device=q.device)]
    if k.shape[heads] != q.shape[heads]:
        every = k.shape[0], q.shape[heads], k.shape[rows]
        work += [torch.empty(*every, x.shape[3], dtype=x.dtype, device=x.device) for x in (k, v)]
    return work


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, into: Any = None) -> Any:
    """Allocate the results of `launch` of lowering/triton/merge_kernel.py."""
    if into is not None:
        return into
    return tuple(torch.empty(x.shape, dtype=lse_a.dtype, device=x.device) for x in (out_a, lse_a))


@dataclass
class _Compiled:
    """Wrappers of the forward and the backward, with the names of the values between them."""

    graphs: list[tuple[Any, Sequence[str], Sequence[Any]]] = field(default_factory=list)
    """(wrapper, names of results, fake inputs)."""
    results: int = 0
    mode: Any = None


def step(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[Tensor]], n: int, ulysses: int | None = None,
    **options: Any,
) -> Step:  # fmt: skip
    """Of the last rank of n. make: the model, of parameters on "cuda"; inputs: whole. Both are called for fakes.

    ulysses: ranks of that axis of a mesh, whose other is "ring". The model returns its loss.
    """
    with group_of(n, n - 1):
        if ulysses is not None:
            options["mesh"] = init_device_mesh("cpu", (n // ulysses, ulysses), mesh_dim_names=("ring", "ulysses"))
        found = _compiled(make, inputs, options)
        with (
            mock.patch.object(merge, "can_use_triton", lambda x: x.is_cuda),
            mock.patch("sp_compile.lowering.triton.merge_kernel.launch_merge", _merged),
        ):
            return _run(found)


def _compiled(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[Tensor]], options: Mapping[str, Any]
) -> _Compiled:
    found = _Compiled()

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        session = CompileSession(gm, example_inputs, options, measures=False)
        lowered = lower(UserProgram(gm, tuple(example_inputs)), options, session)
        lowered.add_boundary_outputs()
        found.mode = detect_fake_mode(lowered.inputs)
        with compiling(found.mode) as modules, apply_checkpoint_policies(lowered.graph):

            def inner(graph: torch.fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
                names = [getattr(x, "name", "") for x in graph.graph.output_node().args[0]]
                out = compile_fx_inner(graph, given, **kwargs)
                found.graphs.append(
                    (modules[-1], names, given, [n.name for n in graph.graph.find_nodes(op="placeholder")])
                )
                return out

            def part(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
                torch_compat.nested_compiler(torch_compat.get_compiler("inductor", {}))(graph, given)
                call = on_fake_tensors(modules[-1])
                return lambda *xs: call(list(xs))

            for program in programs_of(lowered.graph):
                program.compile(part, object(), for_training=True)
            joint, halves = lowered.joint, lowered.partitioned_passes()
            torch_compat.joint_compiler("inductor", joint, None, None, halves)(
                lowered.graph, lowered.inputs, inner_compile=inner
            )
        return gm.forward

    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, given = make(), inputs()
        torch.compile(model, backend=backend, dynamic=False)(*given)
    torch.compiler.reset()
    return found


def _run(found: _Compiled) -> Step:
    """Both wrappers."""
    (forward, made, given, _), (backward, _, wanted, names) = found.graphs
    mode, ledger = found.mode, _Ledger()
    fresh = lambda x: x if not isinstance(x, Tensor) else like(mode, x)  # noqa: E731
    owner = [fresh(x) for x in given]
    call = on_fake_tensors(forward)
    with traced_by(ledger, mode):
        values = dict(zip(made, call(list(owner)), strict=True))
        begin = len(ledger.rows)
        kept = [values.pop(name) if name in values else fresh(x) for name, x in zip(names, wanted, strict=True)]
        theirs = {key_of(x) for x in owner if isinstance(x, Tensor)}
        bytes_of = {(key_of(x), x.is_cuda): x.untyped_storage().nbytes() for x in kept if isinstance(x, Tensor)}
        on_device, on_host = (
            sum(n for (key, cuda), n in bytes_of.items() if cuda is c and key not in theirs) for c in (True, False)
        )
        call = on_fake_tensors(backward)
        grads = call(kept)
    keys = {key_of(x) for x in grads if isinstance(x, Tensor)}
    return Step(ledger.moments(slice(begin), ()), ledger.moments(slice(begin, None), keys), on_device, on_host)
