"""Pretrain a MiniMind language model from raw text.

    python train_pretrain.py --data_path my.jsonl            one process, best device there is
    torchrun --nproc_per_node 8 train_pretrain.py ...        many
    python train_pretrain.py --from_resume 1 ...             go on where the last save left off

The order of events: settings, the checkpoint to go on from, model, data, ranks, dry step, loop, finish. README.md has
the whole story.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing

from errors import NonFinite, SaveFailed, StopRequested, UserError
from training.command_line import load_config, load_config_or_exit, report
from training.config import Config
from training.cpu import set_waiting_policy

if __name__ == "__main__":
    set_waiting_policy(os.environ)  # counts only before torch loads OpenMP
    CONFIG = load_config_or_exit()  # answers --help and misspelt options before torch is imported, which takes seconds
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until StopSignal takes over there is nothing to say

import torch
from torch import Tensor

from dataset.lm_dataset import Batch
from dataset.loader import StepRows
from trainer_utils import set_learning_rate, update_parameters
from training.before.begin import begin_run, look_again
from training.before.evaluation_only import evaluate_only
from training.before.prepare import prepare
from training.commands import generate_command, resume_command, shown
from training.distributed import init_distributed_mode, is_echo, leave_group
from training.during.evaluation import evaluate_and_log, evaluation_is_due
from training.during.reporting import count_skipped_updates, log_is_due, log_step
from training.during.results import show_results
from training.during.run import Listener, Run, Steps, unheard
from training.during.screen import lasting_stdout
from training.during.stopping import StopSignal
from training.launcher import environment_rank
from training.parallel import gradient_sync
from training.saving.run_folder import locked_run_folder

# --- the order of events ---


def main(argv: list[str] | None = None, listener: Listener = unheard) -> int:
    """Train as `argv` says (sys.argv when None). Returns the exit status: 0, 1 for a failure, 2 for a mistake of the
    user's, 128 + signal when stopped. `listener` is told of the events that `Listener` names."""
    try:
        return start(load_config(argv), listener)
    except UserError as error:
        return report(error)


def start(config: Config, listener: Listener = unheard) -> int:
    """Train as `config` says; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console without Chinese must not end a run by an exception
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with lasting_stdout(), StopSignal() as stop, ExitStack() as held:
            return run_config(config, stop, held, listener)
    except UserError as error:
        return report(error)


def run_config(config: Config, stop: StopSignal, held: ExitStack, listener: Listener) -> int:
    """One run from settings to exit status; what it holds to its end, the run folder's lock, goes into `held`."""
    run: Run | None = None
    try:
        try:
            with stop.immediately():  # until the first new step is finished a stop loses nothing
                if config.eval_only:
                    return evaluate_only(config, stop)
                prepared = prepare(config)  # every mistake that can be found is found here, before ranks meet
                world = init_distributed_mode(prepared.config.device)
                stop.at_once = world.size == 1  # several ranks vote: one that just left would leave the others waiting
                if world.is_main:
                    held.enter_context(locked_run_folder(config))
                prepared = look_again(prepared, config, world)  # all ranks
                run = begin_run(prepared, world, stop, listener)
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
    run.notify("begun")
    run.model.train()
    progress, clock = run.state.progress, run.clock
    ends_epoch = progress.rows_seen % clock.rows == 0
    if progress.step > progress.evaluated_step and evaluation_is_due(run, ends_epoch):
        with run.throughput.paused():
            evaluate_and_log(run)  # all ranks; a stop or a kill had come between this step and its evaluation
    if run.is_finished:
        run.console.print(f"Nothing left to do: the run is at its last step, {progress.step}.")
    with closing(run.steps()) as steps:
        while not run.is_finished:
            train_epoch(run, steps)  # all ranks
    with run.stop.saving():
        run.saver.finish()  # all ranks


def train_epoch(run: Run, steps: Steps) -> None:
    """Train what is left of one epoch, or less if the run ends before."""
    run.console.start(run.last_step, run.state.progress.step)
    for step, batches in steps:
        lr = run.clock.lr(step.position)
        set_learning_rate(run.state.optimizers, lr)
        losses = forward_backward(run, step, batches)
        run.notify("gradients")
        grad_norm, finite = update_parameters(run.model, run.state.optimizers, run.state.scaler, run.config.grad_clip)
        run.finish_step(step, finite)
        if log_is_due(run, step):
            log_step(run, step, losses, lr, grad_norm)  # all ranks
        save_evaluate_or_stop(run, step.ends_epoch)  # all ranks
        run.console.advance()
        if step.ends_epoch or run.is_finished:
            return


