"""Exchanges between ranks, each with the right backward."""

from . import all_to_all, all_to_all_permute, collectives, grad_tokens, pack, reorder, scattered_linear  # noqa: F401  (registers the operators)
