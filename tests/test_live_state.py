"""Parameters, optimizers and random generators out of live objects and back: bit-equal, or refused by name."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tied_model import Tied
from torch import nn

from errors import CheckpointError
from storage.tensors import write_tensors
from training.saving import checkpoint, live_state, saver


def train(model, optimizers, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 11, (4, 6), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adamw(model, **options):
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, **options)]


def muon_and_adamw(model):
    matrices = [model.up.weight, model.down.weight]
    others = [model.embed.weight, model.norm.weight]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


# --- parameters and optimizers ---
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: adamw(model, fused=True),
        lambda model: adamw(model, foreach=True),
        muon_and_adamw,
    ],
    ids=["loop", "fused", "foreach", "muon+adamw"],
)
def test_training_goes_on_bit_equal_after_parameters_and_optimizer_are_restored(tmp_path, make):
    torch.manual_seed(0)
    model = Tied()
    optimizers = make(model)
    train(model, optimizers, 3)
    tensors = {
        "model": live_state.flatten_parameters(model),
        "optimizer": live_state.flatten_optimizer(optimizers, model),
    }
    checkpoint.write_checkpoint(tmp_path, 3, tensors, {})
    train(model, optimizers, 3, seed=2)

    torch.manual_seed(99)
    fresh = Tied()
    fresh_optimizers = make(fresh)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    live_state.restore_parameters(fresh, found.load("model"))
    live_state.restore_optimizer(fresh_optimizers, fresh, found.load("optimizer"))
    assert fresh.head.weight is fresh.embed.weight
    train(fresh, fresh_optimizers, 3, seed=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(fresh.named_parameters())[name]), name
    expected, got = (
        live_state.flatten_optimizer(optimizers, model),
        live_state.flatten_optimizer(fresh_optimizers, fresh),
    )
    assert expected.keys() == got.keys() and all(torch.equal(expected[key], got[key]) for key in expected)


def test_a_tied_head_is_stored_once():
    assert set(live_state.flatten_parameters(Tied())) == {"embed.weight", "up.weight", "down.weight", "norm.weight"}


def test_the_restored_optimizer_keeps_the_hyperparameters_it_was_built_with():
    model = Tied()
    old = adamw(model, weight_decay=0.3)
    train(model, old, 1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.01, fused=True)
    live_state.restore_optimizer([new], model, live_state.flatten_optimizer(old, model))
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (0.5, 0.01)
    train(model, [new], 1)
    assert new.state[model.up.weight]["step"].item() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"up.weight/exp_avg": torch.zeros(3, 3)}), r"up.weight/exp_avg is torch.float32 \[3, 3\]"),
        (
            lambda t: t.update({"up.weight/exp_avg": t["up.weight/exp_avg"].half()}),
            r"up.weight/exp_avg is torch.float16",
        ),
        (lambda t: t.pop("down.weight/exp_avg_sq"), "down.weight/exp_avg_sq is missing"),
        (lambda t: t.update({"down.weight/momentum_buffer": torch.zeros(8, 16)}), "momentum_buffer is not known"),
        (lambda t: t.update({"other.weight/step": torch.tensor(1.0)}), "other.weight is not a parameter"),
        (lambda t: t.update({"up.weight/step": torch.ones(2)}), "up.weight/step"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    model = Tied()
    optimizers = adamw(model)
    train(model, optimizers, 1)
    tensors = {key: value.clone() for key, value in live_state.flatten_optimizer(optimizers, model).items()}
    change(tensors)
    fresh = adamw(model)
    with pytest.raises(CheckpointError, match=message):
        live_state.restore_optimizer(fresh, model, tensors)
    assert not fresh[0].state


def test_the_state_of_another_optimizer_is_refused_and_an_empty_one_is_the_state_before_step_1():
    model = Tied()
    mixed = muon_and_adamw(model)
    assert live_state.flatten_optimizer(mixed, model) == {}
    live_state.restore_optimizer(mixed, model, {})
    train(model, mixed, 1)
    with pytest.raises(CheckpointError, match=r"down\.weight/momentum_buffer is not known"):
        live_state.restore_optimizer(adamw(model), model, live_state.flatten_optimizer(mixed, model))


def test_an_optimizer_all_of_whose_updates_were_skipped_is_restored_as_it_was():
    """Fused AdamW makes its state all the same; Muon, which decides on the host, does not."""
    model = Tied()
    muon, adam = muon_and_adamw(model)
    train(model, [adam], 1)
    saved = live_state.flatten_optimizer([muon, adam], model)
    fresh = muon_and_adamw(model)
    live_state.restore_optimizer(fresh, model, saved)
    assert not fresh[0].state and len(fresh[1].state) == 2


def test_parameters_of_another_architecture_are_refused_by_name_and_change_nothing():
    model, before = Tied(8), live_state.flatten_parameters(Tied(12))
    kept = model.up.weight.clone()
    with pytest.raises(CheckpointError, match=r"another architecture:(.|\n)*up.weight has shape \[24, 12\].*\[16, 8\]"):
        live_state.restore_parameters(model, before)
    tensors = dict(live_state.flatten_parameters(Tied(8)), extra=torch.zeros(1))
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"extra is not known(.|\n)*norm.weight is missing"):
        live_state.restore_parameters(model, tensors)
    halves = {name: value.half() for name, value in live_state.flatten_parameters(Tied(8)).items()}
    with pytest.raises(CheckpointError, match=r"float16, this model holds torch\.float32"):
        live_state.restore_parameters(model, halves)
    assert torch.equal(model.up.weight, kept)


def test_names_are_the_same_plain_compiled_or_inside_ddp(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = Tied()
        names = list(live_state.flatten_parameters(plain))
        plain.up.compile()  # in place, as the trainer compiles its blocks
        for wrapped in (plain, nn.parallel.DistributedDataParallel(plain)):
            assert live_state.unwrap(wrapped) is plain
            assert list(live_state.flatten_parameters(wrapped)) == names
            live_state.restore_parameters(wrapped, live_state.flatten_parameters(Tied()))
    finally:
        torch.distributed.destroy_process_group()


# --- random numbers ---
def draw() -> list:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


@pytest.mark.parametrize("odd", [False, True], ids=["no half-used pair", "a normal number waiting in each"])
def test_every_host_generator_goes_on_as_if_nothing_had_happened(tmp_path, odd):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if odd:  # both draw normal numbers in pairs and keep the second
        random.gauss(0, 1)
        np.random.randn()
    state = live_state.capture_rng("cpu")
    expected = [draw() for _ in range(3)]
    write_tensors(tmp_path / "rng.safetensors", state)
    assert live_state.restore_rng(load_file(tmp_path / "rng.safetensors"), "cpu") == []
    assert [draw() for _ in range(3)] == expected


def test_the_device_generator_that_cannot_be_carried_over_is_named():
    state = live_state.capture_rng("cpu")
    assert live_state.restore_rng({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}, "cpu") == ["cuda"]
    del state["numpy"]
    with pytest.raises(CheckpointError, match="no numpy"):
        live_state.restore_rng(state, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_generator_and_snapshots_from_cuda_are_exact():
    state = live_state.capture_rng("cuda")
    expected = torch.rand(5, device="cuda")
    live_state.restore_rng(state, "cuda")
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    copy = saver.BackgroundWriter().snapshot({"x": {"y": expected}})["x"]["y"]
    assert copy.is_pinned() and torch.equal(copy, expected.cpu())
