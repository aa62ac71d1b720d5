"""Sharding rules of all op families; importing this package registers them."""

from . import (  # noqa: F401
    attention_rules,
    convolution_rules,
    exchange_rules,
    expert_rules,
    factories,
    indexing_rules,
    matmul,
    movement,
    norms,
    pointwise,
    scan_rules,
)
