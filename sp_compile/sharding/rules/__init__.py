"""The rules of every op family; importing this package registers them."""

from . import attention, exchanges, factories, indexing, matmul, movement, norms, pointwise, scans, windows  # noqa: F401
