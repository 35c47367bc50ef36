"""The clock of a run: how epochs are cut into steps, where the run ends, and the learning rate on the way there."""

from __future__ import annotations

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

    @property
    def best(self) -> tuple[float | None, int]:
        """(validation loss, step) of the best evaluation so far; (None, 0) before the first."""
        return self.best_val_loss, self.best_step

    @best.setter
    def best(self, best: tuple[float | None, int]) -> None:
        self.best_val_loss, self.best_step = best


def steps_in(rows: int, global_batch_size: int) -> int:
    """Steps that so many rows of one epoch make; the last one may be shorter."""
    return -(-rows // global_batch_size)


def accumulation_steps(global_batch_size: int, batch_size: int, ranks: int) -> int:
    """Micro-batches of a full step on each rank."""
    return -(-global_batch_size // (batch_size * ranks))


@dataclass(frozen=True)
class Epochs:
    """How an epoch of `rows` is cut into steps of `global_batch_size` rows; its last step may be shorter."""

    rows: int
    global_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return steps_in(self.rows, self.global_batch_size)

    @property
    def rows_per_step(self) -> int:
        """Of the fullest step: there may be fewer rows than a step would take."""
        return min(self.global_batch_size, self.rows)

    def epoch(self, rows_seen: int) -> int:
        """The epoch, from 0, that the next row belongs to."""
        return rows_seen // self.rows

    def steps_left_in_epoch(self, rows_seen: int) -> int:
        return steps_in(self.rows - rows_seen % self.rows, self.global_batch_size)

    def rows_after(self, rows_seen: int, steps: int) -> int:
        """rows_seen after `steps` more steps, in constant time."""
        first = self.steps_left_in_epoch(rows_seen)
        if steps < first:
            return rows_seen + steps * self.global_batch_size
        epochs, rest = divmod(steps - first, self.steps_per_epoch)
        return (self.epoch(rows_seen) + 1 + epochs) * self.rows + rest * self.global_batch_size

    def steps_until(self, rows_seen: int, epochs: int) -> int:
        """Steps from `rows_seen` to the end of so many epochs."""
        if rows_seen >= epochs * self.rows:
            return 0
        whole_epochs = epochs - 1 - self.epoch(rows_seen)
        return self.steps_left_in_epoch(rows_seen) + whole_epochs * self.steps_per_epoch


@dataclass(frozen=True)
class Clock(Epochs):
    """Epochs, and the end of the run: `total_steps` in all, `planned_rows` seen by then. `lr` is a function of rows."""

    total_steps: int
    planned_rows: int
    config: Config
    schedule_start: int  # rows_seen where the learning-rate schedule began

    def lr(self, rows_seen: int) -> float:
        """The learning rate of the step that begins at `rows_seen`."""
        return get_lr(
            rows_seen - self.schedule_start,
            self.planned_rows - self.schedule_start,
            self.config.learning_rate,
            warmup=self.config.warmup_steps * self.global_batch_size,
            min_lr_ratio=self.config.min_lr_ratio,
            schedule=self.config.lr_schedule,
        )


def choose_global_batch(config: Config, ranks: int, saved: int = 0) -> int:
    """Rows in a step over all ranks. A resumed run's wins over all but an explicit `--global_batch_size`."""
    explicit = config.global_batch_size if "global_batch_size" in config.given or not saved else 0
    return explicit or saved or config.batch_size * config.accumulation_steps * ranks


def make_clock(config: Config, epochs: Epochs, progress: Progress) -> Clock:
    """The end of the run seen from `progress`: `max_steps` in all, or `epochs` whole epochs."""
    if config.max_steps > 0:
        total_steps = config.max_steps
        planned = epochs.rows_after(progress.rows_seen, max(0, total_steps - progress.step))
    else:
        total_steps = progress.step + epochs.steps_until(progress.rows_seen, config.epochs)
        planned = config.epochs * epochs.rows
    return Clock(epochs.rows, epochs.global_batch_size, total_steps, planned, config, progress.schedule_start)


def choose_batch_size(config: Config, epochs: Epochs, ranks: int) -> int:
    """Rows in a micro-batch: never more than a rank's share of a step, the rest would be padding."""
    return min(config.batch_size, -(-epochs.rows_per_step // ranks))
