"""The checkpoint to go on from: found, fitted to what is asked for, and what going on with it changes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from errors import UserError, refuse
from training.config import FIXED, SHOWN, Config, changed_settings
from training.saving.checkpoint import Checkpoint, load_newest
from training.saving.state import RunFacts, circumstances
from training.schedule import Clock, Progress, accumulation_steps, steps_in


def find_checkpoint(config: Config) -> Checkpoint | None:
    """The save to go on from, or None for a fresh start. Raises UserError where that would overwrite a run, and
    CheckpointError where saves exist and none is good."""
    folder, name = config.run_folder, config.run_name
    has_weights = os.path.exists(folder / f"{name}.pth")
    if config.from_resume:
        checkpoint = load_newest(config.resume_folder)
        if checkpoint is None and has_weights and has_completed_save(folder) and not config.overwrite:
            raise UserError(
                f"--from_resume 1: {folder} holds weights but no resume state; start another run from them with "
                f"--from_weight {config.save_weight} --save_weight NEW, or replace it with --overwrite 1"
            )
        return checkpoint
    holds_run = has_weights or any(config.resume_folder.glob("step_*"))
    if holds_run and not config.overwrite and not config.eval_only:
        raise UserError(
            f"--save_weight {config.save_weight}: {folder} holds a run already; go on with it (--from_resume 1), "
            "name another (--save_weight NEW) or replace it (--overwrite 1)"
        )
    return None


def has_completed_save(folder: Path) -> bool:
    """False where a kill came inside the first save, between weights and resume state: the run has nothing yet."""
    try:
        return bool(json.loads((folder / "run.json").read_bytes()).get("saves"))
    except (OSError, ValueError, AttributeError):
        return True


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
    refuse(problems)


def saved_progress(config: Config, checkpoint: Checkpoint, identity: dict[str, Any]) -> Progress:
    """The counters of a checkpoint. `--resume_reset schedule` restarts the schedule here; a best score counts only on
    the same validation texts."""
    progress = Progress(**checkpoint.state["progress"])
    if config.resume_reset == "schedule":
        progress.schedule_start = progress.rows_seen
    if checkpoint.state["identity"]["validation_fingerprint"] != identity["validation_fingerprint"]:
        progress.best = None, 0
    return progress


def describe_changes(config: Config, saved: dict[str, Any], facts: RunFacts, clock: Clock, rows_seen: int) -> list[str]:
    """Lines saying what a resume changes and what that does to steps, learning rate and exactness. `saved` is the
    checkpoint's state.json, the rest what this start goes on with."""
    was, now = circumstances(saved), circumstances(dataclasses.asdict(facts))
    before, after = saved["global_batch_size"], clock.global_batch_size
    lines = [
        f"  {name}: {old} -> {new}"
        for name, old, new, kind in changed_settings(config, saved["config"])
        if kind == SHOWN and name != "global_batch_size"
    ]
    if after != before:
        lines.append(
            f"  global batch: {before} -> {after} rows; steps an epoch {steps_in(clock.rows, before)} -> "
            f"{clock.steps_per_epoch}; training goes on by rows seen"
        )
    if lines or config.resume_reset == "schedule":
        lr = clock.lr(rows_seen)
        lines.append(f"  learning rate at the join: {saved['next_lr']:.8f} -> {lr:.8f}; last step {clock.total_steps}")
    micro_batches = accumulation_steps(after, now["batch_size"], now["world_size"])
    micro_batches_before = accumulation_steps(before, was["batch_size"], was["world_size"])
    if after == before and micro_batches != micro_batches_before:
        lines.append(
            f"  accumulation_steps: {micro_batches_before} -> {micro_batches}, so that a step stays {after} rows"
        )
    elif "accumulation_steps" in config.flags and config.accumulation_steps != micro_batches:
        lines.append(
            f"  accumulation_steps: stays {micro_batches}, not {config.accumulation_steps}: a step stays "
            f"{after} rows; --global_batch_size changes that"
        )
    if saved["identity"]["validation_fingerprint"] != facts.identity["validation_fingerprint"]:
        lines.append("  validation texts: others than before; the best score starts anew")
    others = [f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]
    if others:
        dropout = "; dropout draws otherwise" if config.dropout and was["world_size"] != now["world_size"] else ""
        lines.append(f"  not bit-exact from here, sums round otherwise: {', '.join(others)}{dropout}")
    return lines
