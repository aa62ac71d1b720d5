"""Keep Python's garbage collector from visiting the objects of a program again and again during a compilation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_old_objects() -> Iterator[None]:
    """Exclude the objects that exist at the start of the block from garbage collections inside it.

    A compilation creates many objects, and so triggers many collections, each of which visits all objects of torch and
    of the model. Objects of the block itself are collected as usual. The block does nothing if the program has frozen
    objects itself, which must stay frozen, or if it is inside another such block.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
