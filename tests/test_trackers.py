"""A tracker never stops, delays or changes the run it follows."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from training import trackers as module
from training.config import Config

ROOT = Path(__file__).parent.parent


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    """A machine without key or saved login, whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("SWANLAB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def start(tmp_path, lines, **options) -> module.Tracker:
    config = {"lr": 0.1, "path": Path("x")}
    return module.start_tracker("swanlab", "project", "run", config, tmp_path, say=lines.append, **options)


def fake_swanlab(monkeypatch, init, key="x") -> None:
    class Settings:
        api_key = key

        @staticmethod
        def model_validate(values):
            return values

    monkeypatch.setitem(sys.modules, "swanlab", types.SimpleNamespace(init=init, Settings=Settings))


class FakeRun:
    id = "abc"

    def __init__(self):
        self.logged, self.finished = [], []

    def log(self, figures, step):
        self.logged.append((figures, step))

    def finish(self, state, error=None):
        self.finished.append(state)


def test_swanlab_without_a_login_runs_offline_and_leaves_our_hooks_and_stdout_alone(tmp_path, no_login):
    pytest.importorskip("swanlab")
    lines: list[str] = []

    def on_interrupt(number, frame):
        pass

    old = signal.signal(signal.SIGINT, on_interrupt)
    hook, write = sys.excepthook, sys.stdout.write
    try:
        tracker = start(tmp_path, lines)
        assert tracker.mode == "offline" and tracker.run_id
        for step in range(60):
            tracker.log({"loss": float("nan"), "grad_norm": math.inf, "lr": 0.1}, step)
        assert signal.getsignal(signal.SIGINT) is on_interrupt and sys.excepthook is hook
        assert sys.stdout.write == write
        tracker.finish()
        tracker.finish()
        assert signal.getsignal(signal.SIGINT) is on_interrupt and sys.excepthook is hook
    finally:
        signal.signal(signal.SIGINT, old)
    assert lines == []
    (data,) = (tmp_path / "swanlog").rglob("*.swanlab")
    assert data.stat().st_size > 2000
    again = start(tmp_path, lines, run_id=tracker.run_id)
    assert again.run_id == tracker.run_id and again.mode == "offline"
    again.finish("aborted")


BLACK_HOLE = """
import sys, time
from training import trackers as module
module.START_SECONDS = 1.0
began = time.monotonic()
tracker = module.start_tracker("swanlab", "p", "r", {}, sys.argv[1], run_id="abc")
tracker.log({"loss": 1.0}, 1)
tracker.finish()
print("mode", tracker.mode, tracker.run_id, "late" if time.monotonic() - began > 6 else "in time")
"""


def test_a_server_that_never_answers_delays_neither_the_start_nor_the_exit(tmp_path):
    pytest.importorskip("swanlab")
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:
        environment = dict(os.environ, PYTHONPATH=str(ROOT), SWANLAB_API_KEY="x" * 21, SWANLAB_ROOT=str(tmp_path / "h"))
        environment["SWANLAB_API_HOST"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", BLACK_HOLE, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
    assert "mode off abc in time" in result.stdout
    assert "SwanLab did not start within 1 s" in result.stdout and "Traceback" not in result.stderr
    assert time.monotonic() - began < 30


class FakeServer(BaseHTTPRequestHandler):
    """As much of SwanLab's service as a run needs; once stalled it answers nothing but the start of a run."""

    protocol_version = "HTTP/1.1"
    stalled = False
    paths: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.paths.append(self.path)
        code, answer = 200, {}
        if self.path.endswith("/login/api_key"):
            answer = {"sid": "s", "expiredAt": "2099-01-01T00:00:00.000Z", "userInfo": {"username": "u"}}
        elif self.path.endswith("/experiment"):
            code, answer = 201, {"cuid": "e", "name": "r", "slug": "abc", "user": {"username": "u"}}
        elif self.path.endswith("/project/u/p"):
            group = {"username": "u"}
            answer = {"cuid": "c", "name": "p", "path": "/u/p", "group": group, "_count": {"experiments": 0}}
        elif self.stalled:
            time.sleep(60)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = answer

    def log_message(self, *_) -> None:
        pass


ONLINE = """
import sys, time
from training import trackers as module
module.FINISH_SECONDS = float(sys.argv[2])
tracker = module.start_tracker("swanlab", "p", "r", {"lr": 0.1}, sys.argv[1], run_id="abc")
for step in range(20):
    tracker.log({"loss": 1.0}, step)
began = time.monotonic()
tracker.finish()
late = time.monotonic() - began > module.FINISH_SECONDS + 2
print("mode", tracker.mode, tracker.run_id, "finished", "late" if late else "in time")
"""


@pytest.mark.parametrize("stalled", [False, True])
def test_swanlab_online_keeps_the_given_run_id_and_a_server_gone_silent_holds_up_nothing(tmp_path, stalled):
    pytest.importorskip("swanlab")
    handler = type("Handler", (FakeServer,), {"stalled": stalled, "paths": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), SWANLAB_API_KEY="x" * 21, SWANLAB_ROOT=str(tmp_path / "h"))
    environment["SWANLAB_API_HOST"] = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-c", ONLINE, str(tmp_path), "1" if stalled else "10"]
    began = time.monotonic()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "mode online abc finished in time" in result.stdout
    assert ("did not finish within 1 s" in result.stdout) == stalled
    assert any(path.endswith("/house/metrics") for path in handler.paths) or stalled
    assert time.monotonic() - began < 30


def test_a_missing_or_broken_swanlab_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    lines: list[str] = []
    tracker = start(tmp_path, lines, run_id="kept")
    assert (tracker.mode, tracker.run_id, len(lines)) == ("off", "kept", 1)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()
    fake_swanlab(monkeypatch, None)  # its init cannot even be called
    assert start(tmp_path, lines).mode == "off"


def test_no_tracker_is_started_unasked(tmp_path, monkeypatch):
    fake_swanlab(monkeypatch, lambda **_: pytest.fail("was started"))
    assert module.start_tracker("", "p", "r", {}, tmp_path, run_id="kept").run_id == "kept"


def test_use_wandb_means_swanlab_and_a_named_tracker_wins():
    assert [Config(**values).tracker_name for values in ({}, {"use_wandb": 1}, {"tracker": "swanlab"})] == [
        "", "swanlab", "swanlab",
    ]  # fmt: skip
    assert Config(use_wandb=1, tracker="other").tracker_name == "other"


def test_a_start_that_hangs_is_left_after_the_limit_and_ended_if_it_comes_late(tmp_path, monkeypatch):
    gate, run, hook = threading.Event(), FakeRun(), sys.excepthook

    def init(**_):
        gate.wait(10)
        return run

    fake_swanlab(monkeypatch, init)
    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    lines: list[str] = []
    began = time.monotonic()
    assert start(tmp_path, lines).mode == "off"
    assert time.monotonic() - began < 3 and "did not start within" in lines[0] and sys.excepthook is hook
    gate.set()
    _until(lambda: run.finished == ["aborted"])


def _until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_refused_key_goes_on_offline_with_the_reason(tmp_path, monkeypatch, no_login):
    modes = []

    def init(**options):
        modes.append((options["mode"], options.get("id"), options.get("resume")))
        if options["mode"] == "online":
            raise RuntimeError("bad key")
        return FakeRun()

    fake_swanlab(monkeypatch, init)
    lines: list[str] = []
    tracker = start(tmp_path, lines, run_id="abc")
    assert tracker.mode == "offline" and modes == [("online", "abc", "allow"), ("offline", "abc", "allow")]
    assert lines == ["SwanLab cannot start online: RuntimeError: bad key"]
    tracker.finish()


def test_swanlab_mode_of_the_environment_is_honoured_and_no_key_never_means_online(tmp_path, monkeypatch, no_login):
    seen = []

    def init(**options):
        seen.append(options["mode"])
        return FakeRun()

    fake_swanlab(monkeypatch, init, key=None)
    start(tmp_path, []).finish()
    monkeypatch.setenv("SWANLAB_MODE", "disabled")
    start(tmp_path, []).finish()
    monkeypatch.setenv("SWANLAB_MODE", "online")
    start(tmp_path, []).finish()
    assert seen == ["offline", "disabled", "offline"]


def test_a_log_that_raises_is_one_line_and_one_that_hangs_costs_nothing(tmp_path, monkeypatch):
    class Broken(FakeRun):
        def log(self, figures, step):
            raise OSError("down")

    class Stuck(FakeRun):
        def log(self, figures, step):
            gate.wait(10)

    gate = threading.Event()
    lines: list[str] = []
    fake_swanlab(monkeypatch, lambda **_: Broken())
    tracker = start(tmp_path, lines)
    for step in range(5):
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert len(lines) == 1 and "down" in lines[0]

    fake_swanlab(monkeypatch, lambda **_: Stuck())
    monkeypatch.setattr(module, "FINISH_SECONDS", 0.2)
    tracker = start(tmp_path, lines)
    began = time.monotonic()
    for step in range(20_000):  # more than it holds: the oldest are dropped
        tracker.log({"loss": 1.0}, step)
    tracker.finish("crashed")
    assert time.monotonic() - began < 3 and "did not finish" in lines[-1]
    gate.set()


def test_everything_logged_before_the_end_arrives_in_order_with_the_final_state(tmp_path, monkeypatch):
    run = FakeRun()
    fake_swanlab(monkeypatch, lambda **_: run)
    tracker = start(tmp_path, [])
    for step in range(500):
        tracker.log({"loss": step / 2}, step)
    tracker.finish("aborted")
    assert run.logged == [({"loss": step / 2}, step) for step in range(500)] and run.finished == ["aborted"]
