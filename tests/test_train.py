"""The whole trainer, called as users call it: one mathematics, files, precedence, resume."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest
import torch
import yaml

from runs import (
    ROOT,
    final_state,
    final_weights,
    finish,
    kill_after,
    largest_difference,
    launch,
    logged,
    replaced,
    run_folder,
    same_bits,
    train,
    without,
)
from training.before import evaluation_only
from training.command_line import load_config
from training.during import evaluation
from training.during.evaluation import Evaluation

# --- a run and what it leaves ---


def test_a_run_lowers_the_loss_and_leaves_weights_state_settings_metrics_and_receipt(arguments, capsys):
    train(arguments, "--epochs", 3)
    loss = logged(arguments)
    assert loss[1] == pytest.approx(math.log(6400) + 32 * 0.02**2 / 2, abs=0.03)
    assert loss[max(loss)] < loss[1] - 1.5
    folder = run_folder(arguments)
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        "pretrain_32.pth",
        "pretrain_32.json",
        "resume",
        "config.yaml",
        "metrics.jsonl",
        "run.json",
        "published.txt",
    }
    assert (folder.parent / "pretrain_32.pth").read_bytes() == (folder / "pretrain_32.pth").read_bytes()
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert yaml.safe_load((folder / "config.yaml").read_text())["hidden_size"] == 32
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch:"))
    assert first.startswith("Epoch:[1/3](1/13), loss: 8.7")
    keys = set(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))
    assert keys == set(
        "step epoch loss logits_loss aux_loss lr grad_norm rows_seen tokens_seen tokens_per_second elapsed_seconds "
        "skipped_steps".split()
    )


def test_the_weights_file_is_minimind_s_half_precision_state_dict(arguments):
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    train(arguments)
    folder = run_folder(arguments)
    weights = torch.load(folder / "pretrain_32.pth", weights_only=True)
    card = json.loads((folder / "pretrain_32.json").read_text())
    model = MiniMindForCausalLM(MiniMindConfig.from_dict(card["config"]))
    model.load_state_dict(weights, strict=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert len(card["tokenizer_digest"]) == 64
    exact = final_weights(arguments)
    assert all(torch.equal(exact[name].half(), weights[name]) for name in exact)


def test_every_target_of_the_corpus_is_trained_exactly_once_an_epoch(arguments):
    train(arguments, "--epochs", 2)
    progress = final_state(arguments)["progress"]
    ledger = json.loads((run_folder(arguments) / "run.json").read_text())["ledger"]["train"]
    assert progress["tokens_seen"] == 2 * ledger["targets"] == 2 * (ledger["tokens"] - ledger["documents"])
    assert progress["rows_seen"] == 2 * ledger["rows"]
    assert progress["step"] == 2 * 13


def test_max_steps_cycles_through_the_data_and_spans_the_schedule(arguments):
    words = without(replaced(arguments, max_steps=30), "epochs")
    train(words)
    lr = logged(words, "lr")
    assert max(lr) == 30
    assert lr[1] == 0.003
    assert lr[30] == pytest.approx(0.0003, rel=0.05)
    assert logged(words, "epoch")[14] == 2


def test_stop_after_leaves_early_but_the_schedule_spans_the_whole_run(arguments):
    train(arguments)
    whole = logged(arguments, "lr")
    train(arguments, "--overwrite", 1, "--stop_after", 5)
    assert logged(arguments, "lr") == {step: whole[step] for step in range(1, 6)}
    assert json.loads((run_folder(arguments) / "run.json").read_text())["status"] == "stopped"


def test_a_second_run_of_the_same_name_is_refused_unless_overwrite(arguments, capsys):
    train(arguments)
    before = final_weights(arguments)
    train(arguments, "--learning_rate", 0.1, expect=2)
    assert "holds a run already" in capsys.readouterr().err
    assert same_bits(before, final_weights(arguments))
    train(arguments, "--learning_rate", 0.1, "--overwrite", 1)
    assert f"Replacing the run in {run_folder(arguments)}" in capsys.readouterr().out
    assert not same_bits(before, final_weights(arguments))


def test_the_command_line_wins_over_yaml_and_yaml_over_defaults(arguments, tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rate: 0.002\nweight_decay: 0.3\n")
    train(without(arguments, "learning_rate"), "--config", tmp_path / "c.yaml", "--weight_decay", 0.2)
    saved = yaml.safe_load((run_folder(arguments) / "config.yaml").read_text())
    assert (saved["learning_rate"], saved["weight_decay"], saved["beta2"]) == (0.002, 0.2, 0.95)


def test_the_saved_config_yaml_repeats_the_run_bit_for_bit(arguments, tmp_path):
    train(arguments)
    first = final_weights(arguments)
    train(["--config", str(run_folder(arguments) / "config.yaml"), "--save_dir", str(tmp_path / "again")])
    assert same_bits(first, final_weights(replaced(arguments, save_dir=tmp_path / "again")))


# --- one mathematics ---

BATCH_SIZES = [4, 2, 1, 3]  # of a global batch of 4: three does not divide it


@pytest.mark.parametrize("moe", [0, 1])
def test_every_split_of_a_step_gives_the_same_losses_and_weights_in_float64(arguments, double_precision, moe):
    reference = None
    for batch_size in BATCH_SIZES:
        words = four_rows_a_step(arguments, use_moe=moe, batch_size=batch_size)
        train(words, "--overwrite", 1)
        found = logged(words), logged(words, "aux_loss"), logged(words, "grad_norm"), final_weights(words)
        reference = reference or found
        for ours, theirs in zip(found[:3], reference[:3], strict=True):
            assert ours.keys() == theirs.keys()
            assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-9
        assert largest_difference(found[3], reference[3]) < 1e-9
    assert (max(reference[1].values()) > 1e-4) == bool(moe)


@pytest.mark.parametrize("moe", [0, 1])
def test_one_two_and_three_ranks_give_the_same_losses_and_weights_in_float64(arguments, moe):
    found = {}
    for ranks in (1, 2, 3):
        words = four_rows_a_step(arguments, use_moe=moe, batch_size=1, save_weight=f"r{ranks}")
        finish(launch(words, ranks=ranks, float64=True))
        found[ranks] = logged(words), logged(words, "grad_norm"), final_weights(words)
    for ranks in (2, 3):
        for ours, theirs in zip(found[ranks][:2], found[1][:2], strict=True):
            assert max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-9
        assert largest_difference(found[ranks][2], found[1][2]) < 1e-9


def test_two_ranks_follow_one_in_float32_within_1e_4_over_8_steps(arguments):
    found = []
    for ranks in (1, 2):
        words = without(
            replaced(arguments, batch_size=2, global_batch_size=4, save_weight=f"r{ranks}"), "accumulation_steps"
        )
        finish(launch(words, "--stop_after", 8, ranks=ranks))
        found.append(logged(words))
    assert len(found[0]) == 8
    assert max(abs(found[0][step] - found[1][step]) for step in found[0]) < 1e-4


def test_the_last_short_window_of_an_epoch_is_divided_by_what_it_holds(arguments):
    """52 rows in windows of 5: the 11th holds 2. Its loss is the mean over its own targets, near its neighbours'."""
    words = without(replaced(arguments, global_batch_size=5), "accumulation_steps")
    train(words)
    loss, rows = logged(words), logged(words, "rows_seen")
    assert (rows[10], rows[11]) == (50, 52)
    assert loss[11] == pytest.approx(loss[10], abs=0.6)


