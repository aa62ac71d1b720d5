"""Log warnings on rank 0, each of them once."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from .ranks import process_rank

_warned: set[tuple[str, Hashable]] = set()  # texts and keys of earlier warnings


def warn_once(log: logging.Logger, text: str, *args: Any, key: Hashable = None) -> None:
    """Log a warning on rank 0, unless one with this text and key was logged before.

    Args:
        log: The logger of the module that warns.
        text: The warning, with a place such as %s for each of `args`.
        *args: The arguments of the text.
        key: What the warning is about; by default `args`.
    """
    reason = text, args if key is None else key
    if process_rank() == 0 and reason not in _warned:
        _warned.add(reason)
        log.warning(text, *args)
