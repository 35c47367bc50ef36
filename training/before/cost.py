"""What a run will cost, estimated before its first step: parameters, FLOPs, disk, memory, time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from dataset.lm_dataset import PretrainDataset
from model.model_minimind import MiniMindForCausalLM
from training.choices import Choices
from training.config import Config
from training.optimizers import state_bytes
from training.schedule import Clock, accumulation_steps
from training.words import duration, mebibytes


@dataclass(frozen=True)
class Cost:
    """What a model of this shape costs on these data.

    FLOPs count 6 per matmul parameter and token (forward 2, backward 4; the tied head once, embedding look-up 0,
    active experts only) and 12 x width for each attended pair of tokens and layer."""

    parameters: int
    active_parameters: int
    matmul_parameters: int  # active ones that a token is multiplied with
    flops_per_token: float
    tokens_per_epoch: int  # valid targets
    tokens_per_parameter: float  # of an epoch
    state_bytes: int  # one resume state on disk: float32 parameters and the optimizer's state
    weights_bytes: int  # one weights file on disk
    training_bytes: int  # parameters, gradients and optimizer state in memory


def estimate_cost(model: MiniMindForCausalLM, config: Config, dataset: PretrainDataset) -> Cost:
    """The cost of training `model`, which may be on the meta device, on the rows of `dataset`."""
    shape = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = experts - experts * shape.num_experts_per_tok // shape.num_experts if experts else 0
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    untied_embedding = 0 if shape.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    matmul = total - idle - vectors - untied_embedding
    tokens = int(dataset.row_targets.sum(dtype="int64"))
    lengths = dataset.plan.piece_length.astype(float)
    attended_pairs = float((lengths * (lengths + 1) / 2).sum())
    width = shape.num_attention_heads * shape.head_dim
    attention = 12 * shape.num_hidden_layers * width * attended_pairs / max(1, tokens)
    state, weights, training = model_bytes(model, config)
    return Cost(
        parameters=total,
        active_parameters=total - idle,
        matmul_parameters=matmul,
        flops_per_token=6 * matmul + attention,
        tokens_per_epoch=tokens,
        tokens_per_parameter=tokens / total,
        state_bytes=state,
        weights_bytes=weights,
        training_bytes=training,
    )


@dataclass(frozen=True)
class Measured:
    """What a dry step found: seconds for forward and backward of a row on one rank and for one update, and the most
    device memory held (bytes; None where it cannot be told)."""

    seconds_per_row: float
    seconds_per_update: float
    peak_bytes: int | None = None

    def seconds_of(self, rows: int, steps: int, ranks: int) -> float:
        """Of so much training: rows are shared among ranks, updates are not."""
        return self.seconds_per_row * rows / ranks + self.seconds_per_update * steps


def predict(
    cost: Cost, clock: Clock, choices: Choices, rows_seen: int, step: int, measured: Measured | None
) -> dict[str, Any]:
    """What the receipt notes of a run before its first step: cost, steps, time. None stands for what was not measured
    (an evaluation, a run that has ended)."""
    rows_left, steps_left = max(0, clock.planned_rows - rows_seen), max(0, clock.total_steps - step)
    ranks = min(choices.world_size, clock.rows_per_step)
    return {
        **dataclasses.asdict(cost),
        "tokens_per_step": cost.tokens_per_epoch / clock.rows * clock.rows_per_step,
        "rows": clock.rows,
        "steps_per_epoch": clock.steps_per_epoch,
        "total_steps": clock.total_steps,
        "accumulation_steps": accumulation_steps(clock.global_batch_size, choices.batch_size, choices.world_size),
        "global_batch_size": clock.global_batch_size,
        "batch_size": choices.batch_size,
        "rows_left": rows_left,
        "seconds_per_row": measured and measured.seconds_per_row,
        "estimated_seconds": measured and measured.seconds_of(rows_left, steps_left, ranks),
        "peak_bytes": measured and measured.peak_bytes,
    }


def cost_lines(predicted: dict[str, Any], world_size: int) -> list[str]:
    """`predict`'s figures for the start page."""
    p = predicted
    active = "" if p["active_parameters"] == p["parameters"] else f", {p['active_parameters'] / 1e6:.2f} M active"
    peak = f"; {p['peak_bytes'] / 2**30:.2f} GiB at the peak of a dry step" if p["peak_bytes"] else ""
    short = f" (the data have {p['rows']:,})" if p["rows"] < p["global_batch_size"] else ""
    seconds = p["estimated_seconds"]
    time = "" if seconds is None else f", about {duration(seconds)} by a dry step; log lines say what is left"
    return [
        f"Model: {p['parameters'] / 1e6:.2f} M parameters{active}, {p['flops_per_token'] / 1e6:.1f} MFLOPs a token",
        f"Step: {p['global_batch_size']:,} rows{short} = {p['batch_size']} x {p['accumulation_steps']} "
        f"micro-batches x {world_size} rank{'s' if world_size > 1 else ''}, about {p['tokens_per_step']:,.0f} tokens",
        f"Run: {p['total_steps']:,} steps, {p['steps_per_epoch']:,} an epoch of {p['tokens_per_epoch']:,} tokens "
        f"({p['tokens_per_parameter']:.2f} tokens a parameter){time}",
        f"Disk: {mebibytes(p['weights_bytes'])} of weights, {mebibytes(p['state_bytes'])} a resume state",
        f"Memory: {mebibytes(p['training_bytes'])} of parameters, gradients and optimizer state{peak}",
    ]


def model_bytes(model: nn.Module, config: Config) -> tuple[int, int, int]:
    """Bytes of (a resume state on disk, a half-precision weights file, what training holds in memory)."""
    total = sum(p.numel() for p in model.parameters())
    state = 4 * total + state_bytes(model, config.optimizer)
    return state, 2 * total, state + 4 * total
