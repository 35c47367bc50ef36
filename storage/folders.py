"""Folders that are whole or not there. What has its name is whole; what is on the way to or from it is called

`.tmp-NAME-PID` while it is written, `.old-NAME-PID` while a newer one takes its place (it counts as long as there is no
NAME), `.del-NAME-PID` while it is deleted. Whoever writes in a folder holds a lock of it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from storage.files import remove_quietly, sync

OLD = re.compile(r"\.old-(.+)-\d+")


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final`, flushed to the disk, when the block ends well, and vanishes otherwise.

    A folder of that name is replaced: at every instant, a crash included, one of the two is there. Raises OSError.
    """
    temporary = _aside(final, "tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        clean_leftovers(final.parent, final.name)
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        _move_into_place(temporary, final)
    finally:
        remove_quietly(temporary)


def _aside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{kind}-{folder.name}-{os.getpid()}")


def _move_into_place(temporary: Path, final: Path) -> None:
    """Rename; an older folder of that name steps aside first and is deleted once the new one has it."""
    old = _aside(final, "old")
    if replaces := final.exists():
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    sync(final.parent)
    remove_quietly(old)


def remove_folder(folder: Path) -> None:
    """Delete a folder, renamed before it is emptied: half of one never has its name."""
    doomed = _aside(folder, "del")
    os.rename(folder, doomed)
    remove_quietly(doomed)


def usual_path(folder: Path) -> Path:
    """Where a folder lies, or will again, that was found as `.old-NAME-PID`."""
    old = OLD.fullmatch(folder.name)
    return folder.with_name(old[1]) if old else folder


def find_folders(parent: Path) -> dict[str, Path]:
    """Name -> where it lies now, of the folders in `parent`, those included that were caught while being replaced."""
    paths = sorted(parent.iterdir()) if parent.is_dir() else []  # "." comes first: NAME is preferred to .old-NAME-PID
    return {usual_path(path).name: path for path in paths if path.is_dir()}


def clean_leftovers(parent: Path, name: str = "") -> None:
    """Remove what killed processes left in `parent` of files and folders (called `name`, if given), and bring back
    what was caught while being replaced. Only while nothing else writes there."""
    pattern = re.escape(name) or ".+"
    leftover = re.compile(rf"\.(tmp|old|del)-{pattern}-\d+|\.{pattern}\.tmp-\d+")
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if OLD.fullmatch(path.name) and leftover.fullmatch(path.name) and not usual_path(path).exists():
            os.rename(path, usual_path(path))
            sync(parent)
        elif leftover.fullmatch(path.name):
            remove_quietly(path)
