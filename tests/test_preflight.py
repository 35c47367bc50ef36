"""Checks before the first step: what they must let pass, and how they count. What they refuse is in test_bad_input."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from errors import CheckpointError, DataError, Findings, UserError
from runs import final_state, final_weights, launch, replaced, run_folder, same_bits, train
from training.before import machine
from training.before.folders import check_disk, folder_bytes
from training.before.machine import amount, check_memory, check_torchrun, host_memory_bytes, local_ranks
from training.before.rules import NOTED, REFUSED, Known, those_that_apply
from training.config import Config
from training.launcher import environment_rank

Usage = namedtuple("Usage", "total used free")


def failing(error: Exception):
    def call() -> None:
        raise error

    return call


def test_problems_of_all_kinds_are_gathered_in_order_and_other_errors_fly():
    problems = Findings(["first"])
    assert problems.of(lambda x: x + 1, 1) == 2
    for error in (UserError(["a", "b"]), DataError("c"), CheckpointError("d")):
        assert problems.of(failing(error)) is None
    assert problems == ["first", "a", "b", "c", "d"]
    with pytest.raises(ZeroDivisionError):
        problems.of(failing(ZeroDivisionError()))


# --- ranks ---

WHOLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def ranks(monkeypatch):
    def set_environment(**values: str) -> None:
        for name in (*WHOLE, "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_environment


def test_a_whole_torchrun_environment_and_none_at_all_pass(ranks):
    ranks()
    assert check_torchrun() == [] and environment_rank() == (0, 0, 1)
    ranks(**WHOLE)
    assert check_torchrun() == [] and environment_rank() == (1, 1, 2)
    ranks(MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_RANK="0")  # what some schedulers always set
    assert check_torchrun() == []


@pytest.mark.parametrize("missing", WHOLE)
def test_each_missing_part_of_it_is_named(ranks, missing):
    ranks(**{name: value for name, value in WHOLE.items() if name != missing})
    (problem,) = check_torchrun()
    assert f"but {missing} missing; start with torchrun or unset them" in problem


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["-1", "two", "1.0", "²"])
def test_each_part_that_is_no_number_is_named_and_nothing_else_stumbles_over_it(ranks, name, value):
    ranks(**{**WHOLE, name: value})
    assert any(f"{name}={value!r} is not a number" in problem for problem in check_torchrun())
    assert all(isinstance(part, int) for part in environment_rank())


def test_the_ranks_of_this_machine_are_torchrun_s_count_or_at_least_mine(ranks):
    ranks()
    assert local_ranks() == 1
    ranks(**WHOLE)
    assert local_ranks() == 2
    ranks(**WHOLE, LOCAL_WORLD_SIZE="8")
    assert local_ranks() == 8


def test_a_mistake_under_several_ranks_ends_all_of_them_with_status_2(arguments, tmp_path):
    log = tmp_path / "log"
    processes = launch(arguments, "--hidden_size", 33, ranks=2, log=str(log))
    codes = []
    for process in processes:  # the launcher would end the second, which waits a moment for that
        process.join(60)
        codes.append(process.exitcode)
    assert codes == [2, 2]
    assert "not divisible by" in log.read_text() and "Traceback" not in log.read_text()


# --- memory and disk ---


def model_of(parameters: int) -> torch.nn.Module:
    return torch.nn.Linear(parameters, 1, bias=False, device="meta")


def test_memory_counts_parameters_gradients_state_and_the_least_of_a_row_for_each_rank(monkeypatch, ranks):
    config = Config(device="cpu", hidden_size=100, num_hidden_layers=10, max_seq_len=1000)
    need = 16 * 1_000_000 + 4 * 100 * 10 * 1000
    for there, local, problems in ((need, "1", 0), (need - 1, "1", 1), (2 * need, "2", 0), (2 * need - 1, "2", 1)):
        ranks(**WHOLE, LOCAL_WORLD_SIZE=local)
        monkeypatch.setattr(machine, "host_memory_bytes", lambda there=there: there)
        assert len(check_memory(config, model_of(1_000_000), 16 * 1_000_000)) == problems


def test_where_memory_cannot_be_told_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 0)
    assert check_memory(Config(device="cpu"), model_of(10**12), 10**13) == []


def test_a_container_s_limit_counts_where_it_is_lower(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for text, expected in (("max\n", whole), ("1000000\n", 1_000_000), (f"{10**15}\n", whole)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
        assert host_memory_bytes(tmp_path) == expected


def test_disk_counts_states_to_keep_and_two_more_and_weights_thrice(monkeypatch, tmp_path):
    config = Config(save_dir=str(tmp_path), keep_checkpoints=3)
    need = 5 * 1000 + 3 * 10
    for free, problems in ((need, 0), (need - 1, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        assert len(check_disk(config, state_bytes=1000, weights_bytes=10)) == problems
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 30))
    assert check_disk(Config(save_dir=str(tmp_path), save_state=0), 1000, 10) == []


def test_sizes_are_told_in_units_that_show_them():
    assert [amount(n) for n in (471_000, 2**30 - 1, 3 * 2**30)] == ["0.4 MiB", "1,024 MiB", "3.0 GiB"]


def test_what_a_run_holds_already_is_not_asked_for_again(arguments, monkeypatch):
    """A disk with room for little more than this run's saves must let the run be resumed."""
    train(arguments, "--stop_after", 5)
    held = folder_bytes(run_folder(arguments))
    need = 4 * 12 * 235_744 + 3 * 2 * 235_744
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, need - held + 1000))
    train(arguments, "--from_resume", 1)
    assert folder_bytes(run_folder(arguments) / "nowhere") == 0


