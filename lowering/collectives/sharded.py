"""Define ``Sharded``, a value between compiled graphs that behaves as the single-device tensor.

    y = compiled(x)        y.shape, y.dtype are the single-device ones; this rank stores its rows
    z = compiled_next(y)   consumes the rows; y.detach(), y.to(dtype) and y.clone() map them
    y.mean()               reads: an all-gather, once for y and all its aliases, on every rank

Reading a value gathers it; ops that only move a value do not read it. Autograd operates on the single-device value, so
that reading is differentiable. In a backward, gradients are such values, too, or full tensors (equal on every rank),
which are sliced where they enter a graph. `shard_storage.py` defines storage, layout, rows, length and origin.

A token of a gradient is a tensor of one element that a program returns next to a value. Its own gradient is a number,
under which `store_grad` stores the gradient of the value for the program's backward (`grad_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import local_row_count
from sp_compile.lowering.torch_compat import OpOverload, make_wrapper, process_group, pytree

from .deferred import DeferredRows
from .grad_tokens import store_grad
from .shard_storage import Layout, Origin, RowPermutation, ShardStorage
from .shard_views import ViewStorage, can_keep_views, refuse_shape_change, refuse_transforms, view_storages

aten, sp = torch.ops.aten, torch.ops.sp

BALANCED_TENSORS = "order", "inverse", "chunks"  # fields of `RowPermutation`


class Sharded(Tensor):
    """Single-device value of which this rank stores its rows until the value is read.

    Dynamo must not trace the methods: it would compile code between two graphs and in its own guards. Every op reads
    the value except those that only move it: detach, alias, a view of its own shape, clone, casts, record_stream, and
    the sum of two values of one layout. Reading is collective. repr() does not read.
    """

    shard_storage: ShardStorage | ViewStorage  # replaced by assignments to `data`

    @staticmethod
    def __new__(cls, storage: ShardStorage | ViewStorage, shape: Sequence[int], strides: Sequence[int] = ()) -> Sharded:
        """Create a tensor of the full tensor's shape and strides (by default without gaps) that refers to a storage."""
        if isinstance(storage, ViewStorage):
            strides = storage.like.stride()
        value: Sharded = make_wrapper(cls, shape, strides or storage.layout.strides(shape), storage.local_like)
        value.shard_storage = storage
        return value

    __torch_function__ = torch_compat.no_torch_function

    @property
    def sharding(self) -> Layout:
        """Return the layout over the ranks. `layout`, an attribute of every tensor, is torch.strided."""
        return self.shard_storage.layout

    @property
    @torch.compiler.disable
    def local(self) -> Tensor:
        """Return this rank's rows, padding included, without a gradient."""
        return self.shard_storage.rows()

    @property
    def is_gathered(self) -> bool:
        """Return True if the value is gathered on this rank."""
        return self.shard_storage.full is not None

    @torch.compiler.disable
    def full(self) -> Tensor:
        """Return the full tensor, differentiable. All ranks must call it; later eager reads use the same memory.

        Raises:
            SpError: A rank runs something else instead.
        """
        return _FullFunction.apply(self)

    @torch.compiler.disable
    def to_dtensor(self, mesh: DeviceMesh | None = None) -> DTensor:
        """Return the value as a DTensor on a 1-D mesh, Shard(dim). Differentiable.

        A contiguous value needs no exchange; a zigzag, balanced or flattened one is read first, on every rank. DTensor
        stores no padding: the last ranks have fewer than ceil(S / n) rows.

        Args:
            mesh: Mesh of the ranks that store the value; created from their group if None.
        """
        layout, dim = self.sharding, self.sharding.dim
        if not (self.is_gathered or (layout.folds == 1 and layout.is_plain)):  # one chunk a rank, no window
            self.shard_storage.read()
        if mesh is None:
            mesh = DeviceMesh.from_group(process_group(layout.group), self.device.type, mesh_dim_names=("sp",))
        contiguous, length = Layout(dim, layout.n, layout.group, layout.order), self.shape[dim]
        rows = local_row_count(contiguous.frame(length), layout.n)
        first = min(length, rows * dist.get_rank(process_group(layout.group)))  # first position of this rank
        local = to_local(self, contiguous).narrow(dim, 0, min(length, first + rows) - first)
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=self.shape, stride=self.stride())

    def __repr__(self, *, tensor_contents: object = None) -> str:
        if self.is_gathered:
            return repr(self.shard_storage.read())
        return f"Sharded({tuple(self.shape)}, {self.dtype}, {self.sharding}: .full() on every rank reads it)"

    # Attributes that torch reads from memory, without a dispatcher.

    @property
    @torch.compiler.disable
    def data(self) -> Tensor:
        """Return `detach()`. An assigned value must match shape, dtype and device; aliases do not change."""
        return self.detach()

    @data.setter
    @torch.compiler.disable
    def data(self, new: Tensor) -> None:
        """Replace the storage by that of a sharded tensor, or by one that stores a plain tensor in full.

        Raises:
            SpError: If the shape, dtype or device differs.
        """
        if (new.shape, new.dtype, new.device) != (self.shape, self.dtype, self.device):
            raise SpError("SP322", f"x.data: expected {_describe(self)}, as x is sharded, got {_describe(new)}.")
        if isinstance(new, Sharded):
            self.shard_storage = new.shard_storage
            return
        storage, full = self.shard_storage, self.sharding.as_dense(new.detach())
        self.shard_storage = ShardStorage(storage.layout, storage.length, local=None, origin=storage.origin, full=full)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as a NumPy array."""
        return self.full().numpy(force=force)

    def tolist(self) -> Any:
        """Return the full tensor as nested lists."""
        return self.full().tolist()

    def share_memory_(self) -> Tensor:
        """Return this value, whose full tensor is moved to shared memory."""
        self.shard_storage.read().share_memory_()
        return self

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.full().__dlpack__(**kwargs)

    def data_ptr(self) -> int:
        """Return the address of the full tensor, after a read."""
        return self.full().data_ptr()

    @torch.compiler.disable
    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the full tensor, after a read; an empty one to compilers that check for aliases."""
        return super().untyped_storage() if torch_compat.is_compiling() else self.shard_storage.read().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    # Parts for torch.compile.

    @torch.compiler.disable
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.sharding.balanced is None:
            return ["local"], self.sharding
        return ["local", *BALANCED_TENSORS], replace(self.sharding, balanced=None)

    @staticmethod
    @torch.compiler.disable
    def __tensor_unflatten__(inner: dict[str, Tensor], layout: Layout, shape: Any, strides: Any) -> Sharded:
        if "order" in inner:
            layout = replace(layout, balanced=RowPermutation(*(inner[name] for name in BALANCED_TENSORS)))
        return Sharded(ShardStorage(layout, shape[layout.dim], inner["local"]), shape, strides)

    # Tensors of a balanced layout, see `RowPermutation`. `__tensor_flatten__` returns their names.
    order = property(lambda self: self.sharding.balanced.order)
    inverse = property(lambda self: self.sharding.balanced.inverse)
    chunks = property(lambda self: self.sharding.balanced.chunks)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of a handler of `SHARDED_MOVES` or of `_view` or, if none supports the call, of the op.

        The op reads its sharded operands.
        """
        # `end_of_view` makes the -1 of x[:, :-1] a constant again, which torch replaces by a symbol under Dynamo.
        args, kwargs = pytree.tree_map_only(torch.SymInt, torch_compat.end_of_view, args), dict(kwargs or {})
        refuse_shape_change(func, args if args and isinstance(args[0], Sharded) else ())
        handler = SHARDED_MOVES.get(func) or (_view if func.is_view and can_keep_views() else None)
        if handler is not None and (moved := handler(func, args, kwargs)) is not None:
            return moved
        values: dict[int, Sharded] = {}  # operands by the id of their full tensors

        def read_value(value: Sharded) -> Tensor:
            """Return the full tensor of an operand, and record the operand in `values`."""
            full = value.shard_storage.read(is_trained=value.requires_grad and torch.is_grad_enabled())
            values[id(full)] = value
            return full

        args, kwargs = pytree.tree_map_only(Sharded, read_value, (args, kwargs))
        out = func(*args, **kwargs)
        if not torch_compat.schema_of(func).is_mutable:
            return out
        # x.add_(1) returns the full tensor of x, as read above: return the sharded x itself.
        return pytree.tree_map_only(Tensor, lambda x: values.get(id(x), x), out)


torch_compat.hide_views(Sharded)


def _describe(x: Tensor) -> str:
    """Return the shape, dtype and device of x for a message."""
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


# Handlers of ops on values that do not read them. Each returns the result, or None for a case that it does not support.

MoveHandler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def _alias(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return another tensor of the same storage, for detach, alias and a view of the value's own shape."""
    value = args[0]
    if func is aten.view.default and not _is_own_shape(args[1], value.shape):
        return _view(func, args, kwargs) if can_keep_views() else None
    with torch.inference_mode(value.is_inference()):  # an alias of an inference tensor is one, too
        return Sharded(value.shard_storage, value.shape, value.stride())


