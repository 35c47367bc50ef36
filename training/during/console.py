"""The screen: lines, above a progress bar where there is a terminal."""

from __future__ import annotations

import sys
from typing import Any


class Console:
    """Prints lines, above a progress bar where stderr is a terminal; silent when not enabled (other ranks)."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self._bar: Any = None

    def start(self, total: int, done: int = 0) -> None:
        """Open a bar of `total` steps; the one before is closed."""
        self.close()
        if self.enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, leave=False)

    def advance(self) -> None:
        """Move the bar by a step."""
        if self._bar is not None:
            self._bar.update()

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
