"""The dry step: nothing comes of it, and a batch that does not fit is halved without changing the step."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from dataset.lm_dataset import PretrainDataset
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import build_or_open
from errors import UserError
from runs import final_state, final_weights, logged, replaced, run_folder, same_bits, train
from training.before import begin, dry_step
from training.before.cost import Measured
from training.before.dry_step import (
    fitting_batch_size,
    halve_until_it_fits,
    kept_free,
    memory_errors,
    reserved_bytes,
    try_step,
)
from training.before.start_model import init_model
from training.choices import Choices
from training.config import Config
from training.distributed import World
from training.saving.live_state import capture_rng

CPU = torch.device("cpu")


@pytest.fixture
def parts(corpus, tmp_path):
    """A small model with dropout and a data set for it."""
    tokenizer = TextTokenizer.load(ROOT / "model")
    dataset = PretrainDataset(build_or_open(str(corpus), tokenizer, cache_dir=tmp_path / "c", progress=False), 64)

    def make(**settings):
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = Config(**shape, max_seq_len=64, dropout=0.1, **settings)
        return config, init_model(config, tokenizer), dataset

    return make


def out_of_memory_above(most: int, sizes: list[int] | None = None):
    """An attempt that fits up to `most` rows."""

    def attempt(batch_size: int) -> Measured:
        if sizes is not None:
            sizes.append(batch_size)
        if batch_size > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")
        return Measured(seconds_per_row=0.5, seconds_per_update=0.1, peak_bytes=batch_size * 1000)

    return attempt


# --- one bad sample ---


@pytest.mark.parametrize(
    ("taken", "medians"), [([1, 0.1, 9, 0.1, 1, 0.9, 1, 0.1, 9, 0.1], [1, 0.1]), ([30, 3], [30, 3])]
)
def test_a_busy_moment_does_not_decide(monkeypatch, taken, medians):
    """Many samples of what is short, one of what takes long."""
    coming = iter(taken)
    monkeypatch.setattr(dry_step, "SAMPLING_SECONDS", 25.0)
    monkeypatch.setattr(dry_step, "seconds_of", lambda work, device: next(coming))
    assert dry_step.median_seconds([lambda: None] * 2, CPU) == medians
    assert next(coming, None) is None


# --- nothing comes of it ---


@pytest.mark.parametrize(
    ("moe", "dtype", "optimizer"),
    [(0, "float32", "adamw"), (1, "float16", "muon"), (0, "bfloat16", "muon"), (1, "bfloat16", "adamw")],
)
def test_parameters_gradients_and_random_numbers_are_as_before(parts, moe, dtype, optimizer):
    config, model, dataset = parts(use_moe=moe, optimizer=optimizer, learning_rate=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rng = capture_rng(CPU)
    found = try_step(model, dataset, 4, config, CPU, getattr(torch, dtype))
    assert found.seconds_per_row > 0 and found.peak_bytes is None
    assert same_bits(before, {name: p.detach() for name, p in model.named_parameters()})
    assert all(p.grad is None for p in model.parameters())
    assert same_bits(rng, capture_rng(CPU))


def test_a_dry_step_that_fails_half_way_leaves_nothing_either(parts, monkeypatch):
    config, model, dataset = parts()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rng = capture_rng(CPU)
    update = dry_step.update_parameters

    def update_then_fail(*arguments):
        update(*arguments)
        assert not same_bits(before, dict(model.named_parameters()))  # it was a real update
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(dry_step, "update_parameters", update_then_fail)
    with pytest.raises(torch.OutOfMemoryError):
        try_step(model, dataset, 4, config, CPU, torch.float32)
    assert same_bits(before, {name: p.detach() for name, p in model.named_parameters()})
    assert same_bits(rng, capture_rng(CPU)) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_has_the_same_bits_with_and_without_a_dry_step(arguments, monkeypatch, resumed):
    words = replaced(arguments, dropout=0.1)
    train(words, "--stop_after", 5 if resumed else 0)
    train(words, "--from_resume", 1)
    whole = final_weights(words)

    def none(model, dataset, choices, *_):
        return choices.batch_size, Measured(1.0, 0.1)

    monkeypatch.setattr(begin, "fitting_batch_size", none)
    without = replaced(words, save_weight="without")
    train(without, "--stop_after", 5 if resumed else 0)
    train(without, "--from_resume", 1)
    assert same_bits(whole, final_weights(without))


def test_the_fullest_rows_are_tried(parts, monkeypatch):
    config, model, dataset = parts()
    seen = []
    fetch = type(dataset).batch
    monkeypatch.setattr(type(dataset), "batch", lambda self, rows: seen.extend(rows) or fetch(self, rows))
    try_step(model, dataset, 3, config, CPU, torch.float32)
    assert len(set(seen)) == 3
    assert min(dataset.row_targets[seen]) >= sorted(dataset.row_targets)[-3]


def test_on_a_processor_a_micro_batch_of_about_a_thousand_positions_is_timed(parts, monkeypatch):
    config, model, dataset = parts()
    tried = []
    monkeypatch.setattr(dry_step, "try_step", lambda *a: tried.append(a[2]) or Measured(1.0, 0.1))
    choices = Choices("cpu", "float32", 1, 1, batch_size=32)
    assert fitting_batch_size(model, dataset, choices, config, World(CPU))[0] == 32
    fitting_batch_size(model, dataset, replace(choices, batch_size=4), config, World(CPU))
    fitting_batch_size(model, dataset, choices, replace(config, max_seq_len=4096), World(CPU))
    assert tried == [16, 4, 1]


# --- out of memory ---


def test_out_of_memory_halves_the_batch_until_it_fits():
    sizes: list[int] = []
    fitting, found = halve_until_it_fits(32, out_of_memory_above(10, sizes), World(CPU), may_halve=True)
    assert sizes == [32, 16, 8] and fitting == 8
    assert found.peak_bytes == 8000


def test_what_fits_stays():
    assert halve_until_it_fits(32, out_of_memory_above(32), World(CPU), may_halve=True)[0] == 32


def test_one_row_that_does_not_fit_is_refused_with_remedies():
    with pytest.raises(UserError, match=r"--batch_size 1: .*CUDA out of memory.*--activation_checkpointing 1"):
        halve_until_it_fits(32, out_of_memory_above(0), World(CPU), may_halve=True)


def test_without_auto_batch_out_of_memory_is_a_plain_error():
    sizes: list[int] = []
    with pytest.raises(UserError, match=r"--batch_size 32: a step does not fit in memory .*--auto_batch 1 find it"):
        halve_until_it_fits(32, out_of_memory_above(10, sizes), World(CPU), may_halve=False)
    assert sizes == [32]


def test_several_ranks_keep_room_for_gradient_buckets(parts):
    _, model, _ = parts()
    parameters = sum(p.numel() for p in model.parameters())
    assert reserved_bytes(model, ranks=1) == 0
    assert reserved_bytes(model, ranks=8) == 2**30 + 4 * parameters


def test_ranks_agree_on_the_smallest_batch_that_fits_everywhere():
    """Two ranks of which one has less memory; `max` meets at a barrier as the real one does."""
    barrier, box = threading.Barrier(2), {}

    class Rank(World):
        def max(self, values):
            box[self.rank] = list(values)
            barrier.wait()
            most = [max(pair) for pair in zip(*box.values(), strict=True)]
            barrier.wait()
            return most

    found = {}

    def one(rank: int) -> None:
        attempt = out_of_memory_above([100, 5][rank])
        found[rank] = halve_until_it_fits(32, attempt, Rank(CPU, rank, 2), True)[0]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1] == 4


@pytest.mark.parametrize("batch_size", [8, 5])
def test_a_halved_batch_trains_the_same_steps_says_so_and_is_what_a_resume_finds(
    arguments, monkeypatch, capsys, batch_size
):
    def small_card(model, dataset, choices, config, world):
        return halve_until_it_fits(choices.batch_size, out_of_memory_above(2), world, may_halve=bool(config.auto_batch))

    words = replaced(arguments, batch_size=batch_size, accumulation_steps=1)
    train(words)
    rows, loss = logged(words, "rows_seen"), logged(words)
    monkeypatch.setattr(begin, "fitting_batch_size", small_card)
    small = replaced(words, save_weight="small")
    train(small, "--stop_after", 3)
    out = capsys.readouterr().out
    fits = 2
    assert f"batch_size: {batch_size} rows do not fit in memory, {fits} do; accumulation_steps: 1 ->" in out
    assert f"a step stays {batch_size} rows" in out
    train(small, "--from_resume", 1)
    assert logged(small, "rows_seen") == rows
    assert max(abs(loss[step] - value) for step, value in logged(small).items()) < 1e-4
    config = final_state(small)["config"]
    assert (config["batch_size"], config["global_batch_size"]) == (fits, batch_size)
    again = run_folder(small) / "config.yaml"
    train(["--config", str(again), "--save_weight", "again"])
    assert logged(replaced(small, save_weight="again"), "rows_seen") == rows


def test_a_batch_that_never_fits_leaves_an_older_run_as_it_was(arguments, monkeypatch, capsys):
    train(arguments)
    before = final_weights(arguments)

    def no_card(model, dataset, choices, config, world):
        return halve_until_it_fits(choices.batch_size, out_of_memory_above(0), world, may_halve=True)

    monkeypatch.setattr(begin, "fitting_batch_size", no_card)
    train(arguments, "--overwrite", 1, expect=2)
    assert "does not fit in memory" in capsys.readouterr().err
    assert same_bits(before, final_weights(arguments))


SAYINGS = [
    MemoryError("Unable to allocate 7.28 TiB for an array"),
    torch.OutOfMemoryError("CUDA out of memory. Tried"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
]


@pytest.mark.parametrize("error", SAYINGS, ids=lambda error: str(error)[:20])
def test_full_memory_is_told_in_words_however_it_shows(error):
    with pytest.raises(UserError, match="--max_seq_len 99 does not fit in memory"), memory_errors("--max_seq_len 99"):
        raise error


def test_other_errors_are_not_taken_for_full_memory():
    with pytest.raises(RuntimeError, match="shapes"), memory_errors("a row"):
        raise RuntimeError("shapes cannot be multiplied")


def test_a_row_that_fills_memory_in_its_dry_step_is_refused_in_words(arguments, monkeypatch, capsys):
    def full(*_, **__):
        raise SAYINGS[2]

    monkeypatch.setattr(dry_step, "try_step", full)
    train(arguments, expect=2)
    assert "--max_seq_len 64: a micro-batch of 2 does not fit in memory" in capsys.readouterr().err
    assert not run_folder(arguments).exists()


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_kept_free_for_other_ranks_cannot_be_had_by_the_dry_step():
    device = torch.device("cuda", 0)
    free, _ = torch.cuda.mem_get_info(device)
    with kept_free(free // 2, device), pytest.raises(torch.OutOfMemoryError):
        torch.empty(free * 3 // 4, dtype=torch.uint8, device=device)
    torch.empty(free * 3 // 4, dtype=torch.uint8, device=device)  # fits again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_batch_beyond_the_card_is_halved_and_nothing_comes_of_it(parts):
    config, model, dataset = parts(activation_checkpointing=0)
    device = torch.device("cuda", 0)
    model.to(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rng = capture_rng(device)
    attempts = []

    def attempt(batch_size: int) -> Measured:
        attempts.append(batch_size)
        ballast = torch.empty(10**15 if batch_size > 8 else 1, dtype=torch.uint8, device=device)  # the real exception
        del ballast
        return try_step(model, dataset, batch_size, config, device, torch.bfloat16)

    fitting, found = halve_until_it_fits(32, attempt, World(device), may_halve=True)
    assert attempts == [32, 16, 8] and fitting == 8
    assert found.peak_bytes and found.peak_bytes > 16 * sum(p.numel() for p in model.parameters())
    assert same_bits(before, {name: p.detach() for name, p in model.named_parameters()})
    assert same_bits(rng, capture_rng(device)) and all(p.grad is None for p in model.parameters())
