"""Compute recurrences of matrices on a GPU, by one launch for any number of rows.

A program has one sequence of matrices and a block of the state's columns, and walks over the rows. The result of a row
is a product with the result of the row before it, which the program reads back from memory:

    inclusive    h_i = m_i @ h_(i-1) + b_i              h_0 = m_0 @ initial + b_0
    exclusive    h_i = m_(i-1) @ h_(i-1) + b_(i-1)      h_0 = initial
    lagged       h_i = m_(i-1) @ h_(i-1) + b_i          h_0 = initial + b_0

so that no product is too large for the registers of a program. States are float32, and products are not rounded to
shorter floats. Importing this module needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import use_device

# Rows, columns and summands of a product that a program computes at once, and its number of warps.
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_SUM, PRODUCT_WARPS = 64, 32, 16, 4


@triton.jit
def _step_affine(  # type: ignore[no-untyped-def]
    factor, before, summand, out, column, size, width, terms, skipped,
    MULTIPLY: tl.constexpr, READ: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write out = factor @ before + summand for the columns of a program.

    before and out are (size, width). summand, (size, terms), is added to the columns from `skipped` on. Without
    MULTIPLY, there is no factor; without READ, `before` is zero; without ADD, there is no summand.
    """
    in_width = column < width
    term = column - skipped
    for start in range(0, size, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < size)[:, None] & in_width[None, :]
        result = tl.zeros((ROWS, COLUMNS), tl.float32)
        if READ:
            if MULTIPLY:
                for first in range(0, size, SUM):
                    k = first + tl.arange(0, SUM)
                    matrix = (row < size)[:, None] & (k < size)[None, :]
                    left = tl.load(factor + row[:, None] * size + k[None, :], mask=matrix, other=0.0)
                    state = (k < size)[:, None] & in_width[None, :]
                    right = tl.load(before + k[:, None] * width + column[None, :], mask=state, other=0.0)
                    result = tl.dot(left, right, result, input_precision="ieee")
            else:
                result = tl.load(before + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        if ADD:
            is_term = (term >= 0) & (term < terms)
            added = (row < size)[:, None] & is_term[None, :]
            result += tl.load(summand + row[:, None] * terms + term[None, :], mask=added, other=0.0)
        tl.store(out + row[:, None] * width + column[None, :], result, mask=inside)
    tl.debug_barrier()  # the next step reads what all threads of the program have written


@triton.jit
def _walk_affine_rows(  # type: ignore[no-untyped-def]
    m, b, initial, out, rows, size, width, terms,
    GIVEN: tl.constexpr, REVERSE: tl.constexpr, FACTOR_LAG: tl.constexpr, TERM_LAG: tl.constexpr, TOTAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute the results of all rows for one sequence of matrices and one block of columns.

    m (N, rows, size, size), b (N, rows, size, terms), initial (N, size, width), read with GIVEN. FACTOR_LAG and
    TERM_LAG are 1 if the factor, or the summand, of a result is that of the row before. out is (N, rows, size, width).
    With TOTAL it is (N, 2, size, width), where the results of rows alternate.
    """
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    skipped = width - terms
    # Numbers of elements of a row, int64, since a sequence may have more than 2^31 elements.
    m_row, b_row, out_row = (
        tl.cast(size * size, tl.int64),
        tl.cast(size * terms, tl.int64),
        tl.cast(size * width, tl.int64),
    )
    m += n * rows * m_row
    b += n * rows * b_row
    initial += n * out_row
    out += n * (2 if TOTAL else rows) * out_row
    before = initial
    for i in range(0, rows):
        place = rows - 1 - i if REVERSE else i
        earlier = place + 1 if REVERSE else place - 1
        target = out + (i % 2 if TOTAL else place) * out_row
        factor = m + (earlier if FACTOR_LAG else place) * m_row
        summand = b + (earlier if TERM_LAG else place) * b_row
        if i == 0:
            _step_affine(
                factor, initial, summand, target, column, size, width, terms, skipped,
                FACTOR_LAG == 0, GIVEN, TERM_LAG == 0, ROWS, COLUMNS, SUM,
            )  # fmt: skip
        else:
            _step_affine(
                factor, before, summand, target, column, size, width, terms, skipped,
                True, True, True, ROWS, COLUMNS, SUM,
            )  # fmt: skip
        before = target


def scan_affine_rows(
    m: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, factor_lag: int, term_lag: int
) -> Tensor:
    """Return the states of all rows.

    Shapes: m (N, S, K, K), b (N, S, K, V), initial (N, K, V), all float32 and contiguous -> like b.

    Args:
        m: The factors.
        b: The summands.
        initial: The state before the first row; zeros if None.
        reverse: True to begin at the last row.
        factor_lag: The number of rows, 0 or 1, by which the factor of a result precedes it.
        term_lag: The same for its summand.
    """
    out = torch.empty_like(b)
    _launch(m, b, initial, out, reverse, factor_lag, term_lag)
    return out


def total_affine_rows(m: Tensor, b: Tensor, first: Tensor, reverse: bool, is_lagged: bool) -> Tensor:
    """Return the state after all rows, (N, K, W), from the state `first` before them.

    The summands are added to the last V of its W columns. If lagged, a row adds its summand before it multiplies.

    Args:
        m: (N, S, K, K), the factors of at least one row.
        b: (N, S, K, V), the summands.
        first: (N, K, W), contiguous.
        reverse: True to begin at the last row.
        is_lagged: See above.
    """
    rows = b.shape[1]
    out = b.new_empty(b.shape[0], 2, *first.shape[1:])  # the results of rows alternate between two places
    _launch(m, b, first, out, reverse, factor_lag=int(is_lagged), term_lag=0, total=True)
    last = out[:, (rows - 1) % 2]
    return torch.bmm(m[:, 0 if reverse else -1], last) if is_lagged else last


def _launch(
    m: Tensor, b: Tensor, initial: Tensor | None, out: Tensor, reverse: bool, factor_lag: int, term_lag: int,
    total: bool = False,
) -> None:  # fmt: skip
    """Write the results of all rows to out; with `total`, only the last two remain."""
    n, rows, size, terms = b.shape
    width = out.shape[-1]
    with use_device(b):
        _walk_affine_rows[(n, triton.cdiv(width, PRODUCT_COLUMNS))](
            m, b, b if initial is None else initial, out, rows, size, width, terms,
            GIVEN=initial is not None, REVERSE=reverse, FACTOR_LAG=factor_lag, TERM_LAG=term_lag, TOTAL=total,
            ROWS=PRODUCT_ROWS, COLUMNS=PRODUCT_COLUMNS, SUM=PRODUCT_SUM, num_warps=PRODUCT_WARPS,
        )  # fmt: skip
