"""A run's folder at the start: locked against a second run, cleared of an older one, described in config.yaml and
run.json."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from errors import UserError
from storage.files import write_file_atomic
from storage.folders import clean_leftovers
from training.before.prepare import Prepared
from training.config import ONE_START_ONLY, Config
from training.during.metrics import MetricsFile
from training.saving.checkpoint import weights_digest
from training.saving.receipt import Receipt
from training.saving.saver import RunFiles
from training.saving.state import TrainingState

LOCK_SECONDS = 10.0  # loader processes of a killed run hold its lock until they notice, at most 5 s later


@contextmanager
def folder_errors(config: Config) -> Iterator[None]:
    """Report an OSError in the run folder (a folder where a file belongs, say) as the user's mistake."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--save_dir {config.run_folder}: {error}; put that right or give another folder") from None


def open_run_folder(prepared: Prepared, state: TrainingState) -> RunFiles:
    """Lock the run folder, clear what must not be mixed with this run, note what the run is. Main process only. Raises
    UserError when another process trains there."""
    config, checkpoint = prepared.config, prepared.checkpoint
    config.run_folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(config)
    clean_leftovers(config.run_folder)
    clean_leftovers(config.resume_folder)
    if checkpoint:
        for path, problem in zip(checkpoint.set_damaged_aside(), checkpoint.damaged, strict=True):
            print(f"Warning: {problem}; set aside as {path.name}", file=sys.stderr)
    else:
        if config.overwrite and (config.run_folder / f"{config.run_name}.pth").exists():
            print(f"Replacing the run in {config.run_folder} (--overwrite 1)", flush=True)
        clear_run(config.run_folder, config.run_name)
    metrics = MetricsFile(config.run_folder / "metrics.jsonl")
    metrics.truncate_after(prepared.progress.step)
    return RunFiles(metrics, note_start(prepared, state), lock)


def lock_folder(config: Config) -> FileLock:
    lock = FileLock(config.run_folder / ".lock")
    try:
        lock.acquire(timeout=LOCK_SECONDS if config.from_resume else 0)
    except Timeout:
        raise UserError(
            f"--save_weight {config.save_weight}: another process is training in {config.run_folder}"
        ) from None
    except NotImplementedError:
        print(
            f"Warning: no file locks on this disk; nothing keeps a second run out of {config.run_folder}",
            file=sys.stderr,
        )
    return lock


def note_start(prepared: Prepared, state: TrainingState) -> Receipt:
    """Write config.yaml, the settings as resolved, and run.json."""
    config, checkpoint = prepared.config, prepared.checkpoint
    repeatable = {name: value for name, value in config.values().items() if name not in ONE_START_ONLY}
    repeatable["global_batch_size"] = prepared.layout.global_batch_size  # the same steps with any number of ranks
    write_file_atomic(
        config.run_folder / "config.yaml", yaml.safe_dump(repeatable, sort_keys=False, allow_unicode=True)
    )
    data = {"train": prepared.dataset, "val": prepared.validation}
    receipt = Receipt(config.run_folder / "run.json")
    receipt.update(
        status="running",
        seed=config.seed,
        config=config.values(),
        identity=prepared.identity,
        choices=state.choices,
        environment=state.environment,
        ledger={part: dataset.ledger for part, dataset in data.items() if dataset},
        plan=asdict(prepared.plan),
    )
    settings = repeatable | {"resume_reset": config.resume_reset}
    receipt.add_start(prepared.progress.step, config=settings, choices=state.choices, environment=state.environment)
    if checkpoint:  # a kill may have come between the save and its note
        receipt.add_save(checkpoint.step, weights_digest(checkpoint.manifest), f"resume/step_{checkpoint.step:08d}")
    return receipt


def clear_run(folder: Path, name: str) -> None:
    """Remove what an older run of this name left: --overwrite 1 allows it, or none of its saves was completed."""
    shutil.rmtree(folder / "resume", ignore_errors=True)
    for leftover in (
        f"{name}.pth",
        f"{name}.json",
        f"{name}_best.pth",
        f"{name}_best.json",
        "metrics.jsonl",
        "run.json",
    ):
        (folder / leftover).unlink(missing_ok=True)
