"""A training run: its parts, and how they are put together once ranks have met."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataset.lm_dataset import PretrainDataset
from dataset.text_tokenizer import TextTokenizer
from errors import refuse
from trainer_utils import Throughput, setup_seed
from training.before.compiling import choose_compile, compile_model
from training.before.dry_step import memory_errors, rehearse
from training.before.prepare import Prepared
from training.before.start_page import start_page
from training.config import ROOT, Config
from training.device import choose_dtype, set_deterministic
from training.distributed import World
from training.during.metrics import Console, DivergenceWatch
from training.during.stopping import StopSignal
from training.optimizers import build_optimizers
from training.saving.checkpoint import Checkpoint
from training.saving.live_state import capture_rng
from training.saving.receipt import environment_facts, git_state
from training.saving.run_folder import folder_errors, open_run_folder
from training.saving.saver import Saver
from training.saving.state import TrainingState
from training.trackers import Tracker, start_tracker


@dataclass
class Run:
    """Everything a running training holds, so that the functions of the loop can be read one at a time."""

    config: Config
    world: World
    stop: StopSignal
    tokenizer: TextTokenizer
    dataset: PretrainDataset
    validation: PretrainDataset | None
    state: TrainingState
    saver: Saver
    tracker: Tracker
    console: Console
    dtype: torch.dtype
    began: float  # monotonic seconds; earlier for a resumed run, by what it had trained
    val_loss: float | None = None  # of the last evaluation
    throughput: Throughput = field(default_factory=Throughput)
    updates: list[tuple[int, list[int], Tensor]] = field(default_factory=list)  # (step, rows, finite) not yet looked at

    @property
    def model(self) -> nn.Module:
        """With DDP around it where there are several ranks."""
        return self.state.model

    @property
    def ends_epoch(self) -> bool:
        """True when the step just finished was the last of an epoch."""
        return self.state.progress.rows_seen % self.state.layout.rows == 0

    @property
    def last_step(self) -> int:
        """Where this start of the program ends: the run's last step, or an earlier one that the user asked for."""
        total = self.state.schedule.total_steps
        return min(total, self.config.stop_after) if self.config.stop_after else total

    @property
    def is_finished(self) -> bool:
        return self.state.progress.step >= self.last_step


def begin_run(prepared: Prepared, world: World, stop: StopSignal) -> Run:
    """Put the parts together: device, precision, optimizers, saved state, DDP, files. All ranks must call."""
    config, checkpoint = prepared.config, prepared.checkpoint
    refuse(differences_between_ranks(prepared, world))  # all ranks
    set_deterministic(bool(config.deterministic))
    choices, notes = resolve_choices(config, world, checkpoint)
    dtype = getattr(torch, choices["dtype"])
    with memory_errors("the model"):
        model = prepared.model.to(world.device)
    notes += rehearse_step(prepared, model, world, dtype)  # all ranks; before the model is wrapped or compiled
    config = prepared.config
    notes += compile_if_worth(prepared, model, choices, world)  # all ranks
    state = fresh_state(prepared, model, choices, world)
    notes = start_page(prepared, world.size, state) + notes
    if checkpoint:
        notes += state.restore(checkpoint, world.rank, world.device, config.resume_reset == "optimizer")
    state.model = distribute(model, world)  # all ranks
    console = Console(world.is_main)
    with folder_errors(config):
        files = open_run_folder(prepared, state) if world.is_main and not config.eval_only else None
    if files:
        stop.before_leaving = lambda: files.receipt.update(status="stopped")
    for line in notes:
        console.print(line)
    tracker = start_tracker(
        config.tracker_name if files else "", config.wandb_project, config.run_name, config.values(),
        config.run_folder, prepared.progress.tracker_run_id or None, console.print,
    )  # fmt: skip
    prepared.progress.tracker_run_id = tracker.run_id or prepared.progress.tracker_run_id
    return Run(
        config=config,
        world=world,
        stop=stop,
        tokenizer=prepared.tokenizer,
        dataset=prepared.dataset,
        validation=prepared.validation,
        state=state,
        saver=Saver(config, world, state, weights_card(prepared), files),
        tracker=tracker,
        console=console,
        dtype=dtype,
        began=time.monotonic() - prepared.progress.elapsed_seconds,
    )


