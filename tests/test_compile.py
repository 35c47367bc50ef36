"""--use_compile: the same numbers, compiled once, chosen by the run's length, and no trouble where nothing compiles."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
import torch

from errors import UserError
from runs import command, environment, final_state, finish, largest_difference, launch, logged, replaced, train
from runs import final_weights as weights_of
from training import compiling
from training.compiling import (
    COMPILE_SECONDS,
    MARGIN,
    SHARE_SAVED,
    choose_compile,
    compile_model,
    compiler_problem,
    uncompiled,
)
from training.distributed import World

CPU = World(torch.device("cpu"))
REPAID = MARGIN * COMPILE_SECONDS["cpu"] / SHARE_SAVED["cpu"]
needs_compiler = pytest.mark.skipif(bool(compiler_problem(CPU.device)), reason="no working C++ compiler here")


def graphs() -> int:
    """How many graphs have been compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# --- the decision ---


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, False), (1, False), (0.9 * REPAID, False), (2 * REPAID, True)]
)
def test_auto_compiles_only_a_run_that_is_long_enough_to_repay_it(monkeypatch, seconds, expected):
    monkeypatch.setattr(compiling, "compiler_problem", lambda device: "")
    assert choose_compile("auto", None, seconds, CPU)[0] is expected


@pytest.mark.parametrize("saved", [True, False])
def test_auto_repeats_what_the_resumed_run_had_decided_and_a_spoken_value_does_not(monkeypatch, saved):
    monkeypatch.setattr(compiling, "compiler_problem", lambda device: "")
    assert choose_compile("auto", saved, 2 * REPAID * (not saved), CPU)[0] is saved
    assert choose_compile("0", saved, 2 * REPAID, CPU)[0] is False
    assert choose_compile("1", saved, 1, CPU)[0] is True


def test_without_a_compiler_auto_says_so_in_one_line_and_1_is_refused():
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        chosen, line = choose_compile("auto", None, 2 * REPAID, CPU)
        with pytest.raises(UserError, match="--use_compile 1: no C\\+\\+ compiler"):
            choose_compile("1", None, 1, CPU)
    assert chosen is False
    assert line == "Not compiled: no C++ compiler (g++, clang++) was found"


def test_a_short_run_on_auto_stays_uncompiled_and_notes_the_choice(arguments):
    train(replaced(arguments, use_compile="auto"), "--stop_after", 1)
    assert final_state(arguments)["choices"]["compile"] is False


# --- compiled training ---


@needs_compiler
@pytest.mark.parametrize("moe", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_training_follows_eager_within_1e_4_and_compiles_nothing_after_the_first_steps(arguments, corpus, moe):
    words = [*replaced(arguments, use_moe=moe, epochs=2), "--val_path", str(corpus)]
    train(words)
    eager, validation = logged(words), logged(words, "val_loss")
    torch._dynamo.reset()
    before = graphs()
    train([*replaced(words, use_compile=1), "--overwrite", "1", "--stop_after", "13"])  # an epoch and its evaluation
    after_one_epoch = graphs()
    train([*replaced(words, use_compile=1), "--from_resume", "1"])
    assert after_one_epoch > before
    assert graphs() == after_one_epoch
    compiled = logged(words)
    assert compiled.keys() == eager.keys()
    assert max(abs(compiled[step] - eager[step]) for step in eager) < 1e-4
    assert max(abs(value - validation[step]) for step, value in logged(words, "val_loss").items()) < 1e-4


@needs_compiler
def test_a_compiled_run_is_resumed_uncompiled_under_the_same_names(arguments):
    train(arguments)
    eager = weights_of(arguments)
    train(replaced(arguments, use_compile=1), "--overwrite", 1, "--stop_after", 6)
    assert final_state(arguments)["choices"]["compile"] is True
    train(replaced(arguments, use_compile=0), "--from_resume", 1)
    assert final_state(arguments)["choices"]["compile"] is False
    resumed = weights_of(arguments)
    assert resumed.keys() == eager.keys()
    assert largest_difference(resumed, eager) < 1e-3


@needs_compiler
def test_texts_of_many_lengths_compile_nothing():
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    compile_model(model, with_loss=True)
    before = graphs()
    with uncompiled(), torch.no_grad():
        for length in (3, 4, 5):
            model(torch.zeros(1, length, dtype=torch.long))
    assert graphs() == before


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_the_compiled_loss_and_its_gradients_are_those_of_the_plain_one(extra):
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=300))
    input_ids = torch.randint(300, (2, 40))
    found = []
    for compiled in (False, True):
        if compiled:
            compile_model(model, with_loss=True)
        model.zero_grad()
        out = model(input_ids, targets=input_ids.roll(-1, 1), **extra)
        out.loss.backward()
        found.append((out.loss.detach(), out.logits_loss.detach(), *(p.grad for p in model.parameters())))
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(*found, strict=True))


@needs_compiler
@pytest.mark.slow
def test_two_ranks_compile_alike_and_follow_one(arguments, tmp_path):
    found = []
    for ranks in (1, 2):
        words = replaced(arguments, batch_size=2, accumulation_steps=2 // ranks, save_weight=f"r{ranks}", use_compile=1)
        finish(launch(words, "--stop_after", 4, ranks=ranks))
        found.append(logged(words))
        assert final_state(words)["choices"]["compile"] is True
    assert max(abs(found[0][step] - found[1][step]) for step in found[0]) < 1e-4


@needs_compiler
@pytest.mark.slow
def test_a_signal_while_compiling_ends_the_run_within_seconds_and_nothing_is_written(arguments, tmp_path):
    words = command(replaced(arguments, use_compile=1))
    process = subprocess.Popen(
        words, env=environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cold")), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Compiled:"):
            break
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 12
    assert not list((tmp_path / "runs").rglob("*.pth"))
    assert json.loads(next((tmp_path / "runs").rglob("run.json")).read_text())["status"] == "stopped"
