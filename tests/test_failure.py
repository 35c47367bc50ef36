"""When something breaks: it ends quickly with its real cause, and the last good checkpoint is never at risk."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import small_run, write_corpus

from dataset.packing import RowOrder
from hooks import at_call, at_event, spoil_loss, val_losses
from runs import (
    ROOT,
    environment,
    final_state,
    final_weights,
    finish,
    launch,
    logged,
    replaced,
    run_folder,
    same_bits,
    train,
    without,
)
from storage import files
from training.distributed import meet
from training.during import evaluation
from training.during.divergence import DivergenceWatch
from training.during.evaluation import Evaluation
from training.saving import weights
from training.saving.checkpoint import find_checkpoints, verify_checkpoint
from training.saving.metrics_file import read_metrics


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """An undisturbed run: its arguments and final weights."""
    folder = tmp_path_factory.mktemp("whole")
    words = small_run(folder, write_corpus(folder / "corpus.jsonl"))
    train(words)
    return {"arguments": words, "weights": final_weights(words)}


@pytest.fixture
def words(whole, tmp_path) -> list[str]:
    return replaced(whole["arguments"], save_dir=tmp_path / "runs")


def record(words: list[str]) -> dict[str, Any]:
    return json.loads((run_folder(words) / "run.json").read_text())


def saves(words: list[str]) -> dict[int, Path]:
    return dict(find_checkpoints(run_folder(words) / "resume"))


# --- numbers that are none ---


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_step_is_skipped_and_recorded_with_its_rows(words, monkeypatch, capsys, value):
    position = {}

    def spoil(event, run):
        step = run.state.progress.step + 1
        if event == "gradients":
            position[step] = run.state.progress.rows_seen
            if step in (5, 6):
                next(run.model.parameters()).grad[0, 0] = value

    train(words, listener=spoil)
    lines = [line for line in read_metrics(run_folder(words) / "metrics.jsonl") if "skipped_rows" in line]
    assert [line["step"] for line in lines] == [5, 6]
    order = RowOrder(52, 42, 0)
    assert [line["skipped_rows"] for line in lines] == [order[position[step] :][:4].tolist() for step in (5, 6)]
    assert logged(words, "skipped_steps")[13] == 2
    assert final_state(words)["progress"]["skipped_steps"] == 2
    assert "Step 5: gradient is not finite; update skipped" in capsys.readouterr().out
    assert all(bool(tensor.isfinite().all()) for tensor in final_weights(words).values())
    assert record(words)["status"] == "finished"


def test_ten_non_finite_steps_in_a_row_end_the_run_naming_the_step_as_invalid(words, tmp_path):
    finish(launch(words, "--epochs", 3, hooks=[spoil_loss(list(range(6, 30)))], log=tmp_path / "log"), expect=1)
    text = (tmp_path / "log").read_text()
    assert "Error: step 15: the gradient was not finite 10 steps in a row" in text
    assert "Traceback" not in text
    assert record(words)["status"] == "invalid"
    newest = saves(words)
    assert all(verify_checkpoint(folder) == [] for folder in newest.values())
    assert all(bool(tensor.isfinite().all()) for tensor in final_weights(words).values())


def test_nan_in_one_rank_s_loss_skips_the_step_on_both(words):
    words = without(replaced(words, batch_size=1, global_batch_size=4), "accumulation_steps")
    finish(launch(words, ranks=2, hooks={1: [spoil_loss([4])]}))
    lines = [line for line in read_metrics(run_folder(words) / "metrics.jsonl") if "skipped_rows" in line]
    assert [line["step"] for line in lines] == [4]
    assert record(words)["status"] == "finished"


@pytest.mark.parametrize("place", ["parameter", "optimizer"])
def test_a_state_that_holds_nan_is_never_saved_over_a_good_one(words, monkeypatch, capsys, place):
    def spoil(event, run):
        state = run.state
        if event == "step" and state.progress.step == 5:
            parameter = next(iter(state.model.parameters()))
            target = parameter if place == "parameter" else state.optimizers[0].state[parameter]["exp_avg"]
            target.data[0, 0] = math.nan

    train(replaced(words, save_interval=1), expect=1, listener=spoil)
    assert "step 5: " in (error := capsys.readouterr().err)
    assert "not saved" in error
    assert record(words)["status"] == "invalid"
    assert list(saves(words)) == [3, 4]
    assert json.loads((run_folder(words) / "pretrain_32.json").read_text())["step"] == 4


def test_a_rising_loss_is_warned_of_once_in_the_log(words, monkeypatch, capsys):
    def watch_four_steps(event, run):
        if event == "begun":
            run.divergence = DivergenceWatch(window=4)

    train(words, "--stop_after", 4)
    wild = replaced(words, learning_rate=3.0, lr_schedule="constant", epochs=2)
    train(wild, "--from_resume", 1, "--grad_clip", 0, listener=watch_four_steps)
    out = capsys.readouterr().out
    assert out.count("Warning: the loss is rising") == 1
    line = next(line for line in out.splitlines() if "the loss is rising" in line)
    assert "lr 3.00000000, grad_norm" in line
    assert "last good checkpoint: step" in line


# --- damaged saves ---


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def empty(folder: Path) -> None:
    (folder / "state.json").write_bytes(b"")


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


HARMS = {
    flip_a_bit: "model.safetensors is damaged: its SHA-256 differs",
    truncate: "optimizer.safetensors has",
    empty: "state.json has 0 bytes",
    remove_manifest: "has no manifest.json: it is incomplete",
}


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_damaged_save_is_named_and_the_good_one_before_it_is_taken(words, whole, capsys, harm):
    train(words, "--stop_after", 6)
    harm(saves(words)[6])
    capsys.readouterr()
    train(words, "--from_resume", 1)
    shown = capsys.readouterr()
    assert HARMS[harm] in shown.err
    assert "set aside as damaged-step_00000006" in shown.err
    assert "Resuming" in shown.out
    assert "step_00000004" in shown.out
    assert same_bits(final_weights(words), whole["weights"])
    assert sorted(logged(words)) == list(range(1, 14))


def test_when_no_save_is_whole_it_stops_naming_each_and_never_starts_afresh(words, capsys):
    train(words, "--stop_after", 6)
    for harm, folder in zip((flip_a_bit, remove_manifest), saves(words).values(), strict=True):
        harm(folder)
    before = {path: path.stat().st_mtime_ns for path in run_folder(words).rglob("*") if path.name != ".lock"}
    train(words, "--from_resume", 1, expect=2)
    error = capsys.readouterr().err
    assert "no checkpoint in" in error
    assert "step_00000004" in error
    assert "step_00000006" in error
    assert "Traceback" not in error
    assert before == {path: path.stat().st_mtime_ns for path in run_folder(words).rglob("*") if path.name != ".lock"}


def test_weights_that_would_run_code_and_weights_of_another_architecture_are_refused(words, tmp_path, capsys):
    import pickle

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'was_here'}",)

    bad = tmp_path / "bad.pth"
    with open(bad, "wb") as file:
        pickle.dump({"weight": Command()}, file)
    train(words, "--from_weight", bad, "--tokenizer_path", "model", expect=2)
    assert f"{bad} is refused" in capsys.readouterr().err
    assert not (tmp_path / "was_here").exists()
    train(words, "--stop_after", 2)
    source = run_folder(words) / "pretrain_32.pth"
    train(words, "--save_weight", "deeper", "--num_hidden_layers", 3, "--from_weight", source, expect=2)
    assert f"--from_weight {source}: another model; it was made with --num_hidden_layers 2" in capsys.readouterr().err


# --- disks ---


def full_disk_during(monkeypatch, broken: range, part: str = "model.safetensors") -> None:
    """Saves (counted from 1 when their state is begun) in `broken` find the disk full for files named so."""
    count = 0
    write_checkpoint, write, copy = files_of_saver().write_checkpoint, files.HashedFile.write, weights.link_or_copy

    def counted(*arguments):
        nonlocal count
        count += 1
        return write_checkpoint(*arguments)

    def full(self, data):
        if count in broken and part in self.file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    def full_for_copies(source, target):  # a second name of a file writes no bytes
        if count in broken and part in target.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    monkeypatch.setattr(weights, "link_or_copy", full_for_copies)
    monkeypatch.setattr(files_of_saver(), "write_checkpoint", counted)
    monkeypatch.setattr(files.HashedFile, "write", full)


def files_of_saver() -> Any:
    from training.saving import saver

    return saver


def test_a_failed_periodic_save_is_a_warning_and_the_next_one_tries_again(words, whole, monkeypatch, capsys):
    full_disk_during(monkeypatch, range(2, 4))
    train(words)
    error = capsys.readouterr().err
    assert error.count("Warning: could not save step") == 2
    assert "No space left on device; earlier checkpoints are untouched. The next save tries again." in error
    assert [save["step"] for save in record(words)["saves"]] == [2, 8, 10, 12, 13]
    assert same_bits(final_weights(words), whole["weights"])


def test_a_failed_final_save_is_tried_once_more_and_then_ends_non_zero_with_the_good_one_intact(
    words, whole, monkeypatch, capsys
):
    full_disk_during(monkeypatch, range(7, 9))  # the save of step 13 and its repetition
    train(words, expect=1)
    error = capsys.readouterr().err
    assert "Error: could not save step 13" in error
    assert "Traceback" not in error
    assert record(words)["status"] == "failed"
    assert max(saves(words)) == 12
    assert all(verify_checkpoint(folder) == [] for folder in saves(words).values())
    monkeypatch.undo()
    train(words, "--from_resume", 1)
    assert same_bits(final_weights(words), whole["weights"])


def test_a_disk_that_takes_no_more_fails_the_run_on_every_rank_and_keeps_the_good_save(words, tmp_path):
    words = without(replaced(words, batch_size=1, global_batch_size=4), "accumulation_steps")
    hook = at_call("training.saving.saver.write_checkpoint", 3, "limit 100000")
    finish(launch(words, ranks=2, hooks={0: [hook]}, log=tmp_path / "log"), expect=1)
    text = (tmp_path / "log").read_text()
    assert "File too large" in text
    assert "Traceback" not in text
    assert record(words)["status"] == "failed"
    assert list(saves(words)) == [2, 4]


def best_of(words: list[str]) -> tuple[float, int, float, int]:
    """(loss, step) of the best evaluation as the newest state has it, then as the card of the best weights has it."""
    progress = final_state(words)["progress"]
    card = json.loads((run_folder(words) / "pretrain_32_best.json").read_text())
    return progress["best_val_loss"], progress["best_step"], card["val_loss"], card["step"]


@pytest.mark.parametrize(
    ("broken", "part", "losses", "expected"),
    [
        # Saves at 2, 3, 4, 6, 8, 9, 10, 12, 13; evaluations at 3, 6, 9, 12, 13.
        (5, "model.safetensors", [9.0, 8.5, 8.0, 8.7, 8.8], (8.0, 9)),  # of step 8; the next one is a best one
        (9, "model.safetensors", [9.0, 8.5, 8.2, 8.1, 8.0], (8.0, 13)),  # of step 13, a best one itself
        (4, "model.safetensors", [9.0, 8.0, 8.5, 8.7, 8.8], (8.0, 6)),  # of step 6, whose best weights were written
        (4, "_best.pth", [9.0, 8.0, 8.5, 8.7, 8.8], (8.5, 9)),  # after that of step 6: its best weights were not
    ],
)
def test_a_save_that_fails_does_not_cost_the_best_one_its_figures(
    words, tmp_path, monkeypatch, broken, part, losses, expected
):
    coming = iter(losses)
    monkeypatch.setattr(evaluation, "evaluate_run", lambda run: Evaluation(next(coming), 1.0, 1.0))
    full_disk_during(monkeypatch, range(broken, broken + 1), part)
    train(words, "--val_path", write_corpus(tmp_path / "v.jsonl", documents=3), "--eval_interval", 3)
    assert best_of(words) == (*expected, *expected)


def test_ranks_agree_on_the_best_one_after_a_save_that_failed(words, tmp_path):
    """Rank 0 alone learns of the failure at step 4; at step 9 both must judge 8.5 by the 8.0 of step 6."""
    words = without(replaced(words, batch_size=1, global_batch_size=4), "accumulation_steps")
    figures = val_losses(9.0, 8.0, 8.5, 8.7, 8.8)
    hooks = {0: [figures, at_call("training.saving.saver.write_checkpoint", 3, "raise full")], 1: [figures]}
    val = write_corpus(tmp_path / "v.jsonl", documents=3)
    finish(launch(words, "--val_path", val, "--eval_interval", 3, ranks=2, hooks=hooks))
    assert best_of(words) == (8.0, 6, 8.0, 6)


def test_a_run_folder_removed_meanwhile_is_made_anew(words, whole):
    def remove(event, run):
        if event == "step" and run.state.progress.step == 5:
            run.saver.writer.wait()
            shutil.rmtree(run_folder(words))

    train(words, listener=remove)
    assert list(saves(words)) == [12, 13]
    assert same_bits(final_weights(words), whole["weights"])


# --- a rank that fails or dies, under torchrun ---


def torchrun(words: list[str], rank: int, call: list[Any], *options: str) -> list[str]:
    """The run on two ranks under torchrun, with an `at_call` on one of them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options]
    return [sys.executable, *launcher, str(ROOT / "tests" / "hooks.py"), str(rank), json.dumps(call), *words]


