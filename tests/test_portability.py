"""What other systems lack is not missed, and a normal run prints no warning."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_a_normal_run_under_warnings_as_errors_prints_nothing_on_stderr_but_the_bar(arguments, tmp_path):
    """With look-ahead, evaluation and samples."""
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
