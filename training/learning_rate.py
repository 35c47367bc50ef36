"""The learning rate as a function of the rows seen."""

from __future__ import annotations

import math

WSD_DECAY_SHARE = 0.2  # of the whole run; Hägele et al. 2024 find 10-20 % enough


def get_lr(
    current: float,
    total: float,
    lr: float,
    *,
    warmup: float = 0.0,
    min_lr_ratio: float = 0.1,
    schedule: str = "cosine",
) -> float:
    """Learning rate at `current` of `total` (any one unit: the trainer counts rows).

    Linear warm-up from lr/10 over the first `warmup`, then from lr to lr x min_lr_ratio over what is left. With the
    defaults the cosine is MiniMind's lr x (0.1 + 0.45 x (1 + cos(pi x progress))). `wsd` stays at lr and falls linearly
    over the last fifth of the run.
    """
    if warmup > 0 and current < warmup:
        return lr * (0.1 + 0.9 * current / warmup)
    progress = min(max((current - warmup) / max(total - warmup, 1e-12), 0.0), 1.0)
    if schedule == "cosine":
        fall = 0.5 * (1 - math.cos(math.pi * progress))
    elif schedule == "linear":
        fall = progress
    elif schedule == "wsd":
        fall = max(0.0, (progress - (1 - WSD_DECAY_SHARE)) / WSD_DECAY_SHARE)
    elif schedule == "constant":
        fall = 0.0
    else:
        raise ValueError(f"lr_schedule {schedule!r}: choose cosine, wsd, linear or constant")
    return lr * (1 - (1 - min_lr_ratio) * fall)
