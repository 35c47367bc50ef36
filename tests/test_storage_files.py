"""A file is whole or not there, and the data side of storage needs no torch."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from errors import SaveFailed
from storage import files

ROOT = Path(__file__).parent.parent


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_replacement_leaves_the_old_content(tmp_path, monkeypatch, call):
    path = tmp_path / "a.json"
    files.write_file_atomic(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(
            SaveFailed, match=r"could not write .*a\.json: No space left .*; what it held before is unt"
        ):
            files.write_file_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    path = tmp_path / "deep" / "a"
    files.write_file_atomic(path, "old")
    with pytest.raises(ZeroDivisionError), files.new_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_a_written_file_knows_its_size_and_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    array = np.arange(777)
    entry = files.write_file(tmp_path / "a", array)
    assert (tmp_path / "a").read_bytes() == array.tobytes()
    assert entry == {"bytes": 777 * 8, "sha256": files.file_digest(tmp_path / "a")}
    assert files.write_file(tmp_path / "b", np.empty(0)) == {"bytes": 0, "sha256": files.file_digest(tmp_path / "b")}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o400


def test_json_takes_paths_and_numbers_of_any_library():
    value = {"path": Path("x"), "one": np.float64(1.5), "two": torch.tensor(2), "text": "小猫", "no": float("inf")}
    expected = {"path": "x", "one": 1.5, "two": 2, "text": "小猫", "no": float("inf")}
    assert json.loads(files.json_bytes(value)) == expected
    with pytest.raises(TypeError, match="of type object"):
        files.json_bytes({"x": object()})


def test_a_link_is_the_same_file_and_a_copy_another(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_text("content")
    files.link_or_copy(source, tmp_path / "b")
    monkeypatch.setattr(os, "link", full)
    files.link_or_copy(source, tmp_path / "c")
    assert os.path.samefile(source, tmp_path / "b") and not os.path.samefile(source, tmp_path / "c")
    assert (tmp_path / "c").read_text() == "content"


def test_the_reason_of_a_disk_error_is_the_system_s(tmp_path):
    message = r"^why: No such file or directory \(.*absent\)$"
    with pytest.raises(SaveFailed, match=message), files.disk_errors(lambda why: SaveFailed(f"why: {why}")):
        (tmp_path / "absent").read_text()


def test_only_tensor_files_need_torch():
    modules = "storage.arrays, storage.folders, storage.locks, storage.manifests"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
