"""SwanLab beside a run: a tracker that is down, slow, logged out or missing neither stops nor delays training."""

import atexit
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ONLINE_START_SECONDS = 10.0
FINISH_SECONDS = 10.0
INSTEAD = "metrics.jsonl has every figure"


class Tracker:
    """No tracker at all; also the interface of the others. Nothing here raises, prompts or waits for a network."""

    mode = "off"

    def __init__(self, run_id: str | None = None):
        self.run_id = run_id  # goes into the resume state, of a run that could not be continued this time as well

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Hand figures over; NaN and infinity are fine."""

    def finish(self, state: str = "success") -> None:
        """End the run as success, crashed or aborted; returns within FINISH_SECONDS."""


class SwanLabTracker(Tracker):
    """A started SwanLab run, fed by a daemon thread: a slow disk or network costs the training loop nothing."""

    def __init__(self, run: Any, mode: str, say: Callable[[str], None]):
        super().__init__(str(run.id))
        self.mode, self._run, self._say = mode, run, say
        self._queue: deque[tuple[dict[str, float], int]] = deque(maxlen=10_000)  # the oldest go if nothing gets through
        self._wake = threading.Condition()
        self._final_state: str | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()
        atexit.register(self.finish, "crashed")  # an orderly end has called it before

    def log(self, figures: Mapping[str, float], step: int) -> None:
        with self._wake:
            self._queue.append((dict(figures), step))
            self._wake.notify()

    def _work(self) -> None:
        batch: list[tuple[dict[str, float], int]] = []
        while batch or not self._final_state:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._final_state)
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
            for figures, step in batch:
                self._safely(self._run.log, figures, step=step)
        error = None if self._final_state == "success" else "the run was stopped"
        self._safely(self._run.finish, state=self._final_state, error=error)

    def _safely(self, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except BaseException as error:  # a tracker that is down must not stop a run
            if not self._warned:
                self._warned = True
                self._say(f"SwanLab: {type(error).__name__}: {error}; {INSTEAD}")

    def finish(self, state: str = "success") -> None:
        with self._wake:
            if self._final_state:
                return
            self._final_state = state
            self._wake.notify()
        atexit.unregister(self.finish)
        with _hooks_kept():
            self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._say(f"SwanLab did not finish within {FINISH_SECONDS:.0f} s and was left; {INSTEAD}")


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """SwanLab replaces sys.excepthook and the Ctrl-C handler; afterwards they are ours again."""
    hook, handler = sys.excepthook, signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        sys.excepthook = hook
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and handler is not None and signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


def start_tracker(
    use_wandb: bool,
    project: str,
    run_name: str,
    config: Mapping[str, Any],
    run_folder: str | os.PathLike[str],
    run_id: str | None = None,
    is_main: bool = True,
    say: Callable[[str], None] = print,
) -> Tracker:
    """A SwanLab run, or the null tracker with one line said why. Main process only; the others get the null tracker.

    Online where there is a key (SWANLAB_API_KEY or a saved login), else offline into `<run_folder>/swanlog`;
    SWANLAB_MODE is honoured. `run_id` (of the resume state) continues that run online; offline it makes one more folder
    with the same id, which `swanlab sync` adds to the same run.
    """
    if not (use_wandb and is_main):
        return Tracker(run_id)
    try:
        swanlab = importlib.import_module("swanlab")
    except Exception as error:
        say(f"No SwanLab tracking: import swanlab failed ({type(error).__name__}: {error}); {INSTEAD}")
        return Tracker(run_id)
    options = {"project": project, "name": run_name, "config": json.loads(json.dumps(dict(config), default=str))}
    options |= {"id": run_id, "resume": "allow"} if run_id else {}
    options["log_dir"] = os.fspath(Path(run_folder) / "swanlog")
    for mode in _modes(swanlab):
        run, problem = _init_with_limit(swanlab, options | {"mode": mode})
        if run is not None:
            return SwanLabTracker(run, mode, say)
        if problem is None:  # its init still holds SwanLab's lock: a second one, even offline, would wait for it
            say(f"SwanLab did not start within {ONLINE_START_SECONDS:.0f} s and was left; {INSTEAD}")
            break
        say(f"SwanLab cannot start {mode}: {problem}")
    return Tracker(run_id)


def _modes(swanlab: Any) -> list[str]:
    """Modes to try in turn."""
    wanted = os.environ.get("SWANLAB_MODE", "online")
    if wanted in ("disabled", "local", "offline"):
        return [wanted]
    try:
        key = swanlab.Settings().api_key  # the environment or a saved login
    except Exception:
        key = os.environ.get("SWANLAB_API_KEY")
    return ["online", "offline"] if key else ["offline"]


def _init_with_limit(swanlab: Any, options: dict[str, Any]) -> tuple[Any, str | None]:
    """(run, None), (None, what went wrong), or (None, None) if it did not return in time."""
    lock, done = threading.Lock(), threading.Event()
    run, problem, given_up = None, None, False

    def start() -> None:
        nonlocal run, problem
        try:
            Path(options["log_dir"]).mkdir(parents=True, exist_ok=True)
            settings = {"interactive": False, "terminal": {"proxy_type": "none"}}  # no prompts, stdout not wrapped
            started = swanlab.init(settings=swanlab.Settings.model_validate(settings), **options)
            with lock:
                if given_up:
                    started.finish(state="aborted", error="started too late")
                    return
                run = started
            atexit.unregister(getattr(run, "_handle_atexit", print))  # it waits without limit; the tracker's does not
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            done.set()

    with _hooks_kept():
        threading.Thread(target=start, name="tracker-start", daemon=True).start()
        done.wait(ONLINE_START_SECONDS)
        with lock:
            given_up = run is None and problem is None
    return run, problem
