"""Learning rate, seeds, precision, optimizers and stop signals."""

from __future__ import annotations

import math
import random
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

from errors import UserError
from trainer_utils import Throughput, autocast, set_learning_rate, setup_seed, update_parameters
from training.device import choose_dtype, dtype_note, product_seconds
from training.learning_rate import get_lr
from training.optimizers import build_optimizers

OPTIMIZER = {"optimizer": "adamw", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}


def settings(**changes: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**OPTIMIZER, **changes})


def test_cosine_is_minimind_s_formula_at_every_step() -> None:
    for step in range(101):
        expected = 5e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / 100)))
        assert get_lr(step, 100, 5e-4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_learning_rate_starts_at_its_peak_and_ends_at_a_tenth(schedule: str) -> None:
    assert get_lr(0, 1000, 3e-4, schedule=schedule) == pytest.approx(3e-4)
    assert get_lr(1000, 1000, 3e-4, schedule=schedule) == pytest.approx(3e-5)
    assert get_lr(5000, 1000, 3e-4, schedule=schedule) == pytest.approx(3e-5)


def test_constant_schedule_never_falls() -> None:
    assert {get_lr(x, 100, 1e-3, schedule="constant") for x in range(101)} == {1e-3}


def test_wsd_falls_only_in_the_last_fifth() -> None:
    assert get_lr(799, 1000, 1.0, schedule="wsd") == 1.0
    assert get_lr(900, 1000, 1.0, schedule="wsd") == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_from_a_tenth_and_joins_without_a_jump(schedule: str) -> None:
    def lr(x: float) -> float:
        return get_lr(x, 1000, 1.0, warmup=100, schedule=schedule)

    assert lr(0) == pytest.approx(0.1)
    assert all(lr(x) < lr(x + 1) for x in range(99))
    assert lr(99.999) == pytest.approx(lr(100.001), abs=1e-4)


def test_seed_fixes_python_numpy_and_torch() -> None:
    def draws() -> tuple:
        setup_seed(5)
        return random.random(), np.random.rand(), torch.rand(1).item(), nn.Dropout(0.5)(torch.ones(9)).tolist()

    assert draws() == draws()


def test_auto_dtype_is_bfloat16_exactly_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for able, expected in (({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({}, None)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: able)
        assert choose_dtype("auto", cpu) == (expected or torch.float32)
    assert choose_dtype("float16", cpu) == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_dtype_slower_than_float32_is_noted_with_its_factor(kind, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    device, name = torch.device(kind), str(dtype).removeprefix("torch.")
    for factor, noted in ((4.6, True), (1.1, False), (0.4, False)):
        line = dtype_note(dtype, device, lambda of, on, factor=factor: 0.002 * (factor if of == dtype else 1.0))
        expected = f"Slow: a matrix product in {name} takes 4.6 x its time in float32 on this {kind}; --dtype float32"
        assert line.startswith(expected) if noted else line == ""


def test_no_time_is_spent_on_dtypes_known_to_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(dtype: torch.dtype, device: torch.device) -> float:
        pytest.fail("was measured")

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert dtype_note(torch.bfloat16, torch.device("cpu"), never) == ""
    assert dtype_note(torch.float32, torch.device("cpu"), never) == ""
    assert dtype_note(torch.float16, torch.device("cuda"), never) == ""


def test_a_dtype_that_a_device_cannot_multiply_is_refused() -> None:
    def unable(dtype: torch.dtype, device: torch.device) -> float:
        raise RuntimeError("BFloat16 is not supported on MPS")

    with pytest.raises(UserError, match=r"--dtype bfloat16: mps cannot multiply it .* use float32 or auto"):
        dtype_note(torch.bfloat16, torch.device("mps"), unable)


def test_measuring_a_product_takes_a_fraction_of_a_second() -> None:
    began = time.perf_counter()
    assert 0 < product_seconds(torch.float32, torch.device("cpu")) < 1
    assert time.perf_counter() - began < 5  # under 0.1 s on a quiet machine


def test_float32_means_float32_and_bfloat16_multiplies_in_bfloat16() -> None:
    x = torch.ones(2, 2)
    with autocast(x.device, torch.float32):
        assert (x @ x).dtype == torch.float32
    with autocast(x.device, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


def test_weight_decay_falls_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False))
    (adamw,) = build_optimizers(model, settings(), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decay == {id(model[0].weight): 0.1, id(model[1].weight): 0.0}


def test_muon_takes_decoder_matrices_and_adamw_everything_else() -> None:
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    model = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, use_moe=True)
    )
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = build_optimizers(model, settings(optimizer="muon"), torch.device("cpu"))
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw
    assert "model.embed_tokens.weight" in by_adamw
    assert "model.layers.0.mlp.gate.weight" in by_adamw
    assert "model.layers.0.self_attn.q_proj.weight" in by_muon


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_no_parameter_and_no_optimizer_state(optimizer: str, bad: float) -> None:
    setup_seed(0)
    model = nn.ModuleDict({"x": nn.Module()})
    model["x"].layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])
    model["x"].norm = nn.LayerNorm(4, bias=False)
    optimizers = build_optimizers(model, settings(optimizer=optimizer), torch.device("cpu"))
    assert len(optimizers) == (2 if optimizer == "muon" else 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parameters = list(model.parameters())

    def step(gradient: float) -> bool:
        for p in parameters:
            p.grad = torch.full_like(p, 0.1)
        parameters[0].grad[0, 0] = gradient
        return bool(update_parameters(model, optimizers, scaler, 1.0)[1])

    assert step(0.2)
    before = [p.detach().clone() for p in parameters]
    state = [v.clone() for o in optimizers for s in o.state.values() for v in s.values()]
    assert not step(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    after = [v for o in optimizers for s in o.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    assert step(0.2)
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_torch_still_lets_fused_optimizers_skip_on_the_device() -> None:
    """`step_if_finite` leans on this private attribute; without it each step would wait for the host."""
    weight = nn.Parameter(torch.ones(2, 2))
    fused, loop = (torch.optim.AdamW([weight], lr=0.1, fused=fused) for fused in (True, False))
    assert fused._step_supports_amp_scaling is True
    assert not getattr(loop, "_step_supports_amp_scaling", False)
    weight.grad = torch.ones(2, 2)
    fused.found_inf = torch.ones(())
    fused.step()
    assert torch.equal(weight, torch.ones(2, 2)) and fused.state[weight]["step"] == 0
    fused.found_inf = torch.zeros(())
    fused.step()
    assert not torch.equal(weight, torch.ones(2, 2)) and fused.state[weight]["step"] == 1


def test_an_overflowing_scaled_gradient_halves_the_scale_and_skips_the_step() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    model = nn.Module()
    model.weight = weight
    optimizers = build_optimizers(model, settings(), torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((weight * math.inf).sum()).backward()
    _, finite = update_parameters(model, optimizers, scaler, 1.0)
    assert not finite
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(weight, torch.ones(2, 2))


def test_clipping_bounds_the_update_and_reports_the_norm_before_it() -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full((3, 4), 10.0)
    norm, _ = update_parameters(
        nn.ParameterList([weight]), [optimizer], torch.amp.GradScaler("cpu", enabled=False), 0.5
    )
    assert norm.item() == pytest.approx(10 * math.sqrt(12), rel=1e-5)
    assert weight.detach().norm().item() == pytest.approx(0.5, rel=1e-4)


def test_set_learning_rate_reaches_every_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False))
    optimizers = build_optimizers(model, settings(), torch.device("cpu"))
    set_learning_rate(optimizers, 0.25)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.25, 0.25]


def test_throughput_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = Throughput()
    for _ in range(4):
        now[0] += 1.0
        meter.count(50)
    with meter.paused():
        now[0] += 1000.0
    assert meter.read() == (50.0, 1.0)
