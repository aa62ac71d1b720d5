"""Define a decoder language model in single-device code."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a label that the loss skips


def rope(x: Tensor, base: float = 10000.0) -> Tensor:
    """Apply rotary position embedding to x (batch, heads, seq, head_dim), in the same shape."""
    seq, half = x.shape[-2], x.shape[-1] // 2
    freqs = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(seq, device=x.device, dtype=torch.float32)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention; with kv_heads < heads, groups of query heads share a key/value head."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.grouped = kv_heads != heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention (batch, seq, dim) of x (batch, seq, dim)."""
        q, k, v = (self._split(proj(x)) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP (batch, seq, dim) of x (batch, seq, dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.norm2 = nn.RMSNorm(dim)
        self.mlp = SwiGLU(dim, hidden=dim * 8 // 3 // 8 * 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (batch, seq, dim) for x (batch, seq, dim)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DecoderLM(nn.Module):
    """A decoder that returns the mean next-token cross entropy of tokens and labels. It shifts the labels."""

    def __init__(
        self,
        *,
        vocab: int = 256,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        tie: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads or heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the 0-d loss over the positions whose label is not IGNORE; both (batch, seq) int64."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
