"""What is checked and foretold before the first step: settings against each other and the machine, and the plan."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import Config, resolve_path
from resume import Schedule, Windows
from trainer_utils import environment_rank

# --- settings ---


def check_settings(config: Config) -> list[str]:
    """Problems of the settings taken together: shapes, paths, device, combinations in which a flag cannot act."""
    return [
        *check_shapes(config),
        *check_paths(config),
        *check_device(config),
        *check_combinations(config),
        *check_torchrun(),
    ]


def check_shapes(config: Config) -> list[str]:
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if hidden % heads:
        return [f"--hidden_size {hidden}: not divisible by --num_attention_heads {heads}; choose a multiple of it"]
    problems = []
    if heads % kv_heads:
        problems.append(
            f"--num_key_value_heads {kv_heads}: --num_attention_heads {heads} is not a multiple of it; "
            "each key/value head serves the same number of query heads"
        )
    if (hidden // heads) % 2:
        problems.append(
            f"--hidden_size {hidden}: {heads} heads of {hidden // heads}; rotary positions need an even head size"
        )
    return problems


def check_paths(config: Config) -> list[str]:
    """Folders must be readable or writable as their use needs. Texts and tokenizer are checked where they are read."""
    problems = []
    bad_names = [c for c in '/\\:*?"<>|\0' if c in config.save_weight]
    if bad_names or config.save_weight in ("", ".", ".."):
        problems.append(f"--save_weight {config.save_weight!r}: it names a folder; use letters, digits, - and _")
    for name in ("save_dir", "cache_dir"):
        problems += check_writable(name, resolve_path(getattr(config, name)))
    return problems


def check_writable(name: str, folder: Path) -> list[str]:
    """Problems of a folder that will be made or written to: the nearest existing parent decides."""
    nearest = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not nearest.is_dir():
        return [f"--{name} {folder}: {nearest} is a file; give a folder"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"--{name} {folder}: {nearest} cannot be written to; give another folder or change its permissions"]
    return []


def check_device(config: Config) -> list[str]:
    """Problems of --device and --dtype on this machine."""
    name = config.device
    try:
        device = torch.device("cpu" if name == "auto" else name)
    except RuntimeError:
        return [f"--device {name}: no such device; use auto, cpu, mps, cuda or cuda:0"]
    if device.type not in ("cpu", "cuda", "mps"):
        return [f"--device {name}: not a device this trainer runs on; use auto, cpu, mps or cuda"]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return [f"--device {name}: this machine has no MPS; use --device cpu"]
    if device.type != "cuda":
        return []
    if not torch.cuda.is_available():
        return [f"--device {name}: no CUDA device can be used here (torch {torch.__version__}); use --device cpu"]
    count, local_rank = torch.cuda.device_count(), environment_rank()[1]
    wanted = device.index if device.index is not None else local_rank
    if wanted >= count:
        return [
            f"--device {name}: rank {local_rank} wants card {wanted}, there are {count}; start {count} ranks at most"
        ]
    if config.dtype == "bfloat16" and torch.cuda.get_device_capability(wanted) < (8, 0):
        return [f"--dtype bfloat16: {torch.cuda.get_device_name(wanted)} has none; use float16 or auto"]
    return []


def check_combinations(config: Config) -> list[str]:
    """Settings that contradict each other, and flags of the command line that could do nothing where they stand. A YAML
    file may hold all settings, as a run's own config.yaml does."""
    given = config.flags
    has_val = bool(config.val_path) or config.val_fraction > 0 or config.uses_sample
    rules = [
        ({"epochs", "max_steps"} <= given and config.max_steps > 0, "epochs", "--max_steps replaces it; give one"),
        (
            {"accumulation_steps", "global_batch_size"} <= given and config.global_batch_size > 0,
            "accumulation_steps",
            "--global_batch_size derives it; give one of the two",
        ),
        (bool(config.val_path) and config.val_fraction > 0, "val_fraction", "--val_path is given already; give one"),
        (config.eval_only == 1 and not has_val, "eval_only", "nothing to evaluate on; give --val_path"),
        ("eval_interval" in given and config.eval_interval > 0 and not has_val, "eval_interval", "give --val_path"),
        ("eval_rows" in given and config.eval_rows > 0 and not has_val, "eval_rows", "give --val_path"),
        (
            "min_lr_ratio" in given and config.lr_schedule == "constant",
            "min_lr_ratio",
            "--lr_schedule constant never falls; drop one of the two",
        ),
        (config.resume_reset != "none" and not config.from_resume, "resume_reset", "it needs --from_resume 1"),
        (config.from_resume == 1 and config.save_state == 0, "save_state", "a run without states cannot be resumed"),
        ("keep_checkpoints" in given and config.save_state == 0, "keep_checkpoints", "--save_state 0 keeps no states"),
        ("wandb_project" in given and not config.use_wandb, "wandb_project", "it needs --use_wandb 1"),
        (
            config.max_steps > 0 and config.warmup_steps >= config.max_steps,
            "warmup_steps",
            f"the run has {config.max_steps} steps; warm up for fewer",
        ),
        (
            config.stop_after > config.max_steps > 0,
            "stop_after",
            f"the run ends at --max_steps {config.max_steps}; stop earlier or drop it",
        ),
    ]
    return [f"--{name} {getattr(config, name)}: {reason}" for broken, name, reason in rules if broken]


