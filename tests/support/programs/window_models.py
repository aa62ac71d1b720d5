"""Small models with attention in windows of an image: windows, shifted and padded ones, and merges of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 2


def partition(x: Tensor, window: int) -> Tensor:
    """(B, H, W, C) -> (B * H / window * W / window, window * window, C)."""
    batch, rows, columns, width = x.shape
    x = x.view(batch, rows // window, window, columns // window, window, width)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, width)


def join_windows(x: Tensor, window: int, rows: int, columns: int) -> Tensor:
    """Undo `partition`."""
    x = x.view(-1, rows // window, columns // window, window, window, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, rows, columns, x.shape[-1])


class Attention(nn.Module):
    """Attention over the second dim, written out, with a mask for each window of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(batch // windows, windows, HEADS, tokens, tokens) + mask[None, :, None]
            scores = scores.view(batch, HEADS, tokens, tokens)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention in windows and an MLP on an image (B, H, W, C), which is padded to windows and may be shifted."""

    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.before, self.after, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def mask(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return -100 for pairs of pixels that are neighbors only because of the shift."""
        image, count = like.new_zeros(1, rows, columns, 1), 0
        bounds = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for i in bounds:
            for j in bounds:
                image[:, i, j] = count
                count += 1
        regions = partition(image, self.window)[..., 0]
        difference = regions[:, None] - regions[:, :, None]
        return difference.masked_fill(difference != 0, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        _, rows, columns, _ = x.shape
        y = F.pad(self.before(x), (0, 0, 0, -columns % self.window, 0, -rows % self.window))
        padded = y.shape[1:3]
        mask = None
        if self.shift:
            y, mask = torch.roll(y, (-self.shift, -self.shift), (1, 2)), self.mask(*padded, y)
        y = join_windows(self.attention(partition(y, self.window), mask), self.window, *padded)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y[:, :rows, :columns]
        return x + self.mlp(self.after(x))


class Merge(nn.Module):
    """Merge squares of 2 * 2 pixels of an image (B, H, W, C), padded to complete ones, to one pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class Pyramid(nn.Module):
    """Stages of blocks with plain and shifted windows, and merges between them.

    tokens: True for values (B, H * W, C) between the blocks.
    """

    def __init__(
        self, stages: int = 2, width: int = 8, window: int = 4, shift: int = 2, merge: bool = True, tokens: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.patches, layers = tokens, nn.Conv2d(3, width, 2, 2), []
        for stage in range(stages):
            if merge and stage:
                layers += [Merge(width)]
                width *= 2
            layers += [Block(width, window, 0), Block(width, window, shift)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2).unflatten(1, size) if self.tokens else x.permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
            if self.tokens:
                x = x.flatten(1, 2).unflatten(1, x.shape[1:3])
        return self.norm(x)


class Backbone(nn.Module):
    """Blocks on images (B, H, W, C): attention in padded windows, and over all pixels in the last block."""

    def __init__(self, blocks: int = 2, width: int = 8, window: int = 3, ends_with_all: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.blocks = nn.ModuleList(Block(width, window, 0) for _ in range(blocks))
        self.last = self.blocks[-1] if ends_with_all else None

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).permute(0, 2, 3, 1)
        for block in self.blocks:
            if block is self.last:
                x = x + block.attention(block.before(x).flatten(1, 2)).unflatten(1, x.shape[1:3])
                x = x + block.mlp(block.after(x))
            else:
                x = block(x)
        return x
