"""Files that are whole or not there: written under a temporary name (`.NAME.tmp-PID`), hashed on the way, flushed to
the disk, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errors import SaveFailed

CHUNK_BYTES = 1 << 22  # hashed and written in turn while the chunk is still in the processor's cache


class HashedFile:
    """A file being written that knows the size and SHA-256 of its content. It is not flushed to the disk: `new_file`
    and `new_folder` do that.

    Created with the mode the umask gives, unlike `tempfile` and `safetensors.save_file` (0600): teammates can read it.
    Both hashing and writing release the interpreter lock: other threads run on meanwhile.
    """

    def __init__(self, path: Path):
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self.size, self.sha256 = 0, hashlib.sha256()
        self.error: OSError | None = None  # torch.save turns it into a RuntimeError about "unexpected pos"

    def write(self, data: Any) -> int:
        """Append bytes or a contiguous array; returns how many bytes it has."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array has no bytes to cast
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self.sha256.update(chunk)
                self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.size += len(view)
        return len(view)

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest says of the file."""
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_file(path: Path, data: Any) -> dict[str, Any]:
    """Write bytes or an array as a file of a folder in the making; returns its manifest entry. Raises OSError."""
    with HashedFile(path) as file:
        file.write(data)
    return file.entry


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name for the file that takes the place of `path`, flushed to the disk, when the block ends well.
    After any other end, a crash included, `path` is what it was. Raises SaveFailed."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with disk_errors(lambda why: SaveFailed(f"could not write {path}: {why}; what it held before is untouched")):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_quietly(temporary)
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        remove_quietly(temporary)  # gone after the rename, unless both were names of one file


def write_file_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a small file as a whole: after a crash it holds the old content or the new one. Raises SaveFailed."""
    with new_file(Path(path)) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """`write_file_atomic` of indented JSON; floats come back bit-equal, paths become text. Raises SaveFailed."""
    write_file_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, default=_json_default) + "\n").encode()


def _json_default(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # numbers of NumPy and torch
        return value.item()
    raise TypeError(f"cannot write {value!r} of type {type(value).__name__} as JSON")


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target`, which must not exist, the content of `source`: as a second name of the same file where the disk
    has such links, else as a copy. Raises OSError."""
    try:
        os.link(source, target)
    except (OSError, NotImplementedError):
        shutil.copyfile(source, target)


def remove_quietly(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's entries (new names, renames), are on the disk. Windows has no such
    call for folders and needs none."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(explained: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `explained(why)` for what a full, read-only or foreign disk does, `why` being the system's own words."""
    try:
        yield
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise explained(f"{error.strerror or error}{name}") from error
