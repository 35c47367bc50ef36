"""Folders that are either whole or not there: locks, temporary names, what a folder says of its files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from errors import DataError
from storage.hashed_file import HashedFile, file_digest, sync

METADATA = "metadata.json"
WAIT_SECONDS = 0.25


def silent(_: str) -> None:
    """What `say` is on every process but the main one."""


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None] = silent) -> Iterator[None]:
    """Hold the lock file `path`: one process at a time, the others wait, and a killed holder leaves it free.

    Waits by polling, so that Ctrl-C and stop signals get through. Raises DataError where no lock file can be made.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))
    with disk_errors(path):
        try:
            lock.acquire(timeout=1, poll_interval=0.05)
        except Timeout:
            say(f"waiting for another process that prepares the same data (lock {path})")
            lock.acquire(timeout=-1, poll_interval=WAIT_SECONDS)
        except NotImplementedError:
            raise DataError(f"token cache {path}: this disk has no file locks; move it with --cache_dir") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn what a full, read-only or foreign disk raises into words."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the disk is read-only",
            errno.EACCES: "writing is not permitted there",
            errno.EPERM: "writing is not permitted there",
        }
        reason = reasons.get(error.errno or 0, str(error))
        raise DataError(f"token cache {where}: {reason}; free space or move it with --cache_dir") from error


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final`, flushed to disk, when the block ends well, and vanishes otherwise.

    The caller holds the lock of `final`: leftovers of a killed process and a damaged `final` are removed.
    """
    temporary = final.with_name(f".building-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, dict]:
    """Write each array raw as <name>.bin; returns what `read_metadata` compares with later."""
    entries = {}
    for name, array in arrays.items():
        with contextlib.closing(HashedFile(folder / f"{name}.bin")) as file:  # `new_folder` flushes it
            file.write(array)
        entries[f"{name}.bin"] = file.entry
    return entries


def read_array(path: Path, dtype: Any) -> np.ndarray:
    """A raw file as a read-only array backed by the file, as a plain ndarray (cheaper to index than np.memmap)."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def write_metadata(folder: Path, metadata: dict) -> None:
    (folder / METADATA).write_text(json.dumps(metadata, indent=1, ensure_ascii=False), encoding="utf-8")


def read_metadata(folder: Path, version: int, verify: bool = False) -> tuple[dict, str | None]:
    """(metadata, None) of a folder that can be used, else ({}, what is wrong with it). `verify` rehashes every file."""
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        if metadata["version"] != version:
            return {}, f"it was written by another version ({metadata['version']}, this is {version})"
        for name, expected in metadata["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return {}, f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if verify and file_digest(folder / name) != expected["sha256"]:
                return {}, f"the content of {name} has changed"
    except FileNotFoundError as error:
        return {}, f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"its {METADATA} cannot be read ({error})"
    return metadata, None
