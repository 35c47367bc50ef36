"""What a run reports is exact, survives crashes, and never stops or delays the run."""

import errno
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

import metrics as mt
from files import SaveFailed

ROOT = Path(__file__).parent.parent
STEP = mt.StepMetrics(
    step=100,
    epoch=1,
    loss=7.8234,
    logits_loss=7.8,
    aux_loss=0.0234,
    lr=0.00049876,
    grad_norm=1.5,
    rows_seen=3200,
    tokens_seen=1_600_000,
    tokens_per_second=24567.8,
    elapsed_seconds=65.25,
    skipped_steps=0,
    epochs=2,
    epoch_step=100,
    epoch_steps=5000,
    epoch_minutes_left=12.34,
    peak_memory_gib=1.239,
)


# ---------------------------------------------------------------------------------------------- log line, metrics.jsonl
def test_the_log_line_is_minimind_s_with_our_figures_after_it():
    assert mt.format_log_line(STEP) == (
        "Epoch:[1/2](100/5000), loss: 7.8234, logits_loss: 7.8000, aux_loss: 0.0234, lr: 0.00049876, "
        "epoch_time: 12.3min, ppl: 2440.60, grad_norm: 1.5000, tokens/s: 24568, memory: 1.24GiB"
    )


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (800.0, "inf")])
def test_perplexity_beyond_a_float_does_not_raise(loss, shown):
    assert str(mt.perplexity(loss)) == shown


def test_a_line_has_the_documented_keys_and_exact_values(tmp_path):
    file = mt.MetricsFile(tmp_path / "metrics.jsonl")
    record = {**STEP.record(), "loss": 0.1 + 0.2, "grad_norm": float("inf"), "aux_loss": float("nan")}
    file.write(record)
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert " ".join(strict) == (
        "step epoch loss logits_loss aux_loss lr grad_norm rows_seen tokens_seen tokens_per_second elapsed_seconds "
        "skipped_steps"
    )
    (read,) = mt.read_metrics(tmp_path / "metrics.jsonl")
    assert read["loss"] == 0.1 + 0.2 and read["grad_norm"] == math.inf and math.isnan(read["aux_loss"])


def test_a_resume_drops_later_and_torn_lines_and_keeps_the_rest_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = mt.MetricsFile(path)
    for step in (1, 10, 20, 30):
        file.write({"step": step, "loss": step / 3})
        file.write({"step": step, "val_loss": 1.5, "val_ppl": 4.48, "val_bits_per_byte": 0.9})
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    with open(path, "ab") as torn:
        torn.write(b'{"step": 5, "lo')
    assert file.truncate_after(10) == 5
    assert path.read_bytes() == kept
    inode = path.stat().st_ino
    assert file.truncate_after(10) == 0 and path.stat().st_ino == inode
    file.write({"step": 11})
    assert [record["step"] for record in mt.read_metrics(path)] == [1, 1, 10, 10, 11]
    assert mt.MetricsFile(tmp_path / "absent").truncate_after(3) == 0


def test_a_full_disk_keeps_lines_in_memory_fails_the_sync_and_loses_nothing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.write_text("a file where the folder should be: nothing can be written")
    file = mt.MetricsFile(path)
    for step in (1, 2):
        file.write({"step": step})
    assert capsys.readouterr().err.count("Warning") == 1
    with pytest.raises(SaveFailed, match="File exists"):
        file.sync()
    path.parent.unlink()  # the folder is made anew, too, if someone removes it
    file.sync()
    file.write({"step": 3})
    assert [record["step"] for record in mt.read_metrics(path)] == [1, 2, 3]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveFailed, match="No space left"):
        file.sync()


PARTLY_FULL = """
import resource, sys
import metrics as mt
file = mt.MetricsFile(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 200))
for step in range(10):
    file.write({"step": step, "loss": 1 / 3})
print(len(mt.read_metrics(sys.argv[1])), open(sys.argv[1], "rb").read().endswith(b"}\\n"))
"""