def fresh_state(prepared: Prepared, model: nn.Module, choices: dict[str, Any], world: World) -> TrainingState:
    """The state before a save is put into it."""
    config = prepared.config
    setup_seed(config.seed + world.rank)  # dropout differs between ranks; the weights were drawn before
    return TrainingState(
        model=model,
        optimizers=build_optimizers(model, config, world.device),
        scaler=torch.amp.GradScaler(world.device.type, enabled=choices["dtype"] == "float16"),
        progress=prepared.progress,
        layout=prepared.layout,
        schedule=prepared.schedule,
        watch=DivergenceWatch(),
        identity=prepared.identity,
        choices=choices,
        environment=environment_facts(world.device) | {"git": git_state(ROOT)},
        rng=capture_rng(world.device),
    )


def rehearse_step(prepared: Prepared, model: nn.Module, world: World, dtype: torch.dtype) -> list[str]:
    """Complete the plan by a dry step; on CUDA also find the batch_size that fits. All ranks must call. Returns what
    was changed, in words."""
    config, layout = prepared.config, prepared.layout
    if config.eval_only or prepared.progress.step >= prepared.schedule.total_steps:
        return []
    fitting, found = rehearse(model, prepared.dataset, layout, config, world, dtype)  # all ranks
    prepared.plan = prepared.plan.measured(fitting, found.seconds_per_row, found.peak_bytes)
    if fitting == layout:
        return []
    prepared.layout = fitting
    # A resume and the saved config.yaml are to find the same micro-batches and the same step.
    prepared.config = replace(
        config,
        batch_size=fitting.batch_size,
        accumulation_steps=fitting.accumulation_steps,
        global_batch_size=fitting.global_batch_size,
    )
    return [
        f"batch_size: {layout.batch_size} rows do not fit in memory, {fitting.batch_size} do; accumulation_steps: "
        f"{layout.accumulation_steps} -> {fitting.accumulation_steps}; a step stays {fitting.global_batch_size} rows"
    ]


def compile_if_worth(prepared: Prepared, model: nn.Module, choices: dict[str, Any], world: World) -> list[str]:
    """Compile the model as --use_compile says, note it in `choices`. All ranks must call. Returns what to print."""
    config, checkpoint = prepared.config, prepared.checkpoint
    keep = checkpoint is not None and "use_compile" not in config.given
    saved = checkpoint.state["choices"].get("compile") if checkpoint and keep else None
    seconds = None if config.eval_only else prepared.plan.estimated_seconds
    choices["compile"], line = choose_compile(config.use_compile, saved, seconds, world)  # all ranks
    if choices["compile"]:
        compile_model(model, with_loss=world.device.type == "cuda")
    return [line] if line else []


def distribute(model: nn.Module, world: World) -> nn.Module:
    """DDP where there is more than one rank. All ranks must call."""
    if world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def differences_between_ranks(prepared: Prepared, world: World) -> list[str]:
    """Problems of ranks that found other data, or another save, than rank 0: a folder that is not shared between the
    machines, or not up to date everywhere. All ranks must call."""
    mine = {
        **prepared.identity,
        "save to go on from": prepared.checkpoint and prepared.checkpoint.manifest["manifest_sha256"],
        "rows in a step": prepared.layout.global_batch_size,
        "steps": prepared.schedule.total_steps,
    }
    first = world.broadcast(mine)
    return [
        f"rank {world.rank}: its {name.replace('_', ' ')} is {mine[name]!s:.16}, rank 0 has {first[name]!s:.16}; every "
        "rank needs the same files and settings"
        for name in mine
        if mine[name] != first[name]
    ]


def resolve_choices(config: Config, world: World, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], list[str]]:
    """(what `auto` comes to, what to print about it). A resume takes the saved run's choices where this command does
    not set them: other kernels or another thread count would give other bits."""
    saved, notes = checkpoint.state["choices"] if checkpoint else {}, []
    dtype = choose_dtype(config.dtype, world.device) if config.dtype != "auto" or not saved else saved["dtype"]
    same_place = saved and (saved["device"], saved["world_size"]) == (world.device.type, world.size)
    offered = torch.get_num_threads()
    if threads := config.threads or (saved["threads"] if same_place else 0):
        torch.set_num_threads(threads)
        if threads != (config.threads or offered):
            notes.append(f"Threads: {threads} as in the saved run; --threads {offered} is what this start was offered")
    choices = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "world_size": world.size,
    }
    return choices, notes


def weights_card(prepared: Prepared) -> dict[str, Any]:
    """What a weights file says of itself: architecture and tokenizer, so that it is never used with another."""
    return {
        "format": 1,
        "kind": "minimind-weights",
        "config": prepared.model.config.to_dict(),  # type: ignore[operator,union-attr]
        "tokenizer_digest": prepared.tokenizer.digest,
        "tokenizer_path": prepared.config.values()["tokenizer_path"],
    }
