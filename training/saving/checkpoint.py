"""Resume folders: `resume/step_XXXXXXXX/` holds everything needed to go on with a run.

Float32 parameters, optimizer state and random generators (safetensors), counters (JSON), and a manifest of sizes and
SHA-256 digests that is written last. What has its name is whole. Temporary names: `.tmp-step_N-PID` (being written),
`.old-step_N-PID` (being replaced by a newer save of the same step; it counts while there is no `step_N`),
`.del-step_N-PID` (being deleted). `damaged-step_N` was found broken by a resume that went on from an older one.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from errors import CheckpointError, SaveFailed
from storage.files import json_bytes, remove_quietly, write_tensors
from storage.hashed_file import HashedFile, file_digest, sync

FORMAT_VERSION = 1
SAVE_NAME = re.compile(r"step_(\d{8,})")
OLD_NAME = re.compile(r"\.old-step_(\d{8,})-\d+")
LEFTOVER_NAME = re.compile(r"\.(tmp|del)-step_\d+-\d+|\..+\.tmp-\d+")


def write_checkpoint(
    resume_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write `resume_dir/step_XXXXXXXX` and return it; when it returns the save is on the disk and complete.

    Args:
        tensors: a file `<name>.safetensors` for each entry (model, optimizer, rng): name -> contiguous host tensor.
        state: what JSON can hold (keys must be strings); floats come back bit-equal, infinities and NaN included.
    Raises SaveFailed; earlier saves, one of the same step included, are untouched then.
    """
    name = f"step_{step:08d}"
    folder, temporary = resume_dir / name, resume_dir / f".tmp-{name}-{os.getpid()}"
    try:
        resume_dir.mkdir(parents=True, exist_ok=True)
        remove_quietly(temporary)  # of a killed process with this pid: in a container every run may have the same one
        temporary.mkdir()
        files = {
            f"{key}.safetensors": write_tensors(temporary / f"{key}.safetensors", value)
            for key, value in tensors.items()
        }
        files["state.json"] = _write_json(temporary / "state.json", state)
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files}
        _write_json(temporary / "manifest.json", manifest | {"manifest_sha256": _manifest_digest(manifest)})
        sync(temporary)
        _move_into_place(temporary, folder)
    except OSError as error:
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise SaveFailed(f"could not save step {step} in {folder}: {reason}; earlier saves are untouched") from error
    finally:
        remove_quietly(temporary)  # gone already after the rename
    return folder


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    with HashedFile(path) as file:
        file.write(json_bytes(value))
    return file.entry


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Of all entries but its own, so that damage to the manifest itself shows."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename; an older save of the same step steps aside first and is deleted once the new one has its name."""
    aside = None
    if folder.exists():
        aside = folder.with_name(f".old-{folder.name}-{os.getpid()}")
        remove_quietly(aside)
        os.rename(folder, aside)
    try:
        os.rename(temporary, folder)
    except OSError:
        if aside:
            os.rename(aside, folder)
        raise
    sync(folder.parent)
    if aside:
        remove_quietly(aside)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a save, its own digest checked. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest["manifest_sha256"] != _manifest_digest(manifest):
            raise CheckpointError(f"{folder / 'manifest.json'} is damaged: it does not match its own digest")
        if manifest["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format version {manifest['format_version']}, this code reads {FORMAT_VERSION}"
            )
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no manifest.json: the save is incomplete") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'manifest.json'} cannot be read: {type(error).__name__}: {error}") from error
    return manifest


def weights_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the float32 parameters of a save: equal for two runs whose parameters are bit-equal."""
    return manifest["files"]["model.safetensors"]["sha256"]


def verify_checkpoint(folder: Path) -> list[str]:
    """Problems of a save in words, empty if it is whole: manifest, step, and size and SHA-256 of each file."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    if manifest["step"] != _step_of(folder):
        problems.append(f"{folder} holds step {manifest['step']}: it was renamed")
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                problems.append(f"{path} has {size:,} bytes instead of {expected['bytes']:,}")
            elif file_digest(path) != expected["sha256"]:
                problems.append(f"{path} is damaged: its SHA-256 differs from the manifest's")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
    return problems


