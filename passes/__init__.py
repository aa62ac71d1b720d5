"""The passes. Each runs by hand on a graph, as `examples/` shows; `sp_compile.pipeline` runs them in order.

`sp_compile.passes.<Pass>` is every pass, whatever folder it lives in.
"""

from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

_FUNCTIONS = {"analyse": "job", "check_order": "base", "flat": "base", "register": "base", "settings": "job"}
_FUNCTIONS |= {"unregister": "base", "validate": "localize.prove"}
_MODULES = {
    "gather": "strategies.gather",
    "scan": "strategies.scan",
    "merge_reductions": "collectives.merge.merge",
    "permute_all_to_all": "collectives.permute.permute",
}


@cache
def _classes() -> dict[str, type]:
    """Every class of a pass, and what passes are made of, by name."""
    modules = [import_module(found.name) for found in walk_packages(__path__, f"{__name__}.")]
    base, parts = import_module(f"{__name__}.base"), import_module(f"{__name__}.job")
    own = [x for module in modules for x in vars(module).values() if isinstance(x, type)]
    return {x.__name__: x for x in own if issubclass(x, (base.Pass, parts.Settings, parts.Note, parts.Lap))}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name in _FUNCTIONS:
        return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    if name[:1].isupper() and name in _classes():
        return _classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_classes(), *_FUNCTIONS, *_MODULES])
