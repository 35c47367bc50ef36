"""A folder is whole or not there, whatever kills its writer and whenever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage import folders

ROOT = Path(__file__).parent.parent


def write(final: Path, text: str) -> None:
    with folders.new_folder(final) as folder:
        (folder / "text").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_takes_the_place_of_an_older_one(tmp_path):
    for text in ("first", "second"):
        write(tmp_path / "deep" / "a", text)
        assert (tmp_path / "deep" / "a" / "text").read_text() == text
        assert names(tmp_path / "deep") == ["a"]


@pytest.mark.parametrize("before", [False, True])
def test_a_block_that_raises_leaves_what_was_there(tmp_path, before):
    if before:
        write(tmp_path / "a", "first")
    with pytest.raises(KeyboardInterrupt), folders.new_folder(tmp_path / "a") as folder:
        (folder / "text").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["a"] * before


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "a", "first")
    rename, calls = os.rename, []

    def fail_once(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "a", "second")
    assert names(tmp_path) == ["a"] and (tmp_path / "a" / "text").read_text() == "first"


KILLED = """
import os, sys
from pathlib import Path
from storage import folders
final, number = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
    def counted(*arguments, call=getattr(os, name), **options):
        global calls
        calls += 1
        if calls == number:
            os._exit(9)
        return call(*arguments, **options)
    setattr(os, name, counted)
with folders.new_folder(final) as folder:
    (folder / "text").write_text("new")
"""


def test_killed_at_any_call_the_old_or_the_new_folder_is_there(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    status, number, seen = 9, 0, []
    while status == 9:
        number += 1
        write(tmp_path / "a", "old")
        status = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a", str(number)], env=environment).returncode
        for _ in range(2):  # before and after the leftovers are cleaned
            assert list(folders.find_folders(tmp_path)).count("a") == 1
            seen.append((folders.find_folders(tmp_path)["a"] / "text").read_text())
            folders.clean_leftovers(tmp_path)
        assert names(tmp_path) == ["a"]
    assert status == 0 and number > 5
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old", "new"}


def leave(folder: Path, *leftovers: str) -> None:
    for name in leftovers:
        (folder / name).mkdir(parents=True)


def test_what_was_caught_while_being_replaced_counts(tmp_path):
    leave(tmp_path, ".old-a-1", "a", ".old-b-1", ".tmp-c-1", ".del-d-1")
    found = folders.find_folders(tmp_path)
    assert found["a"] == tmp_path / "a" and found["b"] == tmp_path / ".old-b-1"
    assert not {"c", "d"} & found.keys()
    assert folders.usual_path(found["b"]) == tmp_path / "b" and folders.usual_path(found["a"]) == found["a"]
    folders.clean_leftovers(tmp_path)
    assert names(tmp_path) == ["a", "b"]


def test_cleaning_for_one_name_spares_the_others(tmp_path):
    leave(tmp_path, ".tmp-a-1", ".del-a-2", ".tmp-aa-1", ".old-b-1", "notes", ".hidden")
    (tmp_path / ".a.tmp-3").touch()
    (tmp_path / ".b.tmp-3").touch()
    folders.clean_leftovers(tmp_path, "a")
    assert names(tmp_path) == [".b.tmp-3", ".hidden", ".old-b-1", ".tmp-aa-1", "notes"]
    folders.clean_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", "b", "notes"]
    folders.clean_leftovers(tmp_path / "absent")


def test_a_builder_clears_what_a_killed_one_left_of_its_name(tmp_path):
    leave(tmp_path, ".tmp-a-99999999/half", ".old-a-99999999")
    write(tmp_path / "a", "whole")
    assert names(tmp_path) == ["a"]


def test_a_removed_folder_never_has_its_name_half_empty(tmp_path, monkeypatch):
    write(tmp_path / "a", "first")
    monkeypatch.setattr(folders, "remove_quietly", lambda path: None)
    folders.remove_folder(tmp_path / "a")
    assert names(tmp_path) == [f".del-a-{os.getpid()}"]
    assert "a" not in folders.find_folders(tmp_path)
