"""Tables of ways to do one thing. A way registers itself; the first that fits is taken, and tests can force one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from .errors import SpError

TableRow = TypeVar("TableRow")
T = TypeVar("T")


class Override(Generic[T]):
    """What everything inside `with forced.to(value)` takes, on any thread: for tests and measurements."""

    def __init__(self) -> None:
        self._values: list[T] = []

    @property
    def value(self) -> T | None:
        """Of the innermost block; None outside."""
        return self._values[-1] if self._values else None

    @contextmanager
    def force(self, value: T) -> Iterator[None]:
        """Force it inside."""
        self._values.append(value)
        try:
            yield
        finally:
            self._values.remove(value)


class Table(dict[Any, TableRow]):
    """Rows by name, in the order in which they were registered: the one way in which anything makes itself known.

    title: what errors call it. again: a name may be registered anew, and the last row counts, as where a user runs a
    cell of a notebook twice.
    """

    def __init__(self, title: str, again: bool = False) -> None:
        super().__init__()
        self.title, self.again = title, again
        self._ranks: dict[Any, Callable[[Any], int]] = {}
        self._forced: Override[str] = Override()

    def register(self, name: Any, row: TableRow, rank: Callable[[Any], int] = lambda problem: 0) -> ExitStack:
        """Add a row: for good, or `with table.register(...):` for a block. Raises SpError: the name is taken.

        rank: of rows with `fits(problem)`, those of low rank are tried first, and equal ones in the table's order.
        """
        if name in self and not self.again:
            raise SpError("SP901", f"{self.title}: {name!r} is registered already.")
        added = ExitStack()
        added.callback(*((self.update, {name: self[name]}) if name in self else (self.pop, name)))
        self[name], self._ranks[name] = row, rank
        return added

    def of(self, *names: Any) -> Callable[[T], T]:
        """Decorator: what it stands on is the row of these names, and keeps its own type."""

        def register(row: Any) -> Any:
            for name in names:
                self.register(name, row)
            return row

        return register

    def use_row(self, name: str) -> AbstractContextManager[None]:
        """A block in which `choose` takes the named row: for tests and measurements. Raises SpError: there is none."""
        if name not in self:
            raise SpError("SP902", f"{self.title}: expected one of {', '.join(self)}, got {name!r}.")
        return self._forced.force(name)

    def choose(self, problem: Any) -> str:
        """The name of the first row that fits. Raises SpError if the one that `using` names does not fit."""
        rows: Mapping[str, Any] = self
        name = self._forced.value
        if name is None:
            return next(n for n in sorted(rows, key=lambda n: self._ranks[n](problem)) if rows[n].fits(problem))
        if not rows[name].fits(problem):
            raise SpError("SP903", f"{self.title}: {name!r} does not support {problem}.")
        return name
