"""Everything that ends a run: mistakes of the user's, unusable files, failed saves, numbers gone wrong, a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UserError(Exception):
    """Mistakes the user can mend, each as value - reason - remedy. Ends the program with status 2 and no traceback."""

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):  # the default would hand the joined message back as the only problem
        return type(self), (self.problems,)


class DataError(UserError):
    """Texts, tokenizer or token cache cannot be used as they are."""


class CheckpointError(UserError):
    """A checkpoint or weights file cannot be used; the text says which, why and what to do."""


class SaveFailed(RuntimeError):
    """A save did not come about (disk full, no permission ...); what was saved before is untouched."""


class NonFinite(RuntimeError):
    """Gradients, parameters or optimizer state hold NaN or infinity; nothing was saved from them."""


class StopRequested(BaseException):
    """Raised at a point where a run told to stop may stop. Not an Exception: nobody should swallow it."""


class Findings(list[str]):
    """Problems gathered from calls that raise them, so that they are all reported in one go."""

    def of(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the call returns, or None with its problems noted."""
        try:
            return call(*arguments)
        except UserError as error:
            self.extend(error.problems)
            return None


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError(problems)
