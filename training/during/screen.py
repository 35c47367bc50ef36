"""Standard output that may go away: a full device or a closed pipe costs a run its screen, never its work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class LastingOutput:
    """`stream` until it can no longer be written to; then one line on stderr, and silence."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.is_lost = False

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Any, *arguments: Any) -> None:
        if self.is_lost:
            return
        try:
            call(*arguments)
        except OSError as error:
            self.is_lost = True
            with contextlib.suppress(OSError):
                reason = error.strerror or error
                print(
                    f"The screen is lost ({reason}); training goes on, metrics.jsonl has its figures", file=sys.stderr
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_stdout() -> Iterator[None]:
    """In this block sys.stdout is a LastingOutput."""
    stream, lasting = sys.stdout, LastingOutput(sys.stdout)
    sys.stdout = lasting
    try:
        yield
    finally:
        lasting.flush()
        sys.stdout = stream
        if lasting.is_lost:  # what is still in the stream's buffer would fail once more when Python exits
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