def two_ranks(words: list[str]) -> list[str]:
    return without(replaced(words, batch_size=1, global_batch_size=4), "accumulation_steps")


def test_ranks_that_start_again_on_the_same_store_never_see_what_an_earlier_start_left():
    store = dist.HashStore()
    store.set("hello/1", "of a rank that was killed")
    for start in range(3):
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(lambda rank: meet(store, rank, 3), range(3)))
        assert not any(part.check(["address"]) for part in parts)
        parts[0].set("address", str(start))
        assert [part.get("address") for part in parts] == [str(start).encode()] * 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_raises_ends_the_job_within_45_seconds_with_its_traceback_first(words, rank):
    words = two_ranks(words)
    call = ["gradients", 5, "raise the fan is on fire"]
    began = time.monotonic()
    done = subprocess.run(
        torchrun(words, rank, call), capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT
    )
    assert time.monotonic() - began < 45
    assert done.returncode != 0
    assert done.stderr.index("Rank") == done.stderr.index(f"Rank {rank} failed:")
    assert "the fan is on fire" in done.stderr[done.stderr.index("Rank") :][:2000]
    assert f"Rank {1 - rank} failed:" not in done.stderr  # it was only cut off
    if rank == 0:
        assert record(words)["status"] == "failed"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_torchrun_restarts_after_a_rank_was_killed_and_ends_with_the_right_weights(words, rank):
    words = two_ranks(words)
    finish(launch(words, "--save_weight", "whole", ranks=2))
    call = ["gradients", 8, "SIGKILL"]
    command = [*torchrun(words, rank, call, "--max-restarts", "3"), "--from_resume", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Resuming" in done.stdout
    assert same_bits(final_weights(words), final_weights(replaced(words, save_weight="whole")))
    assert record(words)["status"] == "finished"


def test_a_raise_without_ranks_is_a_traceback_a_status_and_exit_1(words, tmp_path):
    hook = at_event("gradients", 5, "raise the fan is on fire")
    finish(launch(words, hooks=[hook], log=tmp_path / "log"), expect=1)
    text = (tmp_path / "log").read_text()
    assert "ValueError: the fan is on fire" in text
    assert record(words)["status"] == "failed"
    assert max(saves(words)) == 4


def test_a_kill_leaves_no_lock_behind_even_with_loader_workers(words, whole):
    words = [*words, "--num_workers", "1"]
    hook = at_event("gradients", 5, "SIGKILL")
    finish(launch(words, hooks=[hook]), expect=-signal.SIGKILL)
    train(words, "--from_resume", 1)
    assert same_bits(final_weights(words), whole["weights"])


def test_the_parameters_saved_are_those_of_the_model_not_of_a_later_step(words):
    """The snapshot is taken before the loop goes on: a slow save does not see later updates."""
    hook = at_call("training.saving.saver.write_checkpoint", 1, "limit 100000000", pause=1.0)
    finish(launch(words, "--stop_after", 3, hooks=[hook]))
    finish(launch(words, "--save_weight", "quick", "--stop_after", 2))
    from safetensors.torch import load_file

    slow = load_file(saves(words)[2] / "model.safetensors")
    quick = load_file(saves(replaced(words, save_weight="quick"))[2] / "model.safetensors")
    assert same_bits(slow, quick)
    assert torch.is_tensor(next(iter(slow.values())))