def _is_own_shape(size: Sequence[int], shape: torch.Size) -> bool:
    """Return True if the size of a view, in which -1 stands for one dim, is the shape."""
    return len(size) == len(shape) and all(given in (-1, dim) for given, dim in zip(size, shape, strict=True))


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the view or views as sharded values, or None if one of them has no layout and the value must be read."""
    value, *options = args
    # `like` is a meta tensor like the value, whose view shows the layout of the result.
    storages = view_storages(value.shard_storage, value.shape, lambda like: func(like, *options, **kwargs))
    with torch.inference_mode(value.is_inference()):  # views of an inference tensor are such tensors, too
        return None if storages is None else pytree.tree_map(lambda x: Sharded(x, x.like.shape), storages)


def _copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy or cast of the rows, or None if the full copy would have other strides than the value."""
    value, stride_preserving = args[0], [None, torch.preserve_format]
    if value.sharding.order == tuple(range(value.ndim)):  # contiguous
        stride_preserving.append(torch.contiguous_format)
    if kwargs.get("memory_format") not in stride_preserving or kwargs.get("layout") not in (None, torch.strided):
        return None
    return Sharded(value.shard_storage.map_rows(lambda x: func(x, **kwargs), name=COPIES[func]), value.shape)


def _record_stream(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return (), after a stream is recorded for the memory of the value: its rows, or the gathered full tensor."""
    value, stream = args
    func(value.shard_storage.read() if value.is_gathered else value.local, stream)
    return ()  # the op has no result; None would mean that this handler does not support the call


def _add_rows(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sum of the rows of two values of one layout or, in a backward, of a sharded and a full gradient.

    It is None for other operands, and for two gathered ones, whose sum needs no exchange.
    """
    a, b = args[:2]
    if kwargs or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return None
    first, *others = [x for x in (a, b) if isinstance(x, Sharded)]
    layout = first.sharding
    if others:
        if (first.is_gathered and others[0].is_gathered) or not others[0].sharding.has_same_rows(layout):
            return None
    elif not torch_compat.is_in_backward():  # a full tensor of the forward may differ between ranks
        return None
    total = aten.add.Tensor(*(x.local if isinstance(x, Sharded) else layout.local_rows(x) for x in (a, b)))
    length, origin = first.shard_storage.length, first.shard_storage.origin
    storage = ShardStorage(layout, length, total, replace(origin, description=f"a sum with {origin.description}"))
    if func is aten.add.Tensor:
        return Sharded(storage, first.shape)
    # An in-place addition changes the rows of a and its aliases, unless a is a plain tensor, gathered, or a view.
    if a is not first or a.is_gathered or not isinstance(a.shard_storage, ShardStorage):
        return None
    a.shard_storage.local, a.shard_storage.full = total, None
    return a


def _make_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a factory function, such as zeros_like, for the value's shape, dtype and device."""
    value, *options = args
    like = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)  # one element of memory
    return func(like, *options, **kwargs)


