"""A rehearsal before the first step: does a full-size step fit in memory, and how long will one take?

Nothing may come of it: parameters, gradients, optimizer and random generators are afterwards as if it had not run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dataset.lm_dataset import PretrainDataset
from errors import UserError
from trainer_utils import autocast, update_parameters
from training.before.cost import Measured
from training.choices import Choices
from training.config import Config
from training.distributed import World
from training.optimizers import build_optimizers
from training.saving.live_state import capture_rng, restore_rng

CPU_POSITIONS = 1024  # a micro-batch of this many is enough to judge a processor's speed
SAMPLES, SAMPLING_SECONDS = 5, 2.0  # of what is timed
NCCL_BYTES = 2**30  # of each GPU where several ranks train: they come with the first step


def fitting_batch_size(
    model: nn.Module, dataset: PretrainDataset, choices: Choices, config: Config, world: World
) -> tuple[int, Measured]:
    """The micro-batch that fits, at most `choices.batch_size` rows, and what one costs. All ranks must call, with the
    bare model: neither wrapped nor compiled, its saved state not loaded yet.

    On CUDA a full-size step is tried: forward, backward, update, and again with gradients and optimizer state in
    place. Elsewhere a small micro-batch is timed. Raises UserError when not even one row fits.
    """

    def attempt(batch_size: int) -> Measured:
        return try_step(model, dataset, batch_size, config, world.device, choices.torch_dtype)

    if world.device.type == "cuda":
        reserve = reserved_bytes(model, world.size)
        with memory_errors("the model beside the buffers of several ranks"), kept_free(reserve, world.device):
            return halve_until_it_fits(choices.batch_size, attempt, world, may_halve=bool(config.auto_batch))
    rows = min(choices.batch_size, max(1, CPU_POSITIONS // config.max_seq_len))
    with memory_errors(f"--max_seq_len {config.max_seq_len}: a micro-batch of {rows}"):
        return choices.batch_size, attempt(rows)


def reserved_bytes(model: nn.Module, ranks: int) -> int:
    """Bytes of each GPU that several ranks need beside the model, none for one: NCCL's buffers, and the buckets in
    which DDP exchanges gradients; they exist from its construction on, and the first step allocates both."""
    if ranks == 1:
        return 0
    return NCCL_BYTES + sum(p.numel() * p.element_size() for p in model.parameters())


def halve_until_it_fits(
    batch_size: int, attempt: Callable[[int], Measured], world: World, may_halve: bool
) -> tuple[int, Measured]:
    """Halve batch_size until `attempt(batch_size)` no longer raises torch.OutOfMemoryError on any rank; the rows of a
    step stay the same, so accumulation grows. All ranks must call. Raises UserError when that does not help."""
    while True:
        measured, failure = None, ""
        try:
            measured = attempt(batch_size)
        except torch.OutOfMemoryError as error:
            failure = str(error).split("\n")[0].split(". ")[0]
        if not world.max([bool(failure)])[0]:  # all ranks
            assert measured is not None
            return batch_size, measured
        if world.device.type == "cuda":
            gc.collect()  # the failed attempt's tensors have gone with its traceback
            torch.cuda.empty_cache()
        reason = f"--batch_size {batch_size}: a step does not fit in memory ({failure or 'on another rank'})"
        if not may_halve:
            raise UserError(f"{reason}; give a smaller one, or let --auto_batch 1 find it")
        if batch_size == 1:
            raise UserError(f"{reason}; try --activation_checkpointing 1, a shorter --max_seq_len or a smaller model")
        batch_size //= 2


def try_step(
    model: nn.Module,
    dataset: PretrainDataset,
    batch_size: int,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
) -> Measured:
    """One micro-batch, forward and backward, then an optimizer step, then the same again, measured.
    The fullest rows are taken: the most a step can need."""
    rows = np.argpartition(dataset.row_targets, -batch_size)[-batch_size:].tolist()
    kept = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    rng = capture_rng(device)
    forget_peak(device)
    try:
        batch = dataset.batch(rows).to(device)
        divisor = (batch.targets >= 0).sum().float()
        scaler = torch.amp.GradScaler(device.type, init_scale=1.0, enabled=dtype == torch.float16)  # no update skipped
        optimizers = build_optimizers(model, config, device)  # dropped afterwards, with its state

        def forward_backward() -> None:
            with autocast(device, dtype):
                out = model(
                    **batch.inputs(),
                    target_count=divisor,
                    label_smoothing=config.label_smoothing,
                    z_loss=config.z_loss,
                )
            scaler.scale(out.loss).backward()

        def update() -> None:
            update_parameters(model, optimizers, scaler, config.grad_clip)

        forward_backward()
        update()
        forward_backward()
        seconds, update_seconds = median_seconds([forward_backward, update], device)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Measured(seconds / batch_size, update_seconds, peak)
    finally:
        forget_peak(device)
        model.zero_grad(set_to_none=True)
        put_back(model, kept)
        restore_rng(rng, device)


@contextmanager
def kept_free(count: int, device: torch.device) -> Iterator[None]:
    """Inside this block so many bytes of the device are taken."""
    held = torch.empty(count, dtype=torch.uint8, device=device)
    yield
    del held
    if device.type == "cuda":
        torch.cuda.empty_cache()


def median_seconds(calls: list[Callable[[], None]], device: torch.device) -> list[float]:
    """Of each of these calls, made in turn as often as fits in some seconds: one sample alone may meet a moment in
    which the machine is busy."""
    samples: list[list[float]] = []
    while len(samples) < SAMPLES and sum(map(sum, samples)) < SAMPLING_SECONDS:
        samples.append([seconds_of(call, device) for call in calls])
    return [statistics.median(each) for each in zip(*samples, strict=True)]


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def put_back(model: nn.Module, kept: list[Tensor]) -> None:
    for parameter, before in zip(model.parameters(), kept, strict=True):
        parameter.copy_(before)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn the many ways of saying that memory is full into a UserError about `what`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        told = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in text
        if not told and "allocate memory" not in text:
            raise
        reason = text.split("\n")[0][:150]
        raise UserError(f"{what} does not fit in memory ({reason}); choose a smaller one or a smaller model") from None
