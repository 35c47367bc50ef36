"""Problems of the machine: the launcher's environment, the device, memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from training.before.cost import mebibytes
from training.cgroup import SYSTEM, memory_limit
from training.config import Config
from training.device import choose_device
from training.launcher import environment_rank


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
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in have and not os.environ[name].isdecimal():
            problems.append(
                f"environment: {name}={os.environ[name]!r} is not a number; start with torchrun or unset it"
            )
    rank, _, world_size = environment_rank()
    if not problems and not rank < world_size:
        problems.append(f"environment: RANK={rank} is not below WORLD_SIZE={world_size}; start with torchrun")
    return problems


def check_ranks(world_size: int, rows_per_step: int) -> list[str]:
    """Problems of ranks that would have nothing to do."""
    if world_size <= rows_per_step:
        return []
    return [
        f"environment: WORLD_SIZE={world_size}: a step has {rows_per_step} rows, fewer than ranks; start "
        f"{rows_per_step} ranks at most, or give more text or a larger --global_batch_size"
    ]


def local_ranks() -> int:
    """Ranks on this machine, as far as torchrun tells."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else environment_rank().local_rank + 1


def check_device(config: Config) -> list[str]:
    """Problems of --device and --dtype on this machine."""
    name = config.device
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, ValueError):
        return [f"--device {name}: no such device; use auto, cpu, mps, cuda or cuda:0"]
    if device.type == "cuda":
        return check_cuda(config, device)
    if device.type not in ("cpu", "mps"):
        return [f"--device {name}: not a device this trainer runs on; use auto, cpu, mps or cuda"]
    if device.type == "cpu" and device.index:
        return [f"--device {name}: there is one CPU device; use --device cpu"]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return [f"--device {name}: this machine has no MPS; use --device cpu"]
    return []


def check_cuda(config: Config, device: torch.device) -> list[str]:
    name = config.device
    if not torch.cuda.is_available():
        return [f"--device {name}: no CUDA device can be used here (torch {torch.__version__}); use --device cpu"]
    count, ranks = torch.cuda.device_count(), local_ranks()
    if device.index is None and ranks > count:  # every rank says so, not only those without a GPU
        return [f"--device {name}: {ranks} ranks on this machine, {count} GPUs; start {count} ranks at most"]
    if device.index is not None and device.index >= count:
        return [f"--device {name}: there is no GPU {device.index}; this machine has {count}, counted from 0"]
    if device.index is not None and ranks > 1:
        return [f"--device {name}: all {ranks} ranks would share one GPU; use --device cuda"]
    wanted = device.index or 0
    if config.dtype == "bfloat16" and torch.cuda.get_device_capability(wanted) < (8, 0):
        return [f"--dtype bfloat16: {torch.cuda.get_device_name(wanted)} has none; use float16 or auto"]
    return []


def check_memory(config: Config, model: torch.nn.Module, training_bytes: int) -> list[str]:
    """Problems of memory that no batch size can mend: parameters, gradients, optimizer state and the least that one row
    leaves for its backward (each block's input) are too much. The model may be on the meta device."""
    device, parameters = choose_device(config.device), sum(p.numel() for p in model.parameters())
    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
    row_bytes = 4 * config.max_seq_len * config.hidden_size * config.num_hidden_layers
    need = (training_bytes + row_bytes) * (1 if device.type == "cuda" else local_ranks())
    if not there or need <= there:
        return []
    return [
        f"--hidden_size {config.hidden_size} --num_hidden_layers {config.num_hidden_layers} --max_seq_len "
        f"{config.max_seq_len}: {parameters / 1e9:.2f} G parameters with gradients, optimizer state and one row take "
        f"{amount(need)}, {device.type} has {amount(there)}; choose a smaller model or shorter rows"
    ]


def host_memory_bytes(system: Path = SYSTEM) -> int:
    """Memory of this machine, or of the container around us; 0 where it cannot be told (Windows)."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
    return int(min(whole, memory_limit(system)))


def amount(count: int) -> str:
    """Bytes in the unit in which their difference shows."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else mebibytes(count)
