"""Where a run stands and where it goes: rows and steps counted, steps cut out of epochs, the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.config import Config
from training.learning_rate import get_lr


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
class StepLayout:
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


def make_layout(config: Config, rows: int, world_size: int, saved_global_batch: int = 0) -> StepLayout:
    """The saved global batch wins over all but an explicit `--global_batch_size`; accumulation follows from it."""
    explicit = config.global_batch_size if "global_batch_size" in config.given or not saved_global_batch else 0
    product = config.batch_size * config.accumulation_steps * world_size
    global_batch = explicit or saved_global_batch or product
    # A micro-batch never needs more rows than a rank's share of the step: the rest would be padding.
    batch_size = min(config.batch_size, -(-min(global_batch, rows) // world_size))
    return StepLayout(rows, global_batch, batch_size, world_size)


def make_schedule(config: Config, layout: StepLayout, progress: Progress) -> Schedule:
    """The end of the run seen from `progress`: `max_steps` in all, or `epochs` whole epochs."""
    if config.max_steps > 0:
        total_steps = config.max_steps
        planned = layout.rows_after(progress.rows_seen, max(0, total_steps - progress.step))
    else:
        planned = config.epochs * layout.rows
        left = 0
        if progress.rows_seen < planned:
            whole_epochs = config.epochs - 1 - layout.epoch(progress.rows_seen)
            left = layout.steps_left_in_epoch(progress.rows_seen) + whole_epochs * layout.steps_per_epoch
        total_steps = progress.step + left
    warmup_rows = config.warmup_steps * layout.global_batch_size
    return Schedule(total_steps, planned, warmup_rows, progress.schedule_start, config)
