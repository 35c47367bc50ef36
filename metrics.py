"""What a run reports: the log line, metrics.jsonl, the progress bar, the tracker, run.json and the divergence watch."""

import atexit
import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from files import SaveFailed, write_file_atomic, write_json_atomic

ONLINE_START_SECONDS = 10.0
FINISH_SECONDS = 10.0
INSTEAD = "metrics.jsonl has every figure"


# ------------------------------------------------------------------------------------------- log line and metrics.jsonl
@dataclass(frozen=True)
class StepMetrics:
    """One logged step. The fields of the first block are the keys of a line in metrics.jsonl."""

    step: int
    epoch: int  # counted from 1
    loss: float  # mean over all valid targets of the step: logits_loss + aux_loss
    logits_loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    rows_seen: int
    tokens_seen: int
    tokens_per_second: float  # valid targets
    elapsed_seconds: float
    skipped_steps: int
    # for the log line only
    epochs: int
    epoch_step: int  # steps done in this epoch
    epoch_steps: int  # steps of this epoch
    epoch_minutes_left: float
    peak_memory_gib: float

    def record(self) -> dict[str, float | int]:
        """The metrics.jsonl line: the fields up to skipped_steps, exact."""
        names = list(self.__dataclass_fields__)
        return {name: getattr(self, name) for name in names[: names.index("skipped_steps") + 1]}


def perplexity(loss: float) -> float:
    """e^loss, infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf


def format_log_line(metrics: StepMetrics) -> str:
    """MiniMind's log line, then ppl (of the cross-entropy alone), grad_norm, tokens/s and memory."""
    m = metrics
    return (
        f"Epoch:[{m.epoch}/{m.epochs}]({m.epoch_step}/{m.epoch_steps}), loss: {m.loss:.4f}, "
        f"logits_loss: {m.logits_loss:.4f}, aux_loss: {m.aux_loss:.4f}, lr: {m.lr:.8f}, "
        f"epoch_time: {m.epoch_minutes_left:.1f}min, ppl: {perplexity(m.logits_loss):.2f}, "
        f"grad_norm: {m.grad_norm:.4f}, tokens/s: {m.tokens_per_second:.0f}, memory: {m.peak_memory_gib:.2f}GiB"
    )


