"""What a training loop stands on: ranks and devices, seeds, precision, optimizers, learning rate, time, memory."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataset.lm_dataset import Batch
from model.attention import segment_boundaries

# --- ranks and devices ---


def to_device(batch: Batch, device: torch.device, most_documents: int) -> Batch:
    """The batch where the model is. For CUDA its documents are counted before the copy: afterwards the host would have
    to wait."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        batch.boundaries = segment_boundaries(batch.segment_ids).pin_memory()
    return batch.to(device, non_blocking=on_cuda)


def losses_of(
    model: nn.Module, batch: Batch, target_count: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """The model's output on one micro-batch: loss, logits_loss and aux_loss, each a sum over its targets divided by
    `target_count`, the targets of the whole step."""
    return model(
        batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        boundaries=batch.boundaries,
        targets=batch.targets,
        target_count=target_count,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


# --- seeds ---


def setup_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device). Use the plain seed for weights, seed + rank for dropout."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# --- precision ---


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """The forward's precision; master weights stay float32."""
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


# --- optimizers ---


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
    parameters: list[nn.Parameter], optimizers: list[Optimizer], scaler: torch.amp.GradScaler, grad_clip: float
) -> tuple[Tensor, Tensor]:
    """Unscale, clip, step, update the scale, drop the gradients. Returns (gradient norm before clipping, finite), both
    0-dim on the device. The gradients are equal on all ranks, so all ranks skip a non-finite update alike."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, grad_clip if grad_clip > 0 else math.inf)
    finite = torch.isfinite(norm)
    step_if_finite(optimizers, finite)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm, finite


# --- learning rate ---


# --- time ---


class Throughput:
    """Tokens and steps a second of wall time since the last reading, pauses for evaluating and saving left out."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0
        self._paused = 0.0
        self._since = time.monotonic()

    def count(self, tokens: int) -> None:
        """One step of `tokens` valid targets is done."""
        self._tokens += tokens
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds per step) since the last reading; counting begins anew. Read it after a host
        sync: before one, a device may still be working on the steps counted."""
        seconds = max(time.monotonic() - self._since - self._paused, 1e-9)
        rates = self._tokens / seconds, seconds / max(1, self._steps)
        self._tokens = self._steps = 0
        self._paused, self._since = 0.0, time.monotonic()
        return rates
