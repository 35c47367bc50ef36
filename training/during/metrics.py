"""What a run says of its progress: the log line, metrics.jsonl, the screen, and the warning of a rising loss."""

import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import SaveFailed
from storage.files import write_file_atomic


@dataclass(frozen=True)
class StepMetrics:
    """One logged step. The fields of the first block are the keys of a line in metrics.jsonl."""

    step: int
    epoch: int  # counted from 1
    loss: float  # mean over all valid targets of the step: logits_loss + aux_loss
    logits_loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    rows_seen: int
    tokens_seen: int
    tokens_per_second: float  # valid targets
    elapsed_seconds: float
    skipped_steps: int
    # for the log line only
    epochs: int
    epoch_step: int  # steps done in this epoch
    epoch_steps: int  # steps of this epoch
    epoch_minutes_left: float
    peak_memory_gib: float

    def record(self) -> dict[str, float | int]:
        """The metrics.jsonl line: the fields up to skipped_steps, exact."""
        names = list(self.__dataclass_fields__)
        return {name: getattr(self, name) for name in names[: names.index("skipped_steps") + 1]}


def perplexity(loss: float) -> float:
    """e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf


def format_log_line(metrics: StepMetrics) -> str:
    """MiniMind's log line, then ppl (of the cross-entropy alone), grad_norm, tokens/s and memory."""
    m = metrics
    return (
        f"Epoch:[{m.epoch}/{m.epochs}]({m.epoch_step}/{m.epoch_steps}), loss: {m.loss:.4f}, "
        f"logits_loss: {m.logits_loss:.4f}, aux_loss: {m.aux_loss:.4f}, lr: {m.lr:.8f}, "
        f"epoch_time: {m.epoch_minutes_left:.1f}min, ppl: {perplexity(m.logits_loss):.2f}, "
        f"grad_norm: {m.grad_norm:.4f}, tokens/s: {m.tokens_per_second:.0f}, memory: {m.peak_memory_gib:.2f}GiB"
    )


def _spell_out(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, step and evaluation lines alike, with "nan" and "inf" as floats again."""
    records = []
    for line in Path(path).read_bytes().splitlines():
        record = _parse(line)
        if record is not None:
            records.append({key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in record.items()})
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a line torn by a crash."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsFile:
    """Appends records to metrics.jsonl, one JSON object a line, floats exact. Main process only.

    A full disk never stops training here: lines wait in memory for the next write, and `sync`, which a save calls
    first, raises SaveFailed while they cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()  # sync() runs in the checkpoint writer's thread

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({key: _spell_out(value) for key, value in record.items()}) + "\n"
        with self._lock:
            first_failure = not self._waiting
            self._waiting.append(line.encode())
            error = self._flush()
        if error and first_failure:
            print(f"Warning: {self.path}: {error}; its lines wait in memory", file=sys.stderr)

    def _flush(self) -> OSError | None:
        """Append what waits, all or nothing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # should someone remove it
            with open(self.path, "ab", buffering=0) as file:
                data, size = b"".join(self._waiting), file.tell()
                try:
                    if file.write(data) != len(data):
                        raise OSError("the disk took a part only")
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error
        self._waiting.clear()
        return None

    def sync(self) -> None:
        """Return when every line written so far is on the disk. Raises SaveFailed."""
        with self._lock:
            error = self._flush() if self._waiting else None
        try:
            if error:
                raise error
            if self.path.exists():
                with open(self.path, "ab") as file:  # Windows syncs only what may be written
                    os.fsync(file.fileno())
        except OSError as failure:
            raise SaveFailed(f"could not write {self.path}: {failure.strerror or failure}") from failure

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps and torn ones, atomically. For a resume at `step`."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [
            line for line in lines if line.endswith(b"\n") and (r := _parse(line)) is not None and r["step"] <= step
        ]
        if len(kept) < len(lines):
            write_file_atomic(self.path, b"".join(kept))


class Console:
    """Prints lines, above a progress bar where stderr is a terminal; silent when not enabled (other ranks)."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self._bar: Any = None

    def start(self, total: int, done: int = 0) -> None:
        """Open a bar of `total` steps; the one before is closed."""
        self.close()
        if self.enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, leave=False)

    def advance(self) -> None:
        """Move the bar by a step."""
        if self._bar is not None:
            self._bar.update()

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class DivergenceWatch:
    """Warns once when the mean logged loss of the last `window` steps exceeds that of the `window` before by > 5 %."""

    RISE = 1.05

    def __init__(self, window: int = 200):
        self.window = window
        self.first_step: int | None = None
        self.points: deque[tuple[int, float]] = deque()  # (step, loss) of the last two windows, finite ones only
        self.warned = False

    def update(self, step: int, loss: float, lr: float, grad_norm: float, last_save: int | None = None) -> str | None:
        """Take a logged step; returns the warning the first time the rule is met."""
        self.first_step = step if self.first_step is None else self.first_step
        if math.isfinite(loss):
            self.points.append((step, loss))
        while self.points and self.points[0][0] <= step - 2 * self.window:
            self.points.popleft()
        recent = [value for at, value in self.points if at > step - self.window]
        before = [value for at, value in self.points if at <= step - self.window]
        if self.warned or not recent or not before or step - self.first_step < 2 * self.window - 1:
            return None
        mean, mean_before = sum(recent) / len(recent), sum(before) / len(before)
        if mean <= self.RISE * mean_before:
            return None
        self.warned = True
        save = "no save yet" if last_save is None else f"last good save: step {last_save}"
        return (
            f"Warning: the loss is rising: mean {mean:.4f} over the last {self.window} steps, {mean_before:.4f} over "
            f"the {self.window} before (step {step}, lr {lr:.8f}, grad_norm {grad_norm:.4f}; {save}). "
            "A lower --learning_rate or --grad_clip may help."
        )

    def state(self) -> dict[str, Any]:
        """For the resume state (JSON)."""
        return {"first_step": self.first_step, "points": [list(point) for point in self.points], "warned": self.warned}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.first_step, self.warned = state["first_step"], state["warned"]
        self.points = deque((step, loss) for step, loss in state["points"])
