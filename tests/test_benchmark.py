"""The commands that measure speed: they run, and what they print is what was measured."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
import torch

from runs import ROOT, environment, spawn
from scripts import benchmark
from scripts.plain_baseline import PlainModel, Shape
from scripts.time_to_loss import Outcome

SCRIPT = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]


def entry(**more: object) -> dict:
    shares = dict.fromkeys(benchmark.PARTS, 0.1)
    common = {
        "label": "x",
        "tokens_per_second": 10.0,
        "tokens_per_cpu_second": 10.0,
        "datasheet": None,
        "shares": shares,
    }
    return {**common, "ceiling": 1e9, "peak_memory_gib": 1.0, "first_step_seconds": 1.0, **more}


def test_the_quick_benchmark_prints_a_row_for_the_baseline_and_one_for_the_trainer():
    words = ["--quick", "--rows_only", "--steps", "1", "--warmup", "1", "--num_hidden_layers", "1"]
    lines = [line for line in spawn([*SCRIPT, *words]).splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].split("(")[0].strip() for line in lines] == ["plain baseline", "this trainer"]
    assert all(line.count("|") == len(benchmark.COLUMNS) + 2 for line in lines)
    assert "1.00 x" in lines[0]


def test_ratio_and_mfu_are_medians_over_the_turns():
    plain = [entry(tokens_per_second=rate) for rate in (1.0, 2.0, 4.0)]
    ours = [entry(tokens_per_second=rate, flops_per_token=1e7) for rate in (10.0, 10.0, 16.0)]  # ratios 10, 5, 4
    cells = dict(zip(benchmark.COLUMNS, benchmark.figures(ours, plain, 1e7), strict=True))
    assert (cells["useful tokens/s"], cells["x plain"], cells["useful MFU"]) == ("10", "5.00 x", "10.0%")
    assert cells["data"] == "10.0%"
    assert cells["one save"] == ""  # not measured
    options = argparse.Namespace(rows_only=False, label="")
    assert benchmark.table({"eager": ours, "plain": plain}, ["plain", "eager"], options).count("\n") == 3


def test_unknown_devices_have_no_datasheet_figure_and_the_most_exact_name_wins(monkeypatch):
    assert benchmark.datasheet(torch.device("cpu")) is None
    for name, expected in (
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("T4", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert benchmark.datasheet(torch.device("cuda")) == expected


def test_the_plain_baseline_is_the_trainers_architecture_with_its_parameter_names():
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    torch.manual_seed(0)
    shape = Shape(hidden=32, layers=2, heads=4, kv_heads=2, vocab=50)
    ours = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    )
    plain = PlainModel(shape)
    ours.load_state_dict(plain.state_dict(), strict=True)
    input_ids = torch.randint(50, (2, 12))
    assert plain(input_ids, input_ids).item() == pytest.approx(ours(input_ids, labels=input_ids).loss.item(), abs=1e-5)


def test_steps_to_a_loss_lie_between_the_evaluations_around_it():
    outcome = Outcome({10: 4.0, 20: 3.0, 30: 2.0}, 1.0, 40.0, 5.0)
    assert outcome.steps_to(2.5) == 25
    assert outcome.steps_to(5.0) == 10
    assert outcome.steps_to(1.9) is None


@pytest.mark.slow
def test_the_gpu_check_runs_all_its_steps_on_a_cpu_in_toy_sizes():
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), "--cpu"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert sum("this trainer" in row for row in rows) == 6
    assert "0 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("race", ["optimizers", "baseline"])
def test_the_races_name_a_time_ratio_or_say_that_there_is_none(race):
    sizes = "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --num_key_value_heads 1 --max_seq_len 64"
    words = [*sizes.split(), "--batch_size", "2", "--use_compile", "0", "--eval_rows", "8"]
    options = ["--minutes", "0.2", "--rates", "0.003", "--seeds", "1"]
    command = [sys.executable, str(ROOT / "scripts" / "time_to_loss.py"), race, *options, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode in (0, 1), done.stderr
    ends = ("of AdamW's time", "the baseline's loss", "of the time")
    assert any(end in done.stdout for end in ends)
