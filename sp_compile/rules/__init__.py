"""The rules of every op family; importing this package registers them."""

from . import (
    attention,
    conv,
    embedding,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    random,
    redistribute,
    reductions,
    sharded_attention,
    softmax,
    views,
    windows,
)

__all__ = [
    "attention",
    "conv",
    "embedding",
    "factories",
    "indexing",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "random",
    "redistribute",
    "reductions",
    "sharded_attention",
    "softmax",
    "views",
    "windows",
]
