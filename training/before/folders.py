"""Problems of paths, folders and disk space, as far as looking from outside can tell."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dataset.source_files import find_files
from dataset.text_formats import FORMATS
from errors import DataError, Findings
from training.before.machine import amount
from training.before.start_model import find_weights
from training.config import Config, resolve_path, resolve_paths, split_paths, unset_variables

NAME_BYTES = 200  # file systems allow 255, and a checkpoint's files add to the name


def check_run_folder(config: Config) -> list[str]:
    """Problems of the name and place of the run folder, to be settled before it is looked into."""
    name = config.save_weight
    if any(c in name for c in '/\\:*?"<>|') or name in (".", "..") or name != name.strip():
        return [f"--save_weight {name!r}: it names a folder; use letters, digits, - and _"]
    if len(name.encode()) > NAME_BYTES:
        return [f"--save_weight {name[:20]}...: a name of {len(name.encode())} bytes; {NAME_BYTES} at most"]
    unset = check_variables(config, "save_dir")
    return unset or check_writable("save_dir", config.resume_folder)


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
    for path in split_paths(value):
        if unset := unset_variables(path):
            return [f"--{name} {value}: the variable {unset[0]} is not set; set it or write the path out"]
    return []


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
    """Problems of the texts and weights that will be read."""
    problems = Findings()
    for name in ("val_path",) if config.eval_only and not config.val_fraction else ("data_path", "val_path"):
        text = getattr(config, name)
        if not text or (name == "data_path" and config.uses_sample):  # the sample is made when it is needed
            continue
        found = Findings()
        found.of(find_files, resolve_paths(text))
        problems += [f"--{name} {problem}" for problem in found]
    if config.from_weight != "none":
        problems.of(find_weights, config)
    return list(problems)


def source_notes(config: Config) -> list[str]:
    """What is worth a word about the texts."""
    if "text_key" not in config.flags or config.uses_sample:
        return []
    try:
        suffixes = {file.suffix for file in find_files(resolve_paths(config.data_path))}
    except DataError:  # gone since it was checked: opening it will say so
        return []
    if any(FORMATS[suffix].has_keys for suffix in suffixes):
        return []
    return [f"--text_key {config.text_key}: not used, {'/'.join(sorted(suffixes))} files have no keys"]


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
        f"--save_dir {folder}: {amount(free)} free, this run's saves need {amount(need)}; free some, give another "
        "folder, or lower --keep_checkpoints"
    ]


def folder_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # somebody else deletes there
        return 0
