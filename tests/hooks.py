"""What a test has done inside a training child before `main` runs: record, signal, kill, fail at a chosen call.

Kept apart from the tests, so that a child imports nothing else for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Hook = tuple[Any, ...]  # (function, *arguments), run in the child


def run_all(hooks: list[Hook]) -> None:
    for function, *arguments in hooks:
        function(*arguments)


def _replace(path: str, wrap: Callable[[Callable], Callable]) -> None:
    """Replace `module.attribute` or `module.Class.attribute` by what `wrap` makes of it."""
    module, names = path.split(".")[0], path.split(".")[1:]
    owner: Any = importlib.import_module(module)
    while hasattr(owner, "__path__") and importlib.util.find_spec(f"{module}.{names[0]}"):
        module = f"{module}.{names.pop(0)}"
        owner = importlib.import_module(module)
    name = ".".join(names)
    while "." in name:
        first, _, name = name.partition(".")
        owner = getattr(owner, first)
    setattr(owner, name, wrap(getattr(owner, name)))


LISTENERS: list[Callable[[str, Any], None]] = []


def tell(event: str, run: Any) -> None:
    """The listener of a training child: hands the run's events to the hooks that wait for them."""
    for listener in LISTENERS:
        listener(event, run)


def at_event(event: str, count: int, action: str, *, pause: float = 0.0) -> Hook:
    """A hook: when the run tells of `event` (see training.during.run.Listener) for the `count`-th time, do `action`, as
    `at_call` has it, then wait `pause` seconds."""
    return _at_event, event, count, action, pause


def _at_event(event: str, count: int, action: str, pause: float) -> None:
    act, seen = _prepared(action, pause), 0

    def listen(told: str, _run: Any) -> None:
        nonlocal seen
        seen += told == event
        if told == event and seen == count:
            act()

    LISTENERS.append(listen)


def at_call(path: str, count: int, action: str, *, after: bool = False, pause: float = 0.0) -> Hook:
    """A hook for what no event tells of: at the `count`-th call of `path` (before or after it), send this process the
    signals named in `action` ("SIGTERM", "SIGINT SIGINT", "SIGKILL"), or its whole group ("group SIGTERM"; the child
    becomes a group of its own), raise ("raise MESSAGE"), or let no file grow beyond some bytes from now on ("limit
    100000": as a full disk would); then wait `pause` seconds."""
    return _at_call, path, count, action, after, pause


def _prepared(action: str, pause: float) -> Callable[[], None]:
    if action.startswith("group"):
        os.setpgrp()

    def act() -> None:
        verb, _, rest = action.partition(" ")
        if verb == "raise":
            raise ValueError(rest)
        if verb == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(rest), int(rest)))
            return
        send, whom = (os.killpg, os.getpgrp()) if verb == "group" else (os.kill, os.getpid())
        for number, name in enumerate((rest if verb == "group" else action).split()):
            time.sleep(0.3 * (number > 0))
            send(whom, getattr(signal, name))
        time.sleep(pause)

    return act


def _at_call(path: str, count: int, action: str, after: bool, pause: float) -> None:
    act, calls = _prepared(action, pause), 0

    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == count
            if mine and not after:
                act()
            result = original(*arguments, **options)
            if mine and after:
                act()
            return result

        return wrapped

    _replace(path, wrap)


def spoil_loss(steps: list[int]) -> Hook:
    """A hook: this process's losses of these steps are NaN."""
    return _spoil_loss, steps


def _spoil_loss(steps: list[int]) -> None:
    spoiled = False

    def listen(event: str, run: Any) -> None:
        nonlocal spoiled
        if event == "micro-batch":
            spoiled = run.state.progress.step + 1 in steps

    def wrap_scale(original: Callable) -> Callable:
        return lambda self, loss: original(self, loss * float("nan") if spoiled else loss)

    LISTENERS.append(listen)
    _replace("torch.amp.GradScaler.scale", wrap_scale)


def set_value(path: str, value: Any) -> Hook:
    """A hook: set `module.NAME` (or a class's) to `value`."""
    return _replace, path, functools.partial(_constant, value)


def _constant(value: Any, _old: Any) -> Any:
    return value


def val_losses(*losses: float) -> Hook:
    """A hook: evaluations give these losses, one after the other."""
    return _replace, "training.during.evaluation.evaluate_run", functools.partial(_evaluations, losses)


def _evaluations(losses: tuple[float, ...], _old: Any) -> Any:
    from training.during.evaluation import Evaluation

    coming = iter(losses)
    return lambda run: Evaluation(next(coming), 1.0, 1.0)


def record_rows(path: object) -> Hook:
    """A hook: append {"rank", "step", "rows"} to `path` for every step this process computes, the rows as it fetched
    them (-1: missing), whether or not the step is then finished."""
    return _record_rows, str(path)


def _record_rows(path: str) -> None:
    fetched: list[int] = []

    def wrap_fetch(original: Callable) -> Callable:
        def fetch(self: Any, rows: list[int]) -> Any:
            fetched.extend(rows)
            return original(self, rows)

        return fetch

    def listen(event: str, run: Any) -> None:
        if event == "gradients":
            line = {"rank": run.world.rank, "step": run.state.progress.step + 1, "rows": list(fetched)}
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        if event in ("begun", "gradients", "evaluated"):
            fetched.clear()

    LISTENERS.append(listen)
    _replace("dataset.lm_dataset.PretrainDataset.batch", wrap_fetch)


def main() -> int:
    """`python hooks.py RANK "[event, count, action]" <trainer's arguments>`: the trainer with an `at_event` on one
    rank, in the first start of torchrun's workers only."""
    import train_pretrain

    rank, call, *argv = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        run_all([at_event(*json.loads(call))])
    return train_pretrain.main(argv, tell)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.exit(main())
