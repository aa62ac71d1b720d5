"""Sharding rules of all op families; importing this package registers them.

Families by file:

    attention_rules      fused attention            movement         views, cat, slice, flip, pad, roll
    convolution_rules    convolutions, pooling      norms            normalizations, softmax, losses, distances
    exchange_rules       sp:: exchanges             pointwise        elementwise ops without torch's tag
    expert_rules         rows sorted by expert      reductions       sum, max, var, .., sort, topk, diff
    factories            zeros, full, random        scan_rules       cumulative ops, recurrences
    indexing_rules       gather, index, scatter     linalg           solve, inverse, factorizations
    matmul               products, linear, einsum
"""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
