"""Evaluation: the cross-entropy of held-out documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dataset.lm_dataset import MISSING_ROW, PretrainDataset
from errors import StopRequested
from training.distributed import World
from training.during.metrics import perplexity
from training.during.run import Run
from training.parallel import bare


@dataclass(frozen=True)
class Evaluation:
    """Held-out quality. `val_loss` is nats per token (eos included); bits per byte allow for any tokenizer."""

    val_loss: float
    val_ppl: float
    val_bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: PretrainDataset,
    batch_size: int,
    world: World,
    precision: AbstractContextManager,
    stop_agreed: Callable[[], bool],
) -> Evaluation:
    """Mean cross-entropy over every row of `dataset`. All ranks must call: micro-batch m goes to rank m mod ranks.

    Draws no random numbers and leaves the model in the mode it was in. Raises StopRequested once `stop_agreed`, which
    all ranks ask after each micro-batch.
    """
    was_training = model.training
    model.eval()
    nats: list[Tensor] = []  # of each batch, left on the device: reading one would make the host wait
    one = torch.ones((), device=world.device)
    try:
        for first in range(0, len(dataset), batch_size * world.size):
            begin = first + world.rank * batch_size
            rows = [row if row < len(dataset) else MISSING_ROW for row in range(begin, begin + batch_size)]
            batch = dataset.batch(rows).to(world.device)
            with precision:  # divided by one: means of means would weigh short rows wrongly
                nats.append(model(**batch.inputs(), target_count=one).logits_loss)
            if stop_agreed():  # all ranks
                raise StopRequested
    finally:
        model.train(was_training)
    total = world.sum([sum(torch.stack(nats).tolist())])[0]  # all ranks
    loss = total / max(1, int(dataset.row_targets.sum()))
    return Evaluation(loss, perplexity(loss), total / math.log(2) / max(1, int(dataset.row_bytes.sum())))


def evaluate_run(run: Run) -> Evaluation:
    """The validation set's figures with the model as it is. All ranks must call."""
    assert run.data.validation is not None, "evaluation was asked for without validation texts"
    return evaluate(
        bare(run.model),
        run.data.validation,
        run.choices.batch_size,
        run.world,
        run.precision(),
        lambda: run.stop.agreed(run.world)[0],
    )


def evaluation_is_due(run: Run, ends_epoch: bool) -> bool:
    """After the last step, and every --eval_interval steps or at each epoch's end."""
    if run.data.validation is None:
        return False
    interval = run.config.eval_interval
    return run.is_finished or (run.state.progress.step % interval == 0 if interval else ends_epoch)


def evaluate_and_log(run: Run) -> bool:
    """Evaluate, log, and say whether this is the best so far. All ranks must call."""
    progress = run.state.progress
    run.notify("evaluating")
    result = evaluate_run(run)  # all ranks
    run.val_loss, progress.evaluated_step = result.val_loss, progress.step
    run.console.print(
        f"Step {progress.step}: val_loss: {result.val_loss:.4f}, val_ppl: {result.val_ppl:.2f}, "
        f"val_bits_per_byte: {result.val_bits_per_byte:.4f}"
    )
    figures = asdict(result)
    run.folder.log({"step": progress.step, **figures})
    run.tracker.log(figures, progress.step)
    with run.stop.saving():
        run.saver.settle()  # all ranks: the best score to beat is one that was saved
    best, _ = progress.best
    is_best = result.val_loss < (math.inf if best is None else best)  # NaN: no
    if is_best:
        progress.best = result.val_loss, progress.step
    run.notify("evaluated")
    return is_best
