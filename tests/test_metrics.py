"""The figures of a step: the log line, and metrics.jsonl, which is exact and survives crashes and full disks."""

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from errors import SaveFailed
from training.during import metrics as mt
from training.during.reporting import say_first_step
from training.saving.metrics_file import MetricsFile, read_metrics

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
    epoch_seconds_left=740.4,
    last_step=10_000,
    run_seconds_left=1500.0,
    peak_memory_gib=1.239,
)


def test_the_log_line_is_minimind_s_with_our_figures_after_it():
    assert mt.format_log_line(STEP) == (
        "Epoch:[1/2](100/5000), loss: 7.8234, logits_loss: 7.8000, aux_loss: 0.0234, lr: 0.00049876, "
        "epoch_time: 12.3min, ppl: 2440.60, grad_norm: 1.5000, tokens/s: 24568, memory: 1.24GiB, "
        "step: 100/10000, left: 25 min"
    )


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (800.0, "inf")])
def test_perplexity_beyond_a_float_does_not_raise(loss, shown):
    assert str(mt.perplexity(loss)) == shown


def test_a_rate_that_was_not_measured_yet_is_shown_as_such():
    unknown = {"tokens_per_second": math.nan, "epoch_seconds_left": math.nan, "run_seconds_left": math.nan}
    line = mt.format_log_line(dataclasses.replace(STEP, **unknown))
    assert "epoch_time: ?min" in line and "tokens/s: ?" in line and line.endswith("step: 100/10000")


def test_the_last_line_says_nothing_of_time_left():
    assert mt.format_log_line(dataclasses.replace(STEP, step=10_000)).endswith("step: 10000/10000")


FIRST_STEPS = [
    (4.0, True, []),
    (40.0, False, ["First step: 40 s"]),
    (95.0, True, ["First step: 2 min, compiling included"]),
]


@pytest.mark.parametrize(("seconds", "compiled", "said"), FIRST_STEPS)
def test_a_long_first_step_is_said_once(seconds, compiled, said):
    lines = []
    run = SimpleNamespace(
        throughput=SimpleNamespace(first_step_seconds=seconds),
        choices=SimpleNamespace(compile=compiled),
        console=SimpleNamespace(print=lines.append),
    )
    say_first_step(run)
    say_first_step(run)
    assert lines == said


def test_a_line_has_the_documented_keys_and_exact_values(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    record = {**STEP.record(), "loss": 0.1 + 0.2, "grad_norm": float("inf"), "aux_loss": float("nan")}
    file.write(record)
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert " ".join(strict) == (
        "step epoch loss logits_loss aux_loss lr grad_norm rows_seen tokens_seen tokens_per_second elapsed_seconds "
        "skipped_steps"
    )
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert strict["grad_norm"] is None  # a column of numbers and nulls stays one of numbers
    assert read["loss"] == 0.1 + 0.2 and math.isnan(read["grad_norm"]) and math.isnan(read["aux_loss"])


def test_a_resume_drops_later_and_torn_lines_and_keeps_the_rest_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 10, 20, 30):
        file.write({"step": step, "loss": step / 3})
        file.write({"step": step, "val_loss": 1.5, "val_ppl": 4.48, "val_bits_per_byte": 0.9})
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    with open(path, "ab") as torn:
        torn.write(b'{"step": 5, "lo')
    file.truncate_after(10)
    assert path.read_bytes() == kept
    inode = path.stat().st_ino
    file.truncate_after(10)
    assert path.stat().st_ino == inode
    file.write({"step": 11})
    assert [record["step"] for record in read_metrics(path)] == [1, 10, 11]
    MetricsFile(tmp_path / "absent").truncate_after(3)


def test_a_full_disk_keeps_lines_in_memory_fails_the_sync_and_loses_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.write_text("a file where the folder should be: nothing can be written")
    file = MetricsFile(path)
    for step in (1, 2):
        file.write({"step": step})
    assert capsys.readouterr().err.count("Warning") == 1
    with pytest.raises(SaveFailed, match="File exists"):
        file.sync()
    path.parent.unlink()  # the folder is made anew, too, if someone removes it
    file.sync()
    file.write({"step": 3})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveFailed, match="No space left"):
        file.sync()


PARTLY_FULL = """
import resource, sys
from training.saving.metrics_file import MetricsFile, read_metrics
file = MetricsFile(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 200))
for step in range(10):
    file.write({"step": step, "loss": 1 / 3})
print(len(read_metrics(sys.argv[1])), open(sys.argv[1], "rb").read().endswith(b"}\\n"))
"""


def test_a_line_cut_by_a_full_disk_is_taken_back(tmp_path):
    pytest.importorskip("resource", reason="needs RLIMIT_FSIZE")
    command = [sys.executable, "-c", PARTLY_FULL, str(tmp_path / "m.jsonl")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["2", "True"], result.stdout + result.stderr
    assert result.stderr.count("Warning") == 1 and "Traceback" not in result.stderr


def test_an_evaluation_goes_into_the_line_of_its_step(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"step": 1, "loss": 2.0})
    file.write({"step": 2, "skipped_rows": [4, 5]})
    file.write({"step": 2, "loss": 1.5})
    file.sync()
    file.write({"step": 2, "val_loss": 1.25})
    file.write({"step": 3, "val_loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "skipped_rows": [4, 5], "loss": 1.5, "val_loss": 1.25},
        {"step": 3, "val_loss": 1.0},
    ]


def test_a_line_that_grows_on_a_full_disk_waits_whole(tmp_path):
    file = MetricsFile(tmp_path / "none" / "m.jsonl")
    file.write({"step": 1, "loss": 2.0})
    (tmp_path / "none").rename(tmp_path / "some")
    (tmp_path / "none").write_text("a file where the folder should be")
    file.write({"step": 1, "val_loss": 1.0})
    file.write({"step": 2, "loss": 1.5})
    file.write({"step": 2, "val_loss": 0.5})
    (tmp_path / "none").unlink()
    (tmp_path / "some").rename(tmp_path / "none")
    file.sync()
    assert read_metrics(file.path) == [
        {"step": 1, "loss": 2.0, "val_loss": 1.0},
        {"step": 2, "loss": 1.5, "val_loss": 0.5},
    ]


def test_what_the_first_releases_wrote_is_still_read(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 2.0, "grad_norm": "inf"}\n{"step": 1, "val_loss": "nan"}\n')
    step, evaluation = read_metrics(path)
    assert step == {"step": 1, "loss": 2.0, "grad_norm": math.inf}
    assert evaluation["step"] == 1 and math.isnan(evaluation["val_loss"])
