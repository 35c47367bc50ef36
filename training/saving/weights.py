"""Weights for use: half-precision `.pth` files, each with a description beside it that says what it is."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import CheckpointError, SaveFailed
from storage.files import (
    HashedFile,
    disk_errors,
    file_digest,
    link_or_copy,
    new_file,
    write_file_atomic,
    write_json_atomic,
)
from storage.folders import clean_leftovers
from storage.tensors import all_finite
from training.saving.live_state import plain_name


def half_precision(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies in float16 as MiniMind saves them, with plain names; tied tensors stay tied.

    Raises CheckpointError for what float16 cannot hold (beyond 65504, or not finite to begin with).
    """
    copies: dict[tuple[Any, ...], Tensor] = {}  # one for each place in memory; torch.save writes a shared copy once
    halves: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in copies:
            assert tensor.is_floating_point(), f"{name} is {tensor.dtype}, no weight"
            # A copy always: torch.save writes storages, and a view would drag its whole one into the file.
            half = tensor.detach().to("cpu", torch.float16, copy=True, memory_format=torch.contiguous_format)
            if not all_finite(half):
                raise CheckpointError(
                    f"{name} holds {tensor.abs().max().item():g}, which float16 cannot (its largest number is 65504): "
                    "the weights file was not written; the run has probably diverged"
                )
            copies[place] = half
        halves[plain_name(name)] = copies[place]
    return halves


def write_weights(
    path: str | os.PathLike[str], state_dict: Mapping[str, Tensor], description: Mapping[str, Any]
) -> str:
    """Write a half-precision `.pth` and its description `<stem>.json`, both as a whole; returns the file's SHA-256,
    which the description holds too. Raises SaveFailed, or CheckpointError for numbers beyond float16."""
    halves = half_precision(state_dict)

    def save(temporary: Path) -> str:
        with HashedFile(temporary) as file:
            try:
                torch.save(halves, file)  # type: ignore[arg-type]  # it needs write and flush
            except RuntimeError as error:
                raise file.error or error from None
        return file.sha256.hexdigest()

    return _replace(Path(path), save, description)


def _replace(path: Path, make: Callable[[Path], str], description: Mapping[str, Any]) -> str:
    """Put what `make` writes under a temporary name, returning its SHA-256, in the place of `path`, described.

    The new description comes first and holds the one before it as "previous" until the weights are in place. Without
    that a kill between the two renames would leave weights that no description fits: refused as damaged, and for good
    where no state to resume from is kept.
    """
    beside = path.with_suffix(".json")
    with new_file(path) as temporary:
        new = {**description, "sha256": make(temporary)}
        previous = _newest_description(beside)
        write_json_atomic(beside, {**new, "previous": previous} if previous else new)
    if previous:
        write_json_atomic(beside, new)
    return new["sha256"]


def _newest_description(path: Path) -> dict[str, Any] | None:
    """What a description file says, with what it was about to replace as "previous"; None if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "sha256" in found else None


def read_description(path: Path) -> dict[str, Any] | None:
    """What is said beside a weights file of what it holds now, told by its digest; None if nothing is. Raises
    CheckpointError where that does not fit the file."""
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}")
    beside = path.with_suffix(".json")
    if not beside.exists():
        return None
    found: Any = _newest_description(beside)
    if not found:
        raise CheckpointError(
            f"{beside}, the description of {path.name}, is damaged; delete it to use the weights without"
        )
    digest = file_digest(path)
    while isinstance(found, dict) and found.get("sha256") != digest:
        found = found.get("previous")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged or was exchanged: its SHA-256 differs from that in {beside.name}")
    return {key: value for key, value in found.items() if key != "previous"}


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """(state dict with plain names, description or None) of a `.pth`, one of MiniMind's own included.

    The digest in the description is checked, or the zip archive's checksums where there is none. Only tensors are read:
    a pickle that would run code is refused. Raises CheckpointError in words for whatever is wrong.
    """
    path = Path(path)
    description = read_description(path)
    try:
        if description is None and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if (broken := archive.testzip()) is not None:
                    raise CheckpointError(f"{path} is damaged: the checksum of its part {broken} is wrong")
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # truncated: RuntimeError, empty: EOFError, garbage: KeyError, code: UnpicklingError ...
        unsafe = "Unsupported" in str(error) or "Weights only load failed" in str(error)
        reason = (
            "it holds more than tensors, maybe code, and was not read" if unsafe else "it is damaged or no weights file"
        )
        raise CheckpointError(f"{path} is refused: {reason} ({type(error).__name__})") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no state dict (tensor name -> tensor): is it a file of another program?")
    return {plain_name(name): tensor for name, tensor in weights.items()}, description


def publish_copy(source: Path, target: Path, **fields: Any) -> str:
    """Give the weights file `target` the content of `source` and its description, with some `fields` other or more;
    returns the SHA-256. Replaces `target` as a whole.

    Where the disk has hard links, both are names of one file: no time, no space. `write_weights` replaces files and
    never writes into one, so neither changes with the other. Raises CheckpointError for a source that is damaged or not
    described, SaveFailed.
    """
    return _copy(source, target, {**_description_of(source), **fields}, link_or_copy)


def publish_flat(run_folder: Path, save_dir: Path, run_name: str) -> str:
    """Publish a run's weights as `save_dir/<name>_<hidden>[_moe].pth`, where MiniMind's eval_llm.py and its trainers'
    --from_weight look. Returns a line that says what happened.

    A file that lies there already is replaced only if this run put it there: published.txt in the run's folder holds
    the digests of what it did. A copy, not a second name: MiniMind's trainers write into such files. Main process only,
    with the run's lock held. Raises what `publish_copy` does.
    """
    source, target = run_folder / f"{run_name}.pth", save_dir / f"{run_name}.pth"
    description, record = _description_of(source), run_folder / "published.txt"
    with disk_errors(lambda why: SaveFailed(f"could not publish {source} as {target}: {why}")):
        there = file_digest(target) if target.exists() else ""
        known = record.read_text().split() if record.exists() else []
        clean_leftovers(save_dir, target.name)
    if there and there not in (description["sha256"], *known):
        return f"Not published as {target}: the file there is not of this run; move it away, or take {source}"
    write_file_atomic(record, f"{there}\n{description['sha256']}\n")  # first: after a kill one of them is there
    _copy(source, target, description, shutil.copyfile)
    return f"Published as {target}, where MiniMind's scripts look"


def _description_of(source: Path) -> dict[str, Any]:
    description = read_description(source)
    if description is None:
        raise CheckpointError(f"{source} has no description {source.stem}.json and is not published without")
    return description


def _copy(source: Path, target: Path, description: dict[str, Any], copy: Callable[[Path, Path], Any]) -> str:
    def write(temporary: Path) -> str:
        copy(source, temporary)
        return description["sha256"]

    return _replace(target, write, description)
