"""Combine functions of the scan kernels, in Triton, and their variants for segments.

A state is one tensor p, or two, (p, q): (maximum, sum of exponentials relative to it), (h, factor) or (value, index).
The left operand, with the suffix _a, is the earlier state. A segmented state begins with a flag: nothing is carried
into a state that contains the start of a segment. OP is a key of LEAF_KINDS, or "sum", "prod", "max" or "min".
Extremes select NaN (b != b) before all numbers, and the later one of equal values. Importing this module needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def _sum(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def _prod(a, b):  # type: ignore[no-untyped-def]
    return a * b


@triton.jit
def _max(a, b):  # type: ignore[no-untyped-def]
    return tl.where((b >= a) | (b != b), b, a)


@triton.jit
def _min(a, b):  # type: ignore[no-untyped-def]
    return tl.where((b <= a) | (b != b), b, a)


@triton.jit
def _logsumexp(top_a, a, top_b, b):  # type: ignore[no-untyped-def]
    """Combine two states (maximum, sum of exponentials relative to it)."""
    top = tl.where(top_b >= top_a, top_b, top_a)
    # The weight of the larger is set to 1: the difference of two infinities is NaN.
    a = a * tl.where(top_a == top, 1.0, tl.exp(top_a - top))
    b = b * tl.where(top_b == top, 1.0, tl.exp(top_b - top))
    return top, a + b


@triton.jit
def _linear(h_a, factor_a, h_b, factor_b):  # type: ignore[no-untyped-def]
    return factor_b * h_a + h_b, factor_a * factor_b


@triton.jit
def _argmax(a, index_a, b, index_b):  # type: ignore[no-untyped-def]
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, index_b, index_a)


@triton.jit
def _argmin(a, index_a, b, index_b):  # type: ignore[no-untyped-def]
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, index_b, index_a)


@triton.jit
def _segmented_sum(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, a + b)


@triton.jit
def _segmented_prod(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, a * b)


@triton.jit
def _segmented_max(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, _max(a, b))


@triton.jit
def _segmented_min(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, _min(a, b))


@triton.jit
def _segmented_logsumexp(start_a, top_a, a, start_b, top_b, b):  # type: ignore[no-untyped-def]
    top, total = _logsumexp(top_a, a, top_b, b)
    return start_a | start_b, tl.where(start_b != 0, top_b, top), tl.where(start_b != 0, b, total)


@triton.jit
def _segmented_argmax(start_a, a, index_a, start_b, b, index_b):  # type: ignore[no-untyped-def]
    later = (start_b != 0) | (b >= a) | (b != b)
    return start_a | start_b, tl.where(later, b, a), tl.where(later, index_b, index_a)


@triton.jit
def _segmented_argmin(start_a, a, index_a, start_b, b, index_b):  # type: ignore[no-untyped-def]
    later = (start_b != 0) | (b <= a) | (b != b)
    return start_a | start_b, tl.where(later, b, a), tl.where(later, index_b, index_a)


@triton.jit
def combine(p_a, q_a, p_b, q_b, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine two states (p, q) without flags; a is the earlier. For operations of one tensor, q is p."""
    if OP == "linear":
        p, q = _linear(p_a, q_a, p_b, q_b)
    elif OP == "logsumexp":
        p, q = _logsumexp(p_a, q_a, p_b, q_b)
    elif OP == "argmax":
        p, q = _argmax(p_a, q_a, p_b, q_b)
    elif OP == "argmin":
        p, q = _argmin(p_a, q_a, p_b, q_b)
    else:
        if OP == "sum":
            p = _sum(p_a, p_b)
        elif OP == "prod":
            p = _prod(p_a, p_b)
        elif OP == "max":
            p = _max(p_a, p_b)
        else:
            p = _min(p_a, p_b)
        q = p
    return p, q


@triton.jit
def combine_where(mask, p_a, q_a, p_b, q_b, OP: tl.constexpr, PAIR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the states b, combined with the earlier states a where ``mask`` is True.

    PAIR: the operation has states of two tensors, (p, q); otherwise q is p.
    """
    combined_p, combined_q = combine(p_a, q_a, p_b, q_b, OP)
    p = tl.where(mask, combined_p, p_b)
    q = p
    if PAIR:
        q = tl.where(mask, combined_q, q_b)
    return p, q


@triton.jit
def scan_states(p, q, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inclusive scan of states (p, q) along dim 0. For operations of one tensor, q is p."""
    if OP == "linear":
        p, q = tl.associative_scan((p, q), 0, _linear)
    elif OP == "logsumexp":
        p, q = tl.associative_scan((p, q), 0, _logsumexp)
    elif OP == "argmax":
        p, q = tl.associative_scan((p, q), 0, _argmax)
    elif OP == "argmin":
        p, q = tl.associative_scan((p, q), 0, _argmin)
    else:
        if OP == "sum":
            p = tl.associative_scan(p, 0, _sum)
        elif OP == "prod":
            p = tl.associative_scan(p, 0, _prod)
        elif OP == "max":
            p = tl.associative_scan(p, 0, _max)
        else:
            p = tl.associative_scan(p, 0, _min)
        q = p
    return p, q


@triton.jit
def scan_segments(flag, p, q, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inclusive scan of states (p, q) with flags along dim 0; a flag is 1 where a segment begins.

    The flag of a result is 1 if a segment has begun up to its place. For operations of one tensor, q is p.
    """
    if OP == "logsumexp":
        flag, p, q = tl.associative_scan((flag, p, q), 0, _segmented_logsumexp)
    elif OP == "argmax":
        flag, p, q = tl.associative_scan((flag, p, q), 0, _segmented_argmax)
    elif OP == "argmin":
        flag, p, q = tl.associative_scan((flag, p, q), 0, _segmented_argmin)
    else:
        if OP == "sum":
            flag, p = tl.associative_scan((flag, p), 0, _segmented_sum)
        elif OP == "prod":
            flag, p = tl.associative_scan((flag, p), 0, _segmented_prod)
        elif OP == "max":
            flag, p = tl.associative_scan((flag, p), 0, _segmented_max)
        else:
            flag, p = tl.associative_scan((flag, p), 0, _segmented_min)
        q = p
    return flag, p, q


# Kinds of the state of one element, see `triton_tiles._leaf_states`; "value" for other operations.
LEAF_KINDS = {"logsumexp": "exponentials", "linear": "linear", "argmax": "indexed", "argmin": "indexed"}
