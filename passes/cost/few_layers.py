"""Reduce a model to few layers of each kind, or checkpoint each layer.

From the third layer of a kind on, each layer adds the same to a step: the backward of the last one has a different
peak. Therefore a deep model is analyzed with two layers of the most common kind and one of each other kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from sp_compile.lowering.base.layers import node_layer

from .weight_memory import ModelBytes

MIN_LAYERS = 3
"""Minimum number of layers for a reduction."""


@dataclass(frozen=True)
class FewLayers:
    """Full model that a program of few layers represents."""

    order: Sequence[str]  # all layers in execution order, by the path of the equal remaining layer
    weights: ModelBytes  # bytes of the full model

    @cached_property
    def times(self) -> Mapping[str, int]:
        """Return the number of layers that each path represents; others represent one."""
        return Counter(self.order)

    def of(self, node: Node) -> int:
        """Return the number of nodes that the node represents."""
        return self.times.get(node_layer(node), 1)


@dataclass(frozen=True)
class LayerList:
    """List of layers of a model."""

    layers: nn.ModuleList  # layers
    kinds: tuple[int, ...]  # number of each layer's kind, by first appearance
    settings: tuple[
        tuple[dict[str, Any], str], ...
    ] = ()  # configs (transformers) with per-layer lists such as `layer_types`, and their names
    name: str = ""  # name of the list in the model

    @staticmethod
    def of(model: nn.Module) -> LayerList | None:
        """Return the list with most of the weights, or None if there are few layers or few are equal."""
        lists = [
            (name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) >= MIN_LAYERS
        ]
        if not lists:
            return None
        name, layers = max(lists, key=lambda one: sum(p.numel() for p in one[1].parameters()))
        known: dict[Any, int] = {}
        kinds = tuple(known.setdefault(_layer_kind(layer), len(known)) for layer in layers)
        settings = tuple(_layer_settings(model, len(layers)))
        return LayerList(layers, kinds, settings, name) if len(kinds) >= len(known) + 2 else None

    def _most_common_kind(self) -> list[int]:
        """Return the positions of the most common kind."""
        most = Counter(self.kinds).most_common(1)[0][0]
        return [i for i, k in enumerate(self.kinds) if k == most]

    @property
    def reduce_layers(self) -> tuple[int, ...]:
        """Return two positions of the most common kind, and one of each other kind."""
        first = [self.kinds.index(k) for k in range(max(self.kinds) + 1)]
        one, two, *_ = self._most_common_kind()
        return (one, two, *(place for k, place in enumerate(first) if k != self.kinds[one]))

    @property
    def order(self) -> list[str]:
        """Return for each layer the path of its representative in the reduced model."""
        first, *others = self.reduce_layers
        likes = {self.kinds[i]: place for place, i in enumerate(others, 1)}
        path = f"{self.name}." if self.name else ""
        return [f"{path}{0 if i == first else likes[kind]}" for i, kind in enumerate(self.kinds)]

    @contextmanager
    def only(self, positions: Sequence[int]) -> Iterator[None]:
        """Restrict the model to these layers in this context."""
        remaining, lists = list(self.layers), [holder[name] for holder, name in self.settings]
        del self.layers[:]
        self.layers.extend(remaining[i] for i in positions)
        for (holder, name), one in zip(self.settings, lists, strict=True):
            holder[name] = [one[i] for i in positions]
        try:
            yield
        finally:
            del self.layers[:]
            self.layers.extend(remaining)
            for (holder, name), one in zip(self.settings, lists, strict=True):
                holder[name] = one


def _layer_settings(model: nn.Module, count: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the lists with `count` entries in the configs of a model, without duplicates."""
    found = {id(config): config for m in model.modules() if hasattr(config := getattr(m, "config", None), "__dict__")}
    for config in found.values():
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:
                yield vars(config), name


def _layer_kind(layer: nn.Module) -> Any:
    """Return a key that is equal for equal layers: modules, sizes, and settings except indices."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | float | str | None) or (isinstance(value, int) and "idx" not in key)
            ),
        )
        for name, module in layer.named_modules()
    )


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks to checkpoint: outermost callable entries of the model's module lists."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer modules are first
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = [one for one in module if not isinstance(one, nn.ModuleList) and any(True for _ in one.parameters())]
        if len(blocks) > 1:
            found += [one for one in blocks if one not in inside]
            inside.update(part for one in blocks for part in one.modules())
    return found


@contextmanager
def checkpoint_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint each layer in this context."""
    classes = [(layer, type(layer)) for layer in layers]
    wrapped = {cls: type(cls.__name__, (cls,), {"forward": _checkpointed_class(cls)}) for _, cls in classes}
    try:
        for layer, cls in classes:
            layer.__class__ = wrapped[cls]
        yield
    finally:
        for layer, cls in classes:
            layer.__class__ = cls


def _checkpointed_class(cls: type[nn.Module]) -> Any:
    inside: Any = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward under a checkpoint."""
        return checkpoint(partial(inside, self), *args, use_reentrant=False, **kwargs)

    return forward
