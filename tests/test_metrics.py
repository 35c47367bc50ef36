"""What a run says of its progress is exact, survives crashes and full disks, and stays quiet on other ranks."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from errors import SaveFailed
from training.during import metrics as mt

ROOT = Path(__file__).parent.parent
STEP = mt.StepMetrics(
    step=100,
    epoch=1,
    loss=7.8234,
    logits_loss=7.8,
    aux_loss=0.0234,
    lr=0.00049876,
    grad_norm=1.5,
    rows_seen=3200,
    tokens_seen=1_600_000,
    tokens_per_second=24567.8,
    elapsed_seconds=65.25,
    skipped_steps=0,
    epochs=2,
    epoch_step=100,
    epoch_steps=5000,
    epoch_minutes_left=12.34,
    peak_memory_gib=1.239,
)


def test_the_log_line_is_minimind_s_with_our_figures_after_it():
    assert mt.format_log_line(STEP) == (
        "Epoch:[1/2](100/5000), loss: 7.8234, logits_loss: 7.8000, aux_loss: 0.0234, lr: 0.00049876, "
        "epoch_time: 12.3min, ppl: 2440.60, grad_norm: 1.5000, tokens/s: 24568, memory: 1.24GiB"
    )


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (800.0, "inf")])
def test_perplexity_beyond_a_float_does_not_raise(loss, shown):
    assert str(mt.perplexity(loss)) == shown


def test_a_line_has_the_documented_keys_and_exact_values(tmp_path):
    file = mt.MetricsFile(tmp_path / "metrics.jsonl")
    record = {**STEP.record(), "loss": 0.1 + 0.2, "grad_norm": float("inf"), "aux_loss": float("nan")}
    file.write(record)
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert " ".join(strict) == (
        "step epoch loss logits_loss aux_loss lr grad_norm rows_seen tokens_seen tokens_per_second elapsed_seconds "
        "skipped_steps"
    )
    (read,) = mt.read_metrics(tmp_path / "metrics.jsonl")
    assert read["loss"] == 0.1 + 0.2 and read["grad_norm"] == math.inf and math.isnan(read["aux_loss"])


def test_a_resume_drops_later_and_torn_lines_and_keeps_the_rest_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = mt.MetricsFile(path)
    for step in (1, 10, 20, 30):
        file.write({"step": step, "loss": step / 3})
        file.write({"step": step, "val_loss": 1.5, "val_ppl": 4.48, "val_bits_per_byte": 0.9})
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    with open(path, "ab") as torn:
        torn.write(b'{"step": 5, "lo')
    file.truncate_after(10)
    assert path.read_bytes() == kept
    inode = path.stat().st_ino
    file.truncate_after(10)
    assert path.stat().st_ino == inode
    file.write({"step": 11})
    assert [record["step"] for record in mt.read_metrics(path)] == [1, 1, 10, 10, 11]
    mt.MetricsFile(tmp_path / "absent").truncate_after(3)


def test_a_full_disk_keeps_lines_in_memory_fails_the_sync_and_loses_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.write_text("a file where the folder should be: nothing can be written")
    file = mt.MetricsFile(path)
    for step in (1, 2):
        file.write({"step": step})
    assert capsys.readouterr().err.count("Warning") == 1
    with pytest.raises(SaveFailed, match="File exists"):
        file.sync()
    path.parent.unlink()  # the folder is made anew, too, if someone removes it
    file.sync()
    file.write({"step": 3})
    assert [record["step"] for record in mt.read_metrics(path)] == [1, 2, 3]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveFailed, match="No space left"):
        file.sync()


PARTLY_FULL = """
import resource, sys
from training.during import metrics as mt
file = mt.MetricsFile(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 200))
for step in range(10):
    file.write({"step": step, "loss": 1 / 3})
print(len(mt.read_metrics(sys.argv[1])), open(sys.argv[1], "rb").read().endswith(b"}\\n"))
"""


def test_a_line_cut_by_a_full_disk_is_taken_back(tmp_path):
    pytest.importorskip("resource", reason="needs RLIMIT_FSIZE")
    command = [sys.executable, "-c", PARTLY_FULL, str(tmp_path / "m.jsonl")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["2", "True"], result.stdout + result.stderr
    assert result.stderr.count("Warning") == 1 and "Traceback" not in result.stderr


def test_without_a_terminal_there_are_plain_lines_and_no_bar(capsys):
    console = mt.Console()
    console.start(total=3)
    console.print("hello")
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out == "hello\n" and shown.err == ""


def test_on_a_terminal_lines_go_to_stdout_and_the_bar_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = mt.Console()
    console.start(total=3, done=1)
    console.print("hello")
    console.advance()
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out.strip("\r\n") == "hello" and "1/3" in shown.err


def test_other_ranks_are_silent_even_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = mt.Console(enabled=False)
    console.start(total=3)
    console.print("hello")
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


def feed(watch, losses, every=10, first=0):
    """Feed a loss every few steps; returns the warnings with their steps."""
    warnings = []
    for index, loss in enumerate(losses):
        step = max(first + index * every, 1)
        text = watch.update(step, loss, lr=1e-3, grad_norm=2.5, last_save=300)
        warnings += [(step, text)] if text else []
    return warnings


def test_a_rise_of_more_than_5_percent_is_warned_of_once_with_the_figures():
    ((step, text),) = feed(mt.DivergenceWatch(), [2.0] * 41 + [2.5] * 60)
    assert 410 < step < 610
    assert all(part in text for part in ("2.0000", "lr 0.00100000", "grad_norm 2.5000", "last good save: step 300"))


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 41 + [2.09] * 60,  # 4.5 %
        [3.0 - 0.01 * index for index in range(100)],
        [2.0] * 20 + [4.0] * 20,  # fewer than 400 steps seen
        [2.0, float("nan")] * 60,
        [2.0] * 41 + [float("nan")] * 80,  # other means count those
    ],
)
def test_no_warning_without_a_rise_of_5_percent_over_two_full_windows(losses):
    assert feed(mt.DivergenceWatch(), losses) == []


def test_the_watch_resumed_says_what_the_uninterrupted_one_says():
    losses = [2.0] * 41 + [2.5] * 60
    whole = mt.DivergenceWatch()
    expected = feed(whole, losses)
    for cut in (0, 5, 45, 90):
        watch = mt.DivergenceWatch()
        warnings = feed(watch, losses[:cut])
        resumed = mt.DivergenceWatch()
        resumed.restore(json.loads(json.dumps(watch.state())))
        assert warnings + feed(resumed, losses[cut:], first=cut * 10) == expected, cut
        assert resumed.state() == whole.state()