_LIKE_FACTORIES = """
empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full new_empty_strided
""".split()
COPIES = {aten.clone.default: "a copy", aten._to_copy.default: "a cast"}
SHARDED_MOVES: dict[OpOverload, MoveHandler] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.view.default), _alias),
    **dict.fromkeys(COPIES, _copy),
    aten.record_stream.default: _record_stream,
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), _add_rows),
    **{getattr(aten, name).default: _make_like for name in _LIKE_FACTORIES},
}


# Conversions at the boundaries of graphs.

GradientMap = Callable[[Tensor], Iterable[Tensor]]  # gradient of the rows -> gradients of the operands


class _FullFunction(torch.autograd.Function):
    """Map a sharded value to its full tensor, whose gradient is a full tensor, too: `Sharded.full`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Sharded) -> Tensor:
        """Return the full tensor."""
        return x.shard_storage.read().detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Sharded], output: Tensor) -> None:
        """Save nothing; `generate_vmap_rule` requires the method."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return grad


class _ToLocalFunction(torch.autograd.Function):
    """Map a sharded value to this rank's rows: `to_local`. The gradient of the value is sharded: that of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Sharded, layout: Layout) -> Tensor:
        """Return the rows of this rank."""
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.layout, ctx.origin = x.shape, layout, x.shard_storage.origin
        rows = _local_rows(x, layout).detach()
        # The padding of a view, and of a copy or sum of views, has other rows of the base. Fill it with nearest rows.
        if layout.before or layout.after:
            rows = sp.window(rows, layout.dim, layout.frame(x.shape[layout.dim]), layout.n, layout.group)
        return rows

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the gradient as a sharded tensor."""
        if grad is None:
            return None, None
        layout, origin = ctx.layout, Origin(f"the gradient of {ctx.origin.description}", ctx.origin.check_read)
        return Sharded(ShardStorage(layout, ctx.shape[layout.dim], grad, origin), ctx.shape), None


