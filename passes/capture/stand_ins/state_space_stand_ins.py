"""Define what Dynamo traces in place of state space kernels: selective scans and their short convolutions.

    mamba_ssm          mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_scan_fn
    causal_conv1d      causal_conv1d_fn
    fla                causal_conv1d, which its ShortConvolution calls

A convolution of width W reads W - 1 earlier tokens: a halo of ranks. The state before the first token acts on the first
W - 1 results only, and is added to them. See ``kernel_stand_ins.py`` for calls without an equivalent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype

from .kernel_stand_ins import STAND_INS, KernelStandIn, attend_kernel, document_starts

SILU = ("silu", "swish")


def _mamba_chunk_scan(
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
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """Compute mamba_ssm's mamba_chunk_scan_combined as linear attention: C, B and x are queries, keys and values."""
    if cu_seqlens is not None:
        return NotImplemented
    dt = dt.to(accumulation_dtype(dt.dtype))
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(dt_limit[0], dt_limit[1])
    if initial_states is not None and seq_idx is not None:  # the kernel applies them to documents of number 0 only
        initial_states = initial_states * (seq_idx[:, 0] == 0).view(-1, 1, 1, 1)
    attended = attend_kernel(
        kernel="",  # no installed kernel is called: it is computed by torch ops
        q=C,
        k=B,
        v=x * dt.unsqueeze(-1),
        decay=dt * A,
        scale=1.0,
        initial_state=initial_states,
        output_final_state=return_final_states,
        state_v_first=True,
        starts=None if seq_idx is None else _changes(seq_idx),  # True for the first token of a document
    )
    if attended is NotImplemented:
        return attended
    out, state = attended
    if D is not None:
        out = out + x * (D if D.ndim == 2 else D.unsqueeze(-1))
    out = (out if z is None else out * F.silu(z)).to(x.dtype)
    return (out, state) if return_final_states else out


def _mamba_split_conv_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Compute mamba_ssm's mamba_split_conv1d_scan_combined: convolution, scan, gated norm and projection.

    The last dim of zxbcdt has the gate z, the convolved x, B and C, and one dt per head.
    """
    heads = A.shape[0]
    size = D.shape[1] if D.ndim == 2 else headdim  # of a head: D is (heads,) or (heads, size)
    if initial_states is not None or size is None:
        return NotImplemented
    width, channels = heads * size, conv1d_weight.shape[0]  # of x and z; of x, B and C together
    z, convolved, dt = zxbcdt[..., -(width + channels + heads) :].split([width, channels, heads], -1)
    if zxbcdt.shape[-1] != width + channels + heads:  # an MLP in the same projection
        return NotImplemented
    convolved = _causal_conv(convolved.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    if convolved is NotImplemented:
        return convolved
    state_width = (channels - width) // 2  # of B and of C
    x, B, C = convolved.mT.split([width, state_width, state_width], -1)
    x, B, C = x.unflatten(-1, (heads, size)), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    gate = z.unflatten(-1, (heads, size)) if rmsnorm_weight is None else None
    options: dict[str, Any] = {"dt_limit": dt_limit, "return_final_states": return_final_states, "dt_softplus": True}
    scanned = _mamba_chunk_scan(x, dt, A, B, C, chunk_size, D, gate, dt_bias, seq_idx=seq_idx, **options)
    if scanned is NotImplemented:
        return scanned
    out, states = scanned if return_final_states else (scanned, None)
    out = out.flatten(-2)
    if rmsnorm_weight is not None:
        out = out if norm_before_gate else out * F.silu(z)
        out = F.rms_norm(out.unflatten(-1, (ngroups, -1)), (width // ngroups,), eps=rmsnorm_eps).flatten(-2)
        out = out * rmsnorm_weight
        out = out * F.silu(z) if norm_before_gate else out
    if outproj_weight is not None:
        out = F.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, states) if return_final_states else out


def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Compute causal_conv1d's causal_conv1d_fn: each channel of x (B, D, S) is convolved with its row of weight (D, W).

    With `seq_idx`, the number of the document of each token (B, S), a token reads only tokens of its document. States
    are the W - 1 tokens before the first token, or the last ones, (B, D, W - 1).
    """
    has_states = initial_states is not None or return_final_states
    if final_states_out is not None or (has_states and seq_idx is not None) or activation not in (None, *SILU):
        return NotImplemented
    length, width = x.shape[-1], weight.shape[-1]
    if return_final_states and length < width:
        return NotImplemented
    rows = x.to(weight.dtype)
    if seq_idx is None:
        out = F.conv1d(rows, weight.unsqueeze(1), bias, padding=width - 1, groups=weight.shape[0])[..., :length]
    else:  # a sum of shifted products over earlier tokens of the same document
        out = rows * weight[:, -1:]
        for distance in range(1, width):
            is_same = F.pad(seq_idx, (distance, 0), value=-1)[:, :length] == seq_idx
            earlier = F.pad(rows, (distance, 0))[..., :length] * is_same.unsqueeze(1)
            out = out + earlier * weight[:, width - 1 - distance].unsqueeze(-1)
        out = out if bias is None else out + bias.unsqueeze(-1)
        out = out.masked_fill((seq_idx < 0).unsqueeze(1), 0)  # as the kernel does for padding
    if initial_states is not None and width > 1:
        out = out + _convolve_states(initial_states.to(weight.dtype), weight, length)
    out = (out if activation is None else F.silu(out)).to(x.dtype)
    return (out, x[..., length - width + 1 :]) if return_final_states else out


