"""Pretrain a MiniMind language model from raw text.

    python train_pretrain.py --data_path my.jsonl            one process, best device there is
    torchrun --nproc_per_node 8 train_pretrain.py ...        many
    python train_pretrain.py --from_resume 1 ...             go on where the last save left off

The order of events: settings, the save to go on from, model, data, ranks, dry step, loop, finish. README.md has the
whole story.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict

from errors import UserError
from training.command_line import load_config, load_config_or_exit, report
from training.config import ROOT, Config

if __name__ == "__main__":
    CONFIG = load_config_or_exit()  # answers --help and misspelt options before torch is imported, which takes seconds
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until StopSignal takes over there is nothing to say

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dataset.lm_dataset import Batch, SkipBatchSampler, collate
from dataset.packing import RowOrder
from errors import NonFinite, SaveFailed, StopRequested
from trainer_utils import autocast, losses_of, set_learning_rate, to_device, update_parameters
from training.before.begin import Run, begin_run
from training.before.prepare import prepare
from training.before.start_page import program, resume_command, shown
from training.distributed import init_distributed_mode, is_echo, leave_group
from training.during.reporting import (
    evaluate_and_log,
    evaluate_run,
    evaluation_is_due,
    log_is_due,
    log_step,
    look_at_updates,
    report_on_sample,
    sample_texts,
)
from training.during.stopping import StopSignal, ignore_stop_signals
from training.launcher import environment_rank
from training.saving.live_state import capture_rng

# --- the order of events ---


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` says (sys.argv when None). Returns the exit status: 0, 1 for a failure, 2 for a mistake of the
    user's, 128 + signal when stopped."""
    try:
        config = load_config(argv)
    except UserError as error:
        return report(error)
    return start(config)


