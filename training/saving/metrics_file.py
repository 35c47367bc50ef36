"""metrics.jsonl: every logged figure of a run, one JSON object a step."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import SaveFailed
from storage.files import write_file_atomic


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, a line torn by a crash left out; what was not finite comes back as NaN. (The
    first releases wrote that as "nan", "inf" and "-inf", and evaluations on lines of their own.)"""
    records = [record for line in Path(path).read_bytes().splitlines() if (record := _parse(line)) is not None]
    return [{key: _number(value) for key, value in record.items()} for record in records]


def _number(value: Any) -> Any:
    return math.nan if value is None else float(value) if value in ("nan", "inf", "-inf") else value


def _line(record: Mapping[str, Any]) -> bytes:
    """JSON has no NaN and no infinity; null keeps a column of numbers one."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a line torn by a crash."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsFile:
    """Appends records to metrics.jsonl, one JSON object a step, floats exact. Main process only.

    A full disk never stops training here: lines wait in memory for the next write, and `sync`, which a save calls
    first, raises SaveFailed while they cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._last: dict[str, Any] = {}  # the last line's record; more of its step is added to it
        self._waiting: list[bytes] = []
        self._replaced = 0  # bytes at the file's end that the first waiting line stands in for
        self._lock = threading.Lock()  # sync() runs in the checkpoint writer's thread

    def write(self, record: Mapping[str, Any]) -> None:
        """Add figures of a step; those of the step before it go into its line, as an evaluation's do."""
        with self._lock:
            had_failed, adds = bool(self._waiting), record["step"] == self._last.get("step")
            if adds and had_failed:
                self._waiting.pop()
            elif not had_failed:
                self._replaced = len(_line(self._last)) if adds else 0
            self._last = {**self._last, **record} if adds else dict(record)
            self._waiting.append(_line(self._last))
            error = self._flush()
        if error and not had_failed:
            print(f"Warning: {self.path}: {error}; its lines wait in memory", file=sys.stderr)

    def _flush(self) -> OSError | None:
        """Write what waits, all or nothing; a last line that was added to is replaced."""
        data = b"".join(self._waiting)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # should someone remove it
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
            with open(self.path, "r+b", buffering=0) as file:
                replaced = min(self._replaced, end)
                file.seek(end - replaced)
                before = file.read(replaced)
                file.seek(end - replaced)
                try:
                    if file.write(data) != len(data):
                        raise OSError("the disk took a part only")
                except OSError:
                    file.seek(end - replaced)
                    file.write(before)
                    file.truncate(end)
                    raise
        except OSError as error:
            return error
        self._waiting.clear()
        return None

    def sync(self) -> None:
        """Return when every line written so far is on the disk. Raises SaveFailed."""
        with self._lock:
            error = self._flush() if self._waiting else None
        try:
            if error:
                raise error
            if self.path.exists():
                with open(self.path, "ab") as file:  # Windows syncs only what may be written
                    os.fsync(file.fileno())
        except OSError as failure:
            raise SaveFailed(f"could not write {self.path}: {failure.strerror or failure}") from failure

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps and torn ones, atomically. For a resume at `step`."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [
            line for line in lines if line.endswith(b"\n") and (r := _parse(line)) is not None and r["step"] <= step
        ]
        if len(kept) < len(lines):
            write_file_atomic(self.path, b"".join(kept))
