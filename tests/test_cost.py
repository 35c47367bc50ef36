"""What a run is estimated to cost, against counts made by hand."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from runs import replaced, run_folder, train
from training.before.cost import Cost, Measured, cost_lines, estimate_cost, model_bytes, predict
from training.before.start_model import model_shape
from training.choices import Choices
from training.config import Config
from training.schedule import Clock, Epochs, Progress, choose_batch_size, choose_global_batch, make_clock
from training.words import duration, mebibytes


def shape(**settings) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(MiniMindConfig(**settings))


def two_rows() -> SimpleNamespace:
    """Rows of 8 positions: one segment of 8 tokens, and segments of 5 and 3."""
    plan = SimpleNamespace(piece_length=np.array([8, 5, 3]))
    return SimpleNamespace(plan=plan, row_targets=np.array([8, 8], np.int32))


def clock_of(config: Config, rows: int, ranks: int = 1, progress: Progress | None = None) -> tuple[Clock, Choices]:
    epochs = Epochs(rows, choose_global_batch(config, ranks))
    choices = Choices("cpu", "float32", 1, ranks, choose_batch_size(config, epochs, ranks))
    return make_clock(config, epochs, progress or Progress()), choices


def cost_of(model: MiniMindForCausalLM, **settings) -> Cost:
    return estimate_cost(model, Config(**settings), two_rows())


def lines_of(model: MiniMindForCausalLM, measured: Measured | None = None, ranks: int = 1, **settings) -> list[str]:
    clock, choices = clock_of(Config(**settings), 2, ranks)
    return cost_lines(predict(cost_of(model, **settings), clock, choices, 0, 0, measured), ranks)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 16 + 2 * 32  # q, k and v, o, their norms, the block's norms
EXPERT = 3 * 32 * 128
EMBEDDING = 6400 * 32
VECTORS = 2 * (2 * 16 + 2 * 32) + 32
PAIRS = (8 * 9 + 5 * 6 + 3 * 4) // 2  # each token attends to those before it in its piece, and to itself


def test_a_dense_model_s_parameters_and_flops_agree_with_a_hand_count():
    plan = cost_of(shape(**SMALL))
    total = EMBEDDING + 2 * (LAYER + EXPERT) + 32
    assert plan.parameters == plan.active_parameters == total == 235_744
    assert plan.matmul_parameters == total - VECTORS  # the tied head once, the look-up not at all
    assert plan.flops_per_token == 6 * (total - VECTORS) + 12 * 2 * 32 * PAIRS / 16


def test_a_mixture_of_experts_counts_active_ones_only():
    plan = cost_of(shape(**SMALL, use_moe=True, num_experts=4, num_experts_per_tok=1), use_moe=1)
    router = 4 * 32
    assert plan.parameters == EMBEDDING + 2 * (LAYER + router + 4 * EXPERT) + 32
    assert plan.active_parameters == EMBEDDING + 2 * (LAYER + router + EXPERT) + 32
    assert plan.matmul_parameters == plan.active_parameters - VECTORS
    two = cost_of(shape(**SMALL, use_moe=True, num_experts_per_tok=2))
    assert two.active_parameters - plan.active_parameters == 2 * EXPERT


def test_an_untied_embedding_costs_parameters_but_no_flops():
    tied, untied = cost_of(shape(**SMALL)), cost_of(shape(**SMALL, tie_word_embeddings=False))
    assert untied.parameters - tied.parameters == EMBEDDING
    assert untied.flops_per_token == tied.flops_per_token


def test_minimind_s_two_models_have_64_and_198_million_parameters():
    assert cost_of(shape()).parameters == 63_912_192
    moe = cost_of(shape(use_moe=True))
    assert (moe.parameters, moe.active_parameters) == (198_416_640, 63_936_768)


def test_flops_of_a_token_equal_those_torch_counts_for_a_step():
    """FlopCounterMode sees the matrix products of forward and backward; attention, whose count there depends on the
    kernel and knows no causal mask, is left out."""
    from torch.utils.flop_counter import FlopCounterMode

    seq = 64
    model = MiniMindForCausalLM(MiniMindConfig(**SMALL))
    ids = torch.randint(6400, (1, seq))
    with FlopCounterMode(display=False) as counter:
        model(ids, targets=ids).loss.backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for op, flops in counts.items() if "attention" not in op)
    row = SimpleNamespace(plan=SimpleNamespace(piece_length=np.array([seq])), row_targets=np.array([seq], np.int32))
    plan = estimate_cost(model, Config(), row)
    attention = 12 * 2 * 32 * (seq + 1) / 2
    assert products == seq * (plan.flops_per_token - attention)


def test_steps_tokens_and_time_follow_from_rows_and_ranks():
    config = Config(epochs=3, batch_size=2, accumulation_steps=2)
    dataset = SimpleNamespace(plan=two_rows().plan, row_targets=np.full(10, 7, np.int32))
    cost = estimate_cost(shape(**SMALL), config, dataset)
    clock, choices = clock_of(config, rows=10, ranks=2)
    found = predict(cost, clock, choices, 8, 1, None)
    assert (found["global_batch_size"], found["batch_size"], found["accumulation_steps"]) == (8, 2, 2)
    assert (found["steps_per_epoch"], found["total_steps"], found["rows"], found["rows_left"]) == (2, 6, 10, 22)
    assert (found["tokens_per_epoch"], found["tokens_per_step"]) == (70, 56)
    assert found["tokens_per_parameter"] == 70 / 235_744
    assert found["estimated_seconds"] is None
    measured = Measured(seconds_per_row=3.0, seconds_per_update=0.5)
    assert predict(cost, clock, choices, 8, 1, measured)["estimated_seconds"] == 3.0 * 22 / 2 + 0.5 * 5


def test_a_state_holds_parameters_and_two_moments_and_muon_one_of_its_matrices():
    model = shape(**SMALL)
    total, matrices = 235_744, 2 * (LAYER + EXPERT - 2 * 16 - 2 * 32)
    assert model_bytes(model, Config()) == (12 * total, 2 * total, 16 * total)
    muon = 12 * total - 4 * matrices
    assert model_bytes(model, Config(optimizer="muon")) == (muon, 2 * total, muon + 4 * total)


def test_the_foretold_sizes_are_those_of_the_files(arguments):
    for optimizer in ("adamw", "muon"):
        words = replaced(arguments, optimizer=optimizer, save_weight=optimizer)
        train(words)
        folder = run_folder(words)
        plan = json.loads((folder / "run.json").read_text())["plan"]
        state = sum(path.stat().st_size for path in (folder / "resume" / "step_00000013").glob("[mo]*.safetensors"))
        assert state == pytest.approx(plan["state_bytes"], rel=0.01)
        assert (folder / f"{optimizer}_32.pth").stat().st_size == pytest.approx(plan["weights_bytes"], rel=0.05)


DURATIONS = {
    0.2: "1 s",
    40: "40 s",
    89: "89 s",
    90: "2 min",
    720: "12 min",
    3599: "1 h 0 min",
    12_000: "3 h 20 min",
    47 * 3600: "47 h 0 min",
    2 * 86400 + 3 * 3600: "2 d 3 h",
    30 * 86400: "30 d 0 h",
}


@pytest.mark.parametrize("seconds", DURATIONS)
def test_a_duration_is_told_in_two_units_at_most(seconds):
    assert duration(seconds) == DURATIONS[seconds]


def test_small_and_large_sizes_are_told_in_mebibytes():
    assert [mebibytes(n) for n in (0, 471_000, 2**30, 5 * 2**30)] == ["0.0 MiB", "0.4 MiB", "1,024 MiB", "5,120 MiB"]


def test_the_lines_tell_size_step_run_disk_and_memory():
    settings = {"use_moe": 1, "epochs": 3, "batch_size": 1, "accumulation_steps": 1}
    measured = Measured(seconds_per_row=2000.0, seconds_per_update=0.0, peak_bytes=3 * 2**30)
    assert lines_of(shape(**SMALL, use_moe=True), measured, **settings) == [
        "Model: 0.31 M parameters, 0.24 M active, 1.4 MFLOPs a token",
        "Step: 1 rows = 1 x 1 micro-batches x 1 rank, about 8 tokens",
        "Run: 6 steps, 2 an epoch of 16 tokens (0.00 tokens a parameter), about 3 h 20 min by a dry step; log lines "
        "say what is left",
        "Disk: 0.6 MiB of weights, 3.5 MiB a resume state",
        "Memory: 4.7 MiB of parameters, gradients and optimizer state; 3.00 GiB at the peak of a dry step",
    ]
    short = lines_of(shape(**SMALL), ranks=2)
    assert short[1] == "Step: 512 rows (the data have 2) = 1 x 256 micro-batches x 2 ranks, about 16 tokens"
    assert short[2].endswith("tokens a parameter)")  # no dry step, no time


def test_the_meta_model_of_a_plan_has_the_real_one_s_parameters():
    tokenizer = SimpleNamespace(vocab_size=420, bos_id=1, eos_id=2, pad_id=0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = model_shape(Config(hidden_size=64), tokenizer)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn
    assert model.lm_head.weight.shape == (420, 64)
    assert math.prod(model.model.layers[7].mlp.up_proj.weight.shape) == 64 * 256


def test_plan_and_ledger_in_run_json_hold_all_that_is_promised(arguments, tmp_path):
    (tmp_path / "v.jsonl").write_text('{"text": "two red birds"}\n' * 3)
    train(arguments, "--val_path", tmp_path / "v.jsonl")
    record = json.loads((run_folder(arguments) / "run.json").read_text())
    ledger = record["ledger"]["train"]
    promised = "documents bytes tokens bytes_per_token rows padding_share documents_split exact_duplicates rejected"
    assert set(promised.split()) <= ledger.keys()
    assert ledger["bytes_per_token"] == pytest.approx(ledger["bytes"] / (ledger["tokens"] - 2 * ledger["documents"]))
    plan = record["plan"]
    assert plan["tokens_per_epoch"] == ledger["targets"] == ledger["tokens"] - ledger["documents"]
    assert plan["steps_per_epoch"] == 13 == plan["total_steps"]
    assert plan["tokens_per_parameter"] == ledger["targets"] / 235_744
    assert plan["estimated_seconds"] > 0 and plan["seconds_per_row"] > 0
    assert record["ledger"]["val"]["exact_duplicates"] == 2
    assert record["ledger"]["val"]["shared_with_train"] == 0