class _FromLocalFunction(torch.autograd.Function):
    """Wrap this rank's rows as a sharded value: `from_local` and `from_deferred`.

    The operands `sources` receive the gradient: they are the rows, or tokens (`grad_tokens.py`). `gradients` maps this
    rank's rows of the value's gradient, with zeros in padding, to those of the sources.
    """

    @staticmethod
    def forward(
        ctx: Any, storage: ShardStorage, shape: Sequence[int], gradients: GradientMap, *sources: Tensor
    ) -> Tensor:
        """Return the storage as a sharded tensor."""
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.gradients, ctx.sources = storage.layout, gradients, len(sources)
        return Sharded(storage, shape)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sources from the rows of this rank, with zeros in padded rows."""
        if grad is None:
            return None, None, None, *[None] * ctx.sources
        refuse_transforms([grad])
        layout: Layout = ctx.layout
        frame = layout.frame(grad.shape[layout.dim])
        rows = sp.mask.default(_local_rows(grad, layout), layout.dim, frame, 0, layout.n, layout.group)
        source_grads = list(ctx.gradients(rows))
        for source_grad in source_grads if rows.requires_grad else []:
            source_grad.requires_grad_()  # create_graph=True: a second backward raises, instead of wrong gradients
        return None, None, None, *source_grads


def _local_rows(x: Tensor, layout: Layout) -> Tensor:
    """Return this rank's rows of a full or sharded x in a layout. A sharded x of another layout is read."""
    if not isinstance(x, Sharded):
        return layout.local_rows(x)
    if x.sharding.has_same_rows(layout):
        return layout.as_dense(x.local)  # the same rows, in the memory order of the layout
    return layout.local_rows(x.shard_storage.read())


