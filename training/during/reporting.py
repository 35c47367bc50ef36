"""What a run reports as it goes: the figures of a step, and updates that were skipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dataset.loader import StepRows
from errors import NonFinite
from training.device import peak_memory_gib
from training.during.metrics import StepMetrics, format_log_line
from training.during.run import Run
from training.words import duration

SKIPS_IN_A_ROW_LIMIT = 10
SLOW_FIRST_STEP_SECONDS = 5.0  # worth a word: compiling, or a machine that is slow for this model


def log_is_due(run: Run, step: StepRows) -> bool:
    """At the first step of an epoch, every --log_interval steps, at each epoch's end and after the last step."""
    is_first = step.position % run.clock.rows == 0
    every = run.state.progress.step % run.config.log_interval == 0
    return is_first or every or step.ends_epoch or run.is_finished


def log_step(run: Run, step: StepRows, losses: Tensor, lr: float, grad_norm: Tensor) -> None:
    """The log line, metrics.jsonl and tracker of the step just finished. All ranks must call."""
    count_skipped_updates(run)
    calls = 1 + step.micro_batch_count(run.choices.batch_size, run.world.size)
    wanted = run.stop.wanted_pace(run.pace / calls) if run.world.is_main else 0
    loss, logits_loss, aux_loss, vote_every = run.world.sum([*losses.tolist(), wanted])  # all ranks
    run.stop.vote_every = int(vote_every)
    say_first_step(run)
    entry = metrics_of(run, step, (loss, logits_loss, aux_loss), lr, grad_norm.item())
    run.console.print(format_log_line(entry))
    run.folder.log(entry.record())
    run.tracker.log(entry.record(), entry.step)
    warning = run.divergence.update(entry.step, loss, lr, entry.grad_norm, run.saver.last_good_step or None)
    if warning:
        run.console.print(warning)


def metrics_of(
    run: Run, step: StepRows, losses: tuple[float, float, float], lr: float, grad_norm: float
) -> StepMetrics:
    """The figures of the step just finished; throughput is counted anew from here."""
    progress, clock = run.state.progress, run.clock
    tokens_per_second, seconds_per_step = run.throughput.read()
    if not math.isnan(seconds_per_step):
        run.pace = seconds_per_step if math.isnan(run.pace) else run.pace + 0.3 * (seconds_per_step - run.pace)
    steps_left = run.last_step - progress.step
    left_in_epoch = 0 if step.ends_epoch else min(steps_left, clock.steps_left_in_epoch(progress.rows_seen))
    done_in_epoch = clock.steps_per_epoch - (0 if step.ends_epoch else clock.steps_left_in_epoch(progress.rows_seen))
    return StepMetrics(
        step=progress.step,
        epoch=step.epoch + 1,
        loss=losses[0],
        logits_loss=losses[1],
        aux_loss=losses[2],
        lr=lr,
        grad_norm=grad_norm,
        rows_seen=progress.rows_seen,
        tokens_seen=progress.tokens_seen,
        tokens_per_second=tokens_per_second,
        elapsed_seconds=progress.elapsed_seconds,
        skipped_steps=progress.skipped_steps,
        epochs=-(-clock.planned_rows // clock.rows),
        epoch_step=done_in_epoch,
        epoch_steps=done_in_epoch + left_in_epoch,
        epoch_seconds_left=left_in_epoch * run.pace,
        last_step=run.last_step,
        run_seconds_left=steps_left * run.pace,
        peak_memory_gib=peak_memory_gib(run.world.device),
    )


def say_first_step(run: Run) -> None:
    """How long the first step took, once and where that was long: it is not part of any tokens/s."""
    seconds, run.throughput.first_step_seconds = run.throughput.first_step_seconds, 0.0
    if seconds and seconds >= SLOW_FIRST_STEP_SECONDS:
        why = ", compiling included" if run.choices.compile else ""
        run.console.print(f"First step: {duration(seconds)}{why}")


def count_skipped_updates(run: Run) -> None:
    """Count the updates that were skipped since the last look (one host sync). Raises NonFinite after ten in a row."""
    progress, scaler = run.state.progress, run.state.scaler
    flags = torch.stack([finite for *_, finite in run.updates]).tolist() if run.updates else []
    for (rows, step, _), finite in zip(run.updates, flags, strict=True):
        progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
        if finite:
            continue
        progress.skipped_steps += 1
        run.folder.log({"step": step, "skipped_rows": rows.ids.tolist()})
        run.console.print(f"Step {step}: gradient is not finite; update skipped")
        # float16 overflows on purpose while its scale settles; at scale 1 there is nothing left to give.
        scale_is_spent = not scaler.is_enabled() or scaler.get_scale() <= 1
        if progress.skipped_in_a_row >= SKIPS_IN_A_ROW_LIMIT and scale_is_spent:
            good = run.saver.last_good_step
            raise NonFinite(
                f"step {step}: the gradient was not finite {progress.skipped_in_a_row} steps in a row; "
                f"lower --learning_rate or look at rows {rows.ids[:8].tolist()}; "
                + (f"the last good checkpoint is of step {good}" if good else "nothing was saved yet")
            )
    run.updates.clear()
