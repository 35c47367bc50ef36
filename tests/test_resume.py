"""A resume is the same run: moved, resized, changed on purpose - and what it refuses."""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_corpus
from safetensors.torch import load_file

from hooks import record_rows
from runs import (
    final_state,
    final_weights,
    finish,
    largest_difference,
    launch,
    logged,
    replaced,
    run_folder,
    same_bits,
    train,
    without,
)
from training.before.begin import differences_between_ranks
from training.before.prepare import prepare
from training.command_line import load_config
from training.distributed import World
from training.saving.checkpoint import find_checkpoints
from training.saving.live_state import named_parameters

STEPS = 13  # of an epoch of 52 rows, four a step


def steps_saved(words: list[str]) -> list[int]:
    return [step for step, _ in find_checkpoints(run_folder(words) / "resume")]


def four_rows(arguments: list[str], **changes: object) -> list[str]:
    return without(replaced(arguments, global_batch_size=4, **changes), "accumulation_steps")


def worst(ours: dict[int, float], theirs: dict[int, float]) -> float:
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


# --- moved from one number of ranks to another ---


def rows_by_step(path: Path) -> dict[int, list[int]]:
    """step -> row ids that all ranks consumed, missing ones left out."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] += [row for row in record["rows"] if row >= 0]
    return found


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-9), (False, 1e-4)])
def test_from_one_rank_to_two_to_three_to_one_every_row_is_seen_once_an_epoch_and_the_curve_is_the_same(
    arguments, tmp_path, double, tolerance
):
    words = four_rows(arguments, batch_size=1, epochs=2)
    whole = [*words, "--save_weight", "whole"]
    finish(launch(whole, float64=double, hooks=[record_rows(tmp_path / "whole")]))
    consumed: dict[int, list[int]] = {}
    for ranks, stop in ((1, 5), (2, 16), (3, 20), (1, 0)):  # 16 lies in the second epoch
        path = tmp_path / f"rows_{stop}"
        more = ["--from_resume", 1, "--stop_after", stop]
        finish(launch(words, *more, ranks=ranks, float64=double, hooks=[record_rows(path)]))
        consumed |= {step: rows for step, rows in rows_by_step(path).items() if step <= (stop or 26)}
    expected = rows_by_step(tmp_path / "whole")
    assert {step: sorted(rows) for step, rows in consumed.items()} == {s: sorted(rows) for s, rows in expected.items()}
    for epoch in (0, 1):
        steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
        assert sorted(row for step in steps for row in consumed[step]) == list(range(52))
    assert worst(logged(words), logged(whole)) < tolerance
    assert largest_difference(final_weights(words), final_weights(whole)) < (1e-9 if double else 0.01)


def test_a_state_of_two_ranks_goes_on_with_one_and_says_what_is_no_longer_bit_exact(arguments, capsys):
    words = four_rows(arguments, batch_size=1, dropout=0.1)
    finish(launch(words, "--stop_after", 5, ranks=2))
    capsys.readouterr()
    train(words, "--from_resume", 1, "--stop_after", 6)
    out = capsys.readouterr().out
    assert "not bit-exact from here" in out
    assert "world_size 2 -> 1" in out
    assert "dropout draws otherwise" in out


def test_two_ranks_resumed_as_two_give_the_same_bits_with_dropout(arguments):
    words = four_rows(arguments, batch_size=1, dropout=0.1)
    finish(launch(words, "--save_weight", "whole", ranks=2))
    for stop in (3, 0):
        finish(launch(words, "--from_resume", 1, "--stop_after", stop, ranks=2))
    assert same_bits(final_weights(words), final_weights(replaced(words, save_weight="whole")))
    assert logged(words) == logged(replaced(words, save_weight="whole"))


KINDS = {"plain": (1, 0), "compiled": (1, 1), "DDP": (2, 0)}  # (ranks, --use_compile)


@pytest.mark.slow
def test_every_writer_s_state_goes_on_in_every_reader_with_the_same_losses(arguments, tmp_path):
    words = four_rows(arguments, batch_size=1)
    options = {"float64": True, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "log": tmp_path / "log"}
    finish(launch(words, "--save_weight", "whole", "--stop_after", 8, float64=True))
    expected = logged(replaced(words, save_weight="whole"))
    for writer, (ranks, compiled) in KINDS.items():
        source = replaced(words, save_weight=writer)
        finish(launch(replaced(source, use_compile=compiled), "--stop_after", 4, ranks=ranks, **options), timeout=300)
        for reader, (ranks_then, compiled_then) in KINDS.items():
            target = replaced(words, save_dir=tmp_path / reader, save_weight=writer)
            shutil.copytree(run_folder(source), run_folder(target))
            more = ["--from_resume", 1, "--stop_after", 8]
            finish(launch(replaced(target, use_compile=compiled_then), *more, ranks=ranks_then, **options), timeout=300)
            assert final_state(target)["choices"]["compile"] == bool(compiled_then)
            assert worst(logged(target), expected) < 1e-9, (writer, reader)


@pytest.mark.slow
@pytest.mark.parametrize("moe", [0, 1])
def test_a_compiled_run_with_dropout_resumes_bit_for_bit(arguments, tmp_path, moe):
    words = replaced(arguments, use_compile=1, dropout=0.1, use_moe=moe)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    finish(launch(words, "--save_weight", "whole", **cache), timeout=300)
    for stop in (4, 0):
        finish(launch(words, "--from_resume", 1, "--stop_after", stop, **cache), timeout=300)
    assert same_bits(final_weights(words), final_weights(replaced(words, save_weight="whole")))


def test_ranks_that_found_other_data_or_another_checkpoint_are_told_apart(arguments):
    train(arguments, "--stop_after", 2)
    prepared = prepare(load_config([*arguments, "--from_resume", "1"]))

    class Second(World):
        def broadcast(self, item):
            return item | {"data_fingerprint": "another", "checkpoint to go on from": None}

    assert differences_between_ranks(prepared, World(torch.device("cpu"))) == []
    data, checkpoint = differences_between_ranks(prepared, Second(torch.device("cpu"), rank=1, size=2))
    assert data.startswith(f"rank 1: its data fingerprint is {prepared.data.identity['data_fingerprint'][:16]}")
    assert "rank 0 has another" in data
    assert "checkpoint to go on from" in checkpoint


# --- another batch ---


def test_another_batch_size_or_accumulation_keeps_the_saved_step_and_its_losses(arguments, capsys, double_precision):
    whole = [*arguments, "--save_weight", "whole"]
    train(whole)
    train(arguments, "--stop_after", 3)
    train(replaced(arguments, batch_size=4, accumulation_steps=1), "--from_resume", 1, "--stop_after", 6)
    out = capsys.readouterr().out
    assert "accumulation_steps: 2 -> 1, so that a step stays 4 rows" in out
    assert "not bit-exact from here, sums round otherwise: batch_size 2 -> 4" in out
    train(replaced(arguments, batch_size=1, accumulation_steps=3), "--from_resume", 1, "--stop_after", 9)
    assert "accumulation_steps: 1 -> 4, so that a step stays 4 rows" in capsys.readouterr().out  # 3 was asked for
    train(replaced(arguments, batch_size=3, accumulation_steps=8), "--from_resume", 1)
    assert "accumulation_steps: 4 -> 2, so that a step stays 4 rows" in capsys.readouterr().out
    assert worst(logged(arguments), logged(whole)) < 1e-9
    assert logged(arguments, "rows_seen") == logged(whole, "rows_seen")


def test_another_global_batch_is_announced_and_goes_on_by_rows_seen(arguments, capsys, tmp_path):
    train(arguments, "--stop_after", 5, "--epochs", 2)
    words = without(arguments, "accumulation_steps", "epochs")
    finish(
        launch(
            words, "--from_resume", 1, "--global_batch_size", 8,
            log=tmp_path / "log", hooks=[record_rows(tmp_path / "rows")],
        )
    )  # fmt: skip
    out = (tmp_path / "log").read_text()
    assert "global batch: 4 -> 8 rows; steps an epoch 13 -> 7" in out
    assert "learning rate at the join: 0.002" in out
    rows = rows_by_step(tmp_path / "rows")
    assert len(rows) == 4 + 7  # 32 rows of the first epoch were left, and 52 of the second
    assert sorted(row for step in range(10, 17) for row in rows[step]) == list(range(52))
    state = final_state(arguments)
    assert state["progress"]["rows_seen"] == 104
    assert state["global_batch_size"] == 8
    capsys.readouterr()
    train(words, "--from_resume", 1, "--epochs", 3, "--stop_after", 18)  # and from now on it is the saved one
    assert "global batch" not in capsys.readouterr().out
    assert final_state(arguments)["progress"]["rows_seen"] == 104 + 2 * 8


# --- changed settings ---


def test_intervals_workers_and_the_same_texts_elsewhere_change_in_silence_and_change_no_bit(
    arguments, corpus, tmp_path, capsys
):
    whole = [*arguments, "--save_weight", "whole"]
    train(whole)
    train(arguments, "--stop_after", 4)
    shutil.move(corpus, tmp_path / "moved.jsonl")
    capsys.readouterr()
    words = replaced(arguments, data_path=tmp_path / "moved.jsonl", log_interval=3, save_interval=0, num_workers=1)
    train(words, "--from_resume", 1, "--keep_checkpoints", 1)
    assert "Changed on resume" not in capsys.readouterr().out
    assert same_bits(final_weights(arguments), final_weights(whole))


def test_allowed_changes_are_shown_with_the_learning_rate_before_and_after_and_take_effect(arguments, capsys):
    train(arguments)
    lr = logged(arguments, "lr")
    unchanged = final_weights(arguments)
    train(arguments, "--overwrite", 1, "--stop_after", 6)
    capsys.readouterr()
    changes = {
        "learning_rate": 0.002,
        "lr_schedule": "linear",
        "weight_decay": 0.5,
        "dropout": 0.2,
        "grad_clip": 0.5,
        "epochs": 2,
    }
    train(replaced(arguments, **changes), "--from_resume", 1)
    out = capsys.readouterr().out
    for line in (
        "learning_rate: 0.003 -> 0.002",
        "lr_schedule: cosine -> linear",
        "weight_decay: 0.1 -> 0.5",
        "dropout: 0.0 -> 0.2",
        "grad_clip: 1.0 -> 0.5",
        "epochs: 1 -> 2",
    ):
        assert line in out
    expected = 0.002 * (1 - 0.9 * 24 / 104)
    assert f"learning rate at the join: {lr[7]:.8f} -> {expected:.8f}; last step 26" in out
    assert logged(arguments, "lr")[7] == pytest.approx(expected, rel=1e-12)
    assert not same_bits(unchanged, final_weights(arguments))
    capsys.readouterr()
    train(replaced(arguments, **changes), "--from_resume", 1)  # said again: no longer a change
    assert "Changed on resume" not in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"weight_decay": 0.9}, {"grad_clip": 0.01}, {"dropout": 0.5}, {"beta2": 0.5}])
def test_a_changed_setting_is_applied_again_after_the_optimizer_was_loaded(arguments, change):
    train(arguments, "--stop_after", 6)
    same = replaced(arguments, save_weight="same")
    shutil.copytree(run_folder(arguments), run_folder(same), dirs_exist_ok=True)
    shutil.move(run_folder(same) / "pretrain_32.pth", run_folder(same) / "same_32.pth")
    train(same, "--from_resume", 1, "--stop_after", 8)
    train(replaced(arguments, **change), "--from_resume", 1, "--stop_after", 8)
    assert not same_bits(final_weights(same), final_weights(arguments))


@pytest.mark.parametrize(
    ("change", "was"),
    [
        ({"num_hidden_layers": 3}, 2),
        ({"num_attention_heads": 4}, 2),
        ({"intermediate_size": 64}, 0),
        ({"optimizer": "muon"}, "adamw"),
        ({"seed": 7}, 42),
        ({"packing": 0}, 1),
        ({"max_seq_len": 32}, 64),
        ({"shuffle": 0}, 1),
    ],
)
def test_what_would_be_another_run_is_refused_with_both_values(stopped_run, capsys, change, was):
    ((name, value),) = change.items()
    before = final_weights(stopped_run)
    train(replaced(stopped_run, **change), "--from_resume", 1, expect=2)
    error = capsys.readouterr().err
    assert f"--{name} {value}: the saved run has {was}" in error
    assert "Traceback" not in error
    assert same_bits(before, final_weights(stopped_run))


def test_other_texts_and_another_tokenizer_are_refused_with_both_digests(stopped_run, capsys, tmp_path):
    saved = final_state(stopped_run)["identity"]
    other = write_corpus(tmp_path / "other.jsonl", documents=60, seed=1)
    train(replaced(stopped_run, data_path=other), "--from_resume", 1, expect=2)
    error = capsys.readouterr().err
    assert f"--data_path {other}: its data fingerprint is" in error
    assert f"the saved run's is {saved['data_fingerprint'][:16]}" in error
    tokenizer = json.loads((Path(__file__).parents[1] / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"][-2:] = tokenizer["model"]["merges"][:-3:-1]  # two merges change places
    folder = tmp_path / "tokenizer"
    shutil.copytree(Path(__file__).parents[1] / "model", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    train(replaced(stopped_run, tokenizer_path=folder), "--from_resume", 1, expect=2)
    assert f"the saved run's is {saved['tokenizer_digest'][:16]}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> list[str]:
    """Arguments of a run that stands at step 4; tests of refusals leave it as it is."""
    from conftest import small_run

    folder = tmp_path_factory.mktemp("stopped")
    words = small_run(folder, write_corpus(folder / "corpus.jsonl"))
    train(words, "--stop_after", 4)
    return words


def test_max_steps_extended_goes_on_to_the_new_end(arguments, capsys):
    words = without(arguments, "epochs")
    train(words, "--max_steps", 10)
    train(words, "--max_steps", 16, "--from_resume", 1)
    assert "max_steps: 10 -> 16" in capsys.readouterr().out
    lr = logged(words, "lr")
    assert max(lr) == 16
    assert lr[10] < lr[11]  # the schedule now spans 16 steps
    assert final_state(words)["progress"]["rows_seen"] == 52 + 3 * 4
    train(words, "--max_steps", 8, "--from_resume", 1, expect=2)
    assert "the saved run is at step 16" in capsys.readouterr().err


# --- what is left behind on purpose ---


def test_resume_reset_optimizer_begins_with_fresh_moments(arguments, capsys):
    train(arguments, "--stop_after", 6)
    train(arguments, "--from_resume", 1, "--resume_reset", "optimizer", "--stop_after", 8)
    assert "optimizer state forgotten, as asked" in capsys.readouterr().out
    folder = find_checkpoints(run_folder(arguments) / "resume")[-1][1]
    saved = load_file(folder / "optimizer.safetensors")
    assert {tensor.item() for name, tensor in saved.items() if name.endswith("/step")} == {2.0}


def test_resume_reset_schedule_spans_the_steps_that_are_left_and_stays_so(arguments, capsys):
    train(arguments, "--stop_after", 6)
    train(arguments, "--from_resume", 1, "--resume_reset", "schedule", "--stop_after", 8)
    assert "-> 0.00300000" in capsys.readouterr().out
    lr = logged(arguments, "lr")
    assert lr[7] == 0.003
    train(arguments, "--from_resume", 1)  # not said again: the schedule goes on
    lr = logged(arguments, "lr")
    assert lr[8] > lr[9] > lr[13]
    assert lr[13] == pytest.approx(0.003 * (0.1 + 0.45 * (1 + torch.tensor(torch.pi * 24 / 28).cos().item())), rel=1e-5)


def test_save_state_0_keeps_weights_alone_and_such_a_run_says_it_cannot_be_resumed(arguments, capsys):
    train(arguments, "--save_state", 0)
    folder = run_folder(arguments)
    assert (folder / "pretrain_32.pth").exists()
    assert not (folder / "resume").exists()
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["saves"][-1]["step"]) == ("finished", STEPS)
    train(arguments, "--from_resume", 1, expect=2)
    assert "weights but no resume state" in capsys.readouterr().err


def test_a_repeated_command_needs_its_starting_weights_only_the_first_time(arguments, tmp_path):
    train(arguments, "--stop_after", 2)
    source = run_folder(arguments) / "pretrain_32.pth"
    words = [*arguments, "--save_weight", "warm", "--from_weight", str(source), "--from_resume", "1"]
    train(words, "--stop_after", 3)
    shutil.rmtree(run_folder(arguments))
    train(words, "--stop_after", 5)
    assert max(logged(words)) == 5


# --- what must not matter ---


def test_evaluating_sampling_saving_logging_and_workers_change_no_bit(arguments, tmp_path):
    words = replaced(arguments, dropout=0.1, epochs=2)
    plain = replaced(words, save_weight="plain", save_interval=0, log_interval=1000)
    train(plain)
    busy = replaced(words, save_weight="busy", save_interval=1, log_interval=1, keep_checkpoints=1, num_workers=2)
    val = write_corpus(tmp_path / "val.jsonl", documents=12, seed=9)
    busy += ["--activation_checkpointing", "1", "--val_path", str(val), "--eval_interval", "3"]
    train(busy, "--samples", 1, "--save_minutes", 0.001)
    assert len(logged(busy, "val_loss")) == 9
    assert same_bits(final_weights(plain), final_weights(busy))


def test_the_newest_two_and_the_best_by_validation_are_kept(arguments, tmp_path):
    """A learning rate that ruins the model after a good beginning: the best is early and survives the newer ones."""
    val = write_corpus(tmp_path / "val.jsonl", documents=12, seed=9)
    words = [*replaced(arguments, save_interval=1), "--val_path", str(val), "--eval_interval", "1"]
    train(words, "--stop_after", 6)
    train(replaced(words, learning_rate=1.0), "--from_resume", 1, "--grad_clip", 0, "--stop_after", 12)
    losses = logged(words, "val_loss")
    best = min(losses, key=losses.__getitem__)
    assert best <= 7
    assert steps_saved(words) == [best, 11, 12]
    card = json.loads((run_folder(words) / "pretrain_32_best.json").read_text())
    assert (card["step"], card["val_loss"]) == (best, losses[best])


def test_a_resume_on_other_validation_texts_forgets_the_best_score_and_says_so(arguments, tmp_path, capsys):
    val = [write_corpus(tmp_path / f"val{n}.jsonl", documents=8, seed=20 + n) for n in (0, 1)]
    train(arguments, "--val_path", val[0], "--eval_interval", 2, "--stop_after", 4)
    assert final_state(arguments)["progress"]["best_step"] == 4
    capsys.readouterr()
    train(arguments, "--from_resume", 1, "--stop_after", 4)
    assert "validation texts" not in capsys.readouterr().out
    train(arguments, "--val_path", val[1], "--from_resume", 1, "--stop_after", 5)
    assert "validation texts: others than before" in capsys.readouterr().out
    assert final_state(arguments)["progress"]["best_val_loss"] == logged(arguments, "val_loss")[5]


# --- resolved choices and the receipt ---


def test_the_saved_thread_count_is_used_again_and_another_one_is_announced(arguments, capsys, monkeypatch):
    threads = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        train(arguments, "--stop_after", 2)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        train(arguments, "--from_resume", 1, "--stop_after", 4)
        assert torch.get_num_threads() == 2
        out = capsys.readouterr().out
        assert "not bit-exact" not in out
        assert "Threads: 2 as in the saved run; this start alone would take 1 as OMP_NUM_THREADS says" in out
        train(arguments, "--from_resume", 1, "--threads", 1, "--stop_after", 6)
        assert torch.get_num_threads() == 1
        out = capsys.readouterr().out
        assert "threads: 0 -> 1" in out
        assert "not bit-exact from here, sums round otherwise: threads 2 -> 1" in out
    finally:
        torch.set_num_threads(threads)


def test_the_saved_dtype_is_taken_again_where_auto_would_now_choose_another(arguments, monkeypatch):
    words = without(arguments, "dtype")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    train(words, "--stop_after", 2)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    train(words, "--from_resume", 1, "--stop_after", 3)
    assert final_state(words)["choices"]["dtype"] == "bfloat16"
    train(words, "--from_resume", 1, "--dtype", "float32", "--stop_after", 4)
    assert final_state(words)["choices"]["dtype"] == "float32"


def test_a_float16_run_resumes_bit_for_bit_with_its_gradient_scale(arguments):
    words = replaced(arguments, dtype="float16")
    train(words, "--save_weight", "whole")
    for stop in (3, 8, 0):
        train(words, "--from_resume", 1, "--stop_after", stop)
    whole = replaced(words, save_weight="whole")
    assert same_bits(final_weights(words), final_weights(whole))
    assert final_state(words)["scaler"] == final_state(whole)["scaler"]
    assert final_state(words)["scaler"]["_growth_tracker"] > 8  # counted through the resumes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_run_with_deterministic_kernels_resumes_bit_for_bit(arguments):
    words = replaced(arguments, device="cuda", dtype="bfloat16", dropout=0.1, deterministic=1)
    finish(launch(words, "--save_weight", "whole"))
    for stop in (3, 8, 0):
        finish(launch(words, "--from_resume", 1, "--stop_after", stop))
    assert same_bits(final_weights(words), final_weights(replaced(words, save_weight="whole")))
    assert logged(words) == logged(replaced(words, save_weight="whole"))


def test_deterministic_kernels_are_on_when_asked_for_and_resume_bit_for_bit(arguments):
    try:
        train(arguments, "--deterministic", 1, "--save_weight", "whole")
        assert torch.are_deterministic_algorithms_enabled()
        train(arguments, "--deterministic", 1, "--stop_after", 6)
        train(arguments, "--from_resume", 1)
        assert torch.are_deterministic_algorithms_enabled()  # carried over
        assert same_bits(final_weights(arguments), final_weights(replaced(arguments, save_weight="whole")))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_receipt_says_what_ran_on_what_from_which_data_and_every_save_s_digest(arguments):
    train(arguments, "--stop_after", 6)
    train(arguments, "--from_resume", 1, "--learning_rate", 0.002)
    record = json.loads((run_folder(arguments) / "run.json").read_text())
    environment = record["environment"]
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment.keys() >= {"device", "cpu", "cpu_flags", "cpu_count", "platform", "git"}
    assert record["seed"] == 42
    assert record["config"]["learning_rate"] == 0.002
    assert len(record["identity"]["data_fingerprint"]) == len(record["identity"]["tokenizer_digest"]) == 64
    assert record["choices"].keys() >= {"dtype", "device", "threads", "world_size"}
    assert [save["step"] for save in record["saves"]] == [2, 4, 6, 8, 10, 12, 13]
    assert len({save["weights_digest"] for save in record["saves"]}) == 7
    assert [(s["step"], s["config"]["learning_rate"]) for s in record["starts"]] == [(0, 0.003), (6, 0.002)]


def test_a_start_that_repeats_the_one_before_is_not_noted_again(arguments, monkeypatch):
    monkeypatch.setattr("training.before.begin.git_state", lambda root: None)  # someone may commit meanwhile
    for stop in (2, 4, 6):
        train(arguments, "--from_resume", 1, "--stop_after", stop)
    record = json.loads((run_folder(arguments) / "run.json").read_text())
    assert [start["step"] for start in record["starts"]] == [0]


def test_parameters_in_a_save_are_named_and_typed_as_in_the_model(arguments):
    train(arguments)
    prepared = prepare(load_config([*arguments, "--from_resume", "1"]))
    saved = final_weights(arguments)
    assert saved.keys() == named_parameters(prepared.model).keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
