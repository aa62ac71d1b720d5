"""Find whether a function is a package's own, or one by which a user has replaced it."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

SHARED_PACKAGES = ("torch", "triton")  # packages whose decorators do not change what a function computes


def has_code_of(function: Any, packages: Collection[str]) -> bool:
    """Return True if a function, with all functions that it wraps, is code of some packages.

    The names that `functools.wraps` copies are those of the wrapped function, so that they do not show the wrapper.

    Args:
        function: The function, or another object that is called.
        packages: Names of packages. Decorators of torch, Triton and Python itself are accepted, too.

    Returns:
        False if a part of the code is in another package, as that of a user.
    """
    while function is not None:
        names = getattr(function, "__globals__", None) or {"__name__": type(function).__module__}
        package = str(names.get("__name__")).partition(".")[0]
        function = getattr(function, "__wrapped__", None)
        is_decorator = function is not None and (package in SHARED_PACKAGES or package in sys.stdlib_module_names)
        if package not in packages and not is_decorator:
            return False
    return True