def _convolve_states(states: Tensor, weight: Tensor, length: int) -> Tensor:
    """Return what the states add to a convolution's results, (B, D, S): zeros after the first W - 1 tokens.

    The states are the W - 1 tokens before the first one, (B, D, W - 1).
    """
    count = weight.shape[-1] - 1
    added = F.conv1d(F.pad(states, (0, count)), weight.unsqueeze(1), groups=weight.shape[0])  # (B, D, W - 1)
    position = torch.arange(length, device=states.device)
    return added.index_select(-1, position.clamp(max=count - 1)) * (position < count)


def _short_convolution(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Any:
    """Compute fla's causal_conv1d: x is (B, S, D), states are the last W tokens (B, D, W), of which W - 1 are read.

    The kernel has no gradient of the first of the W tokens of a state.
    """
    has_states = initial_state is not None or output_final_state
    # Neither states of several documents nor those of the CUDA kernel are supported; the default kernel is Triton's.
    has_other_states = has_states and (cu_seqlens is not None or backend == "cuda")
    if weight is None or x.ndim != 3 or has_other_states:
        return NotImplemented
    width = weight.shape[-1]
    if width < 2 or (output_final_state and x.shape[1] < width):
        return NotImplemented
    if cu_seqlens is not None and seq_idx is None:
        seq_idx = document_starts(cu_seqlens, x).cumsum(-1)
    states = None if initial_state is None else initial_state[..., 1:]
    out = _causal_conv(x.mT, weight, bias, seq_idx, states, activation=activation)
    if out is NotImplemented:
        return out
    out = out.mT if residual is None else out.mT + residual
    if not output_final_state:
        return out, None
    last = x[:, x.shape[1] - width :].mT
    return out, torch.cat([last[..., :1].detach(), last[..., 1:]], -1)


def _selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    is_plain_torch: bool = False,
) -> Any:
    """Compute mamba_ssm's selective_scan_fn: a linear recurrence of N states for each channel.

    u, delta and z are (B, D, S), A is (D, N); B and C are (D, N), (B, N, S) or (B, G, N, S), for groups of D / G
    channels. The kernel has no gradient of its last state, (B, D, N); transformers' function in plain torch has one.
    """
    if A.is_complex():
        return NotImplemented
    dtype, channels = accumulation_dtype(u.dtype), u.shape[1]
    step = delta.to(dtype) if delta_bias is None else delta.to(dtype) + delta_bias.to(dtype).unsqueeze(-1)
    step = (F.softplus(step) if delta_softplus else step).mT.unsqueeze(-1)  # (B, S, D, 1)
    # Results read the states by the vectors C, and tokens are written to them by the vectors B.
    read, written = (_channel_rows(x.to(dtype), channels) for x in (C, B))
    factor = (step * A.to(dtype)).exp()
    if cu_seqlens is not None:
        factor = factor.masked_fill(document_starts(cu_seqlens, u.mT)[..., None, None], 0)
    terms = step * u.to(dtype).mT.unsqueeze(-1) * written
    states = torch.ops.sp.linear_scan(factor, terms, None, 1)  # no initial state; dim 1 has the tokens
    out = (states * read).sum(-1).mT
    out = out if D is None else out + u * D.to(dtype).unsqueeze(-1)
    out = (out if z is None else out * F.silu(z.to(dtype))).to(u.dtype)
    last = states[:, -1]
    return (out, last if is_plain_torch else last.detach()) if return_last_state else out


def _channel_rows(x: Tensor, channels: int) -> Tensor:
    """Return B or C of a selective scan, (D, N), (B, N, S) or (B, G, N, S), as (B or 1, S or 1, D or 1, N).

    These are vectors of N numbers, one for each state. A group of G has the same vector for D / G channels.
    """
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        return x.mT.unsqueeze(2)
    return x.permute(0, 3, 1, 2).repeat_interleave(channels // x.shape[1], dim=2)


def _changes(ids: Tensor) -> Tensor:
    """Return True for tokens whose document has another id than that of the token before, bool (B, S)."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))


STAND_INS.register("mamba_chunk_scan_combined", KernelStandIn(_mamba_chunk_scan))
STAND_INS.register("mamba_split_conv1d_scan_combined", KernelStandIn(_mamba_split_conv_scan))
STAND_INS.register("selective_scan_fn", KernelStandIn(_selective_scan))
STAND_INS.register("causal_conv1d_fn", KernelStandIn(_causal_conv))
STAND_INS.register("causal_conv1d", KernelStandIn(_short_convolution))
