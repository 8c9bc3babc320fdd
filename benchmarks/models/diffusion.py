"""The attention blocks of Stable Diffusion 1.5's U-Net on its way down, in torch alone.

At each level: a 1 × 1 projection in, blocks of self-attention over the pixels, cross-attention over the text
and a gated MLP, each behind a LayerNorm and with a residual, and a projection out; then a convolution that
halves the sides. The convolutions of the U-Net's residual blocks are left out, so attention has a larger
share of the time here than in the whole U-Net. Shapes: 8 heads of channels / 8, text [B, 77, 768].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """channels: of each level, the sides of which halve from `side` on."""

    channels: tuple[int, ...]
    side: int
    blocks: int
    configuration: str
    heads: int = 8
    text_tokens: int = 77
    text_width: int = 768


LARGE = Shape(
    channels=(320, 640, 1280, 1280),
    side=64,
    blocks=2,
    configuration="stable-diffusion-v1-5: attention blocks down to the middle, no residual blocks",
)
SMALL = Shape(
    channels=(160, 320),
    side=16,
    blocks=1,
    heads=4,
    text_width=96,
    configuration="4 heads of 40 and 80 at 256 and 64 pixels",
)


class Sample(NamedTuple):
    """What a model of diffusers returns."""

    sample: torch.Tensor


class Attention(nn.Module):
    """Heads of `width` / `heads`; the keys come from the rows themselves or from `text`."""

    def __init__(self, width: int, heads: int, key_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(key_width, width, bias=False)
        self.value = nn.Linear(key_width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor, text: torch.Tensor | None = None) -> torch.Tensor:
        """rows [B, S, C], text [B, 77, W] → [B, S, C]."""
        seen = rows if text is None else text
        q, k, v = (
            layer(tensor).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, D]
            for layer, tensor in ((self.query, rows), (self.key, seen), (self.value, seen))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, cross-attention, gated MLP."""

    def __init__(self, width: int, heads: int, text_width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = Attention(width, heads, width)
        self.cross = Attention(width, heads, text_width)
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """rows [B, S, C] → the same shape."""
        rows = rows + self.own(self.norms[0](rows))
        rows = rows + self.cross(self.norms[1](rows), text)
        value, gate = self.up(self.norms[2](rows)).chunk(2, dim=-1)
        return rows + self.down(value * F.gelu(gate))


class Level(nn.Module):
    """The blocks of one resolution."""

    def __init__(self, width: int, shape: Shape, blocks: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter = nn.Conv2d(width, width, 1)
        self.blocks = nn.ModuleList(Block(width, shape.heads, shape.text_width) for _ in range(blocks))
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, pixels: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """pixels [B, C, side, side] → the same shape."""
        rows = self.enter(self.norm(pixels))
        sides = rows.shape[2:]
        rows = rows.flatten(2).transpose(1, 2)  # [B, S, C]
        for block in self.blocks:
            rows = block(rows, text)
        return pixels + self.leave(rows.transpose(1, 2).unflatten(2, sides))


class Blocks(nn.Module):
    """All levels; the last has one block, as the middle of the U-Net."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        last = len(shape.channels) - 1
        self.levels = nn.ModuleList(
            Level(width, shape, 1 if index == last else shape.blocks)
            for index, width in enumerate(shape.channels)
        )
        self.halve = nn.ModuleList(
            nn.Conv2d(width, after, 3, stride=2, padding=1)
            for width, after in zip(shape.channels, shape.channels[1:], strict=False)
        )
        for module in self.modules():
            if isinstance(module, Attention):  # scores of standard deviation 1.7, as in the other models
                for layer in (module.query, module.key):
                    nn.init.normal_(layer.weight, std=(1.7 / layer.in_features) ** 0.5)

    def forward(self, latents: torch.Tensor, text: torch.Tensor) -> Sample:
        """latents [B, C, side, side], text [B, 77, W] → sample [B, C', side', side']."""
        pixels = latents
        for index, level in enumerate(self.levels):
            pixels = level(pixels, text)
            if index < len(self.halve):
                pixels = self.halve[index](pixels)
        return Sample(pixels)
