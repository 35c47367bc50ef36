"""What a run will cost, estimated before its first step: parameters, FLOPs, steps, disk, memory, time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from training.config import Config
from training.optimizers import is_hidden_matrix
from training.schedule import Schedule, StepLayout


@dataclass(frozen=True)
class Plan:
    """What a run of these settings on these data comes to.

    FLOPs count 6 per matmul parameter and token (forward 2, backward 4; the tied head once, embedding look-up 0,
    active experts only) and 12 x width for each attended pair of tokens and layer. The last three fields stay None
    until a dry step has measured them."""

    parameters: int
    active_parameters: int
    matmul_parameters: int  # active ones that a token is multiplied with
    flops_per_token: float
    tokens_per_epoch: int  # valid targets
    tokens_per_parameter: float  # of an epoch
    tokens_per_step: float
    rows: int  # of an epoch
    steps_per_epoch: int
    total_steps: int
    accumulation_steps: int
    global_batch_size: int
    batch_size: int
    rows_left: int  # of the whole run, from where it stands now
    state_bytes: int  # one resume state on disk: float32 parameters and the optimizer's state
    weights_bytes: int  # one weights file on disk
    training_bytes: int  # parameters, gradients and optimizer state in memory
    seconds_per_row: float | None = None  # forward and backward on one rank
    estimated_seconds: float | None = None  # of what is left
    peak_bytes: int | None = None  # most device memory held by a dry step; on CUDA only

    def measured(self, layout: StepLayout, seconds_per_row: float, peak_bytes: int | None) -> Plan:
        """With what a dry step found: time, memory, and the micro-batches that fit."""
        return dataclasses.replace(
            self,
            batch_size=layout.batch_size,
            accumulation_steps=layout.accumulation_steps,
            seconds_per_row=seconds_per_row,
            estimated_seconds=seconds_per_row * self.rows_left / min(layout.world_size, layout.rows),
            peak_bytes=peak_bytes,
        )

    def lines(self, world_size: int) -> list[str]:
        active = "" if self.active_parameters == self.parameters else f", {self.active_parameters / 1e6:.2f} M active"
        peak = f"; {self.peak_bytes / 2**30:.2f} GiB at the peak of a dry step" if self.peak_bytes else ""
        short = f" (the data have {self.rows:,})" if self.rows < self.global_batch_size else ""
        time = "" if self.estimated_seconds is None else f", about {duration(self.estimated_seconds)}"
        return [
            f"Model: {self.parameters / 1e6:.2f} M parameters{active}, {self.flops_per_token / 1e6:.1f} MFLOPs a token",
            f"Step: {self.global_batch_size:,} rows{short} = {self.batch_size} x {self.accumulation_steps} "
            f"micro-batches x {world_size} rank{'s' * (world_size > 1)}, about {self.tokens_per_step:,.0f} tokens",
            f"Run: {self.total_steps:,} steps, {self.steps_per_epoch:,} an epoch of {self.tokens_per_epoch:,} tokens "
            f"({self.tokens_per_parameter:.2f} tokens a parameter){time}",
            f"Disk: {mebibytes(self.weights_bytes)} of weights, {mebibytes(self.state_bytes)} a resume state",
            f"Memory: {mebibytes(self.training_bytes)} of parameters, gradients and optimizer state{peak}",
        ]


def make_plan(
    model: nn.Module, config: Config, dataset: Any, layout: StepLayout, schedule: Schedule, done: int
) -> Plan:
    """The plan of a run from its parts; `done` rows are behind it. `model` may be on the meta device."""
    shape: Any = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = experts - experts * shape.num_experts_per_tok // shape.num_experts if experts else 0
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    untied_embedding = 0 if shape.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    matmul = total - idle - vectors - untied_embedding
    tokens = int(dataset.row_targets.sum(dtype="int64"))
    lengths = dataset.plan.segment_length.astype(float)
    attended_pairs = float((lengths * (lengths + 1) / 2).sum())
    width = shape.num_attention_heads * shape.head_dim
    attention = 12 * shape.num_hidden_layers * width * attended_pairs / max(1, tokens)
    state, weights, training = model_bytes(model, config)
    return Plan(
        parameters=total,
        active_parameters=total - idle,
        matmul_parameters=matmul,
        flops_per_token=6 * matmul + attention,
        tokens_per_epoch=tokens,
        tokens_per_parameter=tokens / total,
        tokens_per_step=tokens / layout.rows * min(layout.global_batch_size, layout.rows),
        rows=layout.rows,
        steps_per_epoch=layout.steps_per_epoch,
        total_steps=schedule.total_steps,
        accumulation_steps=layout.accumulation_steps,
        global_batch_size=layout.global_batch_size,
        batch_size=layout.batch_size,
        rows_left=max(0, schedule.planned_rows - done),
        state_bytes=state,
        weights_bytes=weights,
        training_bytes=training,
    )


def model_bytes(model: nn.Module, config: Config) -> tuple[int, int, int]:
    """Bytes of (a resume state on disk, a half-precision weights file, what training holds in memory). AdamW keeps two
    moments of a parameter, Muon one of its matrices."""
    total = sum(p.numel() for p in model.parameters())
    by_muon = sum(
        p.numel() for name, p in model.named_parameters() if config.optimizer == "muon" and is_hidden_matrix(name, p)
    )
    state = 4 * (3 * total - by_muon)
    return state, 2 * total, state + 4 * total


def mebibytes(count: int) -> str:
    """Bytes for people; small models are a fraction of a MiB."""
    mib = count / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `5 d 3 h`: two units say enough of an estimate."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"
