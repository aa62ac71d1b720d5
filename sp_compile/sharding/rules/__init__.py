"""The rules of every op family; importing this package registers them."""

from . import attention, exchanges, factories, indexing, matmul, movement, norms, pointwise, scans, sorted_rows, windows  # noqa: F401
