"""Stop signals: served at once wherever they land, the last finished step is what stays, the resume is bit-equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_run, write_corpus

from errors import StopRequested
from hooks import at_call, at_event, set_value
from runs import (
    ROOT,
    command,
    count_steps,
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
from training.commands import program
from training.distributed import World
from training.during.stopping import StopSignal
from training.saving.checkpoint import find_checkpoints

CODES = {"SIGTERM": 143, "SIGUSR1": 138, "SIGINT": 130}
MICRO_BATCHES = 2  # of a step; `autocast` is entered once for each


def status_of(words: list[str]) -> str:
    return json.loads((run_folder(words) / "run.json").read_text())["status"]


def saved_step(words: list[str]) -> int:
    found = find_checkpoints(run_folder(words) / "resume")
    return found[-1][0] if found else 0


def micro_batch(step: int, index: int) -> int:
    """Number of the forward pass of micro-batch `index` (from 1) of a step."""
    return (step - 1) * MICRO_BATCHES + index


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """An uninterrupted run with dropout: its arguments, final weights and losses."""
    folder = tmp_path_factory.mktemp("whole")
    words = replaced(small_run(folder, write_corpus(folder / "corpus.jsonl")), dropout=0.1, save_interval=4)
    train(words)
    return {"arguments": words, "weights": final_weights(words), "loss": logged(words)}


@pytest.fixture
def words(whole, tmp_path) -> list[str]:
    return replaced(whole["arguments"], save_dir=tmp_path)


def assert_resume_is_bit_equal(words: list[str], whole: dict[str, Any]) -> None:
    train(words, "--from_resume", 1)
    assert same_bits(final_weights(words), whole["weights"])
    assert logged(words) == whole["loss"]
    assert status_of(words) == "finished"


@pytest.mark.parametrize("name", CODES)
def test_inside_a_window_the_last_finished_step_is_saved_and_the_resume_is_bit_equal(words, whole, tmp_path, name):
    hook = at_event("micro-batch", micro_batch(7, 1), name)
    finish(launch(words, hooks=[hook], log=tmp_path / "log"), expect=CODES[name])
    assert (saved_step(words), status_of(words)) == (6, "stopped")
    assert (
        f"Stopped at step 6. To go on: {program('python')} train_pretrain.py --save_dir"
        in (tmp_path / "log").read_text()
    )
    assert_resume_is_bit_equal(words, whole)


@pytest.mark.parametrize(
    "place",
    [at_event("micro-batch", 12, "SIGTERM"), at_event("gradients", 6, "SIGTERM")],
)
def test_a_signal_in_the_last_micro_batch_or_the_update_lets_the_step_finish_and_begins_no_other(words, whole, place):
    finish(launch(words, hooks=[place]), expect=143)
    assert saved_step(words) == 6
    assert_resume_is_bit_equal(words, whole)


@pytest.mark.parametrize("name", CODES)
def test_while_texts_are_tokenised_it_ends_at_once_and_leaves_nothing_half_done(words, whole, tmp_path, name):
    words = replaced(words, cache_dir=tmp_path / "cache")
    hook = at_call("dataset.cache_builder._encode", 1, name, pause=0.5)
    finish(launch(words, hooks=[hook]), expect=CODES[name])
    assert not list((tmp_path / "cache").glob("*/metadata.json"))
    assert saved_step(words) == 0
    assert_resume_is_bit_equal(words, whole)


@pytest.mark.parametrize(
    "place",
    [
        at_call("training.before.begin.fitting_batch_size", 1, "SIGTERM"),
        at_call("training.before.begin.start_tracker", 1, "SIGTERM"),
        at_event("micro-batch", 1, "SIGTERM"),
        at_event("gradients", 1, "SIGTERM"),
    ],
    ids=lambda hook: hook[1],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_before_the_first_new_step_is_finished_nothing_is_saved_and_nothing_lost(words, whole, place, resumed):
    if resumed:
        train(words, "--stop_after", 5)
    finish(launch(words, "--from_resume", 1, hooks=[place]), expect=143)
    assert saved_step(words) == 5 * resumed
    if (run_folder(words) / "run.json").exists():
        assert status_of(words) == "stopped"
    assert_resume_is_bit_equal(words, whole)


def test_right_after_the_first_step_that_step_is_saved(words, whole):
    finish(launch(words, hooks=[at_event("step", 1, "SIGTERM")]), expect=143)
    assert saved_step(words) == 1
    assert_resume_is_bit_equal(words, whole)


@pytest.mark.parametrize("call", [1, 3])  # the last one belongs to the end of the run
def test_a_signal_in_an_evaluation_ends_it_and_the_resume_makes_up_for_it(words, whole, tmp_path, call):
    val = write_corpus(tmp_path / "val.jsonl", documents=10, seed=3)
    words = [*words, "--val_path", str(val), "--eval_interval", "5"]
    finish(launch(words, "--save_weight", "w"))
    finish(launch(words, hooks=[at_event("evaluating", call, "SIGTERM")]), expect=143)
    assert saved_step(words) == (5 if call == 1 else 13)
    assert status_of(words) == "stopped"
    assert_resume_is_bit_equal(words, whole)
    uninterrupted = replaced(words, save_weight="w")
    assert logged(words, "val_loss") == logged(uninterrupted, "val_loss")
    assert len(logged(words, "val_loss")) == 3
    assert final_state(words)["progress"]["best_step"] == final_state(uninterrupted)["progress"]["best_step"]


def test_a_signal_while_a_save_runs_waits_for_it_and_saves_the_last_step_too(words, whole):
    finish(
        launch(words, hooks=[at_call("training.saving.saver.write_checkpoint", 1, "SIGTERM", pause=0.5)]), expect=143
    )
    steps = [step for step, _ in find_checkpoints(run_folder(words) / "resume")]
    assert steps[0] == 4
    assert steps[-1] >= 4
    assert_resume_is_bit_equal(words, whole)


def test_a_second_ctrl_c_stops_at_once_even_while_a_save_hangs(words, whole, tmp_path):
    hook = at_call("training.saving.saver.write_checkpoint", 2, "SIGINT SIGINT", pause=60)
    began = time.monotonic()
    finish(launch(words, hooks=[hook], log=tmp_path / "log"), expect=130)
    assert time.monotonic() - began < 40
    assert "second Ctrl-C" in (tmp_path / "log").read_text()
    assert saved_step(words) == 4
    assert_resume_is_bit_equal(words, whole)


def test_a_signal_to_the_whole_process_group_with_loader_workers_is_a_clean_stop(words, whole):
    words = [*words, "--num_workers", "2"]
    finish(launch(words, hooks=[at_event("micro-batch", micro_batch(5, 1), "group SIGTERM")]), expect=143)
    assert (saved_step(words), status_of(words)) == (4, "stopped")
    assert_resume_is_bit_equal(words, whole)


@pytest.mark.slow
def test_a_signal_while_the_model_compiles_is_served_at_once(words, whole, tmp_path):
    log = tmp_path / "log"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    (process,) = launch(replaced(words, use_compile=1), log=log, **cache)
    while process.exitcode is None and "Compiled: decoder blocks" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.05)
    time.sleep(2.0)
    assert count_steps(log) == 0  # the first step is being compiled
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    finish([process], expect=143)
    assert time.monotonic() - began < 11
    assert (saved_step(words), status_of(words)) == (0, "stopped")


def test_a_signal_after_the_last_step_lets_the_run_end_well(words, whole):
    finish(launch(words, hooks=[at_event("leaving", 1, "SIGTERM")]))
    assert status_of(words) == "finished"


def test_a_torchrun_worker_that_was_stopped_ends_with_0(words):
    hook = at_event("micro-batch", micro_batch(5, 1), "SIGTERM")
    finish(launch(words, hooks=[hook], TORCHELASTIC_RUN_ID="x"), expect=0)
    assert (saved_step(words), status_of(words)) == (4, "stopped")


# --- several ranks ---


@pytest.fixture(scope="module")
def whole_of_two(whole, tmp_path_factory) -> dict[str, Any]:
    words = replaced(two_ranks(whole["arguments"]), save_dir=tmp_path_factory.mktemp("two"))
    finish(launch(words, ranks=2))
    return {"arguments": words, "weights": final_weights(words), "loss": logged(words)}


def two_ranks(words: list[str]) -> list[str]:
    """Four rows a step as two micro-batches of one row on each of two ranks."""
    return without(replaced(words, batch_size=1, global_batch_size=4), "accumulation_steps")


@pytest.mark.parametrize("signalled", [0, 1])
def test_one_signalled_rank_of_two_stops_both_and_the_resume_is_bit_equal(whole_of_two, tmp_path, signalled):
    words = replaced(whole_of_two["arguments"], save_dir=tmp_path)
    hooks = {signalled: [at_event("micro-batch", micro_batch(6, 1), "SIGTERM")]}
    finish(launch(words, ranks=2, hooks=hooks), expect=143)
    assert (saved_step(words), status_of(words)) == (5, "stopped")
    finish(launch(words, "--from_resume", 1, ranks=2))
    assert same_bits(final_weights(words), whole_of_two["weights"])
    assert logged(words) == whole_of_two["loss"]


def test_one_signalled_rank_stops_both_in_an_evaluation_and_in_the_first_step(whole_of_two, tmp_path):
    words = replaced(whole_of_two["arguments"], save_dir=tmp_path)
    val = write_corpus(tmp_path / "val.jsonl", documents=10, seed=3)
    hooks = {1: [at_event("micro-batch", 1, "SIGTERM")]}
    finish(launch(words, ranks=2, hooks=hooks), expect=143)
    assert (saved_step(words), status_of(words)) == (0, "stopped")
    hooks = {1: [at_event("evaluating", 1, "SIGTERM")]}
    finish(launch(words, "--val_path", val, "--eval_interval", 3, ranks=2, hooks=hooks), expect=143)
    assert (saved_step(words), status_of(words)) == (3, "stopped")


def test_a_rank_that_waits_for_others_in_vain_leaves_when_told(whole_of_two, tmp_path):
    """Rank 1 is stopped before ranks have met: rank 0 hears nothing of it and sits in a C++ call."""
    words = replaced(whole_of_two["arguments"], save_dir=tmp_path)
    quick = set_value("training.during.stopping.StopSignal.PATIENCE_SECONDS", 0.5)
    waiting, stopped = launch(words, ranks=2, hooks={0: [quick], 1: [at_call("train_pretrain.prepare", 1, "SIGTERM")]})
    stopped.join(60)
    assert stopped.exitcode == 143
    time.sleep(2.0)
    os.kill(waiting.pid, signal.SIGTERM)
    waiting.join(20)
    assert waiting.exitcode == 143


def test_a_rank_that_gets_no_answer_leaves_alone_and_the_last_save_stays(whole_of_two, tmp_path):
    words = replaced(whole_of_two["arguments"], save_dir=tmp_path)
    quick = set_value("training.during.stopping.StopSignal.PATIENCE_SECONDS", 0.5)
    stuck = at_event("micro-batch", micro_batch(6, 2), "SIGSTOP")
    told = at_event("micro-batch", micro_batch(6, 2), "SIGTERM")
    first, second = launch(words, ranks=2, hooks={0: [quick, told], 1: [stuck]})
    first.join(30)
    second.kill()
    second.join()
    assert first.exitcode == 143
    assert (saved_step(words), status_of(words)) == (4, "stopped")


def test_a_ctrl_c_that_the_launcher_passes_on_again_is_one_stop(words, whole, tmp_path):
    hook = at_event("micro-batch", micro_batch(6, 1), "SIGINT SIGINT", pause=0.3)
    finish(launch(words, hooks=[hook], log=tmp_path / "log", TORCHELASTIC_RUN_ID="x"), expect=0)
    assert "second Ctrl-C" not in (tmp_path / "log").read_text()
    assert status_of(words) == "stopped"
    assert_resume_is_bit_equal(words, whole)


# --- as users start it ---


def follow(process: subprocess.Popen, log: Path, steps: int) -> None:
    """Wait until the program has logged so many steps."""
    deadline = time.monotonic() + 120
    while count_steps(log) < steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_steps(log) >= steps, log.read_text()


def start(words: list[str], log: Path) -> subprocess.Popen:
    with open(log, "wb") as output:
        return subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT, start_new_session=True
        )


def test_plain_python_ends_with_143_on_sigterm(words, tmp_path):
    process = start(command(replaced(words, epochs=200)), tmp_path / "log")
    follow(process, tmp_path / "log", 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert status_of(words) == "stopped"
    assert saved_step(words) == max(logged(words)) >= 20


def test_ctrl_c_under_torchrun_which_reaches_workers_twice_saves_the_last_step(whole_of_two, tmp_path):
    words = replaced(whole_of_two["arguments"], save_dir=tmp_path, epochs=200)
    process = start(command(words, ranks=2), tmp_path / "log")
    follow(process, tmp_path / "log", 20)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: torchrun and both workers; torchrun passes it on
    process.wait(60)
    assert status_of(words) == "stopped"
    assert saved_step(words) == max(logged(words)) >= 20
    assert "second Ctrl-C" not in (tmp_path / "log").read_text()


# --- the signal itself ---


def test_a_signal_is_noted_inside_a_window_and_raised_where_nothing_can_be_lost() -> None:
    world = World(torch.device("cpu"))
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(world, True) == (True, True)
        assert stop.exit_code == 143
        with pytest.raises(StopRequested), stop.immediately():
            pass
    with StopSignal() as stop, pytest.raises(StopRequested), stop.immediately():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.exit_code == 138


@pytest.mark.parametrize("own", [signal.SIGTERM, 0])
def test_a_signal_that_comes_during_a_vote_counts_at_the_next_one(own: int) -> None:
    """On both ranks at once, say, while they wait for each other; or on the other rank before the vote."""

    class Voting(World):
        def max(self, values: Iterable[int]) -> list[int]:
            mine, *rest = values
            stop._handle(own, None)
            return [mine or others, *rest]

    world, others = Voting(torch.device("cpu"), size=2), 0
    stop = StopSignal()
    assert stop.agreed(world, True) == (False, True) and stop.received == own
    others = signal.SIGTERM
    assert stop.agreed(world, False) == (True, False) and stop.exit_code == 143


def test_handlers_are_given_back_when_training_is_over() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_torchrun_worker_that_was_stopped_ends_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal()
    stop.received = signal.SIGTERM
    assert stop.exit_code == 143
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert stop.exit_code == 0


# --- saves by the clock, and status for scripts ---


def test_save_minutes_saves_by_the_clock_besides_the_end_of_an_epoch(words):
    train(replaced(words, save_interval=0))
    record = json.loads((run_folder(words) / "run.json").read_text())
    assert [save["step"] for save in record["saves"]] == [13]
    train(replaced(words, save_interval=0), "--save_minutes", 1e-9, "--overwrite", 1)
    record = json.loads((run_folder(words) / "run.json").read_text())
    assert [save["step"] for save in record["saves"]] == list(range(1, 14))


def test_run_json_says_running_while_it_runs_and_after_a_kill(words):
    hook = at_event("micro-batch", micro_batch(6, 1), "SIGKILL")
    finish(launch(words, hooks=[hook]), expect=-signal.SIGKILL)
    assert status_of(words) == "running"
    assert saved_step(words) == 4
