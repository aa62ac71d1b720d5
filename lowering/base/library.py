"""The ``sp`` operator namespace: how operators enter it, and a digest of what their bodies are."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import OpOverload

LIBRARY = torch.library.Library("sp", "DEF")

COMPOSITES: set[OpOverload] = set()
"""Operators whose bodies are ordinary operators; all others are opaque."""

MOVE_OPS: dict[OpOverload, tuple[str, str]] = {}
"""Exchanges of what they are given -> the collectives that they are, forward and backward; "" is none."""

PADDED: dict[OpOverload, str] = {}
"""Operators whose results may be shards -> what padded rows of these hold, see ``collectives/pad_rows.py``.

"nearest": the nearest valid row, whatever the operands hold there. "finite": finite numbers, not those of a valid row.
"as given": each row follows from the same row of the operands; between ``sort_rows`` and ``from_sorted``, which permute
rows, from the row that was at its place before.
"""

INTERNAL_OPS: dict[OpOverload, Callable[..., int]] = {}
"""Opaque operators that take memory while they run -> its bytes, besides operands and results: see `opaque`."""

SOURCE_FOLDERS: set[Path] = set()
"""The files in which operators are defined, wherever they lie."""

Body = TypeVar("Body", bound=Callable[..., object])


def composite(schema: str, moves: tuple[str, str] | None = None, padded: str | None = None) -> Callable[[Body], Body]:
    """Decorator: register the function as ``sp::<schema>``.

    The body is CompositeImplicitAutograd: one node in a rewritten graph, but autograd, fake tensors and
    AOTAutograd trace through it, so that the collectives inside are visible to the compiler. moves: see `MOVE_OPS`.
    padded: see `PADDED`.
    """

    def register(body: Body) -> Body:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.split("(")[0]
        LIBRARY.impl(name, body, "CompositeImplicitAutograd")
        op = getattr(torch.ops.sp, name).default
        COMPOSITES.add(op)
        if moves is not None:
            MOVE_OPS[op] = moves
        if padded is not None:
            PADDED[op] = padded
        _record_body(body)
        return body

    return register


def opaque(
    schema: str, fake: Callable[..., object], replays: bool = True, inside: Callable[..., int] | None = None
) -> Callable[[Body], Body]:
    """Decorator: register the function as ``sp::<schema>``, which no tracer looks into and no autograd derives.

    fake: the function on fake tensors. Results must not be views of operands. replays: may a CUDA graph launch again
    what it launched once? Not if it waits for the device, nor if it launches by what its operands hold. inside: of the
    bytes that its kernels take for themselves, and its operands: all that it takes while it runs, besides operands
    and results.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None) if not replays else None
    tags = (torch.Tag.pt2_compliant_tag, *([] if unsafe is None else [unsafe]))

    def register(body: Body) -> Body:
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=tags)
        LIBRARY.impl(name, torch.no_grad()(body), "CompositeExplicitAutograd")
        torch.library.register_fake(f"sp::{name}", fake, lib=LIBRARY)
        if inside is not None:
            INTERNAL_OPS[getattr(torch.ops.sp, name).default] = inside
        _record_body(body)
        return body

    return register


def _record_body(body: Callable[..., object]) -> None:
    source = Path(inspect.unwrap(body).__code__.co_filename)
    if source.is_file():  # what is typed at a prompt has none
        SOURCE_FOLDERS.add(source.resolve())


class LinearMap(torch.autograd.Function):
    """A linear map and its adjoint, both called as ``map(x, *where)``.

    Here as in every backward of an operator: where eager code calls it between compiled graphs, Dynamo is to leave it
    alone, as it leaves torch's own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *where: Any) -> Tensor:
        ctx.is_ready, ctx.back, ctx.where = there, back, where
        return there(x, *where)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (LinearMap.apply(grad, ctx.back, ctx.is_ready, *ctx.where), None, None, *[None] * len(ctx.where))


def sources_digest(*folders: str) -> str:
    """Changes with every edit of an operator, and of what else lies in these folders.

    A compiler's caches see the operators' names only, and would bring back code made from an older body.
    """
    places = [Path(__file__).resolve().parents[1], *(Path(folder).resolve() for folder in folders)]
    return _hash_sources(frozenset(places), frozenset(SOURCE_FOLDERS))


@cache
def _hash_sources(folders: frozenset[Path], sources: frozenset[Path]) -> str:
    files = sources.union(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in sorted(files))).hexdigest()[:16]


def tag_programs() -> None:
    """Programs compiled from now on are found in caches only by a process with the same operators."""
    config, tag = torch.compiler.config, f"sp_compile {sources_digest()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()
