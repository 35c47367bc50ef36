"""Pretrain a MiniMind language model from raw text.

    python train_pretrain.py --data_path my.jsonl            one process, best device there is
    torchrun --nproc_per_node 8 train_pretrain.py ...        many
    python train_pretrain.py --from_resume 1 ...             go on where the last save left off

The order of events: settings, data, what a save says, ranks, model, loop, finish. README.md has the whole story.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict

from config import ROOT, SAMPLE_FOLDER, Config, UserError, check_command_line, load_config, report

if __name__ == "__main__":
    check_command_line()  # answers --help and misspelt options before torch is imported, which takes seconds
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until StopSignal takes over there is nothing to say

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from compiling import uncompiled
from dataset.lm_dataset import Batch, SkipBatchSampler, collate
from dataset.packing import RowOrder
from dataset.text_reader import DataError
from evaluation import Evaluation, evaluate, floor_report
from files import CheckpointError, SaveFailed
from live_state import capture_rng, unwrap
from metrics import StepMetrics, format_log_line
from run import Run, begin_run, prepare, resume_command, shown
from saver import NonFinite
from stopping import StopRequested, StopSignal, ignore_stop_signals
from trainer_utils import (
    autocast,
    environment_rank,
    init_distributed_mode,
    is_echo,
    leave_group,
    losses_of,
    peak_memory_gib,
    set_learning_rate,
    to_device,
    update_parameters,
)

SKIPS_IN_A_ROW_LIMIT = 10


# --- the order of events ---


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` says (sys.argv when None). Returns the exit status: 0, 1 for a failure, 2 for a mistake of the
    user's, 128 + signal when stopped."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console without Chinese must not end a run by an exception
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        config = load_config(argv)
        with StopSignal() as stop:
            return run_config(config, stop)
    except (UserError, DataError, CheckpointError) as error:
        if environment_rank()[1] > 0:
            time.sleep(2)  # if the machine's first rank has the same problem, the launcher ends us before we repeat it
        return report(error)


def run_config(config: Config, stop: StopSignal) -> int:
    """One run from settings to exit status."""
    run: Run | None = None
    try:
        try:
            with stop.immediately():  # until the first new step is finished a stop loses nothing
                prepared = prepare(config)  # every mistake that can be found is found here, before ranks meet
                world = init_distributed_mode(config.device)
                stop.at_once = world.size == 1  # several ranks vote: one that just left would leave the others waiting
                run = begin_run(prepared, world, stop)
                if config.eval_only:
                    return report_evaluation(run)
                train(run)
        except StopRequested:
            return save_and_leave(run, stop)
        return finish(run)
    except (UserError, DataError, CheckpointError):
        raise
    except BaseException as error:
        return fail(run, stop, error)


# --- the loop ---


def train(run: Run) -> None:
    """Train from where the state stands to the last step, epoch by epoch."""
    run.model.train()
    progress = run.state.progress
    if progress.step > progress.evaluated_step and evaluation_is_due(run) and evaluate_and_log(run):
        run.saver.save(best=True)  # all ranks; a stop had come between this step and its evaluation
    if run.is_finished:
        run.console.print(f"Nothing left to do: the run is at its last step, {progress.step}.")
    while not run.is_finished:
        train_epoch(run, run.state.windows.epoch(progress.rows_seen))
    with run.stop.saving():
        run.saver.finish()  # all ranks


def train_epoch(run: Run, epoch: int) -> None:
    """Train what is left of one epoch, or less if the run ends before."""
    progress, windows = run.state.progress, run.state.windows
    start = progress.rows_seen - epoch * windows.rows
    order = RowOrder(windows.rows, run.config.seed, epoch, bool(run.config.shuffle))
    sampler = SkipBatchSampler(
        order, windows.global_batch_size, windows.batch_size, run.world.rank, run.world.size, start
    )
    batches = load_batches(run, sampler)
    epoch_end = (epoch + 1) * windows.rows
    run.console.start(
        windows.steps_per_epoch, windows.steps_per_epoch - windows.steps_left_in_epoch(progress.rows_seen)
    )
    while progress.rows_seen < epoch_end and not run.is_finished:
        rows = sampler.window(progress.rows_seen - epoch * windows.rows)  # this step's rows, over all ranks
        target_count = int(run.dataset.row_targets[rows].sum())  # known on every rank without a collective
        lr = run.state.schedule.lr(progress.rows_seen)
        set_learning_rate(run.state.optimizers, lr)

        losses = forward_backward(run, batches, sampler.micro_batches(len(rows)), target_count)
        norm, finite = update_parameters(
            list(run.model.parameters()), run.state.optimizers, run.state.scaler, run.config.grad_clip
        )

        run.stop.at_once, run.stop.has_news = False, True  # from here on a stop has a finished step to save
        progress.step += 1
        progress.rows_seen += len(rows)
        progress.tokens_seen += target_count
        progress.elapsed_seconds = run.clock.elapsed_seconds
        run.state.rng = capture_rng(run.world.device)  # what a save of this step holds, whatever happens next
        run.throughput.count(target_count)
        run.updates.append((progress.step, rows.tolist(), finite))

        ends_epoch = progress.rows_seen >= epoch_end
        first_of_epoch = progress.rows_seen - len(rows) <= epoch * windows.rows
        if first_of_epoch or ends_epoch or run.is_finished or progress.step % run.config.log_interval == 0:
            log_step(run, epoch, losses, lr, norm)
        elif run.world.device.type == "cpu":
            look_at_updates(run)  # costs nothing where there is no device to wait for
        with run.throughput.paused():
            best = evaluation_is_due(run) and evaluate_and_log(run)
            stop, clock_due = run.stop.agreed(run.world, run.saver.clock_is_due)  # all ranks
            if best or clock_due or ends_epoch or run.is_finished or run.saver.interval_is_due(progress.step):
                look_at_updates(run)
                with run.stop.saving():
                    run.saver.save(best)  # all ranks
            if stop and not run.is_finished:
                raise StopRequested(run.stop.received)
        run.console.advance()


def load_batches(run: Run, sampler: SkipBatchSampler) -> Iterator[Batch]:
    """This rank's micro-batches. The loader gets a generator of its own: it would draw from the one dropout uses."""
    loader: DataLoader = DataLoader(
        run.dataset,
        batch_sampler=sampler,
        collate_fn=collate,  # type: ignore[arg-type]  # the dataset assembles whole batches
        num_workers=run.config.num_workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=run.world.device.type == "cuda",
        generator=torch.Generator(),
    )
    most_documents = run.dataset.most_documents(run.state.windows.batch_size)
    for index, batch in enumerate(loader):
        if index == 0:
            batch.validate(run.tokenizer.vocab_size, run.config.max_seq_len)
        yield to_device(batch, run.world.device, most_documents)


