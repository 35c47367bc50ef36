"""The golden curve: losses of one small float32 run, kept as figures. No neutral switch may move them, nor any change
of code that does not mean to. `PYTHONPATH=. python tests/test_golden.py` prints the curve of the code as it stands.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import small_run, write_corpus

from runs import logged, replaced, train, without
from training.compiling import compiler_problem

# Float32 on one thread: other processors and libraries round otherwise, which grows over the steps but stays below.
TOLERANCE = 2e-4
STEPS = (1, 5, 10, 15, 20, 25, 30)
GOLDEN = {  # by use_moe
    0: [8.762409, 8.172546, 6.635881, 5.23175, 4.377063, 4.040719, 3.896606],
    1: [8.777685, 8.165548, 6.821527, 5.466349, 4.597585, 4.264602, 4.060539],
}
NEUTRAL: dict[str, dict[str, object]] = {
    "activation checkpointing": {"activation_checkpointing": 1},
    "a loader process": {"num_workers": 1},
    "another micro-batch": {"batch_size": 4},
    "a micro-batch that does not divide the step": {"batch_size": 3},
    "seldom logging": {"log_interval": 5},
    "saving and evaluating often": {"save_interval": 3, "eval_interval": 4},
    "the data verified": {"verify_data": 1},
}


def golden_run(folder: Path, **changes: object) -> list[float]:
    """logits_loss at STEPS."""
    corpus = write_corpus(folder / "golden.jsonl", documents=150, seed=1)
    words = without(small_run(folder, corpus), "epochs", "accumulation_steps")
    settings = {"hidden_size": 64, "global_batch_size": 4, "max_steps": 30, "warmup_steps": 5, "val_path": corpus}
    words = replaced(words, **settings | changes)
    train(words)
    found = logged(words, "logits_loss")
    return [found[step] for step in STEPS]


def differences(found: list[float], golden: list[float]) -> list[float]:
    return [abs(ours - theirs) for ours, theirs in zip(found, golden, strict=True)]


@pytest.mark.parametrize("moe", [0, 1])
def test_the_golden_curve_is_met(tmp_path, moe):
    assert max(differences(golden_run(tmp_path, use_moe=moe), GOLDEN[moe])) < TOLERANCE


@pytest.mark.parametrize("switch", list(NEUTRAL))
def test_neutral_switches_do_not_move_the_golden_curve(tmp_path, switch):
    assert max(differences(golden_run(tmp_path, **NEUTRAL[switch]), GOLDEN[0])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("moe", [0, 1])
def test_compiling_does_not_move_the_golden_curve(tmp_path, moe):
    if problem := compiler_problem(torch.device("cpu")):
        pytest.skip(problem)
    assert max(differences(golden_run(tmp_path, use_moe=moe, use_compile=1), GOLDEN[moe])) < TOLERANCE


if __name__ == "__main__":
    for moe in (0, 1):
        with tempfile.TemporaryDirectory() as name:
            curve = golden_run(Path(name), use_moe=moe)
        print(moe, [round(value, 6) for value in curve], file=sys.stderr)
