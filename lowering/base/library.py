"""Register operators in the ``sp`` namespace of torch.library, and compute a digest of their sources.

A composite operator is one node of a rewritten graph, such as ``sp::all_gather``; AOTAutograd traces into its body,
which calls functional collectives. An opaque operator stays one node for every tracer and compiler. The tables of this
module store what passes need to know about an operator: the collectives that it runs, its padded rows (rows of a
shard that are outside the sequence, see ``base/frames.py``), its temporary memory.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import OpOverload

LIBRARY = torch.library.Library("sp", "DEF")

# Operators of `composite`. All others are opaque.
COMPOSITES: set[OpOverload] = set()

# Collectives of each data-movement operator, forward and backward; "" for none.
MOVE_OPS: dict[OpOverload, tuple[str, str]] = {}

# Contents of padded rows in the results of operators, see ``collectives/pad_rows.py``. "nearest": the nearest valid
# row, independent of the padding of the operands. "finite": any finite numbers. "as given": each row follows from the
# same row of the operands. Between ``sort_rows`` and ``from_sorted``, which permute rows, it follows from the row at
# its original index.
PADDED: dict[OpOverload, str] = {}

# Functions of the temporary bytes of opaque operators, in addition to operands and results; see `opaque`.
INTERNAL_OPS: dict[OpOverload, Callable[..., int]] = {}

SOURCE_FILES: set[Path] = set()  # files in which operators are defined

Body = TypeVar("Body", bound=Callable[..., object])


def composite(schema: str, moves: tuple[str, str] | None = None, padded: str | None = None) -> Callable[[Body], Body]:
    """Return a decorator that registers a function as the composite operator ``sp::<schema>``.

    The body is CompositeImplicitAutograd: it is one node in a rewritten graph. Autograd, fake tensors and AOTAutograd
    trace through it, so that the compiler finds the collectives inside.

    Args:
        schema: Schema of the operator, without namespace.
        moves: Names of the collectives that it runs, forward and backward, for `MOVE_OPS`; None for other operators.
        padded: Contents of padded rows in its result, "nearest", "finite" or "as given", for `PADDED`; None if it has
            no padded rows.
    """

    def register(body: Body) -> Body:
        """Define the operator with this body, add it to the tables, and return the body unchanged."""
        op = _define(schema, body, "CompositeImplicitAutograd")
        COMPOSITES.add(op)
        if moves is not None:
            MOVE_OPS[op] = moves
        if padded is not None:
            PADDED[op] = padded
        return body

    return register


def opaque(
    schema: str, fake: Callable[..., object], replays: bool = True, inside: Callable[..., int] | None = None
) -> Callable[[Body], Body]:
    """Return a decorator that registers a function as the opaque operator ``sp::<schema>``.

    Tracers do not enter it and autograd does not differentiate it. Results must not be views of operands.

    Args:
        schema: Schema of the operator, without namespace.
        fake: Function of the same arguments that returns empty results, for fake tensors.
        replays: True if a CUDA graph may replay its launches. False if it synchronizes with the device, or if its
            launches depend on the contents of its operands.
        inside: For the memory estimate (`INTERNAL_OPS`), a function (workspace, *operands) -> temporary bytes at the
            operator's peak. The workspace is the cost model's estimate of the bytes that the operator's kernels
            allocate; it is the estimate for an operator without such a function.
    """
    has_tag = not replays and hasattr(torch.Tag, "cudagraph_unsafe")  # depends on the torch version
    tags = [torch.Tag.cudagraph_unsafe] if has_tag else []

    def register(body: Body) -> Body:
        """Define the operator with this body and its fake, and return the body unchanged."""
        op = _define(schema, torch.no_grad()(body), "CompositeExplicitAutograd", tags)
        torch.library.register_fake(op, fake, lib=LIBRARY)
        if inside is not None:
            INTERNAL_OPS[op] = inside
        return body

    return register


def _define(schema: str, body: Callable[..., object], key: str, tags: Sequence[torch.Tag] = ()) -> OpOverload:
    """Define the operator ``sp::<schema>`` and return it.

    Args:
        schema: Schema of the operator, without namespace.
        body: Implementation for the dispatch key. Its file is added to `SOURCE_FILES`.
        key: Dispatch key of the body.
        tags: Tags in addition to "pt2_compliant_tag".
    """
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    name = schema.split("(")[0]
    LIBRARY.impl(name, body, key)
    source = Path(inspect.unwrap(body).__code__.co_filename)
    if source.is_file():  # functions from an interactive prompt have no file
        SOURCE_FILES.add(source.resolve())
    return getattr(torch.ops.sp, name).default


class LinearMap(torch.autograd.Function):
    """Linear map of a tensor whose backward runs the adjoint map.

    Both maps are called as ``function(x, *parameters)``. The backward is disabled for Dynamo: eager code may call it
    between compiled graphs, where Dynamo does not trace torch's own backwards, either.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[..., Tensor], adjoint: Callable[..., Tensor], *parameters: Any
    ) -> Tensor:
        """Return ``function(x, *parameters)`` and save both maps for the backward."""
        ctx.function, ctx.adjoint, ctx.parameters = function, adjoint, parameters
        return function(x, *parameters)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the adjoint to the gradient, differentiably: the adjoint of the adjoint is the map itself."""
        x_grad = LinearMap.apply(grad, ctx.adjoint, ctx.function, *ctx.parameters)
        return (x_grad, None, None, *[None] * len(ctx.parameters))


def sources_digest(*folders: str) -> str:
    """Return a digest that changes with each edit of `lowering/`, of an operator, or of a file in the given folders.

    It is part of the keys of compile caches, and ranks compare it. Without it the caches, whose keys contain only the
    names of operators, would return code that was compiled from an older body.
    """
    lowering = Path(__file__).resolve().parents[1]
    resolved = {lowering, *(Path(folder).resolve() for folder in folders)}
    return _hash_sources(frozenset(resolved), frozenset(SOURCE_FILES))


@cache
def _hash_sources(folders: frozenset[Path], sources: frozenset[Path]) -> str:
    """Return a digest of the Python files in the folders and of the source files, cached for the process."""
    files = sources.union(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in sorted(files))).hexdigest()[:16]


def tag_programs() -> None:
    """Add the digest of the operators' sources to the key of torch's compile caches, in torch.compiler.config.

    The functions on shards (`sp_compile/functional/`) call this before they compile, because the keys of the caches do
    not depend on the bodies of operators otherwise.
    """
    config, tag = torch.compiler.config, f"sp_compile {sources_digest()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()