def _step_of(folder: Path) -> int | None:
    match = SAVE_NAME.fullmatch(folder.name) or OLD_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _where(folder: Path) -> Path:
    """A save found as `.old-step_N` has its usual name again once `clean_leftovers` ran, here or on another rank."""
    usual = folder.with_name(f"step_{_step_of(folder) or 0:08d}")
    return folder if folder.exists() else usual


def find_checkpoints(resume_dir: Path) -> list[tuple[int, Path]]:
    """Completed saves as (step, folder), oldest first; whether they are whole is `verify_checkpoint`'s question."""
    if not resume_dir.is_dir():
        return []
    found: dict[int, Path] = {}
    for folder in sorted(resume_dir.iterdir()):  # "." sorts before "s": step_N takes the place of .old-step_N
        step = _step_of(folder)
        if step is not None and folder.is_dir():
            found[step] = folder
    return sorted(found.items())


@dataclass
class Checkpoint:
    """A save that was found whole. `damaged` names the newer ones that were skipped, with what is wrong with each."""

    step: int
    folder: Path
    state: dict[str, Any]
    manifest: dict[str, Any]
    damaged: list[str] = field(default_factory=list)
    damaged_folders: list[Path] = field(default_factory=list)

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of `<name>.safetensors`, on the host. Raises CheckpointError."""
        path = _where(self.folder) / f"{name}.safetensors"
        try:
            return load_file(path)
        except Exception as error:  # SafetensorError is not exported
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def set_damaged_aside(self) -> list[Path]:
        """Rename the damaged newer saves to `damaged-step_N`: `prune` must not count them. Main process only."""
        moved = []
        for folder in self.damaged_folders:
            target = folder.with_name(f"damaged-step_{_step_of(folder):08d}")
            remove_quietly(target)
            os.rename(_where(folder), target)
            moved.append(target)
        return moved


def open_checkpoint(folder: Path) -> Checkpoint:
    """One given save, its digests checked. Raises CheckpointError."""
    if problems := verify_checkpoint(folder):
        raise CheckpointError("; ".join(problems))
    manifest = read_manifest(folder)
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'state.json'} cannot be read: {error}") from error
    return Checkpoint(manifest["step"], folder, state, manifest)


def load_newest(resume_dir: Path) -> Checkpoint | None:
    """The newest save that is whole, or None if none was ever completed.

    Raises CheckpointError, naming each save and its problem, if there are saves and none is good: starting afresh
    silently would throw the run away.
    """
    damaged: list[str] = []
    folders: list[Path] = []
    for _, folder in reversed(find_checkpoints(resume_dir)):
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError as error:
            damaged.append(str(error))
            folders.append(folder)
            continue
        checkpoint.damaged, checkpoint.damaged_folders = damaged, folders
        return checkpoint
    damaged += [f"{folder} was found damaged before" for folder in sorted(resume_dir.glob("damaged-step_*"))]
    if damaged:
        listed = "".join(f"\n  - {problem}" for problem in damaged)
        raise CheckpointError(
            f"no save in {resume_dir} is whole:{listed}\nRestore one from a backup, or delete them all to start afresh."
        )
    return None


def clean_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a run or resume folder and bring back a save caught while being replaced.

    Only while nothing else writes there. Main process only.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        old = OLD_NAME.fullmatch(path.name)
        if old and not (folder / f"step_{old[1]}").exists():
            os.rename(path, folder / f"step_{old[1]}")
            sync(folder)
        elif old or LEFTOVER_NAME.fullmatch(path.name):
            remove_quietly(path)


def prune(resume_dir: Path, keep: int, also_keep: Iterable[int] = ()) -> None:
    """Delete all but the `keep` newest saves and those of the steps in `also_keep`.

    Pass the step just written in `also_keep`. A folder is renamed before it is emptied: half of one is never a save.
    """
    assert keep >= 1, f"keep must be at least 1, got {keep}"
    spared = set(also_keep)
    for step, folder in find_checkpoints(resume_dir)[:-keep]:
        if step not in spared:
            doomed = folder.with_name(f".del-step_{step:08d}-{os.getpid()}")
            remove_quietly(doomed)
            os.rename(folder, doomed)
            remove_quietly(doomed)
