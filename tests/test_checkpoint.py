"""Checkpoints: whole or not there, strict when restored, plain words when something is wrong."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from errors import CheckpointError, SaveFailed
from storage import files, folders, manifests
from training.saving import checkpoint, saver, weights

ROOT = Path(__file__).parent.parent
FILES = ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"]


def save(folder: Path, step: int, value: float = 0.0, **state) -> Path:
    tensors = {
        "model": {"a": torch.full((5, 3), float(step) + value), "b": torch.arange(4)},
        "optimizer": {"a/exp_avg": torch.full((300,), float(step))},
        "rng": {"rank0/torch": torch.zeros(16, dtype=torch.uint8)},
    }
    checkpoint.write_checkpoint(folder, step, tensors, {"step": step, **state})
    return checkpoint.checkpoint_folder(folder, step)


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_checkpoint_comes_back_bit_equal_with_its_state(tmp_path):
    best = float(np.nextafter(1.1, 2))
    save(tmp_path, 7, best=best, worst=float("inf"), path=Path("x"))
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and (found.step, found.folder.name, found.damaged) == (7, "step_00000007", [])
    assert found.state == {"step": 7, "best": best, "worst": float("inf"), "path": "x"}
    assert torch.equal(found.load("model")["a"], torch.full((5, 3), 7.0))
    with pytest.raises(CheckpointError, match="nothing"):
        found.load("nothing")


def test_the_resume_folder_holds_no_pickle_and_obeys_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        folder = save(tmp_path / "resume", 1)
    finally:
        os.umask(old)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_no_folder_and_leftovers_alone_are_no_saves(tmp_path):
    assert checkpoint.load_newest(tmp_path / "absent") is None
    (tmp_path / ".tmp-step_00000003-99").mkdir()
    (tmp_path / ".del-step_00000002-99").mkdir()
    (tmp_path / ".run.json.tmp-99").write_text("{")
    (tmp_path / "notes").mkdir()
    assert checkpoint.load_newest(tmp_path) is None
    folders.clean_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# --- damage ---
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is_and_the_save_before_is_taken(tmp_path, name):
    save(tmp_path, 10)
    whole = save(tmp_path, 20)
    path = whole / name
    original = path.read_bytes()
    for position in {0, len(original) // 3, len(original) // 2, len(original) - 2}:
        flip_bit(path, position)
        found = checkpoint.load_newest(tmp_path)
        assert found is not None and found.step == 10, f"byte {position}"
        assert len(found.damaged) == 1 and "step_00000020" in found.damaged[0] and name in found.damaged[0]
        path.write_bytes(original)
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None and newest.step == 20


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["truncated", "empty", "missing", "longer"])
def test_harm_to_any_file_is_named_and_no_good_save_left_is_an_error_naming_each(tmp_path, name, harm):
    for step in (1, 2):
        path = save(tmp_path, step) / name
        data = path.read_bytes()
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes({"truncated": data[:-3], "empty": b"", "longer": data + b"x"}[harm])
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_newest(tmp_path)
    assert f"step_00000001/{name}" in str(error.value).replace(" has no manifest.json", "/manifest.json")
    assert f"step_00000002/{name}" in str(error.value).replace(" has no manifest.json", "/manifest.json")


def test_a_renamed_save_or_one_of_another_format_is_not_trusted(tmp_path):
    save(tmp_path, 5).rename(tmp_path / "step_00000006")
    assert "holds step 5" in checkpoint.verify_checkpoint(tmp_path / "step_00000006")[0]
    (tmp_path / "step_00000007").mkdir()
    manifest = {"format_version": 99, "step": 7, "files": {}}
    manifests.write_manifest(tmp_path / "step_00000007" / "manifest.json", manifest)
    assert "format version 99" in checkpoint.verify_checkpoint(tmp_path / "step_00000007")[0]


def test_damaged_saves_set_aside_are_neither_counted_by_prune_nor_forgotten(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip_bit(tmp_path / "step_00000003" / "model.safetensors", 200)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.step == 2
    assert [path.name for path in found.set_damaged_aside()] == ["damaged-step_00000003"]
    checkpoint.prune(tmp_path, 1)
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [2]
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="damaged-step_00000003"):
        checkpoint.load_newest(tmp_path)


# --- replacing, crashes ---
def test_a_second_save_of_the_same_step_replaces_the_first(tmp_path):
    save(tmp_path, 4, note="first")
    save(tmp_path, 4, note="second")
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.state["note"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_crash_between_the_renames_of_a_replacement_leaves_a_save_of_that_step(tmp_path, monkeypatch, killed_at):
    save(tmp_path, 4, note="first")
    renames, calls = os.rename, []

    def rename(source, target):
        calls.append(source)
        if len(calls) > killed_at:
            raise KeyboardInterrupt  # no clean-up runs for it, as after kill -9
        renames(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(folders, "remove_quietly", lambda path: None)
        if killed_at == 1:
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, 4, note="second")
        else:
            save(tmp_path, 4, note="second")
    expected = {1: "first", 2: "second"}[killed_at]
    for _ in range(2):  # before and after the leftovers are cleaned
        found = checkpoint.load_newest(tmp_path)
        assert found is not None and (found.step, found.state["note"]) == (4, expected)
        folders.clean_leftovers(tmp_path)
        assert found.load("model")["b"].tolist() == [0, 1, 2, 3]  # under its name from before the clean-up
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


# --- amending ---
def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


def test_amending_replaces_the_state_and_no_tensor(tmp_path):
    folder = save(tmp_path, 4, note="first")
    before, files_before = inodes(folder), json.loads((folder / "manifest.json").read_text())["files"]
    manifest = checkpoint.amend_checkpoint(tmp_path, 4, {"step": 4, "note": "second"})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.state == {"step": 4, "note": "second"} and found.manifest == manifest
    assert inodes(folder) == before
    assert {**manifest["files"], "state.json": None} == {**files_before, "state.json": None}
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_amending_copies_where_the_disk_has_no_links(tmp_path, monkeypatch):
    folder = save(tmp_path, 4, note="first")
    before = inodes(folder)

    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    checkpoint.amend_checkpoint(tmp_path, 4, {"note": "second"})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.state == {"note": "second"} and found.damaged == []
    assert not set(inodes(folder).values()) & set(before.values())


def test_an_amendment_that_fails_leaves_the_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 4, note="first")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SaveFailed, match=r"step 4.*No space left on device"):
            checkpoint.amend_checkpoint(tmp_path, 4, {"note": "second"})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.state["note"] == "first"
    with pytest.raises(CheckpointError, match=r"step_00000005 has no manifest\.json"):
        checkpoint.amend_checkpoint(tmp_path, 5, {})


KILLED_AMENDER = """
import os, sys
from pathlib import Path
import torch
from storage import folders
from training.saving import checkpoint
folder = Path(sys.argv[1])
whole = {"model": {"w": torch.arange(1000.0)}, "optimizer": {"w/m": torch.ones(1000)}}

