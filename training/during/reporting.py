"""What a run reports as it goes: skipped updates, the figures of a step, validation, and what the model writes."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor

from errors import NonFinite
from model.sampling import sample_text
from trainer_utils import autocast
from training.before.begin import Run
from training.before.compiling import uncompiled
from training.config import SAMPLE_FOLDER
from training.device import peak_memory_gib
from training.during.evaluation import Evaluation, evaluate, floor_report
from training.during.metrics import StepMetrics, format_log_line
from training.saving.live_state import unwrap

SKIPS_IN_A_ROW_LIMIT = 10


def look_at_updates(run: Run) -> None:
    """Count the updates that were skipped since the last look (one host sync). Raises NonFinite after ten in a row."""
    progress, scaler = run.state.progress, run.state.scaler
    flags = torch.stack([finite for *_, finite in run.updates]).tolist() if run.updates else []
    for (step, rows, _), finite in zip(run.updates, flags, strict=True):
        progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
        if finite:
            continue
        progress.skipped_steps += 1
        if run.world.is_main:
            run.saver.files.metrics.write({"step": step, "skipped_rows": rows})
        run.console.print(f"Step {step}: gradient is not finite; update skipped")
        # float16 overflows on purpose while its scale settles; at scale 1 there is nothing left to give.
        scale_is_spent = not scaler.is_enabled() or scaler.get_scale() <= 1
        if progress.skipped_in_a_row >= SKIPS_IN_A_ROW_LIMIT and scale_is_spent:
            raise NonFinite(
                f"step {step}: the gradient was not finite {progress.skipped_in_a_row} steps in a row; "
                f"lower --learning_rate or look at rows {rows[:8]}"
            )
    run.updates.clear()


def log_is_due(run: Run) -> bool:
    """Every --log_interval steps, at each epoch's end and after the last step."""
    return run.ends_epoch or run.is_finished or run.state.progress.step % run.config.log_interval == 0


def log_step(run: Run, epoch: int, losses: Tensor, lr: float, grad_norm: Tensor) -> None:
    """The log line, metrics.jsonl, tracker and progress bar of the step just finished. All ranks must call."""
    look_at_updates(run)
    progress, layout, schedule = run.state.progress, run.state.layout, run.state.schedule
    loss, logits_loss, aux_loss = run.world.sum(losses.tolist())  # all ranks
    steps_left = layout.steps_left_in_epoch(progress.rows_seen) if progress.rows_seen % layout.rows else 0
    tokens_per_second, seconds_per_step = run.throughput.read()
    entry = StepMetrics(
        step=progress.step,
        epoch=epoch + 1,
        loss=loss,
        logits_loss=logits_loss,
        aux_loss=aux_loss,
        lr=lr,
        grad_norm=grad_norm.item(),
        rows_seen=progress.rows_seen,
        tokens_seen=progress.tokens_seen,
        tokens_per_second=tokens_per_second,
        elapsed_seconds=progress.elapsed_seconds,
        skipped_steps=progress.skipped_steps,
        epochs=-(-schedule.planned_rows // layout.rows),
        epoch_step=layout.steps_per_epoch - steps_left,
        epoch_steps=layout.steps_per_epoch,
        epoch_minutes_left=steps_left * seconds_per_step / 60,
        peak_memory_gib=peak_memory_gib(run.world.device),
    )
    run.console.print(format_log_line(entry))
    if run.world.is_main:
        run.saver.files.metrics.write(entry.record())
        run.tracker.log(entry.record(), progress.step)
    warning = run.state.watch.update(progress.step, loss, lr, entry.grad_norm, run.saver.last_good_step or None)
    if warning:
        run.console.print(warning)


def evaluation_is_due(run: Run) -> bool:
    """After the last step, and every --eval_interval steps or at each epoch's end."""
    if run.validation is None:
        return False
    interval = run.config.eval_interval
    return run.is_finished or (run.state.progress.step % interval == 0 if interval else run.ends_epoch)


def evaluate_and_log(run: Run) -> bool:
    """Evaluate, log, and say whether this is the best so far. All ranks must call."""
    progress = run.state.progress
    result = evaluate_run(run)  # all ranks
    run.val_loss, progress.evaluated_step = result.val_loss, progress.step
    run.console.print(
        f"Step {progress.step}: val_loss: {result.val_loss:.4f}, val_ppl: {result.val_ppl:.2f}, "
        f"val_bits_per_byte: {result.val_bits_per_byte:.4f}"
    )
    if run.world.is_main:
        figures = asdict(result)
        run.saver.files.metrics.write({"step": progress.step, **figures})
        run.tracker.log(figures, progress.step)
    with run.stop.saving():
        run.saver.settle()  # all ranks: the best score to beat is one that was saved
    if not result.val_loss < (math.inf if progress.best_val_loss is None else progress.best_val_loss):  # NaN: no
        return False
    progress.best_val_loss, progress.best_step = result.val_loss, progress.step
    return True


def evaluate_run(run: Run) -> Evaluation:
    """The validation set's figures with the model as it is. All ranks must call."""
    precision = autocast(run.world.device, run.dtype)
    assert run.validation is not None, "evaluation was asked for without validation texts"
    return evaluate(unwrap(run.model), run.validation, run.state.layout.batch_size, run.world, precision, run.stop)


def report_on_sample(run: Run) -> None:
    """For the bundled sample, whose entropy is known: how near the model has come to the lowest possible loss."""
    is_whole_sample = run.config.uses_sample and not run.config.val_path and not run.config.eval_rows
    if is_whole_sample and run.validation and run.val_loss is not None:
        run.console.print(floor_report(SAMPLE_FOLDER, run.validation, run.val_loss))


def sample_texts(run: Run) -> list[str]:
    """A few texts by the model as it is now, drawn without touching the training's random numbers."""
    if not run.config.samples:
        return []
    model, tokenizer, seed = unwrap(run.model), run.tokenizer, run.config.seed
    with uncompiled():  # every length of text would be compiled anew
        return [
            sample_text(model, tokenizer, "", max_new_tokens=120, temperature=0.8, top_p=0.9, seed=seed + index)
            for index in range(run.config.samples)
        ]
