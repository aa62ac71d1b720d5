"""What the guards of a program say of a length that is a symbol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sp_compile._compat import only_value, symbolic_mode


def halves(length: Any) -> None:
    """What a tree of every second row asks."""
    while length >= 2:
        if length % 2 == 0:
            pass
        length = length // 2


def doubles(length: Any) -> None:
    step = 1
    while step < length:
        step *= 2


def halves_to_one(length: Any) -> None:
    """Its guards give the length no bound that torch knows."""
    while length != 1:
        length = length // 2


def root(length: Any) -> None:
    """Asked by functions of torch."""
    assert length**0.5 < 4


def asked(hint: int, ask: Callable[[Any], Any]) -> Any:
    _, (length, _) = symbolic_mode(hint, 3)
    ask(length)
    return length


@pytest.mark.parametrize("length", [2, 3, 4, 7, 10, 33, 1000, 65535])
def test_a_tree_has_one_length(length: int) -> None:
    assert only_value(asked(length, halves)) == length


@pytest.mark.parametrize(
    ("length", "ask"),
    [
        (7, lambda length: None),
        (10, doubles),
        (10, halves_to_one),
        (10, root),
        (10, lambda length: length <= 11),
        (128, lambda length: length % 64 == 0 and length <= 1 << 20),
        (128, lambda length: length % 64 == 0 and length <= 1 << 60),
    ],
    ids=["nothing", "rounds", "rounds to one", "a root", "a bound", "multiples", "multiples in a wide range"],
)
def test_other_lengths_have_several(length: int, ask: Callable[[Any], Any]) -> None:
    symbol = asked(length, ask)
    assert only_value(symbol) is None
    assert symbol.node.expr.is_Symbol, "a guard was added"