def to_local(x: Sharded, layout: Layout) -> Tensor:
    """Return this rank's rows in a layout, differentiable, as the argument of a program of that layout.

    A value of another layout is read first, on every rank.
    """
    return _ToLocalFunction.apply(x, layout)


def from_local(
    local: Tensor, layout: Layout, length: int, origin: Origin | None = None, grad_token: Tensor | None = None
) -> Tensor:
    """Return this rank's rows, a result of a program, as a sharded value, differentiable; padding has gradient 0.

    Args:
        local: Rows of this rank, any dtype.
        layout: Layout of the value.
        length: Length of the sharded dim in the full tensor.
        origin: Description of the value for messages, and what a read of it calls; None: a general text and no calls.
        grad_token: Token of the gradient of the rows. If None, the gradient flows to `local`.
    """
    shape = [length if dim == layout.dim else extent for dim, extent in enumerate(local.shape)]
    storage = ShardStorage(layout, length, local.detach(), origin or Origin())
    # The function maps the rows of the gradient to the gradient of the last argument.
    if grad_token is None:
        return _FromLocalFunction.apply(storage, shape, lambda rows: [rows], local)
    return _FromLocalFunction.apply(storage, shape, lambda rows: [store_grad(rows)], grad_token)


def from_deferred(
    deferred: DeferredRows, shape: Sequence[int], layout: Layout, length: int, origin: Origin, grad_tokens: list[Tensor]
) -> Tensor:
    """Return a sharded value whose rows `deferred` computes when they are needed, differentiable.

    `shape` is that of the full tensor, and `length` that of its sharded dim. `grad_tokens` has a token for each operand
    of `deferred` that needs a gradient, in the order of `deferred.gradients`, which computes these gradients.
    """
    storage = ShardStorage(layout, length, local=None, origin=origin, deferred=deferred)
    return _FromLocalFunction.apply(
        storage, shape, lambda rows: map(store_grad, deferred.gradients(rows)), *grad_tokens
    )


class _WriteFunction(torch.autograd.Function):
    """In-place assignment to a value (`write`). The gradient flows to the new value."""

    @staticmethod
    def forward(ctx: Any, x: Sharded, new: Tensor) -> Tensor:
        """Return x, to whose storage the value is assigned."""
        ctx.mark_dirty(x)
        x.shard_storage.assign(new, new.shard_storage if isinstance(new, Sharded) else None)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Return the gradient of the assigned value; the old value has none."""
        return None, grad


def write(x: Sharded, new: Tensor) -> None:
    """Assign a new value to x in place, for an in-place op of a program. Visible to autograd and aliases of x."""
    _WriteFunction.apply(x, new)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # autograd detects that saved values have changed


def from_replicated(x: Tensor, layout: Layout, origin: Origin | None = None) -> Tensor:
    """Return a full tensor as a sharded value that is read already, for dry runs, as of `explain` without ranks."""
    return _FromReplicatedFunction.apply(x, layout, origin or Origin())


class _FromReplicatedFunction(torch.autograd.Function):
    """Wrap a full tensor as a sharded value that is read already, with a full gradient: `from_replicated`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, origin: Origin) -> Tensor:
        """Return the full tensor as a value. Its rows are uninitialized, since a dry run has no other ranks."""
        length = x.shape[layout.dim]
        rows = layout.outer * local_row_count(layout.frame(length), layout.n) * layout.inner
        shape = [rows if dim == layout.dim else extent for dim, extent in enumerate(x.shape)]
        local = layout.as_dense(x.new_empty(shape))
        return Sharded(ShardStorage(layout, length, local, origin, full=layout.as_dense(x)), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the full gradient."""
        return grad.shard_storage.read() if isinstance(grad, Sharded) else grad, None, None
