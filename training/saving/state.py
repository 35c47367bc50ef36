"""The state of a training run: what a checkpoint holds, and how a resume takes it back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.choices import Choices, saved_choices
from training.parallel import full_tensors
from training.saving.checkpoint import Checkpoint
from training.saving.live_state import (
    capture_rng,
    flatten_optimizer,
    restore_optimizer,
    restore_parameters,
    restore_rng,
)
from training.schedule import Progress


@dataclass(frozen=True)
class RunFacts:
    """What makes a run this run and no other; the same in each of its checkpoints."""

    config: dict[str, Any]  # the settings as resolved
    global_batch_size: int
    choices: Choices
    identity: dict[str, Any]  # data, tokenizer, rows
    environment: dict[str, Any]  # versions, hardware, git


def circumstances(record: dict[str, Any]) -> dict[str, Any]:
    """What the last bits of a run depend on besides settings and data. `record`: a checkpoint's state.json, a start in
    a receipt, or RunFacts as a dict."""
    environment = record["environment"]
    kept = {"torch": environment["versions"]["torch"], "processor": environment["cpu"], "gpus": environment.get("gpus")}
    return {**saved_choices(record), **kept}


@dataclass
class TrainingState:
    """Exactly what a checkpoint holds of a run as it changes; `rng`: this rank's random generators at the last finished
    step."""

    model: nn.Module  # as `parallelize` left it
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    progress: Progress
    rng: dict[str, Tensor]

    def tensors(self, rng_of_ranks: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The tensor files of a checkpoint, still pointing at the live tensors."""
        return {
            "model": full_tensors(self.model),
            "optimizer": flatten_optimizer(self.optimizers, self.model),
            "rng": {f"rank{r}/{key}": value for r, rng in enumerate(rng_of_ranks) for key, value in rng.items()},
        }

    def as_json(self, facts: RunFacts, next_lr: float) -> dict[str, Any]:
        """state.json of a checkpoint: JSON values only."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "next_lr": next_lr,
            "scaler": self.scaler.state_dict(),
            **dataclasses.asdict(facts),
        }

    def restore(self, checkpoint: Checkpoint, rank: int, device: torch.device, reset_optimizer: bool) -> list[str]:
        """Take parameters, optimizer, scaler and random states back from a checkpoint. Returns what could not be
        carried over, in words. Each part is checked before it is changed: CheckpointError if shapes or names differ."""
        restore_parameters(self.model, checkpoint.load("model"))
        notes = []
        if reset_optimizer:
            notes.append("optimizer state forgotten, as asked")
        else:
            restore_optimizer(self.optimizers, self.model, checkpoint.load("optimizer"))
        if self.scaler.is_enabled() and checkpoint.state["scaler"]:
            self.scaler.load_state_dict(checkpoint.state["scaler"])
        saved = checkpoint.load("rng")
        mine = {key.partition("/")[2]: value for key, value in saved.items() if key.startswith(f"rank{rank}/")}
        if mine:
            notes += [f"random state of {name} is not in the checkpoint" for name in restore_rng(mine, device)]
        else:
            notes.append(f"rank {rank} has no saved random state; dropout draws anew from seed + rank")
        self.rng = capture_rng(device)
        return notes
