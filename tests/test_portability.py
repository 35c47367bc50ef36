"""What other systems lack is not missed, loader processes may start afresh, and a normal run prints no warning."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from dataset.lm_dataset import MISSING_ROW, Batch, PretrainDataset, SkipBatchSampler, collate
from dataset.packing import RowOrder
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import build_or_open
from runs import ROOT, environment, replaced, run_folder

# Windows has no resource module, no sysconf and fewer signals; macOS no /proc. Neither has NCCL.
ELSEWHERE = """
import os, pathlib, signal, sys
import train_pretrain  # with what psutil, say, imports where it runs
sys.modules["resource"] = None
del os.sysconf
for name in ("SIGUSR1", "SIGKILL"):
    delattr(signal, name)
read_text = pathlib.Path.read_text
def no_linux(self, *more, **options):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file", str(self))
    return read_text(self, *more, **options)
pathlib.Path.read_text = no_linux
import torch.distributed
torch.distributed.is_nccl_available = lambda: False
"""


@pytest.fixture
def dataset(corpus, tmp_path) -> PretrainDataset:
    tokenizer = TextTokenizer.load(ROOT / "model")
    return PretrainDataset(build_or_open(str(corpus), tokenizer, cache_dir=tmp_path / "c", progress=False), 64)


def test_loader_processes_that_start_afresh_give_the_same_batches(dataset):
    sampler = SkipBatchSampler(RowOrder(len(dataset), 1, 0), global_batch_size=40, batch_size=16)
    ours = [dataset.__getitems__(rows) for rows in sampler]
    loader = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate, num_workers=1, multiprocessing_context="spawn"
    )
    theirs = list(loader)
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert isinstance(other, Batch)
        for name in ("input_ids", "targets", "position_ids", "segment_ids"):
            assert torch.equal(getattr(mine, name), getattr(other, name))
    assert any(MISSING_ROW in rows for rows in sampler)


def test_a_normal_run_under_warnings_as_errors_prints_nothing_on_stderr_but_the_bar(arguments, tmp_path):
    """With a loader process, evaluation and samples."""
    (tmp_path / "v.jsonl").write_text('{"text": "two red birds"}\n')
    words = replaced(arguments, val_path=tmp_path / "v.jsonl", num_workers=1, samples=1)
    done = run_python(["-W", "error", str(ROOT / "train_pretrain.py"), *words])
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr + done.stdout
    rest = [text for text in done.stderr.replace("\r", "\n").splitlines() if text.strip()]
    assert all(text.startswith("tokenising:") for text in rest)


def test_a_run_misses_nothing_that_only_linux_has(arguments, tmp_path):
    script = f"{ELSEWHERE}\nsys.exit(train_pretrain.main({arguments!r}))"
    done = run_python(["-c", script])
    assert done.returncode == 0, done.stderr
    assert json.loads((run_folder(arguments) / "run.json").read_text())["status"] == "finished"


def test_a_run_works_from_any_folder_and_on_a_console_that_knows_only_ascii(arguments, tmp_path):
    """Relative paths start at the current folder; the default tokenizer is the repository's."""
    (tmp_path / "here").mkdir()
    words = replaced(
        arguments, data_path="../corpus.jsonl", save_dir="runs", cache_dir="cache", save_weight="小猫", samples=1
    )
    done = run_python([str(ROOT / "train_pretrain.py"), *words], cwd=tmp_path / "here", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "runs" / "小猫_32" / "小猫_32.pth").is_file()
    assert "Weights: runs/\\u5c0f\\u732b_32/" in done.stdout


def run_python(words: list[str], cwd=ROOT, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, env=environment(**changes), cwd=cwd
    )
