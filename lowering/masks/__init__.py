"""Who attends to whom, without a tensor of queries x keys: predicates, spans of rows, pieces of vectors, plans."""

from . import balance_rows, pieces  # noqa: F401  (registers the operators)
