"""Sharding rules of all op families; importing this package registers them.

Families by file:

    attention_rules      fused attention            movement         views, cat, slice, flip, pad, roll
    convolution_rules    convolutions, pooling      norms            normalizations, softmax, losses
    exchange_rules       sp:: exchanges             pointwise        elementwise ops without torch's tag
    expert_rules         rows sorted by expert      reductions       sum, max, var, .., sort, topk, diff
    factories            zeros, full, random        scan_rules       cumulative ops, recurrences
    indexing_rules       gather, index, scatter     linalg           solve, inverse, factorizations
    matmul               products, linear, einsum
"""

from . import (  # noqa: F401
    attention_rules,
    convolution_rules,
    exchange_rules,
    expert_rules,
    factories,
    indexing_rules,
    linalg,
    matmul,
    movement,
    norms,
    pointwise,
    reductions,
    scan_rules,
)
