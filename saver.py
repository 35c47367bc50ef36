"""Saves: when one is due, and how the two tiers - weights for use, state for resuming - reach the disk."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import (
    BackgroundWriter,
    SaveFailed,
    prune,
    weights_digest,
    write_checkpoint,
    write_weights,
)
from config import Config
from metrics import MetricsFile, RunRecord
from resume import TrainingState
from trainer_utils import World


@dataclass
class RunFiles:
    """What the main process writes beside the saves."""

    metrics: MetricsFile
    record: RunRecord
    lock: Any  # held while this process trains in the folder


class NonFinite(RuntimeError):
    """The numbers have left the reals; nothing was saved from them."""


class Saver:
    """Writes saves in the background. Every rank holds one, since random states are gathered; rank 0 writes."""

    def __init__(
        self, config: Config, world: World, state: TrainingState, card: dict[str, Any], files: RunFiles | None
    ):
        self.config, self.world, self.state, self.card, self._files = config, world, state, card, files
        self.folder: Path = config.run_folder
        self.writer = BackgroundWriter()
        self.last_saved_step = state.progress.step
        self._last_time = time.monotonic()

    @property
    def files(self) -> RunFiles:
        assert self._files is not None, "only the main process of a training run writes files"
        return self._files

    @property
    def resume_folder(self) -> Path:
        return self.folder / "resume"

    @property
    def clock_is_due(self) -> bool:
        """True on the main process when --save_minutes have passed; the other ranks are told."""
        minutes = (time.monotonic() - self._last_time) / 60
        return self.world.is_main and 0 < self.config.save_minutes <= minutes

    def interval_is_due(self, step: int) -> bool:
        return self.config.save_interval > 0 and step % self.config.save_interval == 0

    def save(self, best: bool = False) -> None:
        """Save the last finished step. All ranks must call. Pays for a snapshot to host memory; the rest happens in the
        background. A failure of the save before is a warning: this one is the retry. Raises NonFinite."""
        states = self.world.gather(self.state.rng)  # all ranks
        step = self.state.progress.step
        self._last_time = time.monotonic()
        self.last_saved_step = step
        if not self.world.is_main:
            return
        self._warn_of_failure()
        tensors = self.writer.snapshot(self.state.tensors(states))
        broken = [name for name, value in tensors["model"].items() if not bool(torch.isfinite(value).all())]
        if broken:
            raise NonFinite(f"step {step}: {broken[0]} and {len(broken) - 1} more hold NaN or Inf; not saved")
        facts = self.state.facts(self.config)
        self.writer.submit(lambda: self._write(step, tensors, facts, best))

    def finish(self) -> None:
        """Wait for the last save. Raises SaveFailed if it failed: a run must not end well without its weights."""
        self.writer.wait()

    def _warn_of_failure(self) -> None:
        try:
            self.writer.wait()
        except SaveFailed as error:
            print(f"Warning: {error}. The next save tries again.", file=sys.stderr, flush=True)

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any], best: bool) -> None:
        """In the writer's thread, on the main process only."""
        self.files.metrics.sync()  # the lines up to this step are on disk before the save counts
        name = self.config.run_name
        folder, digest = "", ""
        if self.config.save_state:
            saved = write_checkpoint(self.resume_folder, step, tensors, facts)
            folder, digest = str(saved.relative_to(self.folder)), weights_digest(saved)
        weights = dict(tensors["model"])
        if "lm_head.weight" not in weights:  # tied; MiniMind's files name the head too
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        card = {**self.card, "step": step, "val_loss": facts["progress"]["best_val_loss"] if best else None}
        half_digest = write_weights(self.folder / f"{name}.pth", weights, card)
        if best:
            write_weights(self.folder / f"{name}_best.pth", weights, card)
        if self.config.save_state:
            prune(self.resume_folder, self.config.keep_checkpoints, {step, facts["progress"]["best_step"]})
        self.files.record.add_save(step, digest or half_digest, folder)
