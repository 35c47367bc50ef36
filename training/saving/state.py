"""The state of a training run: what a save holds, how a resume takes it back, and what a resume may change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from errors import UserError
from training.config import FIXED, SHOWN, Config, changed_settings
from training.during.metrics import DivergenceWatch
from training.saving.checkpoint import Checkpoint
from training.saving.live_state import (
    capture_rng,
    flatten_optimizer,
    flatten_parameters,
    restore_optimizer,
    restore_parameters,
    restore_rng,
)
from training.schedule import Progress, Schedule, StepLayout


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
    layout: StepLayout
    schedule: Schedule
    watch: DivergenceWatch
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
            "global_batch_size": self.layout.global_batch_size,
            "batch_size": self.layout.batch_size,
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
    layout, schedule = state.layout, state.schedule
    lines = [
        f"  {name}: {old} -> {new}"
        for name, old, new, kind in changed_settings(config, saved["config"])
        if kind == SHOWN and name != "global_batch_size"
    ]
    before, after = saved["global_batch_size"], layout.global_batch_size
    old = StepLayout(layout.rows, before, saved["batch_size"], saved["choices"]["world_size"])
    if after != before:
        lines.append(
            f"  global batch: {before} -> {after} rows; steps an epoch {old.steps_per_epoch} -> "
            f"{layout.steps_per_epoch}; training goes on by rows seen"
        )
    if lines or config.resume_reset == "schedule":
        lr = schedule.lr(state.progress.rows_seen)
        lines.append(
            f"  learning rate at the join: {saved['next_lr']:.8f} -> {lr:.8f}; last step {schedule.total_steps}"
        )
    if after == before and layout.accumulation_steps != old.accumulation_steps:
        steps = f"{old.accumulation_steps} -> {layout.accumulation_steps}"
        lines.append(f"  accumulation_steps: {steps}, so that a step stays {after} rows")
    elif "accumulation_steps" in config.flags and config.accumulation_steps != layout.accumulation_steps:
        lines.append(
            f"  accumulation_steps: stays {layout.accumulation_steps}, not {config.accumulation_steps}: a step stays "
            f"{after} rows; --global_batch_size changes that"
        )
    if saved["identity"]["validation_fingerprint"] != state.identity["validation_fingerprint"]:
        lines.append("  validation texts: others than before; the best score starts anew")
    was, now = circumstances(saved), circumstances({"choices": state.choices, "environment": state.environment})
    was["rows in a micro-batch"], now["rows in a micro-batch"] = saved["batch_size"], layout.batch_size
    others = [f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]
    if others:
        dropout = "; dropout draws otherwise" if config.dropout and was["world_size"] != now["world_size"] else ""
        lines.append(f"  not bit-exact from here, sums round otherwise: {', '.join(others)}{dropout}")
    return lines
