"""Resume folders: `resume/step_XXXXXXXX/` holds everything needed to go on with a run.

Float32 parameters, optimizer state and random generators (safetensors), counters (state.json), and manifest.json with
sizes and SHA-256 digests, written last. What has its name is whole (storage/folders.py tells the temporary names);
`damaged-step_XXXXXXXX` was found broken by a resume that went on from an older one.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from errors import CheckpointError, SaveFailed
from storage.files import disk_errors, json_bytes, link_or_copy, remove_quietly, write_file
from storage.folders import find_folders, new_folder, remove_folder, usual_path
from storage.manifests import check_folder, write_manifest
from storage.tensors import write_tensors

FORMAT_VERSION = 1
NAME = re.compile(r"step_(\d{8,})")


def checkpoint_folder(resume_dir: Path, step: int) -> Path:
    return resume_dir / f"step_{step:08d}"


def write_checkpoint(
    resume_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the checkpoint of a step and return its manifest; when it returns all is on the disk.

    Args:
        tensors: a file `<name>.safetensors` for each entry (model, optimizer, rng): name -> contiguous host tensor.
        state: what JSON can hold (keys must be strings); floats come back bit-equal, infinities and NaN included.
    Raises SaveFailed; earlier checkpoints, one of the same step included, are untouched then.
    """

    def write_all(folder: Path) -> dict[str, Any]:
        files = {f"{name}.safetensors": entries for name, entries in tensors.items()}
        return {name: write_tensors(folder / name, entries) for name, entries in files.items()}

    return _write(resume_dir, step, write_all, state)


def amend_checkpoint(resume_dir: Path, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the state of a completed checkpoint, and only that; returns the new manifest.

    The tensor files get a second name in a new folder (copied where the disk has no such links), which takes the place
    of the old one as a whole: after a crash at any instant the old or the new checkpoint is there. Raises
    CheckpointError if there is none to amend, SaveFailed, which leaves it as it was.
    """
    folder = checkpoint_folder(resume_dir, step)
    manifest, problems = _check(folder, rehash=False)
    if problems:
        raise CheckpointError(problems)
    kept = {name: entry for name, entry in manifest["files"].items() if name != "state.json"}

    def link_all(new: Path) -> dict[str, Any]:
        for name in kept:
            link_or_copy(folder / name, new / name)
        return kept

    return _write(resume_dir, step, link_all, state)


def _write(
    resume_dir: Path, step: int, fill: Callable[[Path], dict[str, Any]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint of the tensor files that `fill` puts into a folder, saying their manifest entries, and `state`."""
    folder = checkpoint_folder(resume_dir, step)

    def failed(why: str) -> SaveFailed:
        return SaveFailed(f"could not save step {step} in {folder}: {why}; earlier checkpoints are untouched")

    with disk_errors(failed), new_folder(folder) as new:
        files = {**fill(new), "state.json": write_file(new / "state.json", json_bytes(state))}
        return write_manifest(new / "manifest.json", {"format_version": FORMAT_VERSION, "step": step, "files": files})


def weights_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the float32 parameters of a checkpoint: equal for runs whose parameters are bit-equal."""
    return manifest["files"]["model.safetensors"]["sha256"]


def _check(folder: Path, rehash: bool = True) -> tuple[dict[str, Any], list[str]]:
    expected = {"format_version": FORMAT_VERSION, "step": _step_of(folder)}  # another step: it was renamed
    return check_folder(folder / "manifest.json", expected, rehash=rehash)


def verify_checkpoint(folder: Path) -> list[str]:
    """Problems of a checkpoint in words, empty if it is whole: manifest, step, and size and SHA-256 of each file."""
    return _check(folder)[1]


def _step_of(folder: Path) -> int | None:
    match = NAME.fullmatch(usual_path(folder).name)
    return int(match[1]) if match else None


def find_checkpoints(resume_dir: Path) -> list[tuple[int, Path]]:
    """Completed checkpoints as (step, folder), oldest first; whether they are whole is `verify_checkpoint`'s question.

    A folder caught while being replaced counts; it has its usual name again once `clean_leftovers` ran.
    """
    found = [(_step_of(folder), folder) for folder in find_folders(resume_dir).values()]
    return sorted((step, folder) for step, folder in found if step is not None)


@dataclass
class Checkpoint:
    """One that was found whole. `damaged` names the newer ones that were skipped, with what is wrong with each."""

    step: int
    folder: Path
    state: dict[str, Any]
    manifest: dict[str, Any]
    damaged: list[str]
    damaged_folders: list[Path]

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of `<name>.safetensors`, on the host. Raises CheckpointError."""
        path = _where(self.folder) / f"{name}.safetensors"
        try:
            return load_file(path)
        except Exception as error:  # SafetensorError is not exported
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def set_damaged_aside(self) -> list[Path]:
        """Rename the damaged newer checkpoints to `damaged-step_N`: `prune` must not count them. Main process only."""
        moved = []
        for folder in self.damaged_folders:
            target = folder.with_name(f"damaged-{usual_path(folder).name}")
            remove_quietly(target)
            os.rename(_where(folder), target)
            moved.append(target)
        return moved


def _where(folder: Path) -> Path:
    """Where a checkpoint lies now: `clean_leftovers`, here or on another rank, may have given it its usual name."""
    return folder if folder.exists() else usual_path(folder)


def load_newest(resume_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, its digests checked, or None if none was ever completed.

    Raises CheckpointError, naming each and its problems, if there are some and none is good: starting afresh silently
    would throw the run away.
    """
    damaged: list[str] = []
    folders: list[Path] = []
    for step, folder in reversed(find_checkpoints(resume_dir)):
        manifest, problems = _check(folder)
        if not problems:
            state = json.loads((folder / "state.json").read_bytes())
            return Checkpoint(step, folder, state, manifest, damaged, folders)
        damaged.append("; ".join(problems))
        folders.append(folder)
    damaged += [f"{folder} was found damaged before" for folder in sorted(resume_dir.glob("damaged-step_*"))]
    if damaged:
        listed = "".join(f"\n  - {problem}" for problem in damaged)
        raise CheckpointError(
            f"no checkpoint in {resume_dir} is whole:{listed}\n"
            "Restore one from a backup, or delete them all to start afresh."
        )
    return None


def prune(resume_dir: Path, keep: int, also_keep: Iterable[int] = ()) -> None:
    """Delete all but the `keep` newest checkpoints and those of the steps in `also_keep`.

    Pass the step just written in `also_keep`.
    """
    assert keep >= 1, f"keep must be at least 1, got {keep}"
    spared = set(also_keep)
    for step, folder in find_checkpoints(resume_dir)[:-keep]:
        if step not in spared:
            remove_folder(folder)
