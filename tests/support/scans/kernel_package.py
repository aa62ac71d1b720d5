"""A package with kernel functions of the names and signatures of flash-linear-attention, mamba_ssm and causal_conv1d.

They compute step by step, in the dtype of their operands, and Dynamo must not trace them, as in the packages.
"""

import itertools
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS: list[str] = []  # names of the functions that ran


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Linear attention, one token after another; operands as for `sp::linear_attention`."""
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if initial is None else initial.to(v.dtype)
    outs = []
    for t in range(v.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t].view(-1, 1, 1, 1), 0)
        previous, state = state, state * decay[:, t].exp().unsqueeze(-1)
        key, value = k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-2)
        if beta is not None:
            value = (value - (state * key).sum(-2, keepdim=True)) * beta[:, t, :, None, None]
        if a is not None and b is not None:
            state = state + b[:, t].unsqueeze(-1) * (previous * a[:, t].unsqueeze(-1)).sum(-2, keepdim=True)
        state = state + key * value
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2) * scale)
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _by_document(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run each document, as a kernel does with `cu_seqlens`."""
    CALLS.append(name)
    if use_qk_l2norm_in_kernel:
        q, k = _normalize(q), _normalize(k)
    groups = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    rows = q, k, v, decay if decay.ndim == 4 else decay.unsqueeze(-1), beta, a, b
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (v.shape[0] == 1 and bounds[-1] == v.shape[1] and sorted(bounds) == bounds)
    outs, states = [], []
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        first = initial_state if cu_seqlens is None or initial_state is None else initial_state[i : i + 1]
        out, state = attend(*(None if x is None else x[:, start:stop] for x in rows), None, first, scale)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states) if output_final_state else None


@torch.compiler.disable
def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    return _by_document("chunk_gated_delta_rule", q, k, v, g, beta, **options)


@torch.compiler.disable
def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    return _by_document("chunk_kda", q, k, v, g, beta, **options)


@torch.compiler.disable
def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Any:
    return _by_document("chunk_delta_rule", q, k, v, v.new_zeros(v.shape[:3]), beta, **options)


@torch.compiler.disable
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Any:
    g = v.new_zeros(v.shape[:3]) if g is None else g
    return _by_document("chunk_simple_gla", q, k, v, g if g_gamma is None else g + g_gamma, scale=scale, **options)


@torch.compiler.disable
def chunk_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **options: Any) -> Any:
    slope = torch.arange(v.shape[2]) * -(8 / v.shape[2] * (1 - layer_idx / num_layers))
    return _by_document("chunk_lightning_attn", q, k, v, slope.expand(v.shape[:3]), **options)


@torch.compiler.disable
def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    return _by_document("chunk_gla", q, k, v, g, **options)


@torch.compiler.disable
def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, **options: Any
) -> Any:
    return _by_document("chunk_rwkv7", r, k, v, w, None, a, b, scale, **options)


def _starts(seq_idx: Tensor | None) -> Tensor | None:
    return None if seq_idx is None else F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


@torch.compiler.disable
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
) -> Any:
    CALLS.append("mamba_chunk_scan_combined")
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    first = None if initial_states is None else initial_states.mT
    decay = (dt * A).unsqueeze(-1)
    out, state = attend(C, B, x * dt.unsqueeze(-1), decay, None, None, None, _starts(seq_idx), first, 1.0)
    out = out if D is None else out + x * D.unsqueeze(-1)
    out = out if z is None else out * F.silu(z)
    return (out, state.mT) if return_final_states else out


@torch.compiler.disable
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    CALLS.append("causal_conv1d_fn")
    ids = x.new_zeros(x.shape[0], x.shape[-1]) if seq_idx is None else seq_idx
    columns = []
    for t in range(x.shape[-1]):
        out = torch.zeros_like(x[..., 0]) if bias is None else bias.expand(x.shape[0], -1)
        for j in range(min(weight.shape[1], t + 1)):
            out = out + x[..., t - j] * weight[:, -1 - j] * (ids[:, t - j] == ids[:, t]).unsqueeze(-1)
        columns.append(out)
    y = torch.stack(columns, -1)
    return y if activation is None else F.silu(y)


def install() -> ModuleType:
    """Add the functions to a module whose name is that of a package of kernels."""
    module = ModuleType("fla_of_tests")
    for name, function in list(globals().items()):
        if name.startswith(("chunk_", "mamba_", "causal_")):
            function.__module__ = module.__name__
            setattr(module, name, function)
    sys.modules[module.__name__] = module
    return module


fla = install()
