"""Saves: when one is due, and how the two tiers - weights for use, state for resuming - reach the disk."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import NonFinite, SaveFailed
from storage.tensors import all_finite
from training.config import Config
from training.distributed import World
from training.during.metrics import MetricsFile
from training.saving.checkpoint import checkpoint_folder, prune, weights_digest, write_checkpoint
from training.saving.receipt import Receipt
from training.saving.state import TrainingState
from training.saving.weights import write_weights


@dataclass
class RunFiles:
    """What the main process writes beside the saves."""

    metrics: MetricsFile
    receipt: Receipt
    lock: Any  # held while this process trains in the folder


class BackgroundWriter:
    """Runs saves in a thread, one at a time; the loop pays only for the snapshot.

    A failure surfaces as SaveFailed at the next `snapshot`, `submit` or `wait`. The thread is not a daemon: the
    interpreter does not exit before the save has ended.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def wait(self) -> None:
        """Return when no save is running any more; raises SaveFailed if the last one failed, NonFinite if it
        refused to save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, (SaveFailed, NonFinite)):
            raise error
        if error is not None:
            raise SaveFailed(f"a save failed: {type(error).__name__}: {error}") from error

    def submit(self, save: Callable[[], object]) -> None:
        """Wait for the save before, then start this one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-writer", daemon=False)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:  # handed to the main thread by wait()
            self._error = error

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copy tensors to host memory, laid out as `write_checkpoint` takes them.

        The buffers are kept for the next snapshot (page faults cost more than the copy), so the last save must end.
        From CUDA the copies go to pinned memory together, with one synchronisation.
        """
        self.wait()
        devices: set[torch.device] = set()
        copies: dict[str, dict[str, Tensor]] = {}
        for file, entries in tensors.items():
            copies[file] = {}
            for name, tensor in entries.items():
                buffer = self._buffer((file, name), tensor)
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                copies[file][name] = buffer
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer


class Saver:
    """Writes saves in the background. Every rank holds one, since random states are gathered; rank 0 writes."""

    def __init__(
        self, config: Config, world: World, state: TrainingState, card: dict[str, Any], files: RunFiles | None
    ):
        self.config, self.world, self.state, self.card, self._files = config, world, state, card, files
        self.folder: Path = config.run_folder
        self.writer = BackgroundWriter()
        self.last_good_step = state.progress.step  # on the disk, whole
        self._best_on_disk = state.progress.best_val_loss, state.progress.best_step
        self._last_time = time.monotonic()

    @property
    def files(self) -> RunFiles:
        assert self._files is not None, "only the main process of a training run writes files"
        return self._files

    @property
    def clock_is_due(self) -> bool:
        """True on the main process when --save_minutes have passed; the other ranks are told."""
        minutes = (time.monotonic() - self._last_time) / 60
        return self.world.is_main and 0 < self.config.save_minutes <= minutes

    def interval_is_due(self, step: int) -> bool:
        return self.config.save_interval > 0 and step % self.config.save_interval == 0

    def settle(self) -> None:
        """Know how the save before ended. All ranks must call. If it failed, warns, and all ranks go back to the best
        score whose weights are on the disk. Raises NonFinite if it found NaN or infinity."""
        progress = self.state.progress
        if self.world.is_main:
            try:
                self.writer.wait()
            except SaveFailed as error:
                print(f"Warning: {error}. The next save tries again.", file=sys.stderr, flush=True)
                progress.best_val_loss, progress.best_step = self._best_on_disk
        best = self.world.broadcast((progress.best_val_loss, progress.best_step))  # all ranks
        progress.best_val_loss, progress.best_step = best

    def save(self, best: bool = False) -> None:
        """Save the last finished step. All ranks must call. Pays for a snapshot to host memory; the rest happens in the
        background. `best`: this step's evaluation is the best so far."""
        self.settle()  # all ranks
        states = self.world.gather(self.state.rng)  # all ranks
        step = self.state.progress.step
        self._last_time = time.monotonic()
        if self.world.is_main:
            tensors = self.writer.snapshot(self.state.tensors(states))
            facts = self.state.facts(self.config)
            self.writer.submit(lambda: self._write(step, tensors, facts, best))
        self.world.broadcast(None)  # all ranks: one that went on would ask rank 0 for an answer it cannot give yet

    def finish(self) -> None:
        """Have the last finished step on the disk. All ranks must call. Raises SaveFailed, on all, when the last try
        fails: a run must not end well without its weights."""
        progress, problem = self.state.progress, None
        best, score = progress.best_step == progress.step, progress.best_val_loss
        self.settle()  # all ranks
        if self.world.broadcast(self.last_good_step) < progress.step:  # all ranks
            if best:  # the save that failed was to hold it
                progress.best_val_loss, progress.best_step = score, progress.step
            self.save(best)  # all ranks
        try:
            self.writer.wait()
        except SaveFailed as error:
            problem = str(error)
        if problem := self.world.broadcast(problem):  # all ranks
            raise SaveFailed(problem)

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any], best: bool) -> None:
        """In the writer's thread, main process only. The resume state comes last: a kill before it leaves weights
        that the resumed run writes again, a kill after it nothing to be done."""
        refuse_non_finite(step, {**tensors["model"], **tensors["optimizer"]})
        self.files.metrics.sync()  # the lines up to this step are on disk before the save counts
        weights = dict(tensors["model"])
        if "lm_head.weight" not in weights:  # tied; MiniMind's files name the head too
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        name, progress = self.config.run_name, facts["progress"]
        card = {**self.card, "step": step, "val_loss": progress["best_val_loss"] if best else None}
        digest, folder = write_weights(self.folder / f"{name}.pth", weights, card), ""
        if best:
            write_weights(self.folder / f"{name}_best.pth", weights, card)
            self._best_on_disk = progress["best_val_loss"], step
        if self.config.save_state:
            digest = weights_digest(write_checkpoint(self.config.resume_folder, step, tensors, facts))
            folder = str(checkpoint_folder(self.config.resume_folder, step).relative_to(self.folder))
            prune(self.config.resume_folder, self.config.keep_checkpoints, {step, progress["best_step"]})
        self.last_good_step = step
        self.files.receipt.add_save(step, digest, folder)


def refuse_non_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFinite naming what holds NaN or infinity: such a state is never written over a good one."""
    broken = [name for name, value in tensors.items() if not all_finite(value)]
    if broken:
        raise NonFinite(f"step {step}: {broken[0]} and {len(broken) - 1} more hold NaN or Inf; not saved")
