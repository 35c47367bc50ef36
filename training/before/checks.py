"""What is checked before the first step: settings against each other, the machine, what is to be read, and the plan."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch

from dataset.source_files import find_files
from dataset.text_formats import FORMATS
from errors import Findings
from training.before.cost import Plan, model_bytes
from training.before.start_model import find_weights
from training.config import Config, resolve_path, resolve_paths
from training.device import choose_device
from training.launcher import environment_rank

# --- settings ---


def check_settings(config: Config) -> list[str]:
    """Problems of the settings taken together: shapes, paths, device, combinations in which a flag cannot act."""
    return [
        *check_shapes(config),
        *check_paths(config),
        *check_sources(config),
        *check_device(config),
        *check_combinations(config),
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


NAME_BYTES = 200  # file systems allow 255, and a save adds to the name


def check_run_folder(config: Config) -> list[str]:
    """Problems of the name and place of the run folder, to be settled before it is looked into."""
    name = config.save_weight
    if any(c in name for c in '/\\:*?"<>|') or name in (".", "..") or name != name.strip():
        return [f"--save_weight {name!r}: it names a folder; use letters, digits, - and _"]
    if len(name.encode()) > NAME_BYTES:
        return [f"--save_weight {name[:20]}...: a name of {len(name.encode())} bytes; {NAME_BYTES} at most"]
    unset = check_variables(config, "save_dir")
    return unset or ([] if config.eval_only else check_writable("save_dir", config.resume_folder))


def check_paths(config: Config) -> list[str]:
    """Problems of the other paths that can be told before anything is read from them. A read-only cache folder may hold
    all that is needed."""
    problems = [
        problem
        for name in ("config", "data_path", "val_path", "tokenizer_path", "cache_dir", "from_weight")
        for problem in check_variables(config, name)
    ]
    cache = resolve_path(config.cache_dir)
    return problems if os.path.isdir(cache) else problems + check_writable("cache_dir", cache)


def check_variables(config: Config, name: str) -> list[str]:
    """A path with a variable that is not set would be taken by its letters."""
    value = getattr(config, name)
    unset = re.findall(r"\$\{?\w+\}?", os.path.expandvars(value))
    return [f"--{name} {value}: the variable {unset[0]} is not set; set it or write the path out"] if unset else []


def check_writable(name: str, folder: Path) -> list[str]:
    """Problems of a folder that will be made or written to: the nearest existing parent decides."""
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # too long a name, a parent that may not be entered, a circle of links
        return [f"--{name} {folder}: {error.strerror}; give another folder"]
    nearest = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)
    if not os.path.isdir(nearest):
        return [f"--{name} {folder}: {nearest} is not a folder; give another"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"--{name} {folder}: {nearest} cannot be written to; give another folder or change its permissions"]
    return []


def check_sources(config: Config) -> list[str]:
    """Problems of the texts and weights that will be read, as far as looking at them from outside can tell."""
    problems = Findings()
    for name in ("data_path", "val_path"):
        text = getattr(config, name)
        if not text or (name == "data_path" and config.uses_sample):  # the sample is made when it is needed
            continue
        found = Findings()
        files = found.of(find_files, resolve_paths(text))
        problems += [f"--{name} {problem}" for problem in found]
        suffixes = {file.suffix for file in files or []}
        keyless = suffixes and not any(FORMATS[suffix].has_keys for suffix in suffixes)
        if name == "data_path" and "text_key" in config.flags and keyless:
            problems.append(f"--text_key {config.text_key}: {'/'.join(suffixes)} files have no keys; drop it")
    if config.from_weight != "none":
        problems.of(find_weights, config)
    return list(problems)


def check_device(config: Config) -> list[str]:
    """Problems of --device and --dtype on this machine."""
    name = config.device
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, ValueError):
        return [f"--device {name}: no such device; use auto, cpu, mps, cuda or cuda:0"]
    if device.type not in ("cpu", "cuda", "mps"):
        return [f"--device {name}: not a device this trainer runs on; use auto, cpu, mps or cuda"]
    if device.type == "cpu" and device.index:
        return [f"--device {name}: there is one CPU device; use --device cpu"]
    if device.type == "mps" and not torch.backends.mps.is_available():
        return [f"--device {name}: this machine has no MPS; use --device cpu"]
    if device.type != "cuda":
        useless = "auto_batch" in config.flags and config.auto_batch == 1
        return [f"--auto_batch 1: only CUDA has a dry step that finds out; drop it on {device.type}"] * useless
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


def check_combinations(config: Config) -> list[str]:
    """Settings that contradict each other, and flags of the command line that could do nothing where they stand. A YAML
    file may hold all settings, as a run's own config.yaml does."""
    given = config.flags
    has_val = bool(config.val_path) or config.val_fraction > 0 or config.uses_sample
    no_val = "there are no validation texts; give --val_path or --val_fraction"
    rules = [
        (
            "epochs" in given and config.max_steps > 0,
            "epochs",
            f"--max_steps {config.max_steps} replaces it; give one (--max_steps 0 goes by epochs)",
        ),
        (
            {"accumulation_steps", "global_batch_size"} <= given and config.global_batch_size > 0,
            "accumulation_steps",
            "--global_batch_size derives it; give one of the two",
        ),
        (
            {"batch_size", "global_batch_size"} <= given and config.batch_size > config.global_batch_size > 0,
            "batch_size",
            f"a step has --global_batch_size {config.global_batch_size} rows; give no more than that",
        ),
        (bool(config.val_path) and config.val_fraction > 0, "val_fraction", "--val_path is given already; give one"),
        (
            config.uses_sample and config.val_fraction > 0,
            "val_fraction",
            "the bundled sample has validation texts of its own; drop it",
        ),
        (config.eval_only == 1 and not has_val, "eval_only", no_val),
        ("eval_interval" in given and config.eval_interval > 0 and not has_val, "eval_interval", no_val),
        ("eval_rows" in given and config.eval_rows > 0 and not has_val, "eval_rows", no_val),
        (
            "min_lr_ratio" in given and config.lr_schedule == "constant",
            "min_lr_ratio",
            "--lr_schedule constant never falls; drop one of the two",
        ),
        (config.resume_reset != "none" and not config.from_resume, "resume_reset", "it needs --from_resume 1"),
        (config.from_resume == 1 and config.save_state == 0, "save_state", "a run without states cannot be resumed"),
        ("keep_checkpoints" in given and config.save_state == 0, "keep_checkpoints", "--save_state 0 keeps no states"),
        ("wandb_project" in given and not config.use_wandb, "wandb_project", "nothing is sent; it needs --use_wandb 1"),
        (
            config.packing == 0 and config.max_seq_len < 3,
            "max_seq_len",
            "without packing a row holds bos, a token and eos; give 3 or more",
        ),
    ]
    rules += [
        (config.eval_only == 1 and name in given and bool(getattr(config, name)), name, "--eval_only 1 trains nothing")
        for name in ("overwrite", "stop_after", "samples", "use_wandb")
    ]
    problems = [f"--{name} {getattr(config, name)}: {reason}" for broken, name, reason in rules if broken]
    return problems + check_steps(config, config.max_steps)


