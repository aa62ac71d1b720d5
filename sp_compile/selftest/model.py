"""The model of the self-test: a decoder with one recurrent layer and attention layers, in single-device code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.functional.scan_functions import linear_scan

VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model and of its batch of one sequence."""

    width: int  # of a token's features
    heads: int  # of attention; the ranks divide them, or Ulysses pads
    layers: int  # attention layers
    tokens: int  # of the sequence


class RecurrentLayer(nn.Module):
    """A gated linear recurrence over the tokens, h_t = a_t h_(t-1) + (1 - a_t) v_t."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.project = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (batch, tokens, width) for x of the same shape."""
        decay, value = self.project(self.norm(x)).chunk(2, -1)
        decay = decay.sigmoid()
        return x + linear_scan(decay, (1 - decay) * value, dim=1)


class AttentionLayer(nn.Module):
    """Causal self-attention and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (batch, tokens, width) for x of the same shape."""
        heads = self.project(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # each (batch, heads, tokens, head dim)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class SelfTestModel(nn.Module):
    """A language model that returns the mean cross entropy of the next tokens."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.Sequential(
            RecurrentLayer(size.width), *(AttentionLayer(size.width, size.heads) for _ in range(size.layers))
        )
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss, a scalar in float32 or wider, of ids (batch, tokens), int64."""
        logits = self.head(self.layers(self.embedding(ids)))[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), ids[:, 1:].flatten()
        )


def make_model(size: ModelSize, dtype: torch.dtype, device: torch.device) -> tuple[SelfTestModel, Tensor]:
    """Return a model and its input ids (1, tokens), with equal values in every process and for every dtype.

    Args:
        size: Sizes of the model and the sequence.
        dtype: Dtype of the weights.
        device: Device of the weights and the ids.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SelfTestModel(size)
        ids = torch.randint(VOCABULARY, (1, size.tokens))
    return model.to(device, dtype), ids.to(device)
