"""Scans on one device: the algorithm to read, and those that run. Every module here that is a way registers itself."""

import pkgutil
from importlib import import_module

for _found in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")
