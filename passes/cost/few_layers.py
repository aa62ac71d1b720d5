"""Reduce a model to few layers of each kind, or checkpoint each layer.

A model with 32 equal layers is analyzed as one with two: a dry run then takes a sixteenth of the time.

From the third layer of a kind on, each layer adds the same to a step: the backward of the last one has a different
peak. Therefore a deep model is analyzed with two layers of the most common kind and one of each other kind. Layers are
of one kind if their modules, parameters and settings are equal. The remaining layer of a kind represents the others.
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

MIN_LAYERS = 3  # minimum number of layers for a reduction


@dataclass(frozen=True)
class FewLayers:
    """Model of many layers that a program of few layers represents."""

    order: Sequence[str]  # for each layer of the full model, in execution order, the path of the layer representing it
    weights: ModelBytes  # bytes of the full model

    @cached_property
    def times(self) -> Mapping[str, int]:
        """Return the number of layers that the layer of each path represents; it is 1 for paths without entry."""
        return Counter(self.order)

    def of(self, node: Node) -> int:
        """Return the number of nodes of the full model that a node of the reduced one represents: one per layer."""
        return self.times.get(node_layer(node), 1)


@dataclass(frozen=True)
class LayerList:
    """The list of layers that contains most of the weights of a model, and the kind of each layer."""

    layers: nn.ModuleList  # the list itself, which `only` modifies
    kinds: tuple[int, ...]  # number of each layer's kind, by first appearance
    # configs (transformers) that contain a list of one entry for each layer, such as `layer_types`, and its name
    settings: Sequence[tuple[dict[str, Any], str]] = ()
    name: str = ""  # name of the list in the model

    @staticmethod
    def of(model: nn.Module) -> LayerList | None:
        """Return the list with most of the weights, or None if a reduced model would not have fewer layers."""
        lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) >= MIN_LAYERS}
        if not lists:
            return None
        name = max(lists, key=lambda path: sum(p.numel() for p in lists[path].parameters()))
        layers = lists[name]
        numbers: dict[Any, int] = {}  # key of a kind -> its number, the next one for a new key
        kinds = tuple(numbers.setdefault(_layer_kind(layer), len(numbers)) for layer in layers)
        if len(kinds) < len(numbers) + 2:  # the reduced model would have len(numbers) + 1 layers
            return None
        return LayerList(layers, kinds, list(_layer_settings(model, len(layers))), name)

    @property
    def reduced_positions(self) -> tuple[int, ...]:
        """Return the indices of the remaining layers: two of the most common kind, and one of each other kind."""
        common = Counter(self.kinds).most_common(1)[0][0]
        first_common = self.kinds.index(common)
        second_common = self.kinds.index(common, first_common + 1)
        of_other_kinds = (self.kinds.index(kind) for kind in range(max(self.kinds) + 1) if kind != common)
        return (first_common, second_common, *of_other_kinds)

    @property
    def representatives(self) -> list[str]:
        """Return for each layer the path of the layer of its kind that represents it in the reduced model.

        Of the most common kind, which has two, the second one represents all layers except the first itself. These two
        are the layers 0 and 1 of the reduced model (`reduced_positions`), and those of other kinds follow. For the
        kinds (0, 1, 1, 1) the reduced model has the layers 1, 2 and 0 of the model, and the result is 2, 0, 1, 1.
        """
        first_index, *later_indices = self.reduced_positions
        position_of_kind = {self.kinds[i]: position for position, i in enumerate(later_indices, 1)}
        prefix = f"{self.name}." if self.name else ""
        positions = [0 if i == first_index else position_of_kind[kind] for i, kind in enumerate(self.kinds)]
        return [f"{prefix}{position}" for position in positions]

    @contextmanager
    def only(self, positions: Sequence[int]) -> Iterator[None]:
        """Restrict the model to the layers at these positions while this context is active, for a dry run."""
        all_layers = list(self.layers)
        all_settings = [(config, name, config[name]) for config, name in self.settings]
        del self.layers[:]
        self.layers.extend(all_layers[i] for i in positions)
        for config, name, values in all_settings:
            config[name] = [values[i] for i in positions]
        try:
            yield
        finally:
            del self.layers[:]
            self.layers.extend(all_layers)
            for config, name, values in all_settings:
                config[name] = values


def _layer_settings(model: nn.Module, count: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (attributes of a config, name) for each list of `count` entries in the configs of a model.

    Such a list has one entry for each layer, so `LayerList.only` restricts it together with the layers.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}  # modules share configs
    for config in configs.values():
        for name, value in getattr(config, "__dict__", {}).items():
            if isinstance(value, list) and len(value) == count:
                yield vars(config), name


def _layer_kind(layer: nn.Module) -> Any:
    """Return a key that is equal for layers of one kind, whose modules, parameters and settings are equal.

    An integer setting with "idx" in its name is ignored, since it is the index of the layer.
    """
    key: list[Any] = []
    for name, module in layer.named_modules():
        key += [name, type(module).__qualname__]
        key += [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False)]
        for attribute, value in sorted(vars(module).items()):
            is_index = isinstance(value, int) and not isinstance(value, bool) and "idx" in attribute
            if isinstance(value, bool | int | float | str | None) and not is_index:
                key.append((attribute, value))
    return tuple(key)


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a plan checkpoints: entries of the outermost module lists that have parameters."""
    outermost: list[nn.Module] = []
    covered: set[nn.Module] = set()  # the blocks and all modules inside of them
    for module in model.modules():  # outer modules are first
        if module in covered or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = [b for b in module if not isinstance(b, nn.ModuleList) and next(b.parameters(), None) is not None]
        if len(blocks) > 1:
            outermost += [block for block in blocks if block not in covered]
            covered.update(submodule for block in blocks for submodule in block.modules())
    return outermost


@contextmanager
def checkpoint_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint each layer while this context is active, so that a plan can predict such a step.

    The class of a layer is replaced by a subclass with another forward.
    """
    classes = [(layer, type(layer)) for layer in layers]
    wrapped = {cls: type(cls.__name__, (cls,), {"forward": _checkpointed_forward(cls)}) for _, cls in classes}
    try:
        for layer, cls in classes:
            layer.__class__ = wrapped[cls]
        yield
    finally:
        for layer, cls in classes:
            layer.__class__ = cls


def _checkpointed_forward(cls: type[nn.Module]) -> Any:
    """Return a method that runs the forward of the class under `torch.utils.checkpoint`."""
    original: Any = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward under a checkpoint."""
        return checkpoint(partial(original, self), *args, use_reentrant=False, **kwargs)

    return forward
