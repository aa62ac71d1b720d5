"""Implement exchanges between ranks, each with its exact backward."""

from . import all_to_all, all_to_all_permute, collectives, grad_tokens, pack, reorder, scattered_linear  # noqa: F401  (registers the operators)
