"""Saving and restoring a run.

Two tiers of files. The resume folder `resume/step_XXXXXXXX/` holds everything needed to go on: float32 parameters,
optimizer state, random generators (safetensors) and counters (JSON), with a manifest of sizes and SHA-256 digests
written last; there is no pickle in it. The weights file `<name>.pth` holds half-precision parameters for use; a JSON
card lies beside it.

Everything is written under a temporary name, flushed to the disk and renamed: what has its name is whole. Temporary
names: `.tmp-step_N-PID` (being written), `.old-step_N-PID` (being replaced by a newer save of the same step; it counts
while there is no `step_N`), `.del-step_N-PID` (being deleted), `.NAME.tmp-PID` (a single file being written).
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 22  # hashed and written in turn while the piece is still in the processor's cache
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SAVE_NAME = re.compile(r"step_(\d{8,})")
OLD_NAME = re.compile(r"\.old-step_(\d{8,})-\d+")
LEFTOVER_NAME = re.compile(r"\.(tmp|del)-step_\d+-\d+|\..+\.tmp-\d+")
Optimizers = Optimizer | Sequence[Optimizer]


class CheckpointError(RuntimeError):
    """A checkpoint or weights file cannot be used; the text says which, why and what to do."""


class SaveFailed(RuntimeError):
    """A save did not come about (disk full, no permission ...); what was saved before is untouched."""


# ---------------------------------------------------------------------------------------------------------- plain files
def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (new names, renames) to the disk; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HashedFile:
    """A file being written that knows the SHA-256 of its content; leaving the `with` block flushes it to the disk.

    Created with the mode the umask gives, unlike `tempfile` and `safetensors.save_file` (0600): teammates can read it.
    Both hashing and writing release the interpreter lock: the training loop runs on meanwhile.
    """

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None  # torch.save turns it into a RuntimeError about "unexpected pos"

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                self.sha256.update(piece)
                self.file.write(piece)
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, error_type: Any, *_: object) -> None:
        try:
            if error_type is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            self.file.close()


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def write_file_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a small file as a whole: after a crash it holds the old content or the new one. Raises SaveFailed."""
    path = Path(path)
    temporary = _temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        _remove_quietly(temporary)
        raise SaveFailed(
            f"could not write {path}: {error.strerror or error}; what it held before is untouched"
        ) from error


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """`write_file_atomic` of indented JSON; floats come back bit-equal, paths become text. Raises SaveFailed."""
    write_file_atomic(path, _json_bytes(value))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, default=_json_default) + "\n").encode()


def _json_default(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (np.generic, Tensor)):
        return value.item()
    raise TypeError(f"cannot write {value!r} of type {type(value).__name__} as JSON")


