"""Provide registries of rows by name.

`Table` is for implementations: `table[table.choose(problem)]` is the first that fits a problem, and tests can
force one. A problem describes one call (its shapes, dtypes and device); a row fits it if
`row.can_run(problem)` is True.
`ProgramTable` is for generated programs that a graph calls by name.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from torch.fx import GraphModule

from .errors import SpError

TableRow = TypeVar("TableRow")
T = TypeVar("T")  # a forced value, a program, or the function or class that a decorator registers


class Override(Generic[T]):
    """Value that tests and benchmarks force on all threads inside `with override.force(value)`."""

    def __init__(self) -> None:
        # Values by block, the innermost last. A dict, since the blocks of several threads may end in any order.
        self._values: dict[object, T] = {}

    @property
    def value(self) -> T | None:
        """Return the value of the innermost block, or None outside."""
        values = [*self._values.values()]  # a copy, since other threads may enter or leave blocks
        return values[-1] if values else None

    @contextmanager
    def force(self, value: T) -> Iterator[None]:
        """Force the value inside the block; of nested blocks, the innermost counts."""
        block = object()  # unique key of this block
        self._values[block] = value
        try:
            yield
        finally:
            del self._values[block]


class Table(dict[Any, TableRow]):
    """Registry of rows by name, in the order of registration.

    Args:
        title: Name of the registry in error messages.
        replace: True if a name may be registered again, as by a notebook cell that runs twice; the last row counts.
    """

    def __init__(self, title: str, replace: bool = False) -> None:
        super().__init__()
        self.title, self.replace = title, replace
        self._priorities: dict[Any, Callable[[Any], int]] = {}  # name -> priority for a problem, the lowest is first
        self._forced: Override[str] = Override()  # name of the row that tests and benchmarks force

    def register(self, name: Any, row: TableRow, priority: Callable[[Any], int] = lambda problem: 0) -> ExitStack:
        """Add a row, permanently or, with `with table.register(...):`, for a block.

        Args:
            name: Key of the row.
            row: The row.
            priority: Function of the problem, for rows with `can_run(problem)`: `choose` tries rows with low numbers
                first, and equal ones in the order of registration.

        Returns:
            A context manager that removes the row at its exit, and restores a replaced row.

        Raises:
            SpError: The name is registered already, and the table does not replace rows.
        """
        if name in self and not self.replace:
            raise SpError("SP901", f"{self.title}: {name!r} is registered already.")
        undo = ExitStack()  # runs its callback at the end of a `with` block; without a block, never
        if name in self:
            undo.callback(self._set_row, name, self[name], self._priorities[name])
        else:
            undo.callback(self.pop, name)
        self._set_row(name, row, priority)
        return undo

    def _set_row(self, name: Any, row: TableRow, priority: Callable[[Any], int]) -> None:
        """Add or replace a row with its priority."""
        self[name], self._priorities[name] = row, priority

    def of(self, *names: Any) -> Callable[[T], T]:
        """Return a decorator that registers a function or class under these names."""

        def register(row: Any) -> Any:
            """Register the row under each name, and return it unchanged."""
            for name in names:
                self.register(name, row)
            return row

        return register

    def use_row(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which `choose` selects the named row, for tests and benchmarks.

        Raises:
            SpError: The registry has no such row.
        """
        if name not in self:
            raise SpError("SP902", f"{self.title}: expected one of {', '.join(self)}, got {name!r}.")
        return self._forced.force(name)

    def choose(self, problem: Any) -> str:
        """Return the name of the first row that fits the problem, or of the row that `use_row` forces.

        Every table of implementations has a row that fits all problems.

        Raises:
            SpError: The row that `use_row` forces does not fit.
        """
        rows: Mapping[str, Any] = self
        forced = self._forced.value
        if forced is None:
            ordered = sorted(rows, key=lambda name: self._priorities[name](problem))  # stable: then by registration
            return next(name for name in ordered if rows[name].can_run(problem))
        if not rows[forced].can_run(problem):
            fitting = [name for name in rows if rows[name].can_run(problem)]
            raise SpError("SP903", f"{self.title}: expected one of {fitting}, got {forced!r} for {problem}.")
        return forced


class ProgramTable(dict[str, T]):
    """Registry of programs by name, a digest of their code.

    A program is a function that is generated while a model is compiled, such as the score function of an attention. The
    graph calls an operator with the program's name. Each process registers the program before it runs the graph, so
    that code from a compiler's cache finds the same program.

    Args:
        title: Name of the registry in error messages.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def __getitem__(self, name: str) -> T:
        """Return the program. Raises SpError if this process has not registered it."""
        if name not in self:
            raise SpError("SP908", f"{self.title}: no program {name!r} is registered in this process.")
        return super().__getitem__(name)

    def register(self, code: Any, make: Callable[[str], T]) -> str:
        """Register a program, unless one with the same code is registered, and return its name.

        Args:
            code: Everything that determines the program's results; its `repr` is the same in every process.
            make: Function of the name that creates the program.
        """
        name = hashlib.sha256(repr(code).encode()).hexdigest()[:16]
        if name not in self:
            self[name] = make(name)
        return name


def graph_code(gm: GraphModule) -> tuple[Any, ...]:
    """Return the code of a graph and its buffers' values, as the `code` argument of `ProgramTable.register`."""
    return gm.code, *((name, x.dtype, x.tolist()) for name, x in sorted(gm.named_buffers()))