def test_float16_with_a_gradient_scaler_trains_on_the_cpu(arguments):
    train(replaced(arguments, dtype="float16"))
    loss, state = logged(arguments), final_state(arguments)
    assert state["scaler"]["scale"] > 1
    assert loss[13] < loss[1] - 0.5


def test_muon_trains_and_resumes_bit_for_bit(arguments):
    words = replaced(arguments, optimizer="muon")
    train(words)
    whole = final_weights(words)
    train(words, "--overwrite", 1, "--stop_after", 6)
    train(words, "--from_resume", 1)
    assert same_bits(whole, final_weights(words))


# --- evaluation ---


def test_a_floor_is_told_only_for_the_sample_s_own_validation_texts(arguments, corpus, monkeypatch):
    sample = ROOT / "dataset" / "sample" / "train.jsonl"
    for path, expected in ((sample, True), (f"{sample},{corpus}", False), (corpus, False)):
        assert load_config(["--data_path", str(path)]).uses_sample is expected


def test_a_validation_loss_that_is_no_number_is_never_the_best(arguments, corpus, monkeypatch):
    figures = iter([math.nan, 9.0, 8.0, math.nan, 8.5])
    monkeypatch.setattr(evaluation, "evaluate_run", lambda run: Evaluation(next(figures), 1.0, 1.0))
    train(arguments, "--val_path", corpus, "--eval_interval", 3)
    progress = final_state(arguments)["progress"]
    assert (progress["best_val_loss"], progress["best_step"]) == (8.0, 9)


def test_runs_of_other_seeds_are_judged_by_the_same_validation_rows(arguments, corpus, capsys):
    train(arguments)
    found = []
    for seed in (1, 2):
        capsys.readouterr()
        train(arguments, "--eval_only", 1, "--val_path", corpus, "--eval_rows", 3, "--seed", seed)
        found.append(capsys.readouterr().out.splitlines()[-1])
    assert "val_loss" in found[0] and found[0] == found[1]