def forward_backward(run: Run, batches: Iterator[Batch], micro_batches: int, target_count: int) -> Tensor:
    """Gradients of one step. Returns [loss, logits_loss, aux_loss] on the device: this rank's share of the step's
    means. Raises StopRequested between micro-batches once the ranks agree to stop; the window is then dropped."""
    world = run.world
    shares = torch.zeros(3, device=world.device, dtype=torch.get_default_dtype())
    divisor = torch.full((), float(target_count), device=world.device)  # filled there: a copy would be a host sync
    for index in range(micro_batches):
        batch = next(batches)
        is_last = index == micro_batches - 1
        # Gradients travel between ranks once a step, with the last micro-batch.
        waiting = run.model.no_sync() if world.size > 1 and not is_last else nullcontext()  # type: ignore[operator]
        with waiting:
            with autocast(world.device, run.dtype):
                out = losses_of(run.model, batch, divisor, run.config)
            # Losses are sums over the step's targets; DDP averages over ranks, which the factor undoes.
            run.state.scaler.scale(out.loss * world.size).backward()
        shares += torch.stack([out.loss, out.logits_loss, out.aux_loss]).detach()
        if not is_last and run.stop.agreed(world)[0]:  # all ranks; a finished window is not dropped
            raise StopRequested(run.stop.received)
    return shares


# --- looking at it ---


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


