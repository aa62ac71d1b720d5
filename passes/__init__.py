"""Export the passes.

`examples/` runs passes directly on graphs; `sp_compile.pipeline` runs them in order.

`sp_compile.passes.<Pass>` is every pass, in any subpackage.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any

# functions and modules that are exported by name
_PASS_MODULES = {
    **{name: f"base:{name}" for name in ("PASSES", "check_pass_order", "iterate_passes", "register_pass")},
    "validate": "localize.validate_shapes:validate",
}


@cache
def _pass_classes() -> dict[str, type]:
    """Return the classes of passes, notes, runs and contexts in all submodules, by name."""
    from . import base

    exported = (base.Pass, base.PassContext, base.Note, base.NoteKind, base.PassRun)
    members = [x for module in base.import_submodules(__name__, __path__) for x in vars(module).values()]
    return {x.__name__: x for x in members if isinstance(x, type) and issubclass(x, exported)}


def __getattr__(name: str) -> Any:
    """Import an exported function, or a class of any submodule, when it is first read."""
    if name in _PASS_MODULES:
        return resolve_name(f"{__name__}.{_PASS_MODULES[name]}")
    # `_pass_classes` imports all submodules, so call it only for a name that may be a class.
    if name[:1].isupper() and name in _pass_classes():
        return _pass_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_pass_classes(), *_PASS_MODULES])
