"""What has become of the model: texts it writes and, for the bundled sample, how near it is to the lowest loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from dataset.lm_dataset import PretrainDataset
from model.sampling import sample_text
from training.compiling import uncompiled
from training.config import SAMPLE_FOLDER
from training.during.run import Run
from training.parallel import bare


def show_results(run: Run) -> None:
    """After the last step, on the main process's screen."""
    is_whole_sample = run.config.uses_sample and not run.config.val_path and not run.config.eval_rows
    if is_whole_sample and run.data.validation and not math.isnan(run.val_loss):
        run.console.print(floor_report(SAMPLE_FOLDER, run.data.validation, run.val_loss))
    for number, text in enumerate(sample_texts(run), start=1):
        run.console.print(f"--- sample {number} ---\n{text}")


def sample_texts(run: Run) -> list[str]:
    """A few texts by the model as it is now, drawn without touching the training's random numbers."""
    if not run.config.samples:
        return []
    model, tokenizer, seed = bare(run.model), run.data.tokenizer, run.config.seed
    with uncompiled():  # every length of text would be compiled anew
        return [
            sample_text(model, tokenizer, "", max_new_tokens=120, temperature=0.8, top_p=0.9, seed=seed + index)
            for index in range(run.config.samples)
        ]


def unigram_entropy(dataset: PretrainDataset, chunk_rows: int = 256) -> float:
    """Nats per target of the best model that knows only how often each token occurs in `dataset`."""
    counts = np.zeros(0, dtype=np.int64)
    for first in range(0, len(dataset), chunk_rows):
        targets = dataset.batch(list(range(first, min(first + chunk_rows, len(dataset))))).targets.numpy()
        more = np.bincount(targets[targets >= 0])
        counts = np.pad(counts, (0, max(0, len(more) - len(counts))))
        counts[: len(more)] += more
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def floor_report(sample_folder: Path, dataset: PretrainDataset, val_loss: float) -> str:
    """How near `val_loss` is to the bundled sample's floor: its exact entropy, the lowest loss in expectation."""
    facts = json.loads((sample_folder / "sample.json").read_text(encoding="utf-8"))
    floor = facts["val"]["nats"] / int(dataset.row_targets.sum())
    unigram = unigram_entropy(dataset)
    closed = (unigram - val_loss) / (unigram - floor)
    return (
        f"val_loss {val_loss:.4f} = floor {floor:.4f} + {val_loss - floor:.4f} nats per token; "
        f"{100 * closed:.1f} % of the way from the unigram entropy {unigram:.4f} to the floor"
    )