# --- what does no harm: the run goes on and the start page says so ---

HARMLESS = {  # 13 steps of 2 x 2 rows
    "--global_batch_size 4": "--accumulation_steps 2: --global_batch_size 4 sets the rows of a step; this follows",
    "--batch_size 8 --global_batch_size 4": "--batch_size 8: a step has --global_batch_size 4 rows; its micro-batches",
    "--eval_rows 5": "--eval_rows 5: not used: there are no validation texts",
    "--lr_schedule constant --min_lr_ratio 0.1": "--min_lr_ratio 0.1: not used: --lr_schedule constant never falls",
    "--warmup_steps 13": "--warmup_steps 13: the run has 13 steps; it ends while the learning rate still rises",
    "--stop_after 14": "--stop_after 14: the run has 13 steps and ends before",
    "--save_interval 14": "--save_interval 14: longer than the run, which has 13 steps; its end counts all the same",
    "--eval_interval 14 --val_path {corpus}": "--eval_interval 14: longer than the run, which has 13 steps",
    "--log_interval 14": "--log_interval 14: longer than the run, which has 13 steps",
    "--save_state 0 --keep_checkpoints 3": "--keep_checkpoints 3: not used: --save_state 0 keeps no states",
    "--wandb_project mine": "--wandb_project mine: not used: nothing is sent without --tracker or --use_wandb 1",
    "--auto_batch 1": "--auto_batch 1: not used on cpu: only CUDA has a dry step that finds out",
    "--text_key body --data_path {folder}/d.txt": "--text_key body: not used, .txt files have no keys",
}


def notes_in(out: str) -> list[str]:
    return [line.removeprefix("Note: ") for line in out.splitlines() if line.startswith("Note: ")]


@pytest.mark.parametrize("flags", HARMLESS)
def test_settings_that_do_no_harm_run_and_are_noted(flags, arguments, corpus, tmp_path, capsys):
    (tmp_path / "d.txt").write_text("the cat sat on a mat")
    train(arguments, *flags.format(corpus=corpus, folder=tmp_path).split())
    said = notes_in(capsys.readouterr().out)
    assert any(line.startswith(HARMLESS[flags]) for line in said), said


def test_epochs_beside_max_steps_are_not_refused(arguments, capsys):
    train(arguments, "--max_steps", 5)
    assert final_state(arguments)["progress"]["step"] == 5
    assert notes_in(capsys.readouterr().out) == ["--epochs 1: --max_steps 5 comes first; --max_steps 0 goes by epochs"]


