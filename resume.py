"""The state of a training run: what a save holds, how a resume takes it back, and what a resume may change."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoint import Checkpoint
from config import FIXED, SHOWN, Config, UserError, changed_settings
from live_state import (
    capture_rng,
    flatten_optimizer,
    flatten_parameters,
    restore_optimizer,
    restore_parameters,
    restore_rng,
)
from trainer_utils import get_lr


@dataclass
class Progress:
    """How far a run has come. `rows_seen` is the whole data position: epoch and row follow from it."""

    step: int = 0  # optimizer update windows finished; a skipped one counts, since its rows are consumed
    rows_seen: int = 0
    tokens_seen: int = 0  # valid targets
    elapsed_seconds: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_val_loss: float | None = None
    best_step: int = 0
    evaluated_step: int = 0  # the last one with validation figures
    tracker_run_id: str = ""
    schedule_start: int = 0  # rows_seen where the learning-rate schedule began; moved by --resume_reset schedule


@dataclass(frozen=True)
class Windows:
    """How an epoch of `rows` is cut into steps of `global_batch_size` rows; its last step may be shorter."""

    rows: int
    global_batch_size: int
    batch_size: int
    world_size: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.global_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a full step on each rank."""
        micro_batches = math.ceil(self.global_batch_size / self.batch_size)
        return math.ceil(micro_batches / self.world_size)

    def epoch(self, rows_seen: int) -> int:
        return rows_seen // self.rows

    def steps_left_in_epoch(self, rows_seen: int) -> int:
        return -(-(self.rows - rows_seen % self.rows) // self.global_batch_size)

    def rows_after(self, rows_seen: int, steps: int) -> int:
        """rows_seen after `steps` more steps, in constant time."""
        first = self.steps_left_in_epoch(rows_seen)
        if steps < first:
            return rows_seen + steps * self.global_batch_size
        epochs, rest = divmod(steps - first, self.steps_per_epoch)
        return (self.epoch(rows_seen) + 1 + epochs) * self.rows + rest * self.global_batch_size


@dataclass(frozen=True)
class Schedule:
    """Where the run ends, and what the learning rate is on the way there."""

    total_steps: int
    planned_rows: int
    warmup_rows: int
    start: int  # rows_seen where the schedule began
    config: Config

    def lr(self, rows_seen: int) -> float:
        c = self.config
        return get_lr(
            rows_seen - self.start,
            self.planned_rows - self.start,
            c.learning_rate,
            warmup=self.warmup_rows,
            min_lr_ratio=c.min_lr_ratio,
            schedule=c.lr_schedule,
        )


def make_windows(config: Config, rows: int, world_size: int, saved_global_batch: int = 0) -> Windows:
    """The saved global batch wins over everything but a spoken `--global_batch_size`; accumulation follows from it."""
    spoken = config.global_batch_size if "global_batch_size" in config.given or not saved_global_batch else 0
    product = config.batch_size * config.accumulation_steps * world_size
    global_batch = spoken or saved_global_batch or product
    # A micro-batch never needs more rows than a rank's share of the step: the rest would be padding.
    batch_size = min(config.batch_size, -(-min(global_batch, rows) // world_size))
    return Windows(rows, global_batch, batch_size, world_size)


def make_schedule(config: Config, windows: Windows, progress: Progress) -> Schedule:
    """The end of the run seen from `progress`: `max_steps` in all, or `epochs` whole epochs."""
    if config.max_steps > 0:
        total_steps = config.max_steps
        planned = windows.rows_after(progress.rows_seen, max(0, total_steps - progress.step))
    else:
        planned = config.epochs * windows.rows
        left = 0
        if progress.rows_seen < planned:
            whole_epochs = config.epochs - 1 - windows.epoch(progress.rows_seen)
            left = windows.steps_left_in_epoch(progress.rows_seen) + whole_epochs * windows.steps_per_epoch
        total_steps = progress.step + left
    warmup_rows = config.warmup_steps * windows.global_batch_size
    return Schedule(total_steps, planned, warmup_rows, progress.schedule_start, config)


def check_identity(config: Config, state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse a resume that would be another run: a fixed setting differs, or what `identity` says of tokenizer and
    data. The UserError names both values of each."""
    problems = [
        f"--{name} {new}: the saved run has {old}; a resume cannot change it - start another run with --save_weight"
        for name, old, new, kind in changed_settings(config, state["config"])
        if kind == FIXED
    ]
    remedies = {
        "data_fingerprint": ("data_path", "give the same texts, or start another run with --from_weight"),
        "tokenizer_digest": ("tokenizer_path", "give the tokenizer the run began with"),
        "rows": ("data_path", "the same texts must give the same rows"),
    }
    for key, (flag, remedy) in remedies.items():
        if key == "rows" and problems:
            continue  # other texts have other rows
        if key in identity and state["identity"][key] != identity[key]:
            value = getattr(config, flag)
            problems.append(
                f"--{flag} {value}: its {key.replace('_', ' ')} is {identity[key]!s:.16}, the saved run's is "
                f"{state['identity'][key]!s:.16}; {remedy}"
            )
    if problems:
        raise UserError(problems)


@dataclass
class TrainingState:
    """Everything a resume needs, gathered in one place. `rng` is this rank's generators at the last finished step."""

    model: nn.Module  # with or without DDP around it
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    windows: Windows
    schedule: Schedule
    watch: Any  # metrics.DivergenceWatch
    identity: dict[str, Any]  # what makes it this run and no other: data, tokenizer, rows
    choices: dict[str, Any]  # what `auto` was resolved to
    environment: dict[str, Any]  # versions, hardware, git
    rng: dict[str, Tensor]

    def tensors(self, rng_of_ranks: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The tensor files of a save, still pointing at the live tensors."""
        return {
            "model": flatten_parameters(self.model),
            "optimizer": flatten_optimizer(self.optimizers, self.model),
            "rng": {f"rank{r}/{key}": value for r, rng in enumerate(rng_of_ranks) for key, value in rng.items()},
        }

    def facts(self, config: Config) -> dict[str, Any]:
        """state.json of a save: JSON values only."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "config": config.values(),
            "global_batch_size": self.windows.global_batch_size,
            "batch_size": self.windows.batch_size,
            "next_lr": self.schedule.lr(self.progress.rows_seen),
            "scaler": self.scaler.state_dict(),
            "watch": self.watch.state(),
            "identity": self.identity,
            "choices": self.choices,
            "environment": self.environment,
        }

    def restore(self, checkpoint: Checkpoint, rank: int, device: torch.device, reset_optimizer: bool) -> list[str]:
        """Take parameters, optimizer, scaler and random states back from a save. Returns what could not be carried
        over, in words. Each part is checked before it is changed: CheckpointError if shapes or names differ."""
        restore_parameters(self.model, checkpoint.load("model"))
        notes = []
        if reset_optimizer:
            notes.append("optimizer state forgotten, as asked")
        else:
            restore_optimizer(self.optimizers, self.model, checkpoint.load("optimizer"))
        if self.scaler.is_enabled() and checkpoint.state["scaler"]:
            self.scaler.load_state_dict(checkpoint.state["scaler"])
        self.watch.restore(checkpoint.state["watch"])
        saved = checkpoint.load("rng")
        mine = {key.partition("/")[2]: value for key, value in saved.items() if key.startswith(f"rank{rank}/")}
        if mine:
            notes += [f"random state of {name} is not in the save" for name in restore_rng(mine, device)]
        else:
            notes.append(f"rank {rank} has no saved random state; dropout draws anew from seed + rank")
        self.rng = capture_rng(device)
        return notes


def circumstances(state: dict[str, Any]) -> dict[str, Any]:
    """What the last bits of a run depend on besides settings and data, from a save's state or a run's receipt."""
    environment = state["environment"]
    kept = {"torch": environment["versions"]["torch"], "processor": environment["cpu"], "gpus": environment.get("gpus")}
    return {**state["choices"], **kept}


def describe_changes(config: Config, saved: dict[str, Any], state: TrainingState) -> list[str]:
    """Lines saying what a resume changes and what that does to steps, learning rate and exactness. `saved` is the
    save's state.json, `state` what this start goes on with."""
    windows, schedule = state.windows, state.schedule
    lines = [
        f"  {name}: {old} -> {new}"
        for name, old, new, kind in changed_settings(config, saved["config"])
        if kind == SHOWN and name != "global_batch_size"
    ]
    before, after = saved["global_batch_size"], windows.global_batch_size
    old = Windows(windows.rows, before, saved["batch_size"], saved["choices"]["world_size"])
    if after != before:
        lines.append(
            f"  global batch: {before} -> {after} rows; steps an epoch {old.steps_per_epoch} -> "
            f"{windows.steps_per_epoch}; training goes on by rows seen"
        )
    if lines or config.resume_reset == "schedule":
        lr = schedule.lr(state.progress.rows_seen)
        lines.append(
            f"  learning rate at the join: {saved['next_lr']:.8f} -> {lr:.8f}; last step {schedule.total_steps}"
        )
    if after == before and windows.accumulation_steps != old.accumulation_steps:
        steps = f"{old.accumulation_steps} -> {windows.accumulation_steps}"
        lines.append(f"  accumulation_steps: {steps}, so that a step stays {after} rows")
    elif "accumulation_steps" in config.flags and config.accumulation_steps != windows.accumulation_steps:
        lines.append(
            f"  accumulation_steps: stays {windows.accumulation_steps}, not {config.accumulation_steps}: a step stays "
            f"{after} rows; --global_batch_size changes that"
        )
    if saved["identity"]["validation_fingerprint"] != state.identity["validation_fingerprint"]:
        lines.append("  validation texts: others than before; the best score starts anew")
    was, now = circumstances(saved), circumstances({"choices": state.choices, "environment": state.environment})
    was["rows in a micro-batch"], now["rows in a micro-batch"] = saved["batch_size"], windows.batch_size
    others = [f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]
    if others:
        dropout = "; dropout draws otherwise" if config.dropout and was["world_size"] != now["world_size"] else ""
        lines.append(f"  not bit-exact from here, sums round otherwise: {', '.join(others)}{dropout}")
    return lines
