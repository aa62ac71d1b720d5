"""Reduce the work of Python's garbage collector while programs are traced and compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reduce_collections(threshold: int | None = None) -> Iterator[None]:
    """Exclude the objects that exist at the start of the block from garbage collections inside it.

    Tracing creates many objects, and so triggers many collections, each of which visits all objects of torch and of the
    model: up to a fifth of the time. Objects of the block itself are collected as usual. If the program has frozen
    objects itself, which must stay frozen, or in another such block, nothing is frozen.

    Args:
        threshold: Number of new objects at which the youngest generation is collected; None for that of the program.
    """
    thresholds, has_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not has_frozen:
        gc.freeze()
    if threshold is not None:
        gc.set_threshold(threshold, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not has_frozen:
            gc.unfreeze()