def test_a_failure_while_only_evaluating_shows_its_own_cause(arguments, corpus, monkeypatch):
    train(arguments)

    def fail(*_: object) -> None:
        raise RuntimeError("the cause")

    monkeypatch.setattr(evaluation_only, "evaluate", fail)
    with pytest.raises(RuntimeError, match="the cause"):
        train(arguments, "--eval_only", 1, "--val_path", corpus)


def test_evaluating_needs_neither_shape_nor_training_texts(arguments, corpus, tmp_path, capsys):
    train(arguments, "--val_path", corpus)
    val_loss = logged(arguments, "val_loss")[13]
    (held_out := tmp_path / "held_out.jsonl").write_bytes(corpus.read_bytes())
    corpus.unlink()
    shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()
    place = ["--save_dir", str(tmp_path / "runs"), "--cache_dir", str(tmp_path / "cache"), "--device", "cpu"]
    train(["--eval_only", "1", "--val_path", str(held_out), *place])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["val_loss"] == pytest.approx(val_loss, abs=2e-3)  # the weights are float16


def test_evaluating_one_of_two_runs_asks_which(arguments, corpus, tmp_path, capsys):
    train(arguments, "--max_steps", 1)
    train(replaced(arguments, hidden_size=48), "--max_steps", 1)
    place = ["--save_dir", str(tmp_path / "runs"), "--cache_dir", str(tmp_path / "cache"), "--device", "cpu"]
    words = ["--eval_only", "1", "--val_path", str(corpus), *place]
    train(words, expect=2)
    assert "pretrain_32, pretrain_48 are there; say which: --from_weight pretrain_32" in capsys.readouterr().err
    train([*words, "--from_weight", "pretrain_48"])


def test_paths_in_the_saved_settings_mean_the_same_from_another_folder(arguments, corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    words = replaced(arguments, data_path=corpus.name)
    train(words, "--stop_after", 3)
    assert final_state(words)["config"]["data_path"] == str(corpus)


# --- resume ---


@pytest.mark.parametrize("moe", [0, 1])
def test_stopped_and_resumed_anywhere_gives_the_same_bits(arguments, moe):
    words = replaced(arguments, use_moe=moe, dropout=0.1, epochs=2)
    train(words)
    whole, loss = final_weights(words), logged(words)
    train(words, "--overwrite", 1, "--stop_after", 1)
    for stop in (2, 12, 13, 14, 26):  # around the end of an epoch, and the last step
        train(words, "--from_resume", 1, "--stop_after", stop)
    assert same_bits(whole, final_weights(words))
    assert logged(words) == loss


def test_kill_9_and_resume_gives_the_same_bits(arguments, tmp_path):
    words = replaced(arguments, epochs=4, save_interval=3, dropout=0.1)
    train(words, "--save_weight", "whole")
    whole = final_weights(replaced(words, save_weight="whole"))
    draw, kills, log = random.Random(1), 0, tmp_path / "log"
    for _ in range(40):
        (process,) = launch(words, "--from_resume", 1, log=str(log))
        kills += kill_after(process, log, draw.randint(1, 12), draw.uniform(0, 0.03))
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert kills >= 3
    assert same_bits(whole, final_weights(words))


def test_extending_a_finished_run_by_an_epoch_trains_that_epoch_in_full(arguments, capsys):
    train(arguments)
    train(arguments, "--from_resume", 1, "--epochs", 2)
    assert "epochs: 1 -> 2" in capsys.readouterr().out
    progress = final_state(arguments)["progress"]
    assert progress["step"] == 26
    assert max(logged(arguments)) == 26


def test_resuming_a_finished_run_does_nothing_says_so_and_ends_well(arguments, capsys):
    train(arguments)
    before = final_weights(arguments)
    train(arguments, "--from_resume", 1)
    assert "Nothing left to do: the run is at its last step, 13." in capsys.readouterr().out
    assert same_bits(before, final_weights(arguments))


def test_a_run_without_states_offers_its_weights_as_a_beginning_and_they_are_one(arguments, capsys):
    train(arguments, "--save_state", 0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("To go on:")]
    assert line.endswith("--from_weight pretrain --save_weight NEW")
    train(arguments, "--from_weight", "pretrain", "--save_weight", "NEW")


def test_epochs_beside_a_saved_max_steps_are_noted(arguments, capsys):
    train(without(arguments, "epochs"), "--max_steps", 4)
    train(without(arguments, "epochs"), "--from_resume", 1, "--epochs", 3)
    assert "Note: --epochs 3: --max_steps 4 comes first" in capsys.readouterr().out
    assert max(logged(arguments)) == 4
    train(without(arguments, "epochs"), "--from_resume", 1, "--epochs", 1, "--max_steps", 0)
    assert max(logged(arguments)) == 13


def four_rows_a_step(arguments: list[str], **changes: object) -> list[str]:
    return without(replaced(arguments, global_batch_size=4, **changes), "accumulation_steps")
