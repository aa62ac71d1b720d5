"""The sizes of one attention: what its cost depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention of the global program: q (batch, heads, q_len, head_dim), v (batch, kv_heads, kv_len, v_head_dim).

    n: ranks. causal: query i attends to keys 0..i. window: and, of these, to the last `window` only (without causal:
    to the keys less than `window` away). mask: there is a mask that only data describes. zigzag: the whole program may
    keep the sequence in zigzag order, so that a balanced causal attention costs no exchange. training: gradients flow.
    """

    n: int
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    element_size: int
    causal: bool = False
    window: int | None = None
    mask: bool = False
    zigzag: bool = False
    training: bool = True

    @property
    def q_rows(self) -> int:
        """Queries of one rank."""
        return -(-self.q_len // self.n)

    @property
    def kv_rows(self) -> int:
        """Keys of one rank."""
        return -(-self.kv_len // self.n)

    @property
    def q_bytes(self) -> int:
        """One query head on one rank."""
        return self.batch * self.q_rows * self.head_dim * self.element_size

    @property
    def out_bytes(self) -> int:
        """One head of the result on one rank."""
        return self.batch * self.q_rows * self.v_head_dim * self.element_size

    @property
    def kv_bytes(self) -> int:
        """One key head and one value head on one rank."""
        return self.batch * self.kv_rows * (self.head_dim + self.v_head_dim) * self.element_size

    @property
    def widening(self) -> float:
        """Bytes of an element of what is summed over blocks or ranks (float32, float64 for float64), over its own."""
        return max(4, self.element_size) / self.element_size

    @property
    def flops(self) -> float:
        """Forward FLOPs of one rank if all ranks do the same."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * self.heads * dims * self.pairs(0, self.q_len) / self.n

    def pairs(self, start: float, stop: float) -> float:
        """How many (query, key) pairs the queries [start, stop) attend to, in the limit of long sequences."""

        def distant(by: float) -> float:  # pairs whose key lies at least `by` before the query
            return _below(stop - by, self.kv_len) - _below(start - by, self.kv_len)

        later = (stop - start) * self.kv_len - distant(0)
        attended = (stop - start) * self.kv_len - (later if self.causal else 0)
        if self.window is None:
            return attended
        ahead = 0.0 if self.causal else (stop - start) * self.kv_len - distant(-self.window)
        return attended - distant(self.window) - ahead

    def imbalance(self, parts: int) -> float:
        """The work of the busiest of so many contiguous parts of the queries, over the mean."""
        if not self.q_len * self.kv_len:
            return 1.0
        rows = self.q_len / parts
        return (
            max(self.pairs(r * rows, (r + 1) * rows) for r in range(parts))
            * parts
            / self.pairs(0, self.q_len)
        )


def _below(x: float, keys: int) -> float:
    """The integral of clamp(t, 0, keys) for t up to x."""
    if x <= 0:
        return 0.0
    return x * x / 2 if x <= keys else keys * keys / 2 + (x - keys) * keys
