"""Define what Dynamo traces in place of kernel functions of packages: the same values, by operators with shards.

A stand-in takes the arguments of the kernel's function and returns its results, or `NotImplemented` for values that it
does not support. Then, and if an argument that it does not have is not the default, the original function runs
uncompiled, between two graphs, with a warning. Names and layouts are those of the packages: flash-linear-attention,
mamba_ssm and causal_conv1d; the order of arguments and defaults are those of the function that is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.registry import Table

# Options that change how a kernel computes, and not what.
HINTS = frozenset(
    "accum_c_fp32 accum_dtype accum_e_fp32 accumulate_grad_in_fp32 ce_impl ce_mode chunk_indices chunk_mem_const "
    "chunk_size cu_seqlens_cpu disable_recompute filter_c_grad filter_e_grad filter_eps impl max_num_seqs num_chunks "
    "safe_gate use_graph".split()
)
NORM_EPSILON = 1e-6  # of the kernels' normalization of queries and keys
ATTENTION_OPTIONS = frozenset({"scale", "initial_state", "output_final_state", "cu_seqlens"})
DELTA_OPTIONS = ATTENTION_OPTIONS | {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"}
V_FIRST = frozenset({"state_v_first"})  # states are (..., V, K); other kernels ignore this argument
GATE = frozenset({"use_gate_in_kernel", "A_log", "dt_bias"})
GATED_OPTIONS = DELTA_OPTIONS | GATE | V_FIRST | {"transpose_state_layout"}  # the latter is the name before fla 0.6
PLAIN_TORCH = "is_plain_torch"  # argument of stand-ins: the original is a function in plain torch, not a kernel
DOCUMENTS = ("cu_seqlens", "seq_idx")  # arguments by which a kernel separates documents


class KernelStandIn(NamedTuple):
    """A function with the values of a kernel, called with its required arguments in order, and others by name."""

    compute: Callable[..., Any]  # the function; its result is NotImplemented for values that it does not support
    options: frozenset[str] = frozenset()  # names that it accepts beyond its signature
    kind: type = FunctionType  # what is replaced: a function, `autograd.Function` (its `apply`) or a Module (`forward`)


STAND_INS: Table[KernelStandIn] = Table("stand-ins of kernel functions")


def has_stand_in(name: str, kind: type) -> bool:
    """Return True if the table has a stand-in of this name and kind.

    Packages give one name to different things: torchao's LinearNF4 is an autograd.Function, bitsandbytes' a module.
    """
    return name in STAND_INS and STAND_INS[name].kind is kind


class ArgumentNames(NamedTuple):
    """The parameters of a kernel's function, under the names of its stand-in."""

    positions: tuple[str, ...]  # names of arguments by position
    renamed: dict[str, str]  # the function's name of a parameter -> that of the stand-in, if it differs
    defaults: dict[str, Any]  # default values of the function
    required: tuple[str, ...]  # parameters that the stand-in requires
    known: frozenset[str]  # all parameters of the stand-in

    @classmethod
    def of(cls, stand_in: KernelStandIn, signature: inspect.Signature) -> ArgumentNames:
        """Return the names for a function with this signature.

        Parameters that the stand-in requires are matched by position, because packages name them differently.
        """
        # Parameters of the stand-in, without *args and **options.
        own = [x for x in inspect.signature(stand_in.compute).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        required = tuple(x.name for x in own if x.default is x.empty)
        parameters = signature.parameters.values()
        in_order = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
        names = in_order or [x.name for x in own]  # the latter for a function of (*args, **kwargs)
        renamed = dict(zip(names, required))
        positions = tuple(renamed.get(name, name) for name in names)
        defaults = {renamed.get(x.name, x.name): x.default for x in parameters if x.default is not x.empty}
        return cls(positions, renamed, defaults, required, frozenset(x.name for x in own) | stand_in.options)


def make_stand_in(
    kernel: str,
    signature: inspect.Signature,
    run_original: Callable[..., Any],
    drops_unknown: bool,
    results: int | None = None,
) -> Callable[..., Any]:
    """Return the function that Dynamo traces in place of a kernel's function.

    Args:
        kernel: The name of the kernel.
        signature: The signature of the original function, by which arguments are matched.
        run_original: run_original(reason, args, kwargs) runs the original function.
        drops_unknown: True if the original function ignores arguments that it does not have.
        results: How many results the original function returns: that many of the first ones of the stand-in. None for
            all.
    """
    compute = STAND_INS[kernel].compute
    positions, renamed, defaults, required, known = ArgumentNames.of(STAND_INS[kernel], signature)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        """Compute the results of the kernel, or run the original function.

        Variables of the enclosing scope are described in `ArgumentNames` and in the arguments of `make_stand_in`.
        """
        named = {**defaults, **dict(zip(positions, args))}  # arguments by their name in the stand-in
        named.update({renamed.get(name, name): value for name, value in kwargs.items()})
        for name, value in named.items():
            # Hints do not change the results; a function that ignores unknown arguments does so here, too.
            is_dropped = name in HINTS or (drops_unknown and name not in positions and name not in defaults)
            if name not in known and not is_dropped and not _is_default(value, defaults.get(name)):
                return run_original(f"its argument {name} has no equivalent", args, kwargs)
        # A function that drops unknown arguments is written in plain torch, which some stand-ins must know: the last
        # state of such a selective scan has a gradient, that of the kernel has none.
        if drops_unknown and PLAIN_TORCH in known:
            named[PLAIN_TORCH] = True
        if len(args) > len(positions) or any(name not in named for name in required):
            return run_original("its arguments do not match", args, kwargs)
        values = compute(**{name: value for name, value in named.items() if name in known})
        if values is NotImplemented:
            return run_original("its values have no equivalent", args, kwargs)
        if isinstance(values, tuple) and results is not None:
            return values[0] if results == 1 else values[:results]
        return values

    return stand_in


def _is_default(value: Any, default: Any) -> bool:
    """Return True if an argument has its default value, or turns an option off (None, or False instead of None).

    The default is also None for an argument that the signature does not have, as in a function of **kwargs.
    """
    if value is None or (value is False and default is None):
        return True
    if isinstance(value, Tensor) or default is None:  # no default is a tensor
        return False
    return bool(value == default)


def attend_kernel(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    starts: Tensor | None = None,
    state_v_first: bool = False,
) -> Any:
    """Compute linear attention; return (result (B, S, H, V), final state), or NotImplemented for unsupported shapes.

    Args:
        kernel: Name of the kernel.
        q: (B, S, G, K), of which each of the G heads serves H / G heads of v.
        k: (B, S, G, K).
        v: (B, S, H, V).
        decay: (B, S, H) or (B, S, H, K), logarithm of the decay of the state; None without decay.
        scale: Factor of q, K ** -0.5 by default.
        initial_state: State of each batch entry before its first token, or of each document of `cu_seqlens`.
        output_final_state: False to return None in place of the final state.
        cu_seqlens: Bounds of the documents in one row of tokens, in place of `starts`. Each has a state of its own.
        beta: (B, S, H), factor of the delta rule.
        a: (B, S, H, K), first vector of a transition of rank one, as in RWKV-7.
        b: (B, S, H, K), second vector.
        starts: (B, S), True for the first token of each document.
        state_v_first: True if states are (..., H, V, K) in place of (..., H, K, V).
    """
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    opened = closed = None  # numbers of the documents that start and end at each token
    if cu_seqlens is not None:
        starts = document_starts(cu_seqlens, v)
    if cu_seqlens is not None and (initial_state is not None or output_final_state):  # one state for each document
        count = cu_seqlens.shape[0] - 1
        if v.shape[0] != 1 or (initial_state is not None and initial_state.shape[0] != count):
            return NotImplemented
        opened, closed = _number_documents(cu_seqlens, v)
        if initial_state is None:
            shape = count, v.shape[2], k.shape[-1], v.shape[-1]
            initial_state = v.new_zeros(shape, dtype=accumulation_dtype(v.dtype))
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    decay = _decay_rows(decay, v)
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    by_token, others = (q, k, v, decay, beta, a, b, starts, opened), (initial_state, scale, kernel)
    out = torch.ops.sp.linear_attention(*by_token, None, *others)  # `closed` matters for states only
    state = torch.ops.sp.linear_attention_state(*by_token, closed, *others) if output_final_state else None
    if state is not None and cu_seqlens is not None:  # no token ends an empty document, whose state does not change
        is_empty = cu_seqlens[1:] == cu_seqlens[:-1]
        state = torch.where(is_empty.view(-1, 1, 1, 1), initial_state, state)
    return out, state.mT.contiguous() if state_v_first and state is not None else state


def _decay_rows(decay: Tensor | None, v: Tensor) -> Tensor:
    """Return the logarithm of the decay by token, (B, S, H, 1) or (B, S, H, K); zeros if it is None."""
    if decay is None:
        decay = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    return decay.unsqueeze(-1) if decay.ndim == 3 else decay


def document_starts(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Return True for the first token of each document, bool (B, S), from the bounds of the documents in x.

    For cu_seqlens = [0, 2, 5] and S = 5 this is [True, False, True, False, False].
    """
    marks = torch.zeros(x.shape[1] + 1, dtype=torch.bool, device=x.device)
    marks = marks.scatter(0, cu_seqlens.to(torch.int64), True)
    return marks[:-1].expand(x.shape[0], -1)


def _number_documents(cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers, from 1, of the documents that start and end at each token, as `opened` and `closed`.

    Both are int64 (1, S), and 0 for other tokens. The numbers of empty documents do not occur in them. For
    cu_seqlens = [0, 2, 5] and S = 5 they are [1, 0, 2, 0, 0] and [0, 1, 0, 0, 2].
    """
    bounds, slots = cu_seqlens.to(torch.int64), torch.zeros(x.shape[1] + 1, dtype=torch.int64, device=x.device)
    count = bounds.shape[0] - 1
    numbers = torch.arange(1, count + 1, device=x.device)
    # Of several documents that start at one token, all but the last one are empty: take the largest number. Of several
    # that end at one token, all but the first one are empty: take the smallest number, by the largest reversed number,
    # count + 1 - number.
    opened = slots.scatter_reduce(0, bounds[:-1], numbers, "amax")[:-1]
    reversed_numbers = slots.scatter_reduce(0, bounds[1:], count + 1 - numbers, "amax")[1:]  # 0 where none ends
    return opened[None], torch.where(reversed_numbers > 0, count + 1 - reversed_numbers, 0)[None]


def _normalize(x: Tensor) -> Tensor:
    """Return x with rows of norm 1, as the kernels normalize queries and keys."""
    y = x.to(accumulation_dtype(x.dtype))
    return (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + NORM_EPSILON)).to(x.dtype)


def _attend_delta(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    **options: Any,
) -> Any:
    """Call linear attention with the delta rule; arguments as in `attend_kernel`, and those of the kernels by name."""
    if use_qk_l2norm_in_kernel:
        q, k = _normalize(q), _normalize(k)
    if use_beta_sigmoid_in_kernel:
        # The transition I - beta k k^T has an eigenvalue 1 - beta, which is negative for beta above 1.
        beta = beta.to(accumulation_dtype(beta.dtype)).sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    is_v_first = state_v_first or transpose_state_layout  # one option, and its name in earlier versions
    return attend_kernel(kernel, q, k, v, decay, beta=beta, state_v_first=is_v_first, **options)


def _open_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor | None:
    """Return the logarithm of the decay that a gate computes from its input g, (B, S, H) or (B, S, H, K).

    That is -exp(A_log) * softplus(g + dt_bias), or lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) with a lower
    bound, where exp(A_log) is 1 without A_log. None without both. A_log has H elements, dt_bias those of a token of g.
    """
    g = g.to(accumulation_dtype(g.dtype))
    g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
    rate = None if A_log is None else A_log.to(g.dtype).exp().view(-1, *[1] * (g.ndim - 3))
    if lower_bound is not None:
        return lower_bound * (g if rate is None else rate * g).sigmoid()
    return None if rate is None else -rate * F.softplus(g)


def _attend_gated(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    **options: Any,
) -> Any:
    """Call the delta rule with a decay g, or with the result of a gate of g; arguments as in `_attend_delta`."""
    decay = _open_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return NotImplemented if decay is None else _attend_delta(kernel, q, k, v, decay, beta, **options)


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """Compute fla's chunk_gated_delta_rule: one decay per head and token, g, or the result of a gate of g."""
    return _attend_gated("chunk_gated_delta_rule", q, k, v, g, beta, **options)


def _kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """Compute fla's chunk_kda: a decay for each row of the state, g, or the result of a gate of g."""
    return _attend_gated("chunk_kda", q, k, v, g, beta, **options)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Any:
    """Compute fla's chunk_delta_rule: no decay."""
    return _attend_delta("chunk_delta_rule", q, k, v, decay=None, beta=beta, **options)


def _simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, **options: Any
) -> Any:
    """Compute fla's chunk_simple_gla: a decay per head and token (g), a constant one per head (g_gamma), or both."""
    if g_gamma is not None:
        g = g_gamma.expand(v.shape[:3]) if g is None else g + g_gamma
    return attend_kernel("chunk_simple_gla", q, k, v, g, **options)


