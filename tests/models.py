"""Small models that several test files share, and the one comparison that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sp_compile
from sp_compile.explain import Report

TOLERANCE = 1e-9


def check(model: Callable[..., Any], *args: Any, sp: int, **config: Any) -> Report:
    """`verify` on simulated ranks; every result and every gradient within TOLERANCE of one device."""
    report = sp_compile.verify(model, *args, sp=sp, **config)
    assert report.errors, "nothing was compared"
    wrong = [(name, error) for name, error in report.errors if not error <= TOLERANCE]
    assert not wrong, f"{wrong}\n{report}"
    return report