def kill_at(number):
    calls = 0
    for name in ("mkdir", "link", "fsync", "rename", "replace", "unlink", "rmdir"):
        def counted(*arguments, call=getattr(os, name), **options):
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(9)
            return call(*arguments, **options)
        setattr(os, name, counted)

seen, number, status = [], 0, 9
while status == 9:
    number += 1
    checkpoint.write_checkpoint(folder, 4, whole, {"note": "old"})
    pid = os.fork()
    if pid == 0:
        kill_at(number)
        checkpoint.amend_checkpoint(folder, 4, {"note": "new"})
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for _ in range(2):  # before and after the leftovers are cleaned
        found = checkpoint.load_newest(folder)
        assert found.step == 4 and found.damaged == []
        assert torch.equal(found.load("model")["w"], whole["model"]["w"])
        seen.append(found.state["note"])
        folders.clean_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step_00000004"]
assert status == 0 and seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}, (status, seen)
print("killed at", number - 1, "calls")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_call_an_amendment_is_old_or_new(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", KILLED_AMENDER, str(tmp_path / "resume")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[2]) > 10


# --- pruning ---
def test_prune_keeps_the_newest_and_the_named_ones(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, also_keep={20})
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [20, 40, 50]
    assert len(list(tmp_path.iterdir())) == 3


KILLED_WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from storage import folders
from training.saving import checkpoint
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])

def write_for_ever(first, report):
    for step in range(first, 10_000_000):
        value = float(step)
        tensors = {"model": {"w": torch.full((200_000,), value)}, "optimizer": {"w/m": torch.full((50_000,), value)}}
        for repeat in range(2):  # the second replaces the first
            checkpoint.write_checkpoint(folder, step, tensors, {"step": step})
        checkpoint.amend_checkpoint(folder, step, {"step": step})
        checkpoint.prune(folder, 1, {step})
        os.write(report, f"{step}\\n".encode())