def test_what_an_evaluation_has_no_use_for_is_noted(arguments, corpus, capsys):
    train(arguments)
    capsys.readouterr()
    train(
        arguments, *"--eval_only 1 --stop_after 3 --overwrite 1 --samples 2 --use_wandb 1".split(), "--val_path", corpus
    )
    assert notes_in(capsys.readouterr().out) == [
        f"--{name}: not used: --eval_only 1 trains nothing"
        for name in ("overwrite 1", "stop_after 3", "samples 2", "use_wandb 1")
    ]
    assert final_state(arguments)["progress"]["step"] == 13


def test_a_run_with_nothing_odd_about_it_has_no_notes(arguments, capsys):
    train(arguments)
    assert notes_in(capsys.readouterr().out) == []


def test_every_rule_can_be_told_of_any_settings():
    for rule in (*REFUSED, *NOTED):
        always = rule._replace(applies=lambda c, known: True)
        (text,) = those_that_apply((always,), Config(), Known(5, 2, "cpu"))
        assert text.startswith(f"--{rule.option} ") and "{" not in text


def test_rules_keep_still_about_settings_as_they_come():
    for known in (Known(), Known(1000, 10, "cuda")):
        assert those_that_apply((*REFUSED, *NOTED), Config(), known) == []


# --- what must pass ---


def test_the_printed_command_resumes_a_run_whose_shape_does_not_go_with_the_default_heads(arguments, capsys):
    words = replaced(arguments, hidden_size=36, num_attention_heads=3)
    train(words, "--stop_after", 4)
    printed = re.search(r"To go on: +\S*python train_pretrain.py (.*)", capsys.readouterr().out)
    assert printed
    train(shlex.split(printed[1]))
    assert final_state(words)["progress"]["step"] == 13


def test_a_moved_run_folder_is_resumed_where_it_lies(arguments, tmp_path):
    train(arguments, "--stop_after", 4)
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    moved = replaced(arguments, save_dir=tmp_path / "moved")
    train(["--save_dir", str(tmp_path / "moved"), "--hidden_size", "32", "--from_resume", "1"])
    assert final_state(moved)["progress"]["step"] == 13
    assert not (tmp_path / "runs").exists()


def test_a_read_only_cache_folder_that_holds_the_cache_is_enough(arguments, tmp_path, monkeypatch):
    train(arguments, "--stop_after", 1)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "cache" not in Path(path).parts and allowed(path, mode))
    train(arguments, "--overwrite", 1, "--stop_after", 1)


def test_settings_of_a_yaml_file_may_be_more_than_a_short_run_needs(arguments, tmp_path):
    """Only flags must act: a file serves runs of every length."""
    (tmp_path / "c.yaml").write_text(
        "save_interval: 1000\neval_interval: 1000\nwandb_project: mine\nmin_lr_ratio: 0.2\n"
    )
    words = [
        word
        for pair in zip(arguments[::2], arguments[1::2], strict=True)
        if "save_interval" not in pair[0]
        for word in pair
    ]
    train(words, "--config", tmp_path / "c.yaml", "--lr_schedule", "constant")


def test_a_start_command_may_be_repeated_as_it_stands(arguments, tmp_path):
    """Schedulers start the same line again: first from weights, then from the save, whether or not there is more."""
    train(arguments, "--save_weight", "origin")
    weights = run_folder(replaced(arguments, save_weight="origin"))
    again = [*arguments, "--from_weight", str(weights), "--from_resume", "1", "--stop_after", "4"]
    train(again)
    after = final_weights(arguments)
    shutil.rmtree(weights)  # no longer needed
    train(again)
    assert same_bits(after, final_weights(arguments)) and final_state(arguments)["progress"]["step"] == 4


def test_flags_that_only_say_no_are_let_pass(arguments):
    train(arguments, "--auto_batch", 0, "--eval_only", 0, "--use_wandb", 0, "--val_fraction", 0, "--from_resume", 0)
