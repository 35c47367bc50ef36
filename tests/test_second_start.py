"""A second start of a run, at any instant of the first one's life, neither loses nor rolls back what was saved."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import small_run, write_corpus

from hooks import at_event, wait_before
from runs import final_weights, finish, launch, logged, replaced, run_folder, same_bits, train
from training.saving.checkpoint import find_checkpoints

# Where the second start stands while the first one ends: before it looks, after, and before it takes the lock.
EDGES = {
    "before the look-up": "training.before.prepare.contents",
    "between the two looks": "training.before.prepare.find_checkpoint",
    "after the look-up": "training.before.prepare.check_settings",
    "before the data": "training.before.prepare.open_data",
    "before the lock": "training.saving.run_folder.take_lock",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """An undisturbed run: its arguments and final weights."""
    folder = tmp_path_factory.mktemp("whole")
    words = small_run(folder, write_corpus(folder / "corpus.jsonl"))
    train(words)
    return {"words": words, "weights": final_weights(words), "losses": logged(words)}


@pytest.fixture
def words(whole, tmp_path) -> list[str]:
    return replaced(whole["words"], save_dir=tmp_path / "runs")


def saved_steps(words: list[str]) -> list[int]:
    return [step for step, _ in find_checkpoints(run_folder(words) / "resume")]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("had_saved", [False, True], ids=["a first run", "a run with saves"])
def test_a_waiting_resume_goes_on_from_the_last_save(words, whole, tmp_path, edge, had_saved):
    if had_saved:
        train(words, "--stop_after", 2)
    second = launch(words, "--from_resume", 1, hooks=[wait_before(EDGES[edge], 1, tmp_path / "go")])
    first = launch(words, "--from_resume", 1, hooks=[at_event("step", 7 - 2 * had_saved, "SIGTERM")])
    finish(first, expect=143)
    assert saved_steps(words)[-1] == 7
    (tmp_path / "go").touch()
    finish(second)
    assert same_bits(final_weights(words), whole["weights"])
    assert logged(words) == whole["losses"]


@pytest.mark.parametrize("edge", EDGES)
def test_a_waiting_resume_of_a_finished_run_changes_nothing(words, whole, tmp_path, edge):
    second = launch(words, "--from_resume", 1, hooks=[wait_before(EDGES[edge], 1, tmp_path / "go")])
    train(words)
    (tmp_path / "go").touch()
    finish(second)
    assert same_bits(final_weights(words), whole["weights"])


@pytest.mark.parametrize("edge", EDGES)
def test_a_waiting_fresh_start_is_refused(words, whole, tmp_path, edge):
    second = launch(words, hooks=[wait_before(EDGES[edge], 1, tmp_path / "go")], log=tmp_path / "log")
    train(words)
    (tmp_path / "go").touch()
    finish(second, expect=2)
    assert "holds a run already; go on with it (--from_resume 1)" in (tmp_path / "log").read_text()
    assert same_bits(final_weights(words), whole["weights"])


def test_a_resume_waits_for_a_run_that_is_leaving(words, whole, tmp_path):
    leaving = at_event("leaving", 1, "SIGCONT", pause=2.0)
    first = launch(words, hooks=[leaving])
    while not saved_steps(words) or saved_steps(words)[-1] < 13:
        time.sleep(0.02)
    second = launch(words, "--from_resume", 1, log=tmp_path / "log")
    finish([*first, *second])
    assert "Nothing left to do" in (tmp_path / "log").read_text()
    assert same_bits(final_weights(words), whole["weights"])


def test_two_ranks_that_saw_another_checkpoint_look_again(words, whole, tmp_path):
    """Rank 1 looks before the first run has ended, rank 0 after it."""
    early = wait_before("training.before.prepare.check_settings", 1, tmp_path / "go")
    late = wait_before("training.before.prepare.contents", 1, tmp_path / "go")
    two = launch(words, "--from_resume", 1, "--batch_size", 1, ranks=2, hooks={0: [late], 1: [early]})
    train(words, "--stop_after", 6)
    (tmp_path / "go").touch()
    finish(two)
    assert saved_steps(words)[-1] == 13
    assert max(abs(loss - whole["losses"][step]) for step, loss in logged(words).items()) < 1e-4


def test_a_mistyped_name_is_not_a_fresh_start(words, capsys):
    train(words, "--stop_after", 2)
    train(replaced(words, save_weight="pretrian"), "--from_resume", 1, expect=2)
    error = capsys.readouterr().err
    assert "there is no run pretrian_32 to resume, but pretrain_32; correct the name" in error
    assert not Path(run_folder(replaced(words, save_weight="pretrian"))).exists()
    train(replaced(words, save_weight="pretrian"), "--from_resume", 1, "--overwrite", 1, "--max_steps", 1)


def test_names_that_differ_in_a_digit_are_meant(words):
    train(replaced(words, save_weight="run1"), "--stop_after", 1)
    train(replaced(words, save_weight="run2"), "--from_resume", 1, "--stop_after", 1)
