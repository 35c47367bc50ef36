"""The figures of a logged step, and the line that shows them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.words import duration


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
    epoch_steps: int  # steps of this epoch that the run will train
    epoch_seconds_left: float  # NaN while no step has been timed
    last_step: int  # of the run
    run_seconds_left: float  # NaN while no step has been timed
    peak_memory_gib: float

    def record(self) -> dict[str, float | int]:
        """The metrics.jsonl line: the fields up to skipped_steps, exact."""
        names = list(self.__dataclass_fields__)
        return {name: getattr(self, name) for name in names[: names.index("skipped_steps") + 1]}


def perplexity(loss: float) -> float:
    """e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf


def format_log_line(metrics: StepMetrics) -> str:
    """MiniMind's log line, then ppl (of the cross-entropy alone), grad_norm, tokens/s, memory and the whole run."""
    m = metrics
    timed = not math.isnan(m.tokens_per_second)
    minutes = f"{m.epoch_seconds_left / 60:.1f}" if timed else "?"
    return (
        f"Epoch:[{m.epoch}/{m.epochs}]({m.epoch_step}/{m.epoch_steps}), loss: {m.loss:.4f}, "
        f"logits_loss: {m.logits_loss:.4f}, aux_loss: {m.aux_loss:.4f}, lr: {m.lr:.8f}, "
        f"epoch_time: {minutes}min, ppl: {perplexity(m.logits_loss):.2f}, grad_norm: {m.grad_norm:.4f}, "
        f"tokens/s: {f'{m.tokens_per_second:.0f}' if timed else '?'}, memory: {m.peak_memory_gib:.2f}GiB, "
        f"step: {m.step}/{m.last_step}"
        + (f", left: {duration(m.run_seconds_left)}" if timed and m.step < m.last_step else "")
    )
