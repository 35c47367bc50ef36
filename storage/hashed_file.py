"""Files hashed while they are written, and flushed to the disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 22  # hashed and written in turn while the piece is still in the processor's cache


class HashedFile:
    """A file being written that knows the size and SHA-256 of its content; leaving the `with` block flushes it to the
    disk.

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
                piece = view[start : start + CHUNK_BYTES]
                self.sha256.update(piece)
                self.file.write(piece)
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
        """Close without waiting for the disk: `sync` does that."""
        self.file.close()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, error_type: Any, *_: object) -> None:
        try:
            if error_type is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            self.file.close()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


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
