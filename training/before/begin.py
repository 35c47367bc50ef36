"""Once ranks have met: device, precision, dry step, compiling, optimizers, saved state, files - the parts of a run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from errors import refuse
from trainer_utils import setup_seed
from training.before.cost import Measured, predict
from training.before.dry_step import fitting_batch_size, memory_errors
from training.before.prepare import Prepared, prepare
from training.before.start_page import start_page
from training.choices import Choices, saved_choices
from training.compiling import choose_compile, compile_model
from training.config import ROOT, Config
from training.cpu import choose_threads
from training.device import choose_dtype, dtype_note, set_deterministic
from training.distributed import World
from training.during.console import Console
from training.during.run import Listener, Run
from training.during.stopping import StopSignal
from training.optimizers import build_optimizers
from training.parallel import parallelize
from training.saving.live_state import capture_rng
from training.saving.receipt import environment_facts, git_state
from training.saving.run_folder import RunFolder, contents, folder_errors, open_run_folder
from training.saving.saver import Saver
from training.saving.state import RunFacts, TrainingState
from training.schedule import accumulation_steps, choose_batch_size
from training.trackers import start_tracker


def begin_run(prepared: Prepared, world: World, stop: StopSignal, listener: Listener) -> Run:
    """Put the parts together. All ranks must call; the main process holds the run folder's lock."""
    config, data, clock, progress = prepared.config, prepared.data, prepared.clock, prepared.progress
    refuse(differences_between_ranks(prepared, world))  # all ranks
    set_deterministic(bool(config.deterministic))
    choices, notes = resolve_choices(prepared, world)
    bare_model: nn.Module = prepared.model
    with memory_errors("the model"):
        model = bare_model.to(world.device)
    config, choices, measured, more = rehearse(prepared, choices, world)  # all ranks; before it is wrapped or compiled
    notes += more
    predicted = predict(prepared.cost, clock, choices, progress.rows_seen, progress.step, measured)
    choices, more = compile_if_worth(prepared, choices, predicted["estimated_seconds"], world)  # all ranks
    notes += more
    state = fresh_state(prepared, parallelize(model, world), choices, world)  # all ranks
    environment = environment_facts(world.device) | {"git": git_state(ROOT)}
    facts = RunFacts(config.values(), clock.global_batch_size, choices, data.identity, environment)
    notes = start_page(prepared, facts, predicted) + notes
    if prepared.checkpoint:
        notes += state.restore(prepared.checkpoint, world.rank, world.device, config.resume_reset == "optimizer")
    console, folder = Console(world.is_main), RunFolder()
    if world.is_main:
        with folder_errors(config):
            folder = open_run_folder(config, facts, progress, prepared.checkpoint, predicted, data.ledgers)
        stop.before_leaving = lambda: folder.note(status="stopped")
    for line in notes:
        console.print(line)
    tracker = start_tracker(
        config.tracker_name if world.is_main and progress.step < clock.total_steps else "",
        config.wandb_project, config.run_name, config.values(), config.run_folder, progress.tracker_run_id or None,
        console.print,
    )  # fmt: skip
    progress.tracker_run_id = tracker.run_id or progress.tracker_run_id
    saver = Saver(config, world, state, clock, facts, weights_description(prepared), folder)
    began = time.monotonic() - progress.elapsed_seconds
    run = Run(
        config, choices, data, clock, state, world, stop, saver, folder, tracker, console,
        began=began, listener=listener,
    )  # fmt: skip
    saver.on_saved = lambda: run.notify("saved")
    return run


def look_again(prepared: Prepared, given: Config, world: World) -> Prepared:
    """Prepare anew where another process saved in the run folder before it was locked, or where this rank saw another
    checkpoint than rank 0. All ranks must call, the main process holding the lock."""
    changed = world.broadcast(prepared.run_folder != contents(given))  # all ranks; those of rank 0 decide
    mine = checkpoint_digest(prepared)
    return prepare(given) if changed or mine != world.broadcast(mine) else prepared  # all ranks


def checkpoint_digest(prepared: Prepared) -> str | None:
    return prepared.checkpoint.manifest["manifest_sha256"] if prepared.checkpoint else None


