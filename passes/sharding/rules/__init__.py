"""Sharding rules of all op families; importing this package registers them.

Families by file:

    attention_rules      fused attention            movement         views, cat, slice, flip, pad, roll
    convolution_rules    convolutions, pooling      norms            normalizations, softmax, losses
    exchange_rules       sp:: exchanges             pointwise        elementwise ops without torch's tag
    expert_rules         rows sorted by expert      scan_rules       cumulative ops, recurrences
    factories            zeros, arange, random      matmul           products, reductions, sort, topk
    indexing_rules       gather, index, scatter
"""

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