def _remove_quietly(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors on the host as a safetensors file and return its SHA-256 (hex); equal tensors give equal files.

    Layout (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header padded to a multiple of 8,
    then the data without gaps; the widest types come first, so every tensor is aligned. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    offset = 0
    for name, tensor in ordered:
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), f"{name} must be contiguous and on the host"
        span = [offset, offset + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # the same memory, seen as bytes
    return file.sha256.hexdigest()


# --------------------------------------------------------------------------------------------------- resume checkpoints
def write_checkpoint(
    resume_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write `resume_dir/step_XXXXXXXX` and return it; when it returns the save is on the disk and complete.

    Args:
        tensors: a file `<name>.safetensors` for each entry (model, optimizer, rng): name -> contiguous host tensor.
        state: what JSON can hold (keys must be strings); floats come back bit-equal, infinities and NaN included.
    Raises SaveFailed; earlier saves, one of the same step included, are untouched then.
    """
    resume_dir = Path(resume_dir)
    name = f"step_{step:08d}"
    folder, temporary = resume_dir / name, resume_dir / f".tmp-{name}-{os.getpid()}"
    try:
        resume_dir.mkdir(parents=True, exist_ok=True)
        _remove_quietly(temporary)  # of a killed process with this pid: in a container every run may have the same one
        temporary.mkdir()
        digests = {
            f"{key}.safetensors": write_tensors(temporary / f"{key}.safetensors", value)
            for key, value in tensors.items()
        }
        digests["state.json"] = _write_json(temporary / "state.json", state)
        sizes = {file: (temporary / file).stat().st_size for file in digests}
        files = {file: {"bytes": sizes[file], "sha256": digests[file]} for file in digests}
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files}
        _write_json(temporary / "manifest.json", manifest | {"manifest_sha256": _manifest_digest(manifest)})
        sync_folder(temporary)
        _move_into_place(temporary, folder)
    except OSError as error:
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise SaveFailed(f"could not save step {step} in {folder}: {reason}; earlier saves are untouched") from error
    finally:
        _remove_quietly(temporary)  # gone already after the rename
    return folder


def _write_json(path: Path, value: Any) -> str:
    with HashedFile(path) as file:
        file.write(_json_bytes(value))
    return file.sha256.hexdigest()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Of all entries but its own, so that damage to the manifest itself shows."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename; an older save of the same step steps aside first and is deleted once the new one has its name."""
    aside = None
    if folder.exists():
        aside = folder.with_name(f".old-{folder.name}-{os.getpid()}")
        _remove_quietly(aside)
        os.rename(folder, aside)
    try:
        os.rename(temporary, folder)
    except OSError:
        if aside:
            os.rename(aside, folder)
        raise
    sync_folder(folder.parent)
    if aside:
        _remove_quietly(aside)


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


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) of the float32 parameters of a save: equal for two runs whose parameters are bit-equal."""
    return read_manifest(folder)["files"]["model.safetensors"]["sha256"]


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
            elif _file_digest(path) != expected["sha256"]:
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
    resume_dir = Path(resume_dir)
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
            _remove_quietly(target)
            os.rename(_where(folder), target)
            moved.append(target)
        return moved


def open_checkpoint(folder: Path, verify: bool = True) -> Checkpoint:
    """One given save; `verify=False` is for ranks whose main process checked the digests. Raises CheckpointError."""
    folder = Path(folder)
    problems = verify_checkpoint(folder) if verify else []
    if problems:
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
    damaged += [f"{folder} was found damaged before" for folder in sorted(Path(resume_dir).glob("damaged-step_*"))]
    if damaged:
        listed = "".join(f"\n  - {problem}" for problem in damaged)
        raise CheckpointError(
            f"no save in {resume_dir} is whole:{listed}\nRestore one from a backup, or delete them all to start afresh."
        )
    return None


def clean_leftovers(folder: Path) -> list[str]:
    """Remove what killed processes left in a run or resume folder and bring back a save caught while being replaced.

    Only while nothing else writes there. Returns the names dealt with. Main process only.
    """
    folder = Path(folder)
    dealt_with = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        old = OLD_NAME.fullmatch(path.name)
        if old and not (folder / f"step_{old[1]}").exists():
            os.rename(path, folder / f"step_{old[1]}")
            sync_folder(folder)
        elif old or LEFTOVER_NAME.fullmatch(path.name):
            _remove_quietly(path)
        else:
            continue
        dealt_with.append(path.name)
    return dealt_with


def prune(resume_dir: Path, keep: int, also_keep: Iterable[int] = ()) -> list[int]:
    """Delete all but the `keep` newest saves and those of the steps in `also_keep`; returns the steps deleted.

    Pass the step just written in `also_keep`. A folder is renamed before it is emptied: half of one is never a save.
    """
    assert keep >= 1, f"keep must be at least 1, got {keep}"
    spared = set(also_keep)
    deleted = []
    for step, folder in find_checkpoints(resume_dir)[:-keep]:
        if step not in spared:
            doomed = folder.with_name(f".del-step_{step:08d}-{os.getpid()}")
            _remove_quietly(doomed)
            os.rename(folder, doomed)
            _remove_quietly(doomed)
            deleted.append(step)
    return deleted


# ----------------------------------------------------------------------------------------------- parameters, optimizers
def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile wrappers, in any order."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front: `module.` (DDP) and `_orig_mod.` (torch.compile)."""
    return name.removeprefix("module.").replace("_orig_mod.", "").removeprefix("module.")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Plain name -> parameter; a tied one occurs once, under its first name (`model.embed_tokens.weight`)."""
    return {plain_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def flatten_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the parameter's own storage (no copy; see `BackgroundWriter.snapshot`)."""
    return {name: parameter.detach() for name, parameter in named_parameters(model).items()}


def _refuse(title: str, problems: list[str], remedy: str) -> None:
    """Raise one CheckpointError that names the first problems and counts the rest."""
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:6])
        more = f"\n  - and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{title}:{shown}{more}\n{remedy}")