def _lightning_attention(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **options: Any) -> Any:
    """Compute fla's chunk_lightning_attn: a constant decay per head, which depends on the layer."""
    heads = v.shape[2]
    # The decays of the heads are a geometric series, as fla computes them.
    slope = -(8 / heads * (1 - layer_idx / num_layers))
    gamma = slope * torch.arange(heads, dtype=torch.float32, device=q.device)
    return _simple_gla(q, k, v, g_gamma=gamma, **options)


def _retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Compute fla's chunk_retention: a constant decay per head, 1 - 2 ** (-5 - head)."""
    gamma = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float32, device=q.device))).log()
    return _simple_gla(q, k, v, g_gamma=gamma, **options)


def _attend_without_decay(q: Tensor, k: Tensor, v: Tensor, normalize: bool = True, **options: Any) -> Any:
    """Compute fla's chunk_linear_attn: no decay, and results that are not divided by sums of keys."""
    return NotImplemented if normalize else _simple_gla(q, k, v, **options)


def _comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Any:
    """Compute fla's chunk_comba: a delta rule that subtracts what another key, p, reads of the decayed state.

    This is a transition of rank one: the state h becomes exp(g) (h - beta k (p . h)) + beta k v.
    """
    if p is None or beta is None:
        return NotImplemented
    if use_qk_l2norm_in_kernel:
        q, k, p = _normalize(q), _normalize(k), _normalize(p)
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k, p = (x.repeat_interleave(groups, dim=2) for x in (q, k, p))
    written = k * beta.unsqueeze(-1)
    return attend_kernel("", q, written, v, g, a=-p * g.exp().unsqueeze(-1), b=written, **options)


