"""Ops with integers that are computed from tokens: experts, slots, places, counts, segments.

An integer that no token has on a single device is out of range of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.fuzz.kinds.scene import WIDTH, matrix
from torch import Tensor

EXPERTS = 4


def _experts(x: Tensor) -> Tensor:
    """(B, S) int64: the first expert of each token."""
    return x.detach().argmax(-1)


def _slots(chosen: Tensor) -> Tensor:
    """(..., T, E) one-hot -> (..., T): the place of each token among those of its expert."""
    return ((chosen.cumsum(-2) - 1) * chosen).sum(-1)


def _table(w: Tensor, rows: int) -> Tensor:
    return w[: rows * WIDTH].view(rows, WIDTH)


def _switch(w: Tensor, ids: Tensor, x: Tensor, how: tuple[int, bool]) -> Tensor:
    """Route to `capacity` slots per expert, over the batch or per sequence; other tokens are unchanged."""
    capacity, flat = how
    rows = x.flatten(0, 1)[None] if flat else x
    gate, expert = rows.softmax(-1).max(-1)
    chosen = F.one_hot(expert, EXPERTS)
    place = _slots(chosen)
    kept = (place < capacity)[..., None, None]
    send = F.one_hot(place.clamp(max=capacity - 1), capacity)[..., None, :] * chosen[..., None] * kept
    send = send.to(x.dtype)
    inside = torch.einsum("bsec,bsd->becd", send, rows)
    outside = torch.einsum("becd,edf->becf", inside, w[: EXPERTS * WIDTH * WIDTH].view(EXPERTS, WIDTH, WIDTH)).tanh()
    return x + torch.einsum("becd,bsec->bsd", outside, send * gate[..., None, None]).view(x.shape)


def _nth_of_its_kind(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """A table's row by how often a token's kind was seen."""
    place = _slots(F.one_hot(_experts(x), EXPERTS))
    return x + F.embedding(place, _table(w, x.shape[1]))


def _started(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """(B, S) bool: where a segment starts, at the first token at least."""
    return (ids == 0) | (torch.arange(ids.shape[1]) == 0)


def _segments(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Each token gets the mean of its segment."""
    segment = _started(w, ids, x).long().cumsum(1) - 1
    member = F.one_hot(segment, x.shape[1]).to(x.dtype)
    means = torch.einsum("bsg,bsd->bgd", member, x) / member.sum(1)[..., None].clamp(min=1)
    return x + means.gather(1, segment[..., None].expand_as(x))


def _within_segment(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """A table's row by the place in a segment."""
    at = torch.arange(ids.shape[1])
    begin = (at * _started(w, ids, x)).cummax(1)[0]
    return x * F.embedding(at - begin, _table(w, x.shape[1])).sin()


def _last_seen(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """The last row with an id of zero, or the first one."""
    at = (torch.arange(ids.shape[1]) * (ids == 0)).cummax(1)[0]
    return x.gather(1, at[..., None].expand_as(x)) + x


def _counted_rows(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """The row of which number this is, of those that are marked: indices in [0, S)."""
    number = (x.detach()[..., 0] > 0).long().cumsum(1)
    return x + x[torch.arange(x.shape[0])[:, None], number - 1]


def _only_marked(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """One-hot of a running number that is -1 at no token: the first is marked."""
    number = _started(w, ids, x).long().cumsum(1) - 1
    return x + F.one_hot(number, x.shape[1]).to(x.dtype) @ _table(w, x.shape[1])


def _by_experts(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Tokens in the order of their experts, and back."""
    rows = x.flatten(0, 1)
    order = _experts(rows).argsort(stable=True)
    moved = rows[order] * torch.linspace(0.5, 1.5, len(rows), dtype=x.dtype)[:, None]
    return torch.zeros_like(rows).index_copy(0, order, moved).view_as(x)


def _load(w: Tensor, ids: Tensor, x: Tensor, how: str) -> Tensor:
    """How many tokens an expert has, as its tokens' weight."""
    expert = _experts(x)
    flat = expert.flatten()
    if how == "bincount":
        counts = torch.bincount(flat, minlength=EXPERTS)
    elif how == "scatter":
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
    elif how == "index_add":
        counts = torch.zeros(EXPERTS, dtype=torch.int64).index_add(0, flat, torch.ones_like(flat))
    else:
        counts = F.one_hot(flat, EXPERTS).sum(0)
    return x / counts[expert][..., None]


def _expert_choice(w: Tensor, ids: Tensor, x: Tensor, least: int) -> Tensor:
    """Each expert takes the tokens that like it most."""
    scores = x.softmax(1)
    weights, at = scores.mT.topk(min(least, x.shape[1]), -1)
    taken = x[torch.arange(x.shape[0])[:, None, None], at]
    given = torch.einsum("becd,edf->becf", taken, w[: EXPERTS * WIDTH * WIDTH].view(EXPERTS, WIDTH, WIDTH))
    flat = (given * weights[..., None]).flatten(1, 2)
    return x.scatter_add(1, at.flatten(1)[..., None].expand_as(flat), flat)


def _bucketized(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    edges = torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)
    return x + F.embedding(torch.bucketize(x.detach().mean(-1), edges), matrix(w))


def _searched(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Where running counts reach a number: the row there."""
    counts = _started(w, ids, x).long().cumsum(1)
    wanted = 1 + torch.arange(x.shape[1]).expand(x.shape[0], -1) % 2
    at = torch.searchsorted(counts, wanted).clamp(max=x.shape[1] - 1)
    return x + x.gather(1, at[..., None].expand_as(x))


def _marked(w: Tensor, ids: Tensor, x: Tensor, how: str) -> Tensor:
    """Rows of some ids are another thing."""
    mask = ids == 1
    y = x.clone()
    if how == "zero":
        y[mask] = 0
    elif how == "parameter":
        y[mask] = w[:WIDTH]
    elif how == "where":
        y = torch.where(mask[..., None], w[:WIDTH], y)
    else:
        y = y.masked_scatter(mask[..., None], x.flip(-1).flatten())
    return y


def _ranked(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """The rank of each token in its sequence, as a table's row."""
    return x + F.embedding(x.detach()[..., 0].argsort(1).argsort(1), _table(w, x.shape[1]))


OPS: Mapping[str, Callable[..., Tensor]] = {
    "switch": _switch,
    "nth of its kind": _nth_of_its_kind,
    "segments": _segments,
    "within segment": _within_segment,
    "last seen": _last_seen,
    "counted rows": _counted_rows,
    "only marked": _only_marked,
    "by experts": _by_experts,
    "load": _load,
    "expert choice": _expert_choice,
    "bucketized": _bucketized,
    "searched": _searched,
    "marked": _marked,
    "ranked": _ranked,
    "token": lambda w, i, x: x * F.embedding(i, matrix(w)),
    "class loss": lambda w, i, x: x * F.cross_entropy(x.flatten(0, 1), i.flatten(), reduction="none").view(*i.shape, 1),
}
ARGUMENTS: Mapping[str, Sequence[Any]] = {
    "switch": [(c, flat) for c in (1, 2, 3) for flat in (False, True)],
    "load": ["bincount", "scatter", "index_add", "one_hot"],
    "expert choice": [1, 2, 3],
    "marked": ["zero", "parameter", "where", "scatter"],
}