def check_steps(config: Config, total_steps: int) -> list[str]:
    """Problems of settings that name steps of a run which has so many; 0: not known yet."""
    problems = []
    if config.warmup_steps >= total_steps > 0:
        problems.append(f"--warmup_steps {config.warmup_steps}: the run has {total_steps} steps; warm up for fewer")
    if config.stop_after > total_steps > 0 and not config.eval_only:
        problems.append(f"--stop_after {config.stop_after}: the run has {total_steps} steps; stop earlier or drop it")
    return problems


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


def local_ranks() -> int:
    """Ranks on this machine, as far as torchrun tells."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else environment_rank().local_rank + 1


# --- once data and model are known ---


def check_plan(config: Config, plan: Plan, world_size: int, step: int) -> list[str]:
    """Problems that only show once data and model are known: steps, ranks, disk space."""
    problems = []
    if plan.total_steps < max(step, 1) and not config.eval_only:
        flag = "max_steps" if config.max_steps else "epochs"
        problems.append(
            f"--{flag} {getattr(config, flag)}: the saved run is at step {step}, past the end this gives; raise it"
        )
    problems += check_steps(config, plan.total_steps)
    if 0 < config.stop_after < step and not config.eval_only:
        problems.append(f"--stop_after {config.stop_after}: the saved run is at step {step}; stop later or drop it")
    rows = min(plan.global_batch_size, plan.rows)
    if world_size > rows:
        problems.append(
            f"environment: WORLD_SIZE={world_size}: a step has {rows} rows, fewer than ranks; start {rows} ranks at "
            "most, or give more text or a larger --global_batch_size"
        )
    for name in ("save_interval", "eval_interval"):
        if name in config.flags and getattr(config, name) > plan.total_steps and not config.eval_only:
            problems.append(
                f"--{name} {getattr(config, name)}: the run has {plan.total_steps} steps; its end counts anyway, so "
                "use 0 or fewer steps"
            )
    return problems


def check_model(config: Config, model: torch.nn.Module) -> list[str]:
    """Problems of a model of this size, which may still be on the meta device: memory to train it, disk to save it."""
    if config.eval_only:
        return []
    state, weights, training = model_bytes(model, config)
    return check_memory(config, model, training) + check_disk(config, state, weights)


def check_memory(config: Config, model: torch.nn.Module, training_bytes: int) -> list[str]:
    """Problems of memory that no batch size can mend: parameters, gradients, optimizer state and the least that one row
    leaves for its backward (each block's input) are too much."""
    device, parameters = choose_device(config.device), sum(p.numel() for p in model.parameters())
    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
    row_bytes = 4 * config.max_seq_len * config.hidden_size * config.num_hidden_layers
    need = (training_bytes + row_bytes) * (1 if device.type == "cuda" else local_ranks())
    if not there or need <= there:
        return []
    return [
        f"--hidden_size {config.hidden_size} --num_hidden_layers {config.num_hidden_layers} --max_seq_len "
        f"{config.max_seq_len}: {parameters / 1e9:.2f} G parameters with gradients, optimizer state and one row take "
        f"{need / 2**30:.1f} GiB, {device.type} has {there / 2**30:.1f}; choose a smaller model or shorter rows"
    ]


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container around us; 0 where it cannot be told (Windows)."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # another system, or no limit ("max")
        return whole


def check_disk(config: Config, state_bytes: int, weights_bytes: int) -> list[str]:
    """Problems of the free space: the states to keep, the best, one being written, and the weights twice. What the run
    folder holds already will be replaced."""
    folder = resolve_path(config.save_dir)
    nearest = next(p for p in (folder, *folder.parents) if os.path.isdir(p))
    states = (config.keep_checkpoints + 2) * state_bytes if config.save_state else 0
    need, free = states + 3 * weights_bytes, shutil.disk_usage(nearest).free
    if need <= free or need <= free + folder_bytes(config.run_folder):
        return []
    return [
        f"--save_dir {folder}: {free / 2**30:.1f} GiB free, this run's saves need {need / 2**30:.1f}; "
        "free some, give another folder, or lower --keep_checkpoints"
    ]


def folder_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # somebody else deletes there
        return 0