chance = random.Random(5)
reported = 0
for number in range(rounds):
    out, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(reported + 1, report)
    os.close(report)
    with os.fdopen(out) as lines:
        if number % 5 == 4:  # on a busy machine too some rounds must get as far as a whole save
            reported = int(lines.readline())
        time.sleep(chance.uniform(0.002, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = max([reported, *map(int, lines)])
    found = checkpoint.load_newest(folder)
    step = found.step if found else 0
    assert step >= reported, (step, reported)
    if found:
        assert found.damaged == [] and found.state["step"] == step
        assert bool((found.load("model")["w"] == step).all()) and bool((found.load("optimizer")["w/m"] == step).all())
    if number % 3 == 0:
        folders.clean_leftovers(folder)
        again = checkpoint.load_newest(folder)
        assert (again.step if again else 0) == step
print("survived", rounds, "kills, last step", reported)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_killed_at_random_instants_always_leaves_its_newest_save_whole(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "resume"), "25"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "survived 25 kills" in result.stdout and not result.stdout.rstrip().endswith("step 0")


# --- failing to save ---
FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from errors import SaveFailed
from storage import files
from training.saving import checkpoint, weights
folder = Path(sys.argv[1])
small = {"model": {"w": torch.ones(100)}}
large = {"model": {"w": torch.ones(1_000_000)}}
checkpoint.write_checkpoint(folder / "resume", 1, small, {})
weights.write_weights(folder / "w.pth", small["model"], {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # Python ignores SIGXFSZ: write raises EFBIG
for what in (lambda: checkpoint.write_checkpoint(folder / "resume", 1, large, {}),
             lambda: checkpoint.write_checkpoint(folder / "resume", 2, large, {}),
             lambda: weights.write_weights(folder / "w.pth", large["model"], {"step": 2}),
             lambda: files.write_file_atomic(folder / "w.json", "x" * (2 << 20))):
    try:
        what()
    except SaveFailed as error:
        print(error)
    else:
        sys.exit("no failure")
"""


def test_a_write_that_the_system_refuses_leaves_everything_saved_before_and_says_so_plainly(tmp_path):
    pytest.importorskip("resource", reason="needs RLIMIT_FSIZE")
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 4 and result.stdout.count("File too large") == 4
    assert "Traceback" not in result.stderr
    found = checkpoint.load_newest(tmp_path / "resume")
    assert found is not None and found.step == 1 and found.load("model")["w"].shape == (100,)
    loaded, description = weights.read_weights(tmp_path / "w.pth")
    assert loaded["w"].shape == (100,) and description is not None and description["step"] == 1
    assert not [path.name for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_at_any_stage_is_a_save_that_failed_with_the_last_good_one_intact(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(files.HashedFile, "write", full)
        else:
            patch.setattr(os, call, full)
        for step in (1, 2):
            with pytest.raises(
                SaveFailed, match=f"step {step}.*No space left on device.*earlier checkpoints are untouched"
            ):
                save(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert checkpoint.verify_checkpoint(tmp_path / "step_00000001") == []


def test_a_file_where_the_folder_should_be_is_a_save_that_failed(tmp_path):
    (tmp_path / "resume").write_text("")
    with pytest.raises(SaveFailed, match="step 3"):
        save(tmp_path / "resume", 3)
    with pytest.raises(SaveFailed):
        files.write_file_atomic(tmp_path / "resume" / "x.json", "{}")


# --- in background ---
def test_saves_run_beside_the_loop_one_at_a_time():
    running, order, gate = [], [], threading.Event()

    def slow(name):
        running.append(name)
        assert len(running) == 1
        gate.wait(5)
        running.remove(name)
        order.append(name)

    writer = saver.BackgroundWriter()
    writer.submit(lambda: slow("a"))
    assert not order  # it did not wait for the save
    threading.Timer(0.05, gate.set).start()
    writer.submit(lambda: slow("b"))
    assert order[0] == "a"
    writer.wait()
    assert order == ["a", "b"]


@pytest.mark.parametrize("surface", ["wait", "submit", "snapshot"])
def test_a_failure_in_the_background_surfaces_once_with_its_cause(surface):
    cause = ValueError("boom")

    def fail():
        raise cause

    writer = saver.BackgroundWriter()
    writer.submit(fail)
    actions = {
        "wait": writer.wait,
        "submit": lambda: writer.submit(lambda: None),
        "snapshot": lambda: writer.snapshot({}),
    }
    with pytest.raises(SaveFailed, match="boom") as error:
        actions[surface]()
    assert error.value.__cause__ is cause
    writer.wait()


def test_a_snapshot_is_a_copy_in_buffers_used_again_but_never_during_a_save(tmp_path):
    weight = torch.ones(4, 3).t()  # not contiguous
    writer = saver.BackgroundWriter()
    first = writer.snapshot({"model": {"w": weight}})
    weight.fill_(2)
    assert torch.equal(first["model"]["w"], torch.ones(3, 4)) and first["model"]["w"].is_contiguous()

    def slow_save():
        time.sleep(0.1)
        checkpoint.write_checkpoint(tmp_path, 1, first, {})

    writer.submit(slow_save)
    second = writer.snapshot({"model": {"w": weight}})
    assert second["model"]["w"].data_ptr() == first["model"]["w"].data_ptr()
    third = writer.snapshot({"model": {"w": torch.zeros(2)}})  # another shape: another buffer
    assert third["model"]["w"].shape == (2,)
    writer.wait()
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and torch.equal(found.load("model")["w"], torch.ones(3, 4))


def test_the_interpreter_does_not_exit_before_a_save_in_flight_has_ended(tmp_path):
    code = (
        "import sys, time, torch\nfrom pathlib import Path\nfrom training.saving import checkpoint, saver\n"
        "w = saver.BackgroundWriter()\n"
        "def save():\n    time.sleep(0.3)\n"
        "    checkpoint.write_checkpoint(Path(sys.argv[1]), 1, {'model': {'a': torch.ones(3)}}, {})\n"
        "w.submit(save)\nsys.exit(3)\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60)
    assert result.returncode == 3
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [1]
