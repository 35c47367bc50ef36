"""verify_run: an honest run agrees with itself, a doctored one does not, and the first difference is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import small_run, write_corpus

from runs import finish, launch, replaced, run_folder, train, without
from scripts import verify_run


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> list[str]:
    """A run resumed once as it was and once with another learning rate, at steps 4 and 7."""
    folder = tmp_path_factory.mktemp("honest")
    words = replaced(small_run(folder, write_corpus(folder / "corpus.jsonl")), dropout=0.1, save_interval=3)
    train(words, "--stop_after", 4)
    train(words, "--from_resume", 1, "--stop_after", 7)
    train(words, "--from_resume", 1, "--learning_rate", 0.001)
    return words


@pytest.fixture
def here(monkeypatch) -> None:
    """The trainer is called in this process, which is quicker than starting one."""
    monkeypatch.setattr(verify_run, "run_trainer", lambda words, ranks: train(words))


@pytest.fixture
def doctored(honest, tmp_path) -> Path:
    """A copy of the honest run, for a test to falsify."""
    return Path(shutil.copytree(run_folder(honest), tmp_path / "pretrain_32"))


def test_an_honest_run_agrees_through_its_change_of_settings(honest, capsys):
    assert verify_run.main([str(run_folder(honest)), "--steps", "13"]) == 0
    out = capsys.readouterr().out
    assert "Training steps 1 to 7 again" in out
    assert "Training steps 8 to 13 again" in out
    assert "losses: 13 of 13 logged steps bit-equal" in out
    assert "weights: 6 of 6 digests equal" in out  # 3, 6, 7, 9, 12, 13; nothing was saved at 4 this time
    assert "AGREE: steps 1 to 13" in out


def test_a_doctored_loss_is_found_and_the_first_is_named(here, doctored, capsys):
    path = doctored / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] >= 3:
            line["loss"] *= 0.999
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verify_run.main([str(doctored), "--steps", "5"]) == 1
    out = capsys.readouterr().out
    assert "losses: part at step 3 (loss " in out
    assert "2 logged steps bit-equal before it; largest difference of a loss 0.1 %" in out
    assert "weights: 1 of 1 digests equal" in out
    assert "DIFFER: steps 1 to 5" in out


def test_a_doctored_digest_is_found(here, doctored, capsys):
    record = json.loads((doctored / "run.json").read_text())
    record["saves"][0]["weights_digest"] = "0" * 64
    (doctored / "run.json").write_text(json.dumps(record))
    assert verify_run.main([str(doctored), "--steps", "6"]) == 1
    out = capsys.readouterr().out
    assert "losses: 6 of 6 logged steps bit-equal" in out
    assert "weights: part at the save of step 3, 0 digests equal before it" in out


def test_a_warm_start_is_taken_up_at_its_earliest_save(here, honest, tmp_path, capsys):
    words = replaced(honest, save_dir=tmp_path, save_weight="warm", save_interval=4)
    train(words, "--from_weight", run_folder(honest) / "pretrain_32.pth", "--keep_checkpoints", 4)
    assert verify_run.main([str(run_folder(words)), "--steps", "6"]) == 0
    out = capsys.readouterr().out
    assert "losses: 6 of 6 logged steps bit-equal" in out
    assert "AGREE: steps 5 to 10" in out


def test_a_folder_without_a_receipt_and_other_texts_are_told_in_words(here, doctored, honest, tmp_path, capsys):
    assert verify_run.main([str(tmp_path / "nothing")]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
    other = write_corpus(tmp_path / "other.jsonl", seed=5)
    record = json.loads((doctored / "run.json").read_text())
    record["starts"][0]["config"]["data_path"] = str(other)
    (doctored / "run.json").write_text(json.dumps(record))
    assert verify_run.main([str(doctored), "--steps", "2"]) == 1
    assert "data: not the texts" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_two_ranks_is_trained_again_on_two_ranks(honest, tmp_path, capsys):
    words = without(replaced(honest, save_dir=tmp_path, batch_size=1, global_batch_size=4), "accumulation_steps")
    finish(launch(words, ranks=2))
    assert verify_run.main([str(run_folder(words)), "--steps", "6"]) == 0
    assert "weights: 2 of 2 digests equal" in capsys.readouterr().out