def start(config: Config) -> int:
    """Train as `config` says; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console without Chinese must not end a run by an exception
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with StopSignal() as stop:
            return run_config(config, stop)
    except UserError as error:
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
        with stop.saving():  # no more votes: a stop signal changes nothing now
            return finish(run)
    except UserError:
        raise
    except BaseException as error:
        return fail(run, stop, error)


# --- the loop ---


def train(run: Run) -> None:
    """Train from where the state stands to the last step, epoch by epoch."""
    run.model.train()
    progress = run.state.progress
    with run.throughput.paused():
        if progress.step > progress.evaluated_step and evaluation_is_due(run) and evaluate_and_log(run):
            run.saver.save(best=True)  # all ranks; a stop had come between this step and its evaluation
    if run.is_finished:
        run.console.print(f"Nothing left to do: the run is at its last step, {progress.step}.")
    while not run.is_finished:
        train_epoch(run, run.state.layout.epoch(progress.rows_seen))  # all ranks
    with run.stop.saving():
        run.saver.finish()  # all ranks


def train_epoch(run: Run, epoch: int) -> None:
    """Train what is left of one epoch, or less if the run ends before."""
    progress, layout = run.state.progress, run.state.layout
    first_row, epoch_end = epoch * layout.rows, (epoch + 1) * layout.rows
    order = RowOrder(layout.rows, run.config.seed, epoch, bool(run.config.shuffle))
    sampler = SkipBatchSampler(
        order,
        layout.global_batch_size,
        layout.batch_size,
        run.world.rank,
        run.world.size,
        start=progress.rows_seen - first_row,
    )
    batches = load_batches(run, sampler)
    steps_done = layout.steps_per_epoch - layout.steps_left_in_epoch(progress.rows_seen)
    run.console.start(layout.steps_per_epoch, steps_done)
    while progress.rows_seen < epoch_end and not run.is_finished:
        rows = sampler.window(progress.rows_seen - first_row)  # this step's rows, over all ranks
        target_count = int(run.dataset.row_targets[rows].sum())  # known on every rank without a collective
        lr = run.state.schedule.lr(progress.rows_seen)
        set_learning_rate(run.state.optimizers, lr)

        losses = forward_backward(run, batches, sampler.micro_batches(len(rows)), target_count)
        grad_norm, finite = update_parameters(
            list(run.model.parameters()), run.state.optimizers, run.state.scaler, run.config.grad_clip
        )
        is_first = progress.rows_seen == first_row
        count_step(run, rows.tolist(), target_count, finite)

        if is_first or log_is_due(run):
            log_step(run, epoch, losses, lr, grad_norm)  # all ranks
        elif run.world.device.type == "cpu" or evaluation_is_due(run) or run.saver.interval_is_due(progress.step):
            look_at_updates(run)  # a host sync: inside the pause it would take the device's work out of tokens/s
        with run.throughput.paused():
            evaluate_save_or_stop(run)  # all ranks
        run.console.advance()


def count_step(run: Run, rows: list[int], target_count: int, finite: Tensor) -> None:
    """The step is finished: what a save of it holds is fixed here, whatever happens next."""
    progress = run.state.progress
    run.stop.step_finished()
    progress.step += 1
    progress.rows_seen += len(rows)
    progress.tokens_seen += target_count
    progress.elapsed_seconds = time.monotonic() - run.began
    run.state.rng = capture_rng(run.world.device)
    run.throughput.count(target_count)
    run.updates.append((progress.step, rows, finite))


def evaluate_save_or_stop(run: Run) -> None:
    """What may be due after a step. All ranks must call. Raises StopRequested."""
    progress = run.state.progress
    best = evaluation_is_due(run) and evaluate_and_log(run)  # all ranks
    stop, clock_due = run.stop.agreed(run.world, run.saver.clock_is_due)  # all ranks
    if best or clock_due or run.ends_epoch or run.is_finished or run.saver.interval_is_due(progress.step):
        look_at_updates(run)
        with run.stop.saving():
            run.saver.save(best)  # all ranks
    if stop and not run.is_finished:
        raise StopRequested


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
    most_documents = run.dataset.most_documents(run.state.layout.batch_size)
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
                out = losses_of(run.model, batch, divisor, run.config.label_smoothing, run.config.z_loss)
            # Losses are sums over the step's targets; DDP averages over ranks, which the factor undoes.
            run.state.scaler.scale(out.loss * world.size).backward()
        shares += torch.stack([out.loss, out.logits_loss, out.aux_loss]).detach()
        if not is_last and run.stop.agreed(world)[0]:  # all ranks; a finished window is not dropped
            raise StopRequested
    return shares


# --- the end ---


def fail(run: Run | None, stop: StopSignal, error: BaseException) -> int:
    """The end of a run that went wrong: its status, its cause in words or as a traceback, exit status 1."""
    rank, _, world_size = environment_rank()
    if run:
        set_status(run, "invalid" if isinstance(error, NonFinite) else "failed")
    # Another rank failed first and reports why: wait for the launcher's signal.
    deadline = time.monotonic() + 5 * (world_size > 1 and is_echo(error))
    while not stop.received and time.monotonic() < deadline:
        time.sleep(0.05)
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
    leave_group(run.world)  # all ranks
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
    generate = [program("python"), shown(ROOT / "scripts" / "generate.py"), "--load", shown(config.run_folder)]
    run.console.print(f"To generate: {shlex.join(generate)}")
    run.tracker.finish()
    leave_group(run.world)  # all ranks
    return 0


def report_evaluation(run: Run) -> int:
    """--eval_only: the validation figures of the weights as loaded; nothing is written."""
    result = evaluate_run(run)  # all ranks
    run.console.print(json.dumps(asdict(result)))
    leave_group(run.world)  # all ranks
    return 0


def set_status(run: Run, status: str) -> None:
    """Note in run.json how the run stands; a full disk must not hide the reason for which it ended."""
    if run.world.is_main and not run.config.eval_only:
        try:
            run.saver.files.receipt.update(status=status, progress=asdict(run.state.progress))
        except SaveFailed as error:
            print(f"Warning: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(start(CONFIG))