def differences_between_ranks(prepared: Prepared, world: World) -> list[str]:
    """Problems of ranks that found other data, or another checkpoint, than rank 0: a folder that is not shared between
    the machines, or not up to date everywhere. All ranks must call."""
    mine = {
        **prepared.data.identity,
        "checkpoint to go on from": checkpoint_digest(prepared),
        "rows in a step": prepared.clock.global_batch_size,
        "steps": prepared.clock.total_steps,
    }
    first = world.broadcast(mine)  # all ranks
    return [
        f"rank {world.rank}: its {name.replace('_', ' ')} is {mine[name]!s:.16}, rank 0 has {first[name]!s:.16}; every "
        "rank needs the same files and settings"
        for name in mine
        if mine[name] != first[name]
    ]


def resolve_choices(prepared: Prepared, world: World) -> tuple[Choices, list[str]]:
    """(what `auto` comes to, what to print about it). A resume takes the saved run's choices where this command does
    not set them: other kernels or another thread count would give other bits."""
    config, checkpoint = prepared.config, prepared.checkpoint
    saved, notes = saved_choices(checkpoint.state) if checkpoint else {}, []
    dtype = choose_dtype(saved["dtype"] if saved and config.dtype == "auto" else config.dtype, world.device)
    same_place = saved and (saved["device"], saved["world_size"]) == (world.device.type, world.size)
    threads = choose_threads(config.threads, saved["threads"] if same_place else 0, torch.get_num_threads())
    torch.set_num_threads(threads.count)
    notes.append(threads.line())
    notes += [line for line in [dtype_note(dtype, world.device)] if line]
    choices = Choices(
        device=world.device.type,
        dtype=str(dtype).removeprefix("torch."),
        threads=threads.count,
        world_size=world.size,
        batch_size=choose_batch_size(config, prepared.clock, world.size),
    )
    return choices, notes


def rehearse(prepared: Prepared, choices: Choices, world: World) -> tuple[Config, Choices, Measured | None, list[str]]:
    """A dry step: on CUDA it finds the batch_size that fits. All ranks must call. Returns settings and choices with
    that, what was measured, and what was changed, in words."""
    config, clock, ranks = prepared.config, prepared.clock, world.size
    if prepared.progress.step >= clock.total_steps:
        return config, choices, None, []
    fitting, measured = fitting_batch_size(prepared.model, prepared.data.train, choices, config, world)  # all ranks
    if fitting == choices.batch_size:
        return config, choices, measured, []
    rows = clock.global_batch_size
    before, after = (accumulation_steps(rows, size, ranks) for size in (choices.batch_size, fitting))
    line = (
        f"batch_size: {choices.batch_size} rows do not fit in memory, {fitting} do; accumulation_steps: {before} -> "
        f"{after}; a step stays {rows} rows"
    )
    # A resume and the saved config.yaml are to find the same micro-batches and the same step.
    config = replace(config, batch_size=fitting, accumulation_steps=after, global_batch_size=rows)
    return config, replace(choices, batch_size=fitting), measured, [line]


def compile_if_worth(
    prepared: Prepared, choices: Choices, estimated_seconds: float | None, world: World
) -> tuple[Choices, list[str]]:
    """Compile the model as --use_compile says. All ranks must call. Returns the choices with that, what to print."""
    config, checkpoint = prepared.config, prepared.checkpoint
    keep = checkpoint is not None and "use_compile" not in config.given
    saved = checkpoint.state["choices"].get("compile") if checkpoint and keep else None
    compiled, line = choose_compile(config.use_compile, saved, estimated_seconds, world)  # all ranks
    if compiled:
        compile_model(prepared.model, with_loss=world.device.type == "cuda")
    return replace(choices, compile=compiled), [line] if line else []


def fresh_state(prepared: Prepared, model: nn.Module, choices: Choices, world: World) -> TrainingState:
    """The state before a checkpoint is put into it."""
    config = prepared.config
    setup_seed(config.seed + world.rank)  # dropout differs between ranks; the weights were drawn before
    return TrainingState(
        model=model,
        optimizers=build_optimizers(model, config, world.device),
        scaler=torch.amp.GradScaler(world.device.type, enabled=choices.dtype == "float16"),
        progress=prepared.progress,
        rng=capture_rng(world.device),
    )


def weights_description(prepared: Prepared) -> dict[str, Any]:
    """What a weights file says of itself: architecture and tokenizer, so that it is never used with another."""
    return {
        "format": 1,
        "kind": "minimind-weights",
        "config": prepared.model.config.to_dict(),
        "tokenizer_digest": prepared.data.tokenizer.digest,
        "tokenizer_path": prepared.config.values()["tokenizer_path"],
    }
