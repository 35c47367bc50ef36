"""A run's folder: locked against a second run, cleared of an older one, and what is written there beside the saves."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from errors import SaveFailed, UserError
from storage.files import write_file_atomic
from storage.folders import clean_leftovers
from storage.locks import take_lock
from training.config import ONE_START_ONLY, Config
from training.saving.checkpoint import Checkpoint, find_checkpoints, weights_digest
from training.saving.metrics_file import MetricsFile
from training.saving.receipt import Receipt
from training.saving.state import RunFacts
from training.schedule import Progress

LOCK_SECONDS = 10.0  # a run that was told to stop may still be saving its last step


class RunFolder:
    """Of a rank that writes nothing; also the interface of the one that does."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Figures of a step, for metrics.jsonl; those of one step make one line."""

    def sync(self) -> None:
        """Return when all lines are on the disk. Raises SaveFailed."""

    def note_save(self, step: int, digest: str, place: str) -> None:
        """For run.json. Raises SaveFailed."""

    def note(self, **fields: Any) -> None:
        """Facts for run.json, the run's `status` among them. A full disk is warned of: it must not hide the reason for
        which a run ended."""


@dataclass
class OpenRunFolder(RunFolder):
    """Of the main process."""

    metrics: MetricsFile
    receipt: Receipt

    def log(self, record: Mapping[str, Any]) -> None:
        self.metrics.write(record)

    def sync(self) -> None:
        self.metrics.sync()

    def note_save(self, step: int, digest: str, place: str) -> None:
        self.receipt.add_save(step, digest, place)

    def note(self, **fields: Any) -> None:
        try:
            self.receipt.update(**fields)
        except SaveFailed as error:
            print(f"Warning: {error}", file=sys.stderr)


@contextmanager
def folder_errors(config: Config) -> Iterator[None]:
    """Report an OSError in the run folder (a folder where a file belongs, say) as the user's mistake."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--save_dir {config.run_folder}: {error}; put that right or give another folder") from None


@contextmanager
def locked_run_folder(config: Config) -> Iterator[None]:
    """Hold the folder against a second run. Main process only. A resume waits a while for a run that is just leaving.
    Raises UserError when another process trains there."""
    folder, lock = config.run_folder, None
    is_new = not folder.exists()
    try:
        lock = take_lock(folder / ".lock", LOCK_SECONDS if config.from_resume else 0)
    except TimeoutError:
        raise UserError(f"--save_weight {config.save_weight}: another process is training in {folder}") from None
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise UserError(f"--save_dir {folder}: {error}; put that right or give another folder") from None
        print(f"Warning: no file locks on this disk; nothing keeps a second run out of {folder}", file=sys.stderr)
    try:
        yield
    finally:
        if is_new and os.listdir(folder) == [".lock"]:  # a mistake was found before anything was written
            shutil.rmtree(folder)
        if lock:
            lock.release()


def contents(config: Config) -> list[tuple[str, int]]:
    """What tells that another process saved in the run folder meanwhile: its saves, with times in ns."""
    paths = [config.run_folder / f"{config.run_name}.pth"]
    paths += [folder / "manifest.json" for _, folder in find_checkpoints(config.resume_folder)]
    return [(str(path), path.stat().st_mtime_ns) for path in paths if path.exists()]


def open_run_folder(
    config: Config,
    facts: RunFacts,
    progress: Progress,
    checkpoint: Checkpoint | None,
    predicted: Mapping[str, Any],
    ledgers: Mapping[str, Any],
) -> OpenRunFolder:
    """Clear what must not be mixed with this run, write config.yaml and run.json. Main process only, which holds the
    lock."""
    clean_leftovers(config.run_folder)
    clean_leftovers(config.resume_folder)
    if checkpoint:
        for path, problem in zip(checkpoint.set_damaged_aside(), checkpoint.damaged, strict=True):
            print(f"Warning: {problem}; set aside as {path.name}", file=sys.stderr)
    else:
        clear_run(config)
    metrics = MetricsFile(config.run_folder / "metrics.jsonl")
    metrics.truncate_after(progress.step)
    settings = {name: value for name, value in facts.config.items() if name not in ONE_START_ONLY}
    settings["global_batch_size"] = facts.global_batch_size  # the same steps with any number of ranks
    write_file_atomic(config.run_folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    receipt = Receipt(config.run_folder / "run.json")
    choices = asdict(facts.choices)
    receipt.update(
        status="running",
        seed=config.seed,
        config=facts.config,
        identity=facts.identity,
        choices=choices,
        environment=facts.environment,
        ledger=ledgers,
        plan=predicted,
    )
    start = settings | {"resume_reset": config.resume_reset}
    receipt.add_start(progress.step, config=start, choices=choices, environment=facts.environment)
    if checkpoint:  # a kill may have come between the checkpoint and its note
        receipt.add_save(checkpoint.step, weights_digest(checkpoint.manifest), f"resume/step_{checkpoint.step:08d}")
    return OpenRunFolder(metrics, receipt)


def clear_run(config: Config) -> None:
    """Remove what an older run of this name left: --overwrite 1 allows it, or none of its saves was completed."""
    folder, name = config.run_folder, config.run_name
    if config.from_resume and find_checkpoints(config.resume_folder):
        raise UserError(
            f"--from_resume 1: {config.resume_folder} holds checkpoints; they are never cleared by a resume"
        )
    if config.overwrite and (folder / f"{name}.pth").exists():
        print(f"Replacing the run in {folder} (--overwrite 1)", flush=True)
    shutil.rmtree(folder / "resume", ignore_errors=True)
    weights = [f"{name}{tier}{suffix}" for tier in ("", "_best") for suffix in (".pth", ".json")]
    for leftover in (*weights, "metrics.jsonl", "run.json"):
        (folder / leftover).unlink(missing_ok=True)
