"""What a step of training is made of, beside the model: seeds, precision, learning rate, update, pace."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def setup_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device). Use the plain seed for weights, seed + rank for dropout."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """The forward's precision; master weights stay float32."""
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


def set_learning_rate(optimizers: list[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def step_if_finite(optimizers: list[Optimizer], finite: Tensor) -> None:
    """Update the parameters unless `finite` (0-dim bool on the device) is false. Fused optimizers decide on the device;
    the others cost one host sync."""
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


def update_parameters(
    model: nn.Module, optimizers: list[Optimizer], scaler: torch.amp.GradScaler, grad_clip: float
) -> tuple[Tensor, Tensor]:
    """Unscale, clip, step, update the scale, drop the gradients. Returns (gradient norm before clipping, finite), both
    0-dim on the device. The gradients are equal on all ranks, so all ranks skip a non-finite update alike."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip if grad_clip > 0 else math.inf)
    finite = torch.isfinite(norm)
    step_if_finite(optimizers, finite)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm, finite


class Throughput:
    """Tokens and steps a second of wall time since the last reading, pauses for evaluating and saving left out.

    The first step is not counted: it compiles, warms caches up and allocates.
    """

    def __init__(self) -> None:
        self.first_step_seconds: float | None = None
        self._tokens = self._steps = 0
        self._paused = 0.0
        self._since = time.monotonic()

    def count(self, tokens: int) -> None:
        """One step of `tokens` valid targets is done."""
        if self.first_step_seconds is None:
            self.first_step_seconds = self._seconds()
            self._begin_anew()
            return
        self._tokens += tokens
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds per step) since the last reading, NaN if there was no step to count; counting
        begins anew. Read it after a host sync: before one, a device may still be working on the steps counted."""
        seconds = self._seconds()
        rates = (self._tokens / seconds, seconds / self._steps) if self._steps else (math.nan, math.nan)
        self._begin_anew()
        return rates

    def _seconds(self) -> float:
        return max(time.monotonic() - self._since - self._paused, 1e-9)

    def _begin_anew(self) -> None:
        self._tokens = self._steps = 0
        self._paused, self._since = 0.0, time.monotonic()
