"""The layers of a model that are alike, and the model with fewer of them, or with each computed again.

What a step takes grows by the same with every further layer of a kind, from the third one on: the last one's backward
has another peak than what comes before it. So a deep model is looked at with two layers of the kind that most are of
and one of each other, in place of all.
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
"""Layers from which on some are left out."""


@dataclass(frozen=True)
class FewLayers:
    """What a program of a few layers stands for. order: all layers as they run, each by the path of the one it is like.

    weights: of all of them.
    """

    order: Sequence[str]
    weights: ModelBytes

    @cached_property
    def times(self) -> Mapping[str, int]:
        """How many layers each one is, by its path; others are one."""
        return Counter(self.order)

    def of(self, node: Node) -> int:
        """How many nodes the node stands for."""
        return self.times.get(node_layer(node), 1)


@dataclass(frozen=True)
class LayerList:
    """A list of layers. kinds: which are alike: the number of each one's kind, in order of their first appearance.

    name: of the list in its model. settings: what holds lists with an entry for each layer, and their names:
    transformers' configs, by whose `layer_types` a model takes the mask of a layer by its place.
    """

    layers: nn.ModuleList
    kinds: tuple[int, ...]
    settings: tuple[tuple[dict[str, Any], str], ...] = ()
    name: str = ""

    @staticmethod
    def of(model: nn.Module) -> LayerList | None:
        """The list that holds most of a model's weights; None if none has `MIN_LAYERS` layers, or too few are alike."""
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
        """Positions of the kind that most are of."""
        most = Counter(self.kinds).most_common(1)[0][0]
        return [i for i, k in enumerate(self.kinds) if k == most]

    @property
    def reduce_layers(self) -> tuple[int, ...]:
        """Positions of layers that are like all: two of the kind that most are of, and one of each other kind."""
        first = [self.kinds.index(k) for k in range(max(self.kinds) + 1)]
        one, two, *_ = self._most_common_kind()
        return (one, two, *(place for k, place in enumerate(first) if k != self.kinds[one]))

    @property
    def order(self) -> list[str]:
        """All layers, each by the path that one like it has where there are few; the first one is itself."""
        first, *others = self.reduce_layers
        likes = {self.kinds[i]: place for place, i in enumerate(others, 1)}
        path = f"{self.name}." if self.name else ""
        return [f"{path}{0 if i == first else likes[kind]}" for i, kind in enumerate(self.kinds)]

    @contextmanager
    def only(self, positions: Sequence[int]) -> Iterator[None]:
        """The model with these layers."""
        kept, lists = list(self.layers), [holder[name] for holder, name in self.settings]
        del self.layers[:]
        self.layers.extend(kept[i] for i in positions)
        for (holder, name), one in zip(self.settings, lists, strict=True):
            holder[name] = [one[i] for i in positions]
        try:
            yield
        finally:
            del self.layers[:]
            self.layers.extend(kept)
            for (holder, name), one in zip(self.settings, lists, strict=True):
                holder[name] = one


def _layer_settings(model: nn.Module, count: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Lists of so many entries in the configs of a model's modules, each once."""
    found = {id(config): config for m in model.modules() if hasattr(config := getattr(m, "config", None), "__dict__")}
    for config in found.values():
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:
                yield vars(config), name


def _layer_kind(layer: nn.Module) -> Any:
    """What two layers have in common that do the same: modules, sizes, and settings other than their number."""
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
    """What is checkpointed block by block: entries of the model's lists of modules, the outermost that are called."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # those outside come first
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = [one for one in module if not isinstance(one, nn.ModuleList) and any(True for _ in one.parameters())]
        if len(blocks) > 1:
            found += [one for one in blocks if one not in inside]
            inside.update(part for one in blocks for part in one.modules())
    return found


@contextmanager
def checkpoint_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Each layer keeps what goes into it, and its inside is computed again in the backward."""
    classes = [(layer, type(layer)) for layer in layers]
    made = {cls: type(cls.__name__, (cls,), {"forward": _checkpointed_class(cls)}) for _, cls in classes}
    try:
        for layer, cls in classes:
            layer.__class__ = made[cls]
        yield
    finally:
        for layer, cls in classes:
            layer.__class__ = cls


def _checkpointed_class(cls: type[nn.Module]) -> Any:
    inside: Any = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(inside, self), *args, use_reentrant=False, **kwargs)

    return forward