def forward_backward(run: Run, step: StepRows, batches: Iterator[Batch]) -> Tensor:
    """Gradients of one step. Returns [loss, logits_loss, aux_loss] on the device: this rank's share of the step's
    means. Raises StopRequested between micro-batches once the ranks agree to stop; the window is then dropped."""
    world, config = run.world, run.config
    shares = torch.zeros(3, device=world.device, dtype=torch.get_default_dtype())
    divisor = torch.full((), float(step.target_count), device=world.device)  # filled there: a copy would be a host sync
    micro_batches = step.micro_batch_count(run.choices.batch_size, world.size)
    for index, batch in zip(range(1, micro_batches + 1), batches, strict=False):
        run.notify("micro-batch")
        is_last = index == micro_batches
        # Gradients travel between ranks once a step, with the last micro-batch.
        with gradient_sync(run.model, on=is_last):
            with run.precision():
                out = run.model(
                    **batch.to(world.device).inputs(),
                    target_count=divisor,
                    label_smoothing=config.label_smoothing,
                    z_loss=config.z_loss,
                )
            run.state.scaler.scale(out.loss * world.gradient_scale).backward()
        shares += torch.stack([out.loss, out.logits_loss, out.aux_loss]).detach()
        run.console.sign_of_life(f"step {run.state.progress.step + 1}: micro-batch {index} of {micro_batches} is done")
        if not is_last and run.stop.agreed(world)[0]:  # all ranks; a finished window is not dropped
            raise StopRequested
    return shares


def save_evaluate_or_stop(run: Run, ends_epoch: bool) -> None:
    """What may be due after a step, the save before the evaluation: whatever becomes of that, the step is kept. All
    ranks must call. Raises StopRequested."""
    progress = run.state.progress
    stop, clock_due = run.stop.agreed(run.world, run.saver.clock_is_due)  # all ranks
    save_due = clock_due or ends_epoch or run.is_finished or run.saver.interval_is_due(progress.step)
    evaluation_due = evaluation_is_due(run, ends_epoch)
    if save_due or evaluation_due:
        count_skipped_updates(run)  # a host sync: inside the pause it would take the device's work out of tokens/s
    with run.throughput.paused():
        if save_due:
            with run.stop.saving():
                run.saver.save()  # all ranks
                if evaluation_due:
                    run.saver.settle()  # all ranks: on the disk before the evaluation begins
        if evaluation_due:
            evaluate_and_log(run)  # all ranks
    if stop and not run.is_finished:
        raise StopRequested


# --- the end ---


def fail(run: Run | None, stop: StopSignal, error: BaseException) -> int:
    """The end of a run that went wrong: its status, its cause in words or as a traceback, exit status 1."""
    rank, _, world_size = environment_rank()
    if run:
        run.note_status("invalid" if isinstance(error, NonFinite) else "failed")
    # Another rank failed first and reports why: wait for the launcher's signal.
    deadline = time.monotonic() + (5 if world_size > 1 and is_echo(error) else 0)
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
    if run and run.world.is_main and run.saver.last_good_step:
        print(f"To go on from step {run.saver.last_good_step}: {resume_command(run.config)}", flush=True)
    if world_size > 1:
        os._exit(1)  # at once: the launcher ends the other ranks, which may wait for this one in a collective
    return 1


def save_and_leave(run: Run | None, stop: StopSignal) -> int:
    """Answer a stop signal: the last finished step is saved, the unfinished window is dropped. All ranks must call."""
    if run is None:
        stop.before_leaving()
        print("Stopped before the first new step; the last save, if any, is as it was.", flush=True)
        return stop.exit_code
    count_skipped_updates(run)
    with stop.saving():
        run.saver.finish()  # all ranks
    run.note_status("stopped")
    run.console.close()
    step = run.state.progress.step
    go_on = f"Stopped at step {step}. To go on: {resume_command(run.config)}"
    run.console.print(go_on if step else "Stopped before the first step was finished; there is nothing to go on from.")
    run.tracker.finish("aborted")
    code = stop.exit_code
    leave_group(run.world)  # all ranks
    return code


def finish(run: Run) -> int:
    """The end of a run, or of the part that --stop_after asked for: status, figures, samples, what to do next."""
    config, step = run.config, run.state.progress.step
    run.notify("leaving")
    run.console.close()
    whole = step >= run.clock.total_steps
    run.note_status("finished" if whole else "stopped")
    if run.world.is_main and whole:
        show_results(run)
        run.console.print(run.saver.publish())
    weights = shown(config.run_folder / f"{config.run_name}.pth")
    longer = f" --{'max_steps' if config.max_steps else 'epochs'} N" if whole and config.save_state else ""
    run.console.print(f"{'Finished' if whole else 'Stopped'} at step {step}. Weights: {weights}")
    run.console.print(f"To go on:    {resume_command(config)}{longer}")
    run.console.print(f"To generate: {generate_command(config)}")
    run.tracker.finish()
    leave_group(run.world)  # all ranks
    return 0


if __name__ == "__main__":
    sys.exit(start(CONFIG))