def test_a_line_cut_by_a_full_disk_is_taken_back(tmp_path):
    pytest.importorskip("resource", reason="needs RLIMIT_FSIZE")
    command = [sys.executable, "-c", PARTLY_FULL, str(tmp_path / "m.jsonl")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["2", "True"], result.stdout + result.stderr
    assert result.stderr.count("Warning") == 1 and "Traceback" not in result.stderr


# -------------------------------------------------------------------------------------------------------------- console
def test_without_a_terminal_there_are_plain_lines_and_no_bar(capsys):
    console = mt.Console()
    console.start(total=3, description="epoch 1")
    console.print("hello")
    console.advance(1, loss="1.0")
    console.close()
    shown = capsys.readouterr()
    assert shown.out == "hello\n" and shown.err == ""


def test_on_a_terminal_lines_go_to_stdout_and_the_bar_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = mt.Console()
    console.start(total=3, done=1)
    console.print("hello")
    console.advance(2, loss="1.0")
    console.close()
    shown = capsys.readouterr()
    assert shown.out.strip("\r\n") == "hello" and "1/3" in shown.err


def test_other_ranks_are_silent_even_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = mt.Console(enabled=False)
    console.start(total=3)
    console.print("hello")
    console.advance()
    console.close()
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


# -------------------------------------------------------------------------------------------------------------- tracker
@pytest.fixture
def no_login(tmp_path, monkeypatch):
    """A machine without key or saved login, whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("SWANLAB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def start(tmp_path, lines, **options) -> mt.Tracker:
    config = {"lr": 0.1, "path": Path("x")}
    return mt.start_tracker(True, "project", "run", config, tmp_path, say=lines.append, **options)


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
import metrics as mt
mt.ONLINE_START_SECONDS = 1.0
began = time.monotonic()
tracker = mt.start_tracker(True, "p", "r", {}, sys.argv[1], run_id="abc")
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
import metrics as mt
mt.FINISH_SECONDS = float(sys.argv[2])
tracker = mt.start_tracker(True, "p", "r", {"lr": 0.1}, sys.argv[1], run_id="abc")
for step in range(20):
    tracker.log({"loss": 1.0}, step)
began = time.monotonic()
tracker.finish()
late = time.monotonic() - began > mt.FINISH_SECONDS + 2
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


def test_no_tracker_is_started_unasked_or_on_other_ranks(tmp_path, monkeypatch):
    fake_swanlab(monkeypatch, lambda **_: pytest.fail("was started"))
    assert mt.start_tracker(False, "p", "r", {}, tmp_path).mode == "off"
    assert mt.start_tracker(True, "p", "r", {}, tmp_path, is_main=False).mode == "off"


def test_a_start_that_hangs_is_left_after_the_limit_and_ended_if_it_comes_late(tmp_path, monkeypatch):
    gate, run, hook = threading.Event(), FakeRun(), sys.excepthook

    def init(**_):
        gate.wait(10)
        return run

    fake_swanlab(monkeypatch, init)
    monkeypatch.setattr(mt, "ONLINE_START_SECONDS", 0.1)
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
    monkeypatch.setattr(mt, "FINISH_SECONDS", 0.2)
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


# ------------------------------------------------------------------------------------------------------------- run.json
def test_the_receipt_is_kept_whole_through_updates_and_restarts(tmp_path):
    record = mt.RunRecord(tmp_path / "run.json")
    record.update(status="running", seed=42, config={"data_path": Path("a.jsonl"), "lr": 1e-3})
    record.add_save(10, "aa", "resume/step_00000010")
    record.add_save(20, "bb", "resume/step_00000020")
    resumed = mt.RunRecord(tmp_path / "run.json")
    resumed.add_save(20, "cc", "resume/step_00000020")
    resumed.update(status="finished")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["status"], data["seed"], data["config"]["data_path"]) == ("finished", 42, "a.jsonl")
    assert [(save["step"], save["weights_digest"]) for save in data["saves"]] == [(10, "aa"), (20, "cc")]
    resumed.add_save(15, "dd", "resume/step_00000015")  # gone back: step 20 is no longer part of this run
    assert [save["step"] for save in resumed.data["saves"]] == [10, 15]
    with pytest.raises(AssertionError, match="unknown status"):
        resumed.update(status="done")


def test_an_unreadable_receipt_is_replaced_and_the_new_one_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{")
    mt.RunRecord(tmp_path / "run.json").update(status="running")
    assert "unreadable" in json.loads((tmp_path / "run.json").read_text())["notes"][0]


def test_the_loop_and_the_writer_s_thread_may_update_the_receipt_together(tmp_path):
    record = mt.RunRecord(tmp_path / "run.json")

    def note_saves():
        for step in range(1, 30):
            record.add_save(step, "x", "y")

    thread = threading.Thread(target=note_saves)
    thread.start()
    for number in range(30):
        record.update(number=number)
    thread.join()
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["number"] == 29 and len(data["saves"]) == 29


def test_environment_facts_import_no_package_and_are_json():
    code = (
        "import sys, json, metrics\nfacts = metrics.environment_facts()\n"
        "assert not {'transformers', 'tokenizers', 'swanlab'} & set(sys.modules)\nprint(json.dumps(facts))"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"].startswith("2.") and facts["threads"] == 1 and facts["cpu"]


def test_git_state_tells_clean_from_dirty_and_is_none_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert mt.git_state(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    state = mt.git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert mt.git_state(tmp_path) == {**state, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert mt.git_state(tmp_path) is None


# ----------------------------------------------------------------------------------------------------------- divergence
def feed(watch, losses, every=10, first=0):
    """Feed a loss every few steps; returns the warnings with their steps."""
    warnings = []
    for index, loss in enumerate(losses):
        step = max(first + index * every, 1)
        text = watch.update(step, loss, lr=1e-3, grad_norm=2.5, last_save=300)
        warnings += [(step, text)] if text else []
    return warnings


def test_a_rise_of_more_than_5_percent_is_warned_of_once_with_the_figures():
    ((step, text),) = feed(mt.DivergenceWatch(), [2.0] * 41 + [2.5] * 60)
    assert 410 < step < 610
    assert all(part in text for part in ("2.0000", "lr 0.00100000", "grad_norm 2.5000", "last good save: step 300"))


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 41 + [2.09] * 60,  # 4.5 %
        [3.0 - 0.01 * index for index in range(100)],
        [2.0] * 20 + [4.0] * 20,  # fewer than 400 steps seen
        [2.0, float("nan")] * 60,
        [2.0] * 41 + [float("nan")] * 80,  # other means count those
    ],
)
def test_no_warning_without_a_rise_of_5_percent_over_two_full_windows(losses):
    assert feed(mt.DivergenceWatch(), losses) == []


def test_the_watch_resumed_says_what_the_uninterrupted_one_says():
    losses = [2.0] * 41 + [2.5] * 60
    whole = mt.DivergenceWatch()
    expected = feed(whole, losses)
    for cut in (0, 5, 45, 90):
        watch = mt.DivergenceWatch()
        warnings = feed(watch, losses[:cut])
        resumed = mt.DivergenceWatch()
        resumed.restore(json.loads(json.dumps(watch.state())))
        assert warnings + feed(resumed, losses[cut:], first=cut * 10) == expected, cut
        assert resumed.state() == whole.state()
