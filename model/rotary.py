"""Rotary positions, with YaRN for contexts longer than trained on."""

import math
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(
    head_dim: int, theta: float, scaling: dict[str, Any] | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2] (RoFormer, arXiv:2104.09864, section 3.2.2).

    With `scaling` the slow pairs are stretched by `factor` (YaRN, arXiv:2309.00071, section 3.2): those that turn less
    than beta_slow times within the original context entirely, those above beta_fast not at all, a ramp between.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    original = scaling["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(scaling["beta_slow"])), head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=device, dtype=dtype)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)


def rotary_table(position_ids: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each [batch, seq, 1, head_dim / 2], in the dtype of `frequencies`."""
    angles = position_ids[:, :, None, None].to(frequencies.dtype) * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) of x [batch, seq, heads, head_dim] by their angles."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
