"""Exchanges between ranks, each with the right backward."""

from . import all_to_all, all_to_all_permute, collectives, pack, reorder, tensor_parallel, tickets  # noqa: F401  (registers the operators)
