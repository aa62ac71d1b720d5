"""Define attention as one differentiable function for every exchange of keys.

Local queries attend to the keys that a ``KeySource`` provides: it gathers the shards of all ranks, or rotates them in a
ring. The forward saves shards, the output and its log-sum-exps (lse); the backward exchanges the keys again.

Sinks are one additional logit per head, of no key. Tables are the tensors that a score function indexes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.errors import SpError

from .gathered_kernel import GatheredKeys
from .merge_blocks import add_sinks, sinks_grad
from .op_args import LocalArgs
from .ring_kernel import RingKeys

# An exchange of keys and values. `forward` returns out and lse over all keys. `backward` takes (cotangent, out, lse)
# and returns dq, dk, dv, and dmask or the flat gradients of tables if they are required.
KeySource = GatheredKeys | RingKeys


def attention(
    q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, keys: KeySource, sinks: Tensor | None = None,
    with_lse: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention of local queries over all keys, for every way to exchange the keys (ring, gathered).

    It saves only shards, the output and its log-sum-exps: the backward exchanges the keys again. Second derivatives are
    not supported.

    Args:
        q: (B, H, s, D), any floating dtype.
        k: (B, Hkv, t, D).
        v: (B, Hkv, t, E).
        args: Mask, score and dropout arguments of the local queries.
        keys: The exchange that provides the keys and values of all ranks.
        sinks: (H,), a logit per head that takes a share of the weights and has no value. The gradients of q, k and v
            need no further term, because out and lse include the sinks.
        with_lse: Append each row's log-sum-exp; not together with sinks, whose gradient would have a further term.

    Returns:
        (B, H, s, E) in q's dtype; with ``with_lse`` (B, H, s, E + 1) in float32 or wider.

    Raises:
        SpError: If there are sinks and ``with_lse``.
    """
    if with_lse and sinks is not None:
        raise SpError("SP433", "lse of attention: expected False with sinks, got True.")
    out, row_lse = _AttentionFunction.apply(args, keys, with_lse, q, k, v, sinks, *args.tensors())
    return torch.cat([out.to(row_lse.dtype), row_lse.unsqueeze(-1)], -1) if with_lse else out


class _AttentionFunction(Function):
    """Autograd function of `attention`. `backward` returns a gradient per argument of `forward`, in order."""

    @staticmethod
    def forward(
        ctx: Any, args: LocalArgs, keys: KeySource, with_lse: bool, q: Tensor, k: Tensor, v: Tensor,
        sinks: Tensor | None, *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute out (B, H, s, E) and lse (B, H, s), and save shards.

        ``tensors`` are the tensors of ``args``, such as the mask. They are operands so that autograd tracks them.
        """
        dtype = q.dtype if sinks is None else accumulation_dtype(q.dtype)  # sinks scale an output before it is rounded
        out, lse = keys.forward(q, k, v, args.with_tensors(list(tensors)), dtype)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        ctx.args, ctx.keys = args.with_tensors([None] * len(tensors)), keys
        ctx.with_lse = with_lse
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, sinks, the mask and the tables, and None for all other operands.

        Tables are tensors that a score function indexes, such as a bias per distance.
        """
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        args = ctx.args.with_tensors(tensors)
        # The operands after v: sinks, then `LocalArgs.tensors`, of which the mask is the first and tables are the last.
        needs_sinks, needs_mask, *needs_others = ctx.needs_input_grad[6:]
        needs_tables = any(needs_others[len(needs_others) - len(args.tables) :])
        dsinks = sinks_grad(grad, out, lse, sinks) if needs_sinks else None
        upstream, values = (grad, out, lse), v
        if ctx.with_lse:
            # With weights p, d(score) = p * (dout . v - dout . out + dlse); kernels do not compute the last term. A
            # further column adds it: dlse in dout, ones in v, and zeros in out.
            ones, zeros = torch.ones_like(v[..., :1]), torch.zeros_like(out[..., :1])
            grad = torch.cat([grad, lse_grad.unsqueeze(-1).to(grad.dtype)], -1)
            upstream = (grad, torch.cat([out, zeros], -1), lse)
            values = torch.cat([v, ones], -1)
        # `learned` is the gradient of the mask, or those of all tables as one flat tensor: no attention has both.
        dq, dk, dv, learned = ctx.keys.backward(upstream, q, k, values, args, needs_mask or needs_tables)
        dmask = learned if needs_mask else None
        dtables = args.table_grads(learned) if needs_tables else [None] * len(args.tables)
        other_grads = [None] * (len(tensors) - 1 - len(dtables))
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv[..., : v.shape[-1]].to(v.dtype)
        return None, None, None, dq, dk, dv, dsinks, dmask, *other_grads, *dtables
