"""Find whether a function is a package's own, or one by which a user has replaced it.

`functools.wraps` copies the name and the module of a wrapped function: they do not show a wrapper of a user. The code
of the wrapper does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

DECORATORS = ("torch", "triton", "typing_extensions")  # packages whose decorators do not change the values


def has_code_of(function: Any, is_in_package: Callable[[str], bool]) -> bool:
    """Return True if a function, with all functions that wrap it, is a package's own code.

    Args:
        function: The function, or another object that is called.
        is_in_package: Returns True for the name of a module of the package.

    Returns:
        False if a part of the code is in another package. Decorators of torch, Triton and Python itself are accepted.
    """
    _, has_own_wrappers = _unwrap(function, is_in_package)
    return has_own_wrappers and is_in_package(str(getattr(function, "__module__", type(function).__module__)))


def has_own_method(cls: type, name: str, is_in_package: Callable[[str], bool]) -> bool:
    """Return True if a method was not replaced after its class, or a base of it, was created.

    Args:
        cls: The class.
        name: The name of the method.
        is_in_package: Returns True for the name of a module of the package.

    Returns:
        True if the code of the method is in the body of a class, or in another place of the package.
    """
    innermost, has_own_wrappers = _unwrap(getattr(cls, name), is_in_package)
    is_in_class = getattr(innermost, "__qualname__", "") in {f"{base.__qualname__}.{name}" for base in cls.__mro__}
    return has_own_wrappers and (is_in_class or is_in_package(str(getattr(innermost, "__module__", ""))))


def _unwrap(function: Any, is_in_package: Callable[[str], bool]) -> tuple[Any, bool]:
    """Return the innermost function, and True if all code around it is that of a package or of decorators."""
    has_own_wrappers = True
    while hasattr(function, "__wrapped__"):
        module = str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))
        package = module.partition(".")[0]
        is_decorator = package in DECORATORS or package in sys.stdlib_module_names
        has_own_wrappers = has_own_wrappers and (is_decorator or is_in_package(module))
        function = function.__wrapped__
    return function, has_own_wrappers
