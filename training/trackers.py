"""Trackers beside a run, one row each. One that is down, slow, logged out or missing neither stops nor delays training.

A row is all it takes to add one: a small class for the service's own side. Threads, limits and warnings are the same
for all of them.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

START_SECONDS = 10.0
FINISH_SECONDS = 10.0
INSTEAD = "metrics.jsonl has every figure"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run. With a `run_id`, of the saved state, it goes on with the run of that id."""

    project: str
    name: str
    config: dict[str, Any]  # JSON values
    folder: Path
    run_id: str | None


class Service:
    """A tracker's own side, to be subclassed: making one starts it. Everything here runs on a thread of its own and may
    be slow or raise."""

    title: ClassVar[str]
    run_id: str  # set by __init__; goes into the checkpoint

    @classmethod
    def modes(cls) -> list[str]:
        """Ways to start, tried in turn. Raises where the service's package is missing."""
        return ["on"]

    def __init__(self, run: TrackedRun, mode: str):
        raise NotImplementedError

    def log(self, figures: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def finish(self, state: str) -> None:
        """`state` is success, crashed or aborted."""


class SwanLab(Service):
    """Online where there is a key (SWANLAB_API_KEY or a saved login), else offline into `<run folder>/swanlog`;
    SWANLAB_MODE is honoured. Online a `run_id` continues that run; offline it makes one more folder with the same id,
    which `swanlab sync` adds to the same run."""

    title = "SwanLab"

    @classmethod
    def modes(cls) -> list[str]:
        swanlab = importlib.import_module("swanlab")
        wanted = os.environ.get("SWANLAB_MODE", "online")
        if wanted in ("disabled", "local", "offline"):
            return [wanted]
        try:
            key = swanlab.Settings().api_key  # the environment or a saved login
        except Exception:
            key = os.environ.get("SWANLAB_API_KEY")
        return ["online", "offline"] if key else ["offline"]

    def __init__(self, run: TrackedRun, mode: str):
        swanlab = importlib.import_module("swanlab")
        folder = run.folder / "swanlog"
        folder.mkdir(parents=True, exist_ok=True)
        again = {"id": run.run_id, "resume": "allow"} if run.run_id else {}
        settings = {"interactive": False, "terminal": {"proxy_type": "none"}}  # no prompts, stdout not wrapped
        self._run = swanlab.init(
            settings=swanlab.Settings.model_validate(settings), project=run.project, name=run.name, config=run.config,
            log_dir=str(folder), mode=mode, **again,
        )  # fmt: skip
        atexit.unregister(getattr(self._run, "_handle_atexit", print))  # it waits without limit; Tracker's does not
        self.run_id = str(self._run.id)

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def finish(self, state: str) -> None:
        self._run.finish(state=state, error=None if state == "success" else "the run was stopped")


# What --tracker chooses from.
TRACKERS: dict[str, type[Service]] = {"swanlab": SwanLab}


class Tracker:
    """No tracker at all; also the interface of a started one. Nothing here raises, prompts or waits for a network."""

    mode = "off"

    def __init__(self, run_id: str | None = None):
        self.run_id = run_id  # goes into the checkpoint, of a run that could not be continued this time as well

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Hand figures over; NaN and infinity are fine."""

    def finish(self, state: str = "success") -> None:
        """End the run as success, crashed or aborted; returns within FINISH_SECONDS."""


class StartedTracker(Tracker):
    """A started service, fed by a daemon thread: a slow disk or network costs the training loop nothing."""

    def __init__(self, service: Service, mode: str, say: Callable[[str], None]):
        super().__init__(service.run_id)
        self.mode, self._service, self._say = mode, service, say
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
                self._safely(self._service.log, figures, step)
        self._safely(self._service.finish, self._final_state)

    def _safely(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except BaseException as error:  # a tracker that is down must not stop a run
            if not self._warned:
                self._warned = True
                self._say(f"{self._service.title}: {type(error).__name__}: {error}; {INSTEAD}")

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
            self._say(f"{self._service.title} did not finish within {FINISH_SECONDS:.0f} s and was left; {INSTEAD}")


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Some services replace sys.excepthook and the Ctrl-C handler; afterwards they are ours again."""
    hook, handler = sys.excepthook, signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        sys.excepthook = hook
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and handler is not None and signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


def start_tracker(
    name: str,
    project: str,
    run_name: str,
    config: Mapping[str, Any],
    run_folder: str | os.PathLike[str],
    run_id: str | None = None,
    say: Callable[[str], None] = print,
) -> Tracker:
    """The tracker `name` ("" for none) started for this run, or the null tracker with one line said why. Main process
    only."""
    if not name:
        return Tracker(run_id)
    kind = TRACKERS[name]
    run = TrackedRun(project, run_name, json.loads(json.dumps(dict(config), default=str)), Path(run_folder), run_id)
    try:
        modes = kind.modes()
    except Exception as error:
        say(f"No {kind.title} tracking: {type(error).__name__}: {error}; {INSTEAD}")
        return Tracker(run_id)
    for mode in modes:
        service, problem = _start_with_limit(kind, run, mode)
        if service is not None:
            return StartedTracker(service, mode, say)
        if problem is None:  # its start may still hold a lock of the service's: a second one would wait for it
            say(f"{kind.title} did not start within {START_SECONDS:.0f} s and was left; {INSTEAD}")
            break
        say(f"{kind.title} cannot start {mode}: {problem}")
    return Tracker(run_id)


def _start_with_limit(kind: type[Service], run: TrackedRun, mode: str) -> tuple[Service | None, str | None]:
    """(service, None), (None, what went wrong), or (None, None) if it did not start in time."""
    lock, done = threading.Lock(), threading.Event()
    service: Service | None = None
    problem: str | None = None
    given_up = False

    def start() -> None:
        nonlocal service, problem
        try:
            started = kind(run, mode)
            with lock:
                if given_up:
                    started.finish("aborted")
                    return
                service = started
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            done.set()

    with _hooks_kept():
        threading.Thread(target=start, name="tracker-start", daemon=True).start()
        done.wait(START_SECONDS)
        with lock:
            given_up = service is None and problem is None
    return service, problem