def _differences(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is not known to this model" for name in given if name not in expected]
    for name in expected.keys() & given.keys():
        want, have = expected[name], given[name]
        if want.shape != have.shape:
            problems.append(f"{name} has shape {list(have.shape)}, this model needs {list(want.shape)}")
    return sorted(problems)


@torch.no_grad()
def restore_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into a model, plain, compiled or DDP.

    Raises CheckpointError, before anything is changed, unless every name, shape and type agrees.
    """
    parameters = named_parameters(model)
    problems = _differences(parameters, tensors)
    for name in parameters.keys() & tensors.keys():
        if parameters[name].dtype != tensors[name].dtype:
            problems.append(f"{name} is {tensors[name].dtype}, this model holds {parameters[name].dtype}")
    _refuse(
        "the saved parameters are those of another architecture",
        problems,
        "Start with the model options the checkpoint was made with (they are in its state.json).",
    )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _optimizer_list(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def flatten_optimizer(optimizers: Optimizers, model: nn.Module) -> dict[str, Tensor]:
    """`<parameter name>/<state key>` -> the optimizer's own tensor (no copy), over one or several optimizers.

    Hyperparameters are not included: a resume takes them from its configuration.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model).items()}
    flat: dict[str, Tensor] = {}
    for optimizer in _optimizer_list(optimizers):
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                assert isinstance(value, Tensor), f"optimizer state {key} is a {type(value).__name__}, not a tensor"
                flat[f"{names[parameter]}/{key}"] = value.detach()
    return flat


