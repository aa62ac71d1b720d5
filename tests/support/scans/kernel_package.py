"""A package with kernel functions of the names and signatures of flash-linear-attention, mamba_ssm and causal_conv1d.

They compute step by step, in the dtype of their operands, and Dynamo must not trace them, as in the packages.
"""

import itertools
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run each document, as a kernel does with `cu_seqlens`."""
    CALLS.append(name)
    if use_qk_l2norm_in_kernel:
        q, k = _normalize(q), _normalize(k)
    if use_beta_sigmoid_in_kernel and beta is not None:
        beta = beta.sigmoid() * (1 + allow_neg_eigval)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
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
    final = torch.cat([state.mT if state_v_first else state for state in states])
    return torch.cat(outs, 1), final if output_final_state else None


def _gate(
    g: Tensor,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """The logarithm of the decay, of g (B, S, H) or (B, S, H, K)."""
    if not use_gate_in_kernel:
        return g
    g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
    factor = torch.ones(g.shape[2]) if A_log is None else A_log.exp()
    factor = factor.view(-1, *[1] * (g.ndim - 3))
    return -factor * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(factor * g)


@torch.compiler.disable
def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    gate = {name: options.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")}
    options["state_v_first"] = options.get("state_v_first") or options.pop("transpose_state_layout", False)
    return _by_document("chunk_gated_delta_rule", q, k, v, _gate(g, **gate), beta, **options)


@torch.compiler.disable
def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, safe_gate: bool = False, **options: Any) -> Any:
    gate = {name: options.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound")}
    return _by_document("chunk_kda", q, k, v, _gate(g, **gate), beta, **options)


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
def chunk_retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    decay = (1 - 2.0 ** (-5 - torch.arange(v.shape[2]))).log().to(v.dtype)
    return _by_document("chunk_retention", q, k, v, decay.expand(v.shape[:3]), **options)


@torch.compiler.disable
def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, normalize: bool = True, **options: Any) -> Any:
    assert not normalize
    return _by_document("chunk_linear_attn", q, k, v, v.new_zeros(v.shape[:3]), **options)


@torch.compiler.disable
def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    CALLS.append("chunk_comba")
    if use_qk_l2norm_in_kernel:
        q, k, p = _normalize(q), _normalize(k), _normalize(p)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, states = [], []
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        first = slice(i, i + 1) if cu_seqlens is not None else slice(None)
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        state = state if initial_state is None else initial_state[first]
        for t in range(start, stop):
            state = state * g[:, t].exp()[..., None, None]
            value = (v[:, t] - (state * p[:, t].unsqueeze(-1)).sum(-2)) * beta[:, t].unsqueeze(-1)
            state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
            outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(state)
    return torch.stack(outs, 1), torch.cat(states) if output_final_state else None


@torch.compiler.disable
def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    return _by_document("chunk_gla", q, k, v, g, **options)


@torch.compiler.disable
def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    chunk_size: int | None = None,
    **options: Any,
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
    if first is not None and seq_idx is not None:  # the kernel continues document 0 only
        first = first * (seq_idx[:, 0] == 0).view(-1, 1, 1, 1)
    decay = (dt * A).unsqueeze(-1)
    out, state = attend(C, B, x * dt.unsqueeze(-1), decay, None, None, None, _starts(seq_idx), first, 1.0)
    out = out if D is None else out + x * D.unsqueeze(-1)
    out = out if z is None else out * F.silu(z)
    return (out, state.mT) if return_final_states else out


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Convolve x (B, D, S), token by token; initial (B, D, W - 1) are the tokens before the first."""
    ids = x.new_zeros(x.shape[0], x.shape[-1]) if seq_idx is None else seq_idx
    columns = []
    for t in range(x.shape[-1]):
        out = torch.zeros_like(x[..., 0]) if bias is None else bias.expand(x.shape[0], -1)
        for j in range(weight.shape[1]):
            if j <= t:
                out = out + x[..., t - j] * weight[:, -1 - j] * (ids[:, t - j] == ids[:, t]).unsqueeze(-1)
            elif initial is not None:
                out = out + initial[..., t - j] * weight[:, -1 - j]
        columns.append(out)
    y = torch.stack(columns, -1)
    return y if activation is None else F.silu(y)


@torch.compiler.disable
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    CALLS.append("causal_conv1d_fn")
    y = _convolve(x, weight, bias, seq_idx, initial_states, activation)
    return (y, x[..., 1 - weight.shape[1] :]) if return_final_states else y


@torch.compiler.disable
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    CALLS.append("causal_conv1d")
    assert weight is not None
    ids = None if cu_seqlens is None else torch.bucketize(torch.arange(x.shape[1]), cu_seqlens, right=True)[None]
    y = _convolve(x.mT, weight, bias, ids, None if initial_state is None else initial_state[..., 1:], activation).mT
    last = x[:, -weight.shape[1] :].mT
    final = torch.cat([last[..., :1].detach(), last[..., 1:]], -1) if output_final_state else None
    return y if residual is None else y + residual, final


class ShortConvolution(nn.Conv1d):
    """A module that calls `causal_conv1d`, as in flash-linear-attention."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1)
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if mask is not None:
            x = x.mul_(mask.unsqueeze(-1))
        weight = self.weight.squeeze(1)
        return causal_conv1d(
            x=x,
            weight=weight,
            bias=self.bias,
            residual=residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            backend="triton",
            cu_seqlens=cu_seqlens,
            **kwargs,
        )


@torch.compiler.disable
def selective_scan_fn(
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
) -> Any:
    CALLS.append("selective_scan_fn")
    delta = delta if delta_bias is None else delta + delta_bias.unsqueeze(-1)
    delta = F.softplus(delta) if delta_softplus else delta
    starts = [] if cu_seqlens is None else cu_seqlens[1:-1].tolist()
    state, columns = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[-1]):
        write, read = (
            x
            if x.ndim == 2
            else x[..., t].unsqueeze(1)
            if x.ndim == 3
            else x[..., t].repeat_interleave(len(A) // x.shape[1], 1)
            for x in (B, C)
        )
        state = torch.zeros_like(state) if t in starts else state
        step = delta[..., t].unsqueeze(-1)
        state = (step * A).exp() * state + step * u[..., t].unsqueeze(-1) * write
        columns.append((state * read).sum(-1))
    out = torch.stack(columns, -1)
    out = out if D is None else out + u * D.unsqueeze(-1)
    out = out if z is None else out * F.silu(z)
    return (out, state.detach()) if return_last_state else out


def install() -> ModuleType:
    """Add the functions to a module whose name is that of a package of kernels."""
    module = ModuleType("fla_of_tests")
    for name, function in list(globals().items()):
        if name.startswith(("chunk_", "mamba_", "causal_", "selective_")):
            function.__module__ = module.__name__
            setattr(module, name, function)
    module.ShortConvolution = ShortConvolution  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


fla = install()