def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    """Compute fla's chunk_gla: a decay for each row of the state."""
    return attend_kernel("chunk_gla", q, k, v, g, **options)


def _rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    lower_bound: float | None = None,
    **options: Any,
) -> Any:
    """Compute fla's chunk_rwkv7: decays w, and a transition of rank one by a and b.

    `lower_bound`, a bound on w for the kernel, does not change the results.
    """
    return attend_kernel("chunk_rwkv7", r, k, v, w, scale, a=a, b=b, **options)


STAND_INS["chunk_gated_delta_rule"] = KernelStandIn(_gated_delta_rule, GATED_OPTIONS)
STAND_INS["chunk_delta_rule"] = KernelStandIn(_delta_rule, DELTA_OPTIONS)
STAND_INS["chunk_kda"] = KernelStandIn(_kda, GATED_OPTIONS | {"lower_bound"})
STAND_INS["chunk_simple_gla"] = KernelStandIn(_simple_gla, ATTENTION_OPTIONS | V_FIRST)
STAND_INS["chunk_retention"] = KernelStandIn(_retention, ATTENTION_OPTIONS)
STAND_INS["chunk_linear_attn"] = KernelStandIn(_attend_without_decay, ATTENTION_OPTIONS)
STAND_INS["chunk_comba"] = KernelStandIn(_comba, ATTENTION_OPTIONS)
STAND_INS["chunk_lightning_attn"] = KernelStandIn(_lightning_attention, ATTENTION_OPTIONS)
STAND_INS["chunk_gla"] = KernelStandIn(_gla, ATTENTION_OPTIONS | V_FIRST)
STAND_INS["chunk_rwkv7"] = KernelStandIn(_rwkv7, ATTENTION_OPTIONS)
