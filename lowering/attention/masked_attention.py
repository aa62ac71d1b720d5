"""Define ``sp::masked_attention``: attention over unsharded sequences whose mask is a predicate."""

from dataclasses import replace
from typing import Any

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
def masked_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Compute ``scaled_dot_product_attention`` with a predicate in place of a mask tensor.

    See ``masks/predicate.py`` for predicates. Leading dims are batch dims, then heads; they broadcast. With
    ``enable_gqa`` k and v may have fewer heads. A query that attends to no key has output 0.

    Args:
        q: (..., Sq, D), any floating dtype.
        k: (..., Sk, D).
        v: (..., Sk, E).
        *rest: The remaining arguments of the schema, in order:
            rows, cols: Vectors (B | 1, Sq) and (B | 1, Sk) that the predicate reads; B is all batch dims, flattened.
            sizes, predicate: The sizes that the predicate reads, and its text.
            dropout_p, scale, enable_gqa: As for ``scaled_dot_product_attention``.
            pieces: Tables of rows and cols (``sp::pieces``), if they exist already.
            score: Name of the score modification (``masks/score.py``).
            heads: Vectors (H,) that the score modification reads.
            attn_mask: An additional bool or additive mask that broadcasts to (..., Sq, Sk).
            sinks: (H,), one additional logit per head that takes a share of the weights and has no value.
            tables: Tensors of any shape that the score modification indexes; not together with ``attn_mask``.
            lse: Append each row's log-sum-exp as the last column; not together with sinks.

    Returns:
        (..., Sq, E) in q's dtype; with ``lse`` (..., Sq, E + 1) in float32 or wider.

    Raises:
        SpError: If the text is not a valid predicate.

    Bytes: none. Differentiable in q, k, v, floating masks, tables and sinks.
    """
    rows, cols, sizes, predicate, dropout_p, scale, enable_gqa, *data = rest
    rest_of_them: list[Any] = [None, "", None, None, None, None, False]
    pieces, score, heads, mask, sinks, tables, lse = data + rest_of_them[len(data) :]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seed = None
    if dropout_p > 0:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    lookups = rows, cols, pieces or [], sizes, predicate
    reads = heads or [], tables or []
    args = LocalArgs(mask, *lookups, seed, dropout_p, scale, score, *reads, full_span(q.shape[-2]), [], 1, "")
    args = replace(args, pieces=args.make_pieces())
    headless = not enable_gqa and max(q.ndim, k.ndim, v.ndim) <= 3
    q, k, v = (x.unsqueeze(-3) if headless else x for x in autocast(q, k, v))
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    if mask is not None:
        args = autocast_args(replace(args, mask=_expand_mask(mask, batch, headless)))
    out = attention(*_to_four_dims(q, k, v, batch, enable_gqa), args, GatheredKeys(None, 1, ""), sinks, lse)
    out = out.reshape(*batch, *out.shape[1:])
    return out.squeeze(-3) if headless else out


@torch.compiler.assume_constant_result  # Dynamo of torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def autocast(*xs: Tensor) -> list[Tensor]:
    """Cast tensors as autocast casts the operands of ``scaled_dot_product_attention``."""
    device = xs[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return list(xs)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in xs]


def autocast_args(args: LocalArgs) -> LocalArgs:
    """Cast the mask to the dtype of the autocast operands, which the kernels require."""
    return args if args.mask is None else replace(args, mask=autocast(args.mask)[0])


def _expand_mask(mask: Tensor, batch: torch.Size, headless: bool) -> Tensor:
    """Reshape a mask that broadcasts to (*batch, H, Sq, Sk) to (B | 1, H | 1, Sq | 1, Sk | 1).

    If ``headless``, the mask broadcasts to (*batch, Sq, Sk).
    """
    mask = mask[(None,) * max(2 - mask.ndim, 0)]
    mask = mask.unsqueeze(-3) if headless or mask.ndim == 2 else mask
    if mask.shape[:-3].numel() == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(batch.numel(), *mask.shape[-3:])


def _to_four_dims(
    q: Tensor, k: Tensor, v: Tensor, batch: torch.Size, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape q, k and v to (B, heads, S, width) each.

    A single key head for all query heads is not expanded: the kernels group heads.
    """
    key_heads = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
    heads = q.shape[-3:-2] if enable_gqa else torch.broadcast_shapes(q.shape[-3:-2], key_heads)
    wanted = zip((q, k, v), (heads, key_heads, key_heads))
    query, key, value = (
        x.expand(*batch, *h, *x.shape[-2:]).reshape(batch.numel(), *h, *x.shape[-2:]) for x, h in wanted
    )
    return query, key, value
