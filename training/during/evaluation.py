"""Evaluation: the cross-entropy of held-out documents, and what it is measured against."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from errors import StopRequested
from trainer_utils import losses_of, to_device
from training.distributed import World
from training.during.metrics import perplexity
from training.during.stopping import StopSignal


@dataclass(frozen=True)
class Evaluation:
    """Held-out quality. `val_loss` is nats per token (eos included); bits per byte allow for any tokenizer."""

    val_loss: float
    val_ppl: float
    val_bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Any,
    batch_size: int,
    world: World,
    precision: AbstractContextManager,
    stop: StopSignal,
) -> Evaluation:
    """Mean cross-entropy over every row of `dataset`. All ranks must call: micro-batch m goes to rank m mod ranks.

    Draws no random numbers and leaves the model in the mode it was in. Raises StopRequested when a signal came.
    """
    was_training = model.training
    model.eval()
    nats: list[Tensor] = []  # of each batch, left on the device: reading one would make the host wait
    share = range(0, len(dataset), batch_size * world.size)
    one = torch.ones((), device=world.device)
    most_documents = dataset.most_documents(batch_size)
    try:
        for first in share:
            begin = first + world.rank * batch_size
            rows = [row if row < len(dataset) else -1 for row in range(begin, begin + batch_size)]
            batch = to_device(dataset.__getitems__(rows), world.device, most_documents)
            with precision:  # divided by one: means of means would weigh short rows wrongly
                out = losses_of(model, batch, one)
            nats.append(out.logits_loss)
            if stop.agreed(world)[0]:
                raise StopRequested
    finally:
        model.train(was_training)
    total = world.sum([sum(torch.stack(nats).tolist())])[0]
    loss = total / max(1, int(dataset.row_targets.sum()))
    return Evaluation(loss, perplexity(loss), total / math.log(2) / max(1, int(dataset.row_bytes.sum())))


def unigram_entropy(dataset: Any, chunk_rows: int = 256) -> float:
    """Nats per target of the best model that knows only how often each token occurs in `dataset`."""
    counts = np.zeros(0, dtype=np.int64)
    for first in range(0, len(dataset), chunk_rows):
        targets = dataset.__getitems__(list(range(first, min(first + chunk_rows, len(dataset))))).targets.numpy()
        more = np.bincount(targets[targets >= 0])
        counts = np.pad(counts, (0, max(0, len(more) - len(counts))))
        counts[: len(more)] += more
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def floor_report(sample_folder: Path, dataset: Any, val_loss: float) -> str:
    """How near `val_loss` is to the bundled sample's floor: its exact entropy, the lowest loss in expectation."""
    facts = json.loads((sample_folder / "sample.json").read_text(encoding="utf-8"))
    floor = facts["val"]["nats"] / int(dataset.row_targets.sum())
    unigram = unigram_entropy(dataset)
    closed = (unigram - val_loss) / (unigram - floor)
    return (
        f"val_loss {val_loss:.4f} = floor {floor:.4f} + {val_loss - floor:.4f} nats per token; "
        f"{100 * closed:.1f} % of the way from the unigram entropy {unigram:.4f} to the floor"
    )
