"""One process at a time; a dead one holds nothing."""

import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from storage.locks import locked, take_lock

ROOT = Path(__file__).parent.parent
HOLDER = """
import sys, time
from pathlib import Path
from storage.locks import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "deep" / "lock")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_held_elsewhere_is_told_and_freed_by_a_kill(tmp_path, holder):
    path = tmp_path / "deep" / "lock"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        take_lock(path, 0)
    with pytest.raises(TimeoutError):
        take_lock(path, 0.2)
    assert 0.2 <= time.monotonic() - began < 10
    holder.kill()
    take_lock(path, 10).release()


def test_who_waits_says_so_and_goes_on_when_it_is_free(tmp_path, holder):
    path, said = tmp_path / "deep" / "lock", []

    def say(line):
        said.append(line)
        holder.kill()

    with locked(path, say), pytest.raises(TimeoutError):
        take_lock(path, 0)
    assert said == [f"waiting for another process that prepares the same data (lock {path})"]
    take_lock(path, 0).release()


def test_a_disk_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(OSError, match="this disk has no file locks"), locked(tmp_path / "lock"):
        raise AssertionError("entered")
