"""Lock files: one process at a time, and a killed holder leaves them free."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

WAIT_SECONDS = 0.05


def silent(_: str) -> None:
    """What `say` is on every process but the main one."""


def take_lock(path: Path, seconds: float = -1) -> BaseFileLock:
    """The lock, held until it is released or this process ends, however it ends. Its folder is made if need be.

    Waits by polling, so that Ctrl-C and stop signals get through. Raises TimeoutError where another process still
    holds it after so many seconds (-1: never), and any other OSError where no lock file can be made.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds, poll_interval=WAIT_SECONDS)
    except NotImplementedError:
        raise OSError(errno.ENOLCK, "this disk has no file locks", str(path)) from None
    return lock


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None] = silent) -> Iterator[None]:
    """Hold the lock file in the block, waiting as long as it takes. Raises OSError where no lock file can be made."""
    try:
        lock = take_lock(path, 1)
    except TimeoutError:
        say(f"waiting for another process that prepares the same data (lock {path})")
        lock = take_lock(path)
    try:
        yield
    finally:
        lock.release()
