"""--eval_only: the validation figures of weights as they are; nothing is trained or written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dataset.text_tokenizer import TextTokenizer
from errors import Findings, UserError, refuse
from trainer_utils import autocast
from training.before.checks import check_settings, notes_on
from training.before.data import open_validation
from training.before.start_model import find_weights, init_model
from training.config import Config, resolve_path, with_saved
from training.device import choose_dtype
from training.distributed import init_distributed_mode, leave_group
from training.during.evaluation import evaluate
from training.during.stopping import StopSignal
from training.launcher import environment_rank


def evaluate_only(given: Config, stop: StopSignal) -> int:
    """Print the figures as one line of JSON; returns the exit status. All ranks must call. Raises UserError."""
    config = with_settings_of_the_run(given)
    problems = Findings(check_settings(config))
    tokenizer = problems.of(TextTokenizer.load, resolve_path(config.tokenizer_path), bool(config.parse_special))
    refuse(problems)
    model: torch.nn.Module = init_model(config, tokenizer)
    validation = open_validation(config, tokenizer, show=environment_rank().rank == 0)
    assert validation is not None, "the rules have asked for validation texts"
    world = init_distributed_mode(config.device)
    stop.at_once = world.size == 1  # several ranks vote: one that just left would leave the others waiting
    if config.threads:
        torch.set_num_threads(config.threads)
    precision = autocast(world.device, choose_dtype(config.dtype, world.device))
    found = evaluate(
        model.to(world.device), validation, config.batch_size, world, precision, lambda: stop.agreed(world)[0]
    )
    if world.is_main:
        for note in notes_on(config, 0, world.device.type):
            print(f"Note: {note}")
        print(json.dumps(asdict(found)), flush=True)
    leave_group(world)  # all ranks
    return 0


def with_settings_of_the_run(given: Config) -> Config:
    """The settings of the run whose weights are evaluated, under whatever was said this time: its shape, tokenizer and
    validation texts need no flags. Weights that come without a run leave the settings as they are."""
    if given.from_weight == "none":
        given = replace(given, from_weight=name_of_the_run(given))
    weights = find_weights(given)
    saved = settings_beside(weights)
    return replace(with_saved(given, saved), from_weight=str(weights))


def name_of_the_run(config: Config) -> str:
    """The run that --save_weight means: the one of this width, or the only one there is. Raises UserError."""
    if "hidden_size" in config.given or config.run_folder.exists():
        return config.save_weight
    save_dir, name = resolve_path(config.save_dir), config.save_weight
    runs = sorted(path.parent.name for path in save_dir.glob(f"{name}_*/run.json"))
    if len(runs) > 1:
        raise UserError(f"--save_weight {name}: {', '.join(runs)} are there; say which: --from_weight {runs[0]}")
    return str(save_dir / runs[0]) if runs else name


def settings_beside(weights: Path) -> dict[str, Any]:
    """What run.json beside a weights file says of the run's settings; nothing where there is none."""
    try:
        return dict(json.loads((weights.parent / "run.json").read_bytes())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
