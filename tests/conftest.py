"""Shared fixtures: tiny corpora that tests make themselves, and the trainer called in-process."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on busy machines two threads are slower than one

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = Path(os.environ.get("MINIMIND_SHARED_DATA", ROOT.parent / "shared" / "data"))
WORDS = "the cat sat on a mat and saw two red birds 小 猫 在 河边 看 见 一 只 鸟 then it slept until noon".split()

torch.set_num_threads(1)


def write_corpus(path: Path, documents: int = 60, seed: int = 0, longest: int = 60) -> Path:
    """A .jsonl of `documents` random texts of 3 to `longest` words."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, longest))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


@pytest.fixture
def arguments(tmp_path: Path, corpus: Path) -> list[str]:
    return small_run(tmp_path, corpus)


def small_run(folder: Path, corpus: Path) -> list[str]:
    """A run of the smallest model on the tiny corpus: 52 rows of 64, 13 steps an epoch, well under a second."""
    settings = {
        "data_path": corpus,
        "save_dir": folder / "runs",
        "cache_dir": folder / "cache",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_seq_len": 64,
        "batch_size": 2,
        "accumulation_steps": 2,
        "epochs": 1,
        "learning_rate": 0.003,
        "log_interval": 1,
        "save_interval": 2,
        "device": "cpu",
        "dtype": "float32",
        "use_compile": 0,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def shared_data() -> Path:
    if not (SHARED_DATA / "train.jsonl").is_file():
        pytest.skip(f"the shared corpus is not at {SHARED_DATA} (set MINIMIND_SHARED_DATA)")
    return SHARED_DATA