def check_torchrun() -> list[str]:
    """Problems of a torchrun environment that is only half set, as a forgotten `export RANK=0` leaves it."""
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    have = [name for name in needed if os.environ.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(have):
        return []
    missing = [name for name in needed if name not in have]
    problems = []
    if missing:
        problems.append(
            f"environment: {', '.join(have)} set but {', '.join(missing)} missing; start with torchrun or unset them"
        )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if name in have and not os.environ[name].isdigit():
            problems.append(
                f"environment: {name}={os.environ[name]!r} is not a number; start with torchrun or unset it"
            )
    return problems


# --- the plan ---


@dataclass(frozen=True)
class Plan:
    """What the run will cost. FLOPs count 6 per matmul parameter and token (forward 2, backward 4; the tied head once,
    embedding look-up 0, active experts only) and 12 x width for each attended pair of tokens and layer."""

    parameters: int
    active_parameters: int
    matmul_parameters: int  # active ones that a token is multiplied with
    flops_per_token: float
    tokens_per_epoch: int
    tokens_per_step: float
    steps_per_epoch: int
    total_steps: int
    accumulation_steps: int
    global_batch_size: int
    batch_size: int
    state_bytes: int  # one resume state on disk
    weights_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self, world_size: int) -> list[str]:
        active = "" if self.active_parameters == self.parameters else f", {self.active_parameters / 1e6:.2f} M active"
        return [
            f"Model: {self.parameters / 1e6:.2f} M parameters{active}, {self.flops_per_token / 1e6:.1f} MFLOPs a token",
            f"Step: {self.global_batch_size} rows = {self.batch_size} x {self.accumulation_steps} micro-batches x "
            f"{world_size} rank{'s' * (world_size > 1)}, about {self.tokens_per_step:,.0f} tokens",
            f"Run: {self.total_steps:,} steps, {self.steps_per_epoch:,} an epoch of {self.tokens_per_epoch:,} tokens "
            f"({self.tokens_per_epoch / self.parameters:.2f} tokens a parameter)",
            f"Disk: {self.weights_bytes / 2**20:.0f} MiB of weights, {self.state_bytes / 2**20:.0f} MiB a resume state",
        ]


def make_plan(model: torch.nn.Module, dataset: Any, windows: Windows, schedule: Schedule) -> Plan:
    """The plan of a run from its parts. `dataset` tells targets and attended pairs of its rows."""
    config: Any = model.config
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = experts - experts * config.num_experts_per_tok // config.num_experts if experts else 0
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    untied_embedding = 0 if config.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    matmul = total - idle - vectors - untied_embedding
    tokens = int(dataset.row_targets.sum())
    width = config.num_attention_heads * config.head_dim
    lengths = dataset.plan.piece_length.astype(float)
    attended_pairs = float((lengths * (lengths + 1) / 2).sum())
    attention = 12 * config.num_hidden_layers * width * attended_pairs / max(1, tokens)
    return Plan(
        parameters=total,
        active_parameters=total - idle,
        matmul_parameters=matmul,
        flops_per_token=6 * matmul + attention,
        tokens_per_epoch=tokens,
        tokens_per_step=tokens / windows.rows * min(windows.global_batch_size, windows.rows),
        steps_per_epoch=windows.steps_per_epoch,
        total_steps=schedule.total_steps,
        accumulation_steps=windows.accumulation_steps,
        global_batch_size=windows.global_batch_size,
        batch_size=windows.batch_size,
        state_bytes=12 * total,  # float32 parameters and AdamW's two moments
        weights_bytes=2 * total,
    )


def check_plan(config: Config, plan: Plan, world_size: int, step: int) -> list[str]:
    """Problems that only show once data and model are known: steps, ranks, disk space."""
    problems = []
    if plan.total_steps < max(step, 1) and not config.eval_only:
        flag = "max_steps" if config.max_steps else "epochs"
        problems.append(
            f"--{flag} {getattr(config, flag)}: the saved run is at step {step}, past the end this gives; raise it"
        )
    if config.warmup_steps >= plan.total_steps > 0:
        problems.append(
            f"--warmup_steps {config.warmup_steps}: the run has {plan.total_steps} steps; warm up for fewer"
        )
    if world_size > plan.global_batch_size:
        problems.append(
            f"--global_batch_size {plan.global_batch_size}: fewer rows in a step than the {world_size} ranks; "
            "start fewer ranks or enlarge it"
        )
    if config.save_interval > plan.total_steps and "save_interval" in config.given:
        problems.append(
            f"--save_interval {config.save_interval}: the run has {plan.total_steps} steps; the end of an epoch saves "
            "anyway, so use 0 or fewer steps"
        )
    problems += check_disk(config, plan)
    return problems


def check_disk(config: Config, plan: Plan) -> list[str]:
    """Problems of the free space: the states to keep, the best, one being written, and the weights twice."""
    folder = resolve_path(config.save_dir)
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    states = (config.keep_checkpoints + 2) * plan.state_bytes if config.save_state else 0
    need, free = states + 3 * plan.weights_bytes, shutil.disk_usage(nearest).free
    if need <= free:
        return []
    return [
        f"--save_dir {folder}: {free / 2**30:.1f} GiB free, this run's saves need {need / 2**30:.1f}; "
        "free some, give another folder, or lower --keep_checkpoints"
    ]