def log_step(run: Run, epoch: int, losses: Tensor, lr: float, norm: Tensor) -> None:
    """The log line, metrics.jsonl, tracker and progress bar of the step just finished. All ranks must call."""
    look_at_updates(run)
    progress, windows, schedule = run.state.progress, run.state.windows, run.state.schedule
    loss, logits_loss, aux_loss = run.world.sum(losses.tolist())  # all ranks
    steps_left = windows.steps_left_in_epoch(progress.rows_seen) if progress.rows_seen % windows.rows else 0
    tokens_per_second, seconds_per_step = run.throughput.read()
    entry = StepMetrics(
        step=progress.step,
        epoch=epoch + 1,
        loss=loss,
        logits_loss=logits_loss,
        aux_loss=aux_loss,
        lr=lr,
        grad_norm=norm.item(),
        rows_seen=progress.rows_seen,
        tokens_seen=progress.tokens_seen,
        tokens_per_second=tokens_per_second,
        elapsed_seconds=progress.elapsed_seconds,
        skipped_steps=progress.skipped_steps,
        epochs=-(-schedule.planned_rows // windows.rows),
        epoch_step=windows.steps_per_epoch - steps_left,
        epoch_steps=windows.steps_per_epoch,
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
    if run.validation is None:
        return False
    progress, interval = run.state.progress, run.config.eval_interval
    ends_epoch = progress.rows_seen % run.state.windows.rows == 0
    return run.is_finished or (progress.step % interval == 0 if interval else ends_epoch)


def evaluate_and_log(run: Run) -> bool:
    """Evaluate, log, and say whether this is the best so far. All ranks must call."""
    progress = run.state.progress
    result = evaluate_run(run)
    run.val_loss, progress.evaluated_step = result.val_loss, progress.step
    run.console.print(
        f"Step {progress.step}: val_loss: {result.val_loss:.4f}, val_ppl: {result.val_ppl:.2f}, "
        f"val_bits_per_byte: {result.val_bits_per_byte:.4f}"
    )
    if run.world.is_main:
        figures = asdict(result)
        run.saver.files.metrics.write({"step": progress.step, **figures})
        run.tracker.log(figures, progress.step)
    if not result.val_loss < (math.inf if progress.best_val_loss is None else progress.best_val_loss):  # NaN: no
        return False
    progress.best_val_loss, progress.best_step = result.val_loss, progress.step
    return True


def evaluate_run(run: Run) -> Evaluation:
    """The validation set's figures with the model as it is. All ranks must call."""
    precision = autocast(run.world.device, run.dtype)
    assert run.validation is not None, "evaluation was asked for without validation texts"
    return evaluate(unwrap(run.model), run.validation, run.state.windows.batch_size, run.world, precision, run.stop)


# --- the end ---


def fail(run: Run | None, stop: StopSignal, error: BaseException) -> int:
    """The end of a run that went wrong: its status, its cause in words or as a traceback, exit status 1."""
    rank, _, world_size = environment_rank()
    if run:
        set_status(run, "invalid" if isinstance(error, NonFinite) else "failed")
    patience = time.monotonic() + 5 * (world_size > 1 and is_echo(error))
    while not stop.received and time.monotonic() < patience:  # another rank ended first and says why; the launcher's
        time.sleep(0.05)  # signal that ends us is on its way
    if isinstance(error, (SaveFailed, NonFinite)):
        print(f"Error: {error}", file=sys.stderr, flush=True)
    elif world_size == 1:
        raise error
    elif not (stop.received and is_echo(error)):
        print(f"Rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
    if world_size > 1:
        os._exit(1)  # at once: the launcher ends the other ranks, which may wait for this one in a collective
    return 1


def save_and_leave(run: Run | None, stop: StopSignal) -> int:
    """Answer a stop signal: the last finished step is saved, the unfinished window is dropped. All ranks must call."""
    if run is None:
        stop.before_leaving()
        print("Stopped before the first new step; the last save, if any, is as it was.", flush=True)
        return stop.exit_code
    look_at_updates(run)
    with stop.saving():
        run.saver.finish()  # all ranks
    set_status(run, "stopped")
    run.console.close()
    run.console.print(f"Stopped at step {run.state.progress.step}. To go on: {resume_command(run.config)}")
    run.tracker.finish("aborted")
    code = stop.exit_code
    leave_group(run.world)
    return code


def finish(run: Run) -> int:
    """The end of a run, or of the part that --stop_after asked for: status, figures, samples, what to do next."""
    config, step = run.config, run.state.progress.step
    run.console.close()
    whole = step >= run.state.schedule.total_steps
    set_status(run, "finished" if whole else "stopped")
    if run.world.is_main and whole:
        report_on_sample(run)
        for number, text in enumerate(sample_texts(run), start=1):
            run.console.print(f"--- sample {number} ---\n{text}")
    weights = shown(config.run_folder / f"{config.run_name}.pth")
    run.console.print(f"{'Finished' if whole else 'Stopped'} at step {step}. Weights: {weights}")
    longer = f" --{'max_steps' if config.max_steps else 'epochs'} N" if whole and config.save_state else ""
    run.console.print(f"To go on:    {resume_command(config)}{longer}")
    generate = ["python", shown(ROOT / "scripts" / "generate.py"), "--load", shown(config.run_folder)]
    run.console.print(f"To generate: {shlex.join(generate)}")
    run.tracker.finish()
    leave_group(run.world)
    return 0


def report_on_sample(run: Run) -> None:
    """For the bundled sample, whose entropy is known: how near the model has come to the lowest possible loss."""
    is_whole_sample = run.config.uses_sample and not run.config.val_path and not run.config.eval_rows
    if is_whole_sample and run.validation and run.val_loss is not None:
        run.console.print(floor_report(SAMPLE_FOLDER, run.validation, run.val_loss))


def sample_texts(run: Run) -> list[str]:
    """A few texts by the model as it is now, drawn without touching the training's random numbers."""
    if not run.config.samples:
        return []
    from model.sampling import sample_text

    model, tokenizer, seed = unwrap(run.model), run.tokenizer, run.config.seed
    with uncompiled():  # every length of text would be compiled anew
        return [
            sample_text(model, tokenizer, "", max_new_tokens=120, temperature=0.8, top_p=0.9, seed=seed + index)
            for index in range(run.config.samples)
        ]


def report_evaluation(run: Run) -> int:
    """--eval_only: the validation figures of the weights as loaded; nothing is written."""
    result = evaluate_run(run)
    run.console.print(json.dumps(asdict(result)))
    leave_group(run.world)
    return 0


def set_status(run: Run, status: str) -> None:
    """Note in run.json how the run stands; a full disk must not hide the reason for which it ended."""
    if run.world.is_main and not run.config.eval_only:
        try:
            run.saver.files.record.update(status=status, progress=asdict(run.state.progress))
        except SaveFailed as error:
            print(f"Warning: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
