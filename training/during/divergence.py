"""A loss that rises for long is worth a word."""

from __future__ import annotations

import math
from collections import deque


class DivergenceWatch:
    """Warns once when the mean logged loss of the last `window` steps exceeds that of the `window` before by > 5 %."""

    RISE = 1.05

    def __init__(self, window: int = 200):
        self.window = window
        self.first_step: int | None = None
        self.points: deque[tuple[int, float]] = deque()  # (step, loss) of the last two windows, finite ones only
        self.warned = False

    def update(
        self, step: int, loss: float, lr: float, grad_norm: float, last_good_step: int | None = None
    ) -> str | None:
        """Take a logged step; returns the warning the first time the rule is met."""
        self.first_step = step if self.first_step is None else self.first_step
        if math.isfinite(loss):
            self.points.append((step, loss))
        while self.points and self.points[0][0] <= step - 2 * self.window:
            self.points.popleft()
        recent = [value for at, value in self.points if at > step - self.window]
        before = [value for at, value in self.points if at <= step - self.window]
        if self.warned or not recent or not before or step - self.first_step < 2 * self.window - 1:
            return None
        mean, mean_before = sum(recent) / len(recent), sum(before) / len(before)
        if mean <= self.RISE * mean_before:
            return None
        self.warned = True
        checkpoint = "no checkpoint yet" if last_good_step is None else f"last good checkpoint: step {last_good_step}"
        return (
            f"Warning: the loss is rising: mean {mean:.4f} over the last {self.window} steps, {mean_before:.4f} over "
            f"the {self.window} before (step {step}, lr {lr:.8f}, grad_norm {grad_norm:.4f}; {checkpoint}). "
            "A lower --learning_rate or --grad_clip may help."
        )
