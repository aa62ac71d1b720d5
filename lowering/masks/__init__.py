"""Describe masks without a tensor of queries x keys: predicates, spans, vector pieces and plans."""

from . import balance_rows, pieces  # noqa: F401  (registers the operators)
