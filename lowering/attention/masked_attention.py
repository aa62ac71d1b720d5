"""Define ``sp::masked_attention``: attention over unsharded sequences whose mask is a predicate.

scaled_dot_product_attention(q, k, v, mask)   ->   sp.masked_attention(q, k, v, ..., "(k <= q) & (q - k < 4)", ...)
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite
from sp_compile.lowering.masks.spans import full_span

from .attention_autograd import attention
from .gathered_kernel import GatheredKeys
from .op_args import LocalArgs


@composite(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor[] rows, Tensor[] cols, SymInt[] sizes, str predicate, "
    "float dropout_p, float? scale, bool enable_gqa, Tensor[]? pieces=None, "
    "str score='', Tensor[]? heads=None, Tensor? attn_mask=None, Tensor? sinks=None, Tensor[]? tables=None, "
    "bool lse=False) -> Tensor",
    padded="as given",
)
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: list[Tensor], cols: list[Tensor], sizes: list[int], predicate: str,
    dropout_p: float, scale: float | None, enable_gqa: bool, pieces: list[Tensor] | None = None, score: str = "",
    heads: list[Tensor] | None = None, attn_mask: Tensor | None = None, sinks: Tensor | None = None,
    tables: list[Tensor] | None = None, lse: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``scaled_dot_product_attention`` of unsharded tensors, with a predicate in place of a mask tensor.

    A predicate is the text of a condition on the indices of a query and a key, such as "(k <= q) & (q - k < 4)"; see
    ``masks/predicate.py``. Leading dims are batch dims, then heads; they broadcast. With
    ``enable_gqa`` k and v may have fewer heads. A query that attends to no key has output 0.

    Args:
        q: (..., Sq, D), any floating dtype.
        k: (..., Sk, D).
        v: (..., Sk, E).
        rows: Vectors (B | 1, Sq) that the predicate reads; B is the number of batch entries over all batch dims.
        cols: Vectors (B | 1, Sk) that the predicate reads.
        sizes: The sizes that the predicate reads.
        predicate: The text of the predicate.
        dropout_p: As for ``scaled_dot_product_attention``, and so are ``scale`` and ``enable_gqa``.
        scale: The factor of the scores.
        enable_gqa: Whether k and v may have fewer heads than q.
        pieces: Bounds of the values of rows, then of cols, on the host (``sp::pieces``), if they exist already.
        score: Name of the score function (``masks/score.py``).
        heads: Vectors (H,) that the score function reads.
        attn_mask: An additional bool or additive mask that broadcasts to (..., Sq, Sk).
        sinks: (H,), one additional logit per head that takes a share of the weights and has no value.
        tables: Tensors of any shape that the score function indexes; not together with ``attn_mask``.
        lse: Append each row's log-sum-exp as the last column; not together with sinks.

    Returns:
        (..., Sq, E) in q's dtype; with ``lse`` (..., Sq, E + 1) in float32 or wider.

    Raises:
        SpError: If the text is not a valid predicate.

    Bytes: none. Differentiable in q, k, v, floating masks, tables and sinks.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    args = LocalArgs(
        attn_mask, rows, cols, pieces or [], sizes, predicate, seed, dropout_p, scale, score, heads or [], tables or [],
        q_span=full_span(q.shape[-2]), k_span=[], split_heads=1, group="",
    )  # fmt: skip
    args = replace(args, pieces=args.make_pieces())
    # Operands of up to three dims have batch dims and no heads: insert a dim of one head.
    headless = not enable_gqa and max(q.ndim, k.ndim, v.ndim) <= 3
    q, k, v = (x.unsqueeze(-3) if headless else x for x in autocast(q, k, v))
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    if attn_mask is not None:
        args = autocast_args(replace(args, mask=_expand_mask(attn_mask, batch, headless)))
    keys = GatheredKeys(frame=None, n=1, group="")  # every rank has all keys: nothing is exchanged
    out = attention(*_to_four_dims(q, k, v, batch, enable_gqa), args, keys, sinks, lse)
    out = out.reshape(*batch, *out.shape[1:])
    return out.squeeze(-3) if headless else out


@torch.compiler.assume_constant_result  # Dynamo of torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    """Return True if autocast supports this type of device."""
    return torch.amp.is_autocast_available(device)


def autocast(*xs: Tensor) -> list[Tensor]:
    """Return the tensors, cast as autocast casts the operands of ``scaled_dot_product_attention`` if it is enabled."""
    device = xs[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return list(xs)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in xs]


def autocast_args(args: LocalArgs) -> LocalArgs:
    """Return the arguments with an additive mask cast as `autocast` casts q, k and v, since kernels require it."""
    return args if args.mask is None else replace(args, mask=autocast(args.mask)[0])


def _expand_mask(mask: Tensor, batch: torch.Size, headless: bool) -> Tensor:
    """Reshape a mask that broadcasts to (*batch, H, Sq, Sk) to (B | 1, H | 1, Sq | 1, Sk | 1).

    If ``headless``, the operands have no dim of heads, and the mask broadcasts to (*batch, Sq, Sk).
    """
    mask = mask[(None,) * max(2 - mask.ndim, 0)]  # insert leading dims: at least (Sq, Sk)
    mask = mask.unsqueeze(-3) if headless or mask.ndim == 2 else mask  # insert the dim of heads
    if math.prod(mask.shape[:-3]) == 1:  # Size.numel() would make a symbolic size a constant
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])


def _to_four_dims(
    q: Tensor, k: Tensor, v: Tensor, batch: torch.Size, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast q, k and v to the batch dims ``batch`` and reshape them to (B, heads, S, width) each.

    k and v keep their number of heads, even if all query heads broadcast over it: the kernels group query heads.
    """
    # Numbers of heads, as shapes of one dim, since they broadcast.
    key_heads = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
    heads = q.shape[-3:-2] if enable_gqa else torch.broadcast_shapes(q.shape[-3:-2], key_heads)

    def expand(x: Tensor, heads: torch.Size) -> Tensor:
        """Broadcast the leading dims of x to the batch dims and `heads`, and merge those of the batch."""
        return x.expand(*batch, *heads, *x.shape[-2:]).reshape(math.prod(batch), *heads, *x.shape[-2:])

    return expand(q, heads), expand(k, key_heads), expand(v, key_heads)
