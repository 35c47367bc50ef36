"""A training run while it lasts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn

from dataset.lm_dataset import Batch
from dataset.loader import StepRows, load_batches, steps_from
from trainer_utils import Throughput, autocast
from training.choices import Choices
from training.config import Config
from training.data import Data
from training.distributed import World
from training.during.console import Console
from training.during.divergence import DivergenceWatch
from training.during.stopping import StopSignal
from training.saving.live_state import capture_rng
from training.saving.run_folder import RunFolder
from training.saving.saver import Saver
from training.saving.state import TrainingState
from training.schedule import Clock
from training.trackers import Tracker

Listener = Callable[[str, "Run"], None]  # told of begun, micro-batch, gradients, step, evaluating ...
Steps = Generator[tuple[StepRows, Iterator[Batch]], None, None]


@dataclass
class Run:
    """The parts of a run, by lifetime: what was asked for, what that came to, what changes, what serves."""

    config: Config  # as resolved: of a resumed run, the saved settings under what was said this time
    choices: Choices
    data: Data
    clock: Clock

    state: TrainingState
    updates: list[tuple[StepRows, int, Tensor]] = field(default_factory=list, kw_only=True)  # not yet looked at
    val_loss: float = field(default=math.nan, kw_only=True)  # of the last evaluation
    began: float = field(default_factory=time.monotonic, kw_only=True)  # seconds; earlier by what a resumed run trained

    world: World
    stop: StopSignal
    saver: Saver
    folder: RunFolder
    tracker: Tracker
    console: Console
    throughput: Throughput = field(default_factory=Throughput, kw_only=True)
    divergence: DivergenceWatch = field(default_factory=DivergenceWatch, kw_only=True)
    pace: float = field(default=math.nan, kw_only=True)  # seconds a step, smoothed; NaN until one was timed
    listener: Listener = field(default=lambda event, run: None, kw_only=True)

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @property
    def last_step(self) -> int:
        """Where this start of the program ends: the run's last step, or an earlier one that the user asked for."""
        total = self.clock.total_steps
        return min(total, self.config.stop_after) if self.config.stop_after else total

    @property
    def is_finished(self) -> bool:
        return self.state.progress.step >= self.last_step

    def notify(self, event: str) -> None:
        self.listener(event, self)

    def precision(self) -> AbstractContextManager:
        return autocast(self.world.device, self.choices.torch_dtype)

    def steps(self) -> Steps:
        """The one cursor over the data: the steps from where the state stands to the last one, each with this rank's
        batches, checked and on the host."""
        world, config, progress = self.world, self.config, self.state.progress
        vocabulary, pinned = self.data.tokenizer.vocab_size, world.device.type == "cuda"

        def ready(batch: Batch) -> Batch:
            batch.validate(vocabulary)
            return batch.pin_memory() if pinned else batch

        endless = steps_from(
            self.data.train, progress.rows_seen, self.clock.global_batch_size, config.seed, bool(config.shuffle)
        )
        steps = itertools.islice(endless, max(0, self.last_step - progress.step))
        return load_batches(
            self.data.train, steps, self.choices.batch_size, world.rank, world.size, ready, bool(config.num_workers)
        )

    def finish_step(self, step: StepRows, finite: Tensor) -> None:
        """The step is finished: what a save of it holds is fixed here, whatever happens next."""
        progress = self.state.progress
        assert step.position == progress.rows_seen, f"step at row {step.position}, the state is at {progress.rows_seen}"
        self.stop.step_finished()
        progress.step += 1
        progress.rows_seen += len(step.ids)
        progress.tokens_seen += step.target_count
        progress.elapsed_seconds = time.monotonic() - self.began
        self.state.rng = capture_rng(self.world.device)
        self.throughput.count(step.target_count)
        self.updates.append((step, progress.step, finite))
        self.notify("step")