def _expected_keys(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """State keys a parameter has after a step; None for optimizers not listed here (nothing to compare with)."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer"}
    return None


def restore_optimizer(optimizers: Optimizers, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved state back into fresh optimizers; lr, weight decay, fused ... stay as the optimizers were built.

    `Optimizer.load_state_dict` would overwrite those and takes wrong shapes without a word; here a missing or
    unexpected key, a wrong shape or type raises CheckpointError naming it, before anything is changed.
    No tensors at all is the state before the first step.
    """
    if not tensors:
        return
    names = {parameter: name for name, parameter in named_parameters(model).items()}
    saved: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        saved.setdefault(name, {})[key] = value
    problems: list[str] = []
    plan: list[tuple[Optimizer, nn.Parameter, dict[str, Tensor]]] = []
    for optimizer in _optimizer_list(optimizers):
        for group in optimizer.param_groups:
            on_device = bool(
                group.get("fused") or group.get("capturable")
            )  # their step counts live beside the parameters
            for parameter in group["params"]:
                entries = saved.pop(names[parameter], {})
                expected = _expected_keys(optimizer, group) if parameter.requires_grad else set()
                problems += _state_problems(names[parameter], parameter, entries, expected)
                plan.append((optimizer, parameter, _placed(entries, parameter, on_device)))
    problems += [f"{name} is not a parameter of this optimizer" for name in saved]
    _refuse(
        "the saved optimizer state does not fit this optimizer",
        sorted(problems),
        "Use the model and optimizer it was made with, or `--resume_reset optimizer` to begin with a fresh one.",
    )
    for optimizer, parameter, entries in plan:
        if entries:
            optimizer.state[parameter] = entries


def _state_problems(
    name: str, parameter: Tensor, entries: Mapping[str, Tensor], expected: set[str] | None
) -> list[str]:
    wanted = entries.keys() if expected is None else expected
    problems = [f"{name}/{key} is missing" for key in wanted - entries.keys()]
    problems += [f"{name}/{key} is not known to this optimizer" for key in entries.keys() - wanted]
    for key, value in entries.items():
        shape, dtype = (torch.Size(()), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
        if value.shape != shape or value.dtype != dtype:
            problems.append(
                f"{name}/{key} is {value.dtype} {list(value.shape)}, this optimizer needs {dtype} {list(shape)}"
            )
    return problems


def _placed(entries: Mapping[str, Tensor], parameter: Tensor, on_device: bool) -> dict[str, Tensor]:
    """Own copies (files are memory-mapped) on the device where this optimizer expects them."""
    host = torch.device("cpu")
    return {
        key: value.to(parameter.device if on_device or key != "step" else host, copy=True)
        for key, value in entries.items()
    }


# ------------------------------------------------------------------------------------------------------- random numbers
def capture_rng(device: torch.device | str) -> dict[str, Tensor]:
    """State of Python's, NumPy's global, torch's and the device's generators as tensors (15 KB).

    Cheap (tens of microseconds, no device synchronisation): it may be called at the end of each step.
    """
    device = torch.device(device)
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict) and legacy["bit_generator"] == "MT19937", "NumPy's global generator was replaced"
    state: dict[str, Tensor] = {
        "python": torch.from_numpy(np.array([version, *words], dtype=np.int64)),  # [626]: version, 624 words, position
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(legacy["state"]["key"], legacy["state"]["pos"]).astype(np.int64)),  # [625]
        "numpy_gauss": torch.tensor([legacy["gauss"]] if legacy["has_gauss"] else [], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device | str) -> list[str]:
    """Set all generators from `capture_rng`'s tensors.

    Returns the device generators that could not be carried over (a run saved on another kind of device); a missing host
    generator raises CheckpointError.
    """
    device = torch.device(device)
    missing = {"python", "python_gauss", "numpy", "numpy_gauss", "torch"} - state.keys()
    if missing:
        raise CheckpointError(f"the saved random state has no {', '.join(sorted(missing))}")
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *key, position = state["numpy"].tolist()
    gauss = state["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, len(gauss), gauss[0] if gauss else 0.0))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
    return sorted(({device.type} - {"cpu"}) ^ ({"cuda", "mps"} & state.keys()))


# ------------------------------------------------------------------------------------------------------ weights for use
def half_precision(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies with plain names, floating-point ones in float16 as MiniMind saves them; tied tensors stay tied.

    Raises CheckpointError for what float16 cannot hold (beyond 65504, or not finite to begin with).
    """
    copies: dict[tuple[Any, ...], Tensor] = {}  # one for each place in memory; torch.save writes a shared copy once
    halves: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in copies:
            half = tensor.detach().to(torch.float16) if tensor.is_floating_point() else tensor.detach()
            if half.is_floating_point() and not bool(half.isfinite().all()):
                raise CheckpointError(
                    f"{name} holds {tensor.abs().max().item():g}, which float16 cannot (its largest number is 65504): "
                    "the weights file was not written; the run has probably diverged"
                )
            # A view would drag its whole storage into the file: torch.save writes storages.
            copies[place] = half.to("cpu", copy=True).contiguous()
        halves[plain_name(name)] = copies[place]
    return halves


def write_weights(path: str | os.PathLike[str], state_dict: Mapping[str, Tensor], card: Mapping[str, Any]) -> str:
    """Write a half-precision `.pth` and its card `<stem>.json` (with the file's SHA-256, which is returned).

    Both atomically. The card comes first and keeps the one it replaces under "previous": a crash between the two
    renames leaves the older weights with the card that describes them.
    Raises SaveFailed, or CheckpointError for numbers beyond float16.
    """
    path = Path(path)
    card_path, temporary = path.with_suffix(".json"), _temporary_name(path)
    halves = half_precision(state_dict)
    file: HashedFile | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(temporary) as file:
            torch.save(halves, file)  # type: ignore[arg-type]  # it needs write and flush
        digest = file.sha256.hexdigest()
        new_card = {**card, "sha256": digest}
        previous = _cards(card_path)[:1] if path.exists() else []
        write_json_atomic(card_path, {**new_card, "previous": previous[0]} if previous else new_card)
        os.replace(temporary, path)
        sync_folder(path.parent)
        if previous:
            write_json_atomic(card_path, new_card)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        _remove_quietly(temporary)
        cause = (file.error if file else None) or error
        if isinstance(cause, SaveFailed):
            raise
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
        raise SaveFailed(f"could not write {path}: {reason}; the file it would have replaced is untouched") from cause
    return digest


def _cards(card_path: Path) -> list[dict[str, Any]]:
    """The card of a weights file, then the one it was about to replace; none if there is no readable one."""
    try:
        card = json.loads(card_path.read_bytes())
        return [c for c in (card, card.pop("previous", None)) if c and c["sha256"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _matching_card(path: Path) -> dict[str, Any] | None:
    """The card that describes the weights file as it is now, by digest; None without one. Raises CheckpointError."""
    card_path = path.with_suffix(".json")
    if not card_path.exists():
        return None
    cards = _cards(card_path)
    if not cards:
        raise CheckpointError(f"{card_path}, the card of {path.name}, is damaged; delete it to use the weights without")
    digest = _file_digest(path)
    matching = [card for card in cards if card["sha256"] == digest]
    if not matching:
        raise CheckpointError(f"{path} is damaged or was exchanged: its SHA-256 differs from that in {card_path.name}")
    return matching[0]


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """(state dict with plain names, card or None) of a `.pth`, one of MiniMind's own included.

    The digest of the card is checked, or the zip archive's checksums where there is no card. Only tensors are read: a
    pickle that would run code is refused. Raises CheckpointError in words for whatever is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}")
    card = _matching_card(path)
    try:
        if card is None and zipfile.is_zipfile(path):
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
    return {plain_name(name): tensor for name, tensor in weights.items()}, card


# -------------------------------------------------------------------------------------------------------- in background
class BackgroundWriter:
    """Runs saves in a thread, one at a time; the loop pays only for the snapshot.

    A failure surfaces as SaveFailed at the next `snapshot`, `submit` or `wait`. The thread is not a daemon: the
    interpreter does not exit before the save has ended.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when no save is running any more; raises SaveFailed if the last one failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, SaveFailed):
            raise error
        if error is not None:
            raise SaveFailed(f"a save failed: {type(error).__name__}: {error}") from error

    def submit(self, save: Callable[[], object]) -> None:
        """Wait for the save before, then start this one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-writer", daemon=False)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:  # handed to the main thread by wait()
            self._error = error

    @torch.no_grad()
    def snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copy tensors to host memory, laid out as `write_checkpoint` takes them.

        The buffers are kept for the next snapshot (page faults cost more than the copy), so the last save must end.
        From CUDA the copies go to pinned memory together, with one synchronisation.
        """
        self.wait()
        devices: set[torch.device] = set()
        copies: dict[str, dict[str, Tensor]] = {}
        for file, entries in tensors.items():
            copies[file] = {}
            for name, tensor in entries.items():
                buffer = self._buffer((file, name), tensor)
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                copies[file][name] = buffer
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, error_type: Any, *_: object) -> None:
        try:
            self.wait()
        except SaveFailed as error:
            if error_type is None:
                raise
            print(f"Also, while stopping: {error}", file=sys.stderr)  # must not hide the error that ends the run