def _spell_out(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl, step and evaluation lines alike, with "nan" and "inf" as floats again."""
    records = []
    for line in Path(path).read_bytes().splitlines():
        record = _parse(line)
        if record is not None:
            records.append({key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in record.items()})
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a line torn by a crash."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsFile:
    """Appends records to metrics.jsonl, one JSON object a line, floats exact. Main process only.

    A full disk never stops training here: lines wait in memory for the next write, and `sync`, which a save calls
    first, raises SaveFailed while they cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()  # sync() runs in the checkpoint writer's thread

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({key: _spell_out(value) for key, value in record.items()}) + "\n"
        with self._lock:
            first_failure = not self._waiting
            self._waiting.append(line.encode())
            error = self._flush()
        if error and first_failure:
            print(f"Warning: {self.path}: {error}; its lines wait in memory", file=sys.stderr)

    def _flush(self) -> OSError | None:
        """Append what waits, all or nothing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # should someone remove it
            with open(self.path, "ab", buffering=0) as file:
                data, size = b"".join(self._waiting), file.tell()
                try:
                    if file.write(data) != len(data):
                        raise OSError("the disk took a part only")
                except OSError:
                    file.truncate(size)
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

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps and torn ones, atomically; returns how many. For a resume at `step`."""
        if not self.path.exists():
            return 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [
            line for line in lines if line.endswith(b"\n") and (r := _parse(line)) is not None and r["step"] <= step
        ]
        if len(kept) < len(lines):
            write_file_atomic(self.path, b"".join(kept))
        return len(lines) - len(kept)


# -------------------------------------------------------------------------------------------------------------- console
class Console:
    """Prints lines, above a progress bar where stderr is a terminal; silent when not enabled (other ranks)."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self._bar: Any = None

    def start(self, total: int, done: int = 0, description: str = "", unit: str = "step") -> None:
        """Open a bar (of an epoch, say); the one before is closed."""
        self.close()
        if self.enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=description, unit=unit, dynamic_ncols=True, leave=False)

    def advance(self, count: int = 1, **figures: str) -> None:
        """Move the bar; `figures` are shown at its end."""
        if self._bar is not None:
            if figures:
                self._bar.set_postfix(figures, refresh=False)
            self._bar.update(count)

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


# -------------------------------------------------------------------------------------------------------------- tracker
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


# ------------------------------------------------------------------------------------------------------------- run.json
class RunRecord:
    """The receipt run.json: what ran, on what, from which data, with which saves. Main process only.

    `status` is running, finished, stopped, failed or invalid. A change replaces the file as a whole; raises SaveFailed.
    """

    STATUSES = ("running", "finished", "stopped", "failed", "invalid")

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock = threading.RLock()  # saves are noted by the checkpoint writer's thread
        self.data: dict[str, Any] = {}
        if self.path.exists():
            try:
                self.data = dict(json.loads(self.path.read_bytes()))
            except (OSError, ValueError, TypeError):
                self.data = {"notes": ["an unreadable run.json was replaced"]}

    def update(self, **fields: Any) -> None:
        assert fields.get("status", "running") in self.STATUSES, f"unknown status {fields['status']!r}"
        with self._lock:
            self.data.update(fields, updated=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
            write_json_atomic(self.path, self.data)

    def add_start(self, step: int, **facts: Any) -> None:
        """Note a start of the program that goes on from `step`, for whoever wants to do it again: settings (`config`),
        choices, environment. One that repeats the last one's is not noted; those of later steps belong to a branch that
        was left and go."""
        start = {"step": step, **facts}
        with self._lock:
            starts = [old for old in self.data.get("starts", []) if old["step"] < step]
            if not starts or {**starts[-1], "step": step} != start or facts["config"]["resume_reset"] != "none":
                starts.append(start)
            self.update(starts=starts)

    def add_save(self, step: int, weights_digest: str, folder: str | os.PathLike[str]) -> None:
        """Note a save; those of the same or later steps belong to a branch that was left and go."""
        with self._lock:
            saves = [save for save in self.data.get("saves", []) if save["step"] < step]
            self.update(saves=[*saves, {"step": step, "weights_digest": weights_digest, "folder": os.fspath(folder)}])


def environment_facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, platform, processor and its matrix instructions, threads; GPUs if `device` is one. Imports nothing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "numpy", "transformers", "tokenizers", "safetensors", "swanlab"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    facts: dict[str, Any] = {"versions": versions, "platform": platform.platform(), "device": str(device)}
    facts["cpu"], facts["cpu_flags"] = _processor()
    facts |= {"cpu_count": os.cpu_count(), "threads": torch.get_num_threads(), "cuda": torch.version.cuda}
    if torch.device(device).type == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def _processor() -> tuple[str, list[str]]:
    """Name of the processor and those of its flags that matter to speed and rounding."""
    relevant = {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve", "i8mm"}
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return platform.processor() or platform.machine(), []
    values = {key.strip().lower(): value.strip() for key, _, value in reversed(lines)}
    flags = relevant & set((values.get("flags") or values.get("features") or "").split())
    return values.get("model name") or platform.machine(), sorted(flags)


def git_state(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the working tree (tracked files); None without git or repository, or after 2 s."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", os.fspath(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


# ----------------------------------------------------------------------------------------------------------- divergence
class DivergenceWatch:
    """Warns once when the mean logged loss of the last `window` steps exceeds that of the `window` before by > 5 %."""

    RISE = 1.05

    def __init__(self, window: int = 200):
        self.window = window
        self.first_step: int | None = None
        self.points: deque[tuple[int, float]] = deque()  # (step, loss) of the last two windows, finite ones only
        self.warned = False

    def update(self, step: int, loss: float, lr: float, grad_norm: float, last_save: int | None = None) -> str | None:
        """Take a logged step; returns the warning the first time the rule is met."""
        self.first_step = step if self.first_step is None else self.first_step
        if math.isfinite(loss):
            self.points.append((step, loss))
        while self.points and self.points[0][0] <= step - 2 * self.window:
            self.points.popleft()
        recent = [value for at, value in self.points if at > step - self.window]
        before = [value for at, value in self.points if at <= step - self.window]
        if self.warned or not recent or not before or step - self.first_step < 2 * self.window - 1:
            return None
        mean, mean_before = sum(recent) / len(recent), sum(before) / len(before)
        if mean <= self.RISE * mean_before:
            return None
        self.warned = True
        save = "no save yet" if last_save is None else f"last good save: step {last_save}"
        return (
            f"Warning: the loss is rising: mean {mean:.4f} over the last {self.window} steps, {mean_before:.4f} over "
            f"the {self.window} before (step {step}, lr {lr:.8f}, grad_norm {grad_norm:.4f}; {save}). "
            "A lower --learning_rate or --grad_clip may help."
        )

    def state(self) -> dict[str, Any]:
        """For the resume state (JSON)."""
        return {"first_step": self.first_step, "points": [list(point) for point in self.points], "warned": self.warned}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.first_step, self.warned = state["first_step"], state["warned"]
        self.points = deque((step, loss) for step, loss in state["points"])
