"""Checkpoints and weights: when one is due, and how both reach the disk while training goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from errors import NonFinite, SaveFailed
from storage.tensors import all_finite
from training.config import Config
from training.distributed import World
from training.saving.background import BackgroundWriter
from training.saving.checkpoint import amend_checkpoint, prune, weights_digest, write_checkpoint
from training.saving.run_folder import RunFolder
from training.saving.state import RunFacts, TrainingState
from training.saving.weights import publish_copy, write_weights
from training.schedule import Clock


class Saver:
    """Saves in the background. Every rank holds one, since random states are gathered; rank 0 writes.

    Weights come first and the checkpoint last: a kill before it leaves weights that the resumed run writes again, a
    kill after it nothing to be done. `on_saved` is called in the writer's thread.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        clock: Clock,
        facts: RunFacts,
        description: dict[str, Any],
        folder: RunFolder,
    ):
        self.config, self.world, self.state, self.clock, self.facts = config, world, state, clock, facts
        self.description, self.folder = description, folder
        self.on_saved: Callable[[], None] = lambda: None
        self.weights: Path = config.run_folder / f"{config.run_name}.pth"
        self.best_weights: Path = config.run_folder / f"{config.run_name}_best.pth"
        self.writer = BackgroundWriter()
        self.last_good_step = state.progress.step  # on the disk, whole; the same on all ranks once settled
        self._written_step = 0  # the last one that this start handed to the writer, on all ranks
        self._best_on_disk = state.progress.best
        self._last_time = time.monotonic()

    @property
    def clock_is_due(self) -> bool:
        """True on the main process when --save_minutes have passed; the other ranks are told."""
        minutes = (time.monotonic() - self._last_time) / 60
        return self.world.is_main and 0 < self.config.save_minutes <= minutes

    def interval_is_due(self, step: int) -> bool:
        return self.config.save_interval > 0 and step % self.config.save_interval == 0

    def settle(self) -> None:
        """Return when the last save has ended and all ranks know how. All ranks must call. If it failed, warns, and all
        ranks go back to the best score whose weights are on the disk. Raises NonFinite if it found NaN or infinity."""
        progress = self.state.progress
        if self.world.is_main:
            try:
                self.writer.wait()
            except SaveFailed as error:
                print(f"Warning: {error}. The next save tries again.", file=sys.stderr, flush=True)
                progress.best = self._best_on_disk
        progress.best, self.last_good_step = self.world.broadcast((progress.best, self.last_good_step))  # all ranks

    def save(self, is_best: bool = False) -> None:
        """Save the last finished step. All ranks must call. Pays for a snapshot to host memory; the rest happens in the
        background. `is_best`: this step was evaluated, and is the best so far."""
        self.settle()  # all ranks
        states = self.world.gather(self.state.rng)  # all ranks
        step = self._written_step = self.state.progress.step
        self._last_time = time.monotonic()
        if self.world.is_main:
            tensors = self.writer.snapshot(self.state.tensors(states))
            state = self._state_json()
            self.writer.submit(lambda: self._write(step, tensors, state, is_best))
        self.world.barrier()  # all ranks: one that went on would ask rank 0 for an answer it cannot give yet

    def note_evaluation(self, is_best: bool) -> None:
        """Keep what the evaluation of the last finished step found: in its checkpoint, where there is one already, and
        with its weights, where they are the best so far. All ranks must call."""
        step = self.state.progress.step
        if is_best and not self._written_step == self.last_good_step == step:
            self.save(is_best)  # all ranks
        elif self.last_good_step == step and self.world.is_main:
            state = self._state_json()
            self.writer.submit(lambda: self._amend(step, state, is_best))

    def finish(self) -> None:
        """Have the last finished step on the disk, and its weights as the best if they are. All ranks must call. Raises
        SaveFailed, on all, when the last try fails: a run must not end well without its weights."""
        progress, problem = self.state.progress, None
        best = progress.best
        self.settle()  # all ranks
        is_best = best[1] == progress.step
        if self.last_good_step < progress.step or (is_best and progress.best != best):
            if is_best:  # what failed was to hold it
                progress.best = best
            self.save(is_best)  # all ranks
        try:
            self.writer.wait()
        except SaveFailed as error:
            problem = str(error)
        if problem := self.world.broadcast(problem):  # all ranks
            raise SaveFailed(problem)

    def _state_json(self) -> dict[str, Any]:
        return self.state.as_json(self.facts, self.clock.lr(self.state.progress.rows_seen))

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], is_best: bool) -> None:
        """In the writer's thread, main process only."""
        refuse_non_finite(step, {**tensors["model"], **tensors["optimizer"]})
        self.folder.sync()  # the lines up to this step are on disk before the checkpoint counts
        weights = dict(tensors["model"])
        if "lm_head.weight" not in weights:  # tied; MiniMind's files name the head too
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        digest = write_weights(self.weights, weights, {**self.description, "step": step, "val_loss": None})
        place = ""
        if is_best:
            self._publish_best(step, state)
        if self.config.save_state:
            manifest = write_checkpoint(self.config.resume_folder, step, tensors, state)
            digest, place = weights_digest(manifest), f"resume/step_{step:08d}"
            self._prune(step, state)
        self.last_good_step = step
        self.folder.note_save(step, digest, place)
        self.on_saved()

    def _amend(self, step: int, state: dict[str, Any], is_best: bool) -> None:
        """In the writer's thread, main process only."""
        self.folder.sync()
        if is_best:
            self._publish_best(step, state)
        if self.config.save_state:
            amend_checkpoint(self.config.resume_folder, step, state)
            self._prune(step, state)
        self.on_saved()

    def _publish_best(self, step: int, state: dict[str, Any]) -> None:
        score = state["progress"]["best_val_loss"]
        publish_copy(self.weights, self.best_weights, val_loss=score)
        self._best_on_disk = score, step

    def _prune(self, step: int, state: dict[str, Any]) -> None:
        prune(self.config.resume_folder, self.config.keep_checkpoints, {step, state["progress"]["best_step"]})


def refuse_non_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFinite naming what holds NaN or infinity: such a state is never written over a good one."""
    broken = [name for name, value in tensors.items() if not all_finite(value)]
    if broken:
        raise NonFinite(f"step {step}: {broken[0]} and {len(broken) - 1} more hold NaN or Inf; not saved")
