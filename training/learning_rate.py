"""The learning rate as a function of the rows seen."""

from __future__ import annotations

import math
from collections.abc import Callable

WSD_DECAY_SHARE = 0.2  # of the whole run; Hägele et al. 2024 find 10-20 % enough


def cosine(progress: float) -> float:
    return 0.5 * (1 - math.cos(math.pi * progress))


def wsd(progress: float) -> float:
    """Warm-up, stable, decay: falls linearly over the last fifth of the run."""
    return max(0.0, (progress - (1 - WSD_DECAY_SHARE)) / WSD_DECAY_SHARE)


def linear(progress: float) -> float:
    return progress


def constant(progress: float) -> float:
    return 0.0


# What --lr_schedule chooses from. Each says how much of the way from the peak to the end the rate has fallen (0 to 1)
# when `progress` (0 to 1) of the run after the warm-up is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "wsd": wsd,
    "linear": linear,
    "constant": constant,
}


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

    Linear warm-up from lr/10 over the first `warmup`, then from lr to lr x min_lr_ratio over what is left, as the
    schedule falls. With the defaults the cosine is MiniMind's lr x (0.1 + 0.45 x (1 + cos(pi x progress))).
    """
    if warmup > 0 and current < warmup:
        return lr * (0.1 + 0.9 * current / warmup)
    progress = min(max((current - warmup) / max(total - warmup, 1e-12), 0.0), 1.0)
    return lr * (1 - (1 - min_lr_ratio) * SCHEDULES[schedule](progress))
