"""What is checked before the first step, and when: settings alone, then the model's size, then the run's length."""

from __future__ import annotations

import torch

from training.before.cost import model_bytes
from training.before.folders import check_disk, check_paths, check_sources, source_notes
from training.before.machine import check_device, check_memory, check_ranks
from training.before.rules import NOTED, REFUSED, Known, those_that_apply
from training.config import Config


def check_settings(config: Config) -> list[str]:
    """Problems that the settings and a look around show, before anything is read."""
    return [
        *those_that_apply(REFUSED, config, Known()),
        *check_paths(config),
        *check_sources(config),
        *check_device(config),
    ]


def check_model(config: Config, model: torch.nn.Module) -> list[str]:
    """Problems of a model of this size, which may still be on the meta device: memory to train it, disk to save it."""
    state, weights, training = model_bytes(model, config)
    return check_memory(config, model, training) + check_disk(config, state, weights)


def check_length(config: Config, rows_per_step: int, world_size: int, step: int) -> list[str]:
    """Problems that only show once the data are known: ranks without rows, ends that lie behind the saved `step`."""
    return those_that_apply(REFUSED, config, Known(step=step)) + check_ranks(world_size, rows_per_step)


def notes_on(config: Config, total_steps: int, device: str) -> list[str]:
    """For the start page: settings that do nothing here or come to something else, and do no harm."""
    return those_that_apply(NOTED, config, Known(total_steps, device=device)) + source_notes(config)
