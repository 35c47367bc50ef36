"""One row adds a part: an optimizer, a schedule and a tracker that only this file knows train, are killed and go on."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from errors import UserError
from hooks import at_call
from runs import final_state, final_weights, finish, launch, logged, replaced, run_folder, same_bits, train
from training.before.cost import model_bytes
from training.command_line import build_parser, load_config
from training.config import Config
from training.learning_rate import SCHEDULES, get_lr
from training.optimizers import OPTIMIZERS, OptimizerRow, build_optimizers, like_parameter, row_of
from training.trackers import TRACKERS, Service, TrackedRun

TOYS = {"optimizer": "sgd", "lr_schedule": "square", "tracker": "toy"}


class Toy(Service):
    title = "Toy"

    def __init__(self, run: TrackedRun, mode: str):
        self.run_id = run.run_id or f"toy-{run.config['seed']}"
        self._path = run.folder / "toy.jsonl"

    def log(self, figures, step):
        with self._path.open("a") as file:
            file.write(json.dumps([self.run_id, step, figures["loss"]]) + "\n")

    def finish(self, state):
        with self._path.open("a") as file:
            file.write(json.dumps([self.run_id, state, 0]) + "\n")


SGD = OptimizerRow(
    kind=lambda: torch.optim.SGD,
    options=lambda config, device: {"momentum": config.beta1},
    state={"momentum_buffer": like_parameter},
)


def add_toys() -> None:
    OPTIMIZERS["sgd"], SCHEDULES["square"], TRACKERS["toy"] = SGD, (lambda progress: progress**2), Toy


@pytest.fixture
def toys():
    add_toys()
    yield
    del OPTIMIZERS["sgd"], SCHEDULES["square"], TRACKERS["toy"]


def test_toy_parts_train_are_killed_and_resume_bit_equal(toys, arguments):
    whole, killed = (replaced(arguments, **TOYS, save_weight=name) for name in ("whole", "killed"))
    train(whole)
    kill = at_call("torch.optim.SGD.step", 8, "SIGKILL")
    finish(launch(killed, hooks=[(add_toys,), kill]), expect=-signal.SIGKILL)
    finish(launch(killed, "--from_resume", 1, hooks=[(add_toys,)]))
    assert final_state(killed)["progress"]["step"] == 13
    assert same_bits(final_weights(whole), final_weights(killed))
    assert logged(whole) == logged(killed)
    lines = [json.loads(line) for line in (run_folder(killed) / "toy.jsonl").read_text().splitlines()]
    assert {run_id for run_id, _, _ in lines} == {"toy-42"}  # the resumed run went on with the same id
    assert [step for _, step, _ in lines][-1] == "success"
    assert {step: loss for _, step, loss in lines if step in logged(whole)} == logged(whole)


def test_toy_parts_stop_and_resume_bit_equal(toys, arguments):
    whole, stopped = (replaced(arguments, **TOYS, save_weight=name) for name in ("whole", "stopped"))
    train(whole)
    train(stopped, "--stop_after", 5)
    train(stopped, "--from_resume", 1)
    assert same_bits(final_weights(whole), final_weights(stopped)) and logged(whole) == logged(stopped)


def test_a_fake_row_shows_in_the_help_and_in_errors(toys):
    text = build_parser().format_help()
    for shown in ("--optimizer adamw|muon|sgd ", "--lr_schedule cosine|wsd|linear|constant|square", "swanlab|toy "):
        assert shown in text
    with pytest.raises(UserError) as caught:
        load_config(["--optimizer", "sgdd", "--lr_schedule", "sqare", "--tracker", "toys"])
    assert caught.value.problems == [
        "--optimizer sgdd: choose one of adamw, muon, sgd (did you mean sgd?)",
        "--lr_schedule sqare: choose one of cosine, wsd, linear, constant, square (did you mean square?)",
        "--tracker toys: choose one of swanlab, toy (did you mean toy?)",
    ]
    assert load_config(["--optimizer", "sgd"]).optimizer == "sgd"


def test_without_the_row_its_name_is_refused():
    with pytest.raises(UserError, match="--optimizer sgd: choose one of adamw, muon"):
        load_config(["--optimizer", "sgd"])


def test_memory_figures_follow_from_a_row_s_state(toys):
    model = torch.nn.Linear(1000, 1, bias=False)
    for name, state in (("adamw", 2), ("sgd", 1)):
        bytes_of = 4000 * (1 + state)
        assert model_bytes(model, Config(optimizer=name)) == (bytes_of, 2000, bytes_of + 4000)


def test_a_schedule_is_asked_for_the_share_fallen(toys):
    assert get_lr(50, 100, 1.0, min_lr_ratio=0.0, schedule="square") == 0.75
    assert get_lr(0, 100, 1.0, schedule="square") == 1.0


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_each_row_names_the_state_that_an_update_leaves(toys, name):
    model = torch.nn.ModuleDict({"x": torch.nn.Module()})
    model["x"].layers = torch.nn.ModuleList([torch.nn.Linear(4, 6)])
    for optimizer in build_optimizers(model, Config(optimizer=name), torch.device("cpu")):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, found in optimizer.state.items():
            expected = row_of(optimizer).state_of(parameter)
            assert {key: (tuple(value.shape), value.dtype) for key, value in found.items()} == expected


def test_an_optimizer_without_a_row_is_not_taken_for_another():
    with pytest.raises(LookupError, match="RMSprop has no row"):
        row_of(torch.optim.RMSprop([torch.nn.Parameter(torch.ones(1))]))
