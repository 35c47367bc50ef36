"""A manifest tells damage to any file of its folder, and to itself."""

import json
import os

import pytest

from storage.files import write_file
from storage.manifests import check_folder, write_manifest


@pytest.fixture
def path(tmp_path):
    entries = {name: write_file(tmp_path / name, name.encode() * 99) for name in ("a.bin", "b.bin")}
    content = {"version": 1, "sizes": (1, 2), "facts": {7: "seven"}, "files": entries}
    written = write_manifest(tmp_path / "manifest.json", content)
    assert json.loads((tmp_path / "manifest.json").read_bytes()) == written
    return tmp_path / "manifest.json"


def check(path, **options) -> list[str]:
    return check_folder(path, {"version": 1}, **options)[1]


def flip(path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_whole_folder_has_no_problem_and_its_manifest(path):
    manifest, problems = check_folder(path, {"version": 1})
    assert problems == [] and manifest["sizes"] == [1, 2] and manifest["facts"] == {"7": "seven"}


def test_a_flipped_bit_anywhere_in_a_manifest_is_told(path):
    original = path.read_bytes()
    for position in range(len(original) - 1):  # its last byte ends the line
        flip(path, position)
        assert check(path), f"byte {position}"
        path.write_bytes(original)


def test_a_changed_size_is_told_and_content_when_asked(path):
    flip(path.with_name("a.bin"), 3)
    assert check(path, rehash=False) == []
    assert check(path) == [f"{path.with_name('a.bin')} is damaged: its SHA-256 differs from that in manifest.json"]
    os.truncate(path.with_name("a.bin"), 7)
    path.with_name("b.bin").unlink()
    a, b = check(path, rehash=False)
    assert a == f"{path.with_name('a.bin')} has 7 bytes instead of 495"
    assert b == f"{path.with_name('b.bin')} cannot be read: No such file or directory"


def test_entries_that_are_not_as_expected_are_named(path):
    assert check_folder(path, {"version": 2}) == ({}, [f"{path.parent} holds version 1, not 2"])
    assert "KeyError: 'format_version'" in check_folder(path, {"format_version": 1})[1][0]


@pytest.mark.parametrize("content", ["", "[]", "{", "3", '{"version": 1}', '{"version": 1, "files": {"a": 3}}'])
@pytest.mark.parametrize("signed", [True, False])
def test_what_is_no_manifest_is_told(path, content, signed):
    path.with_name("a").touch()
    path.write_text(content)
    assert "manifest.json cannot be read" in check(path, signed=signed)[0]
    path.unlink()
    assert check(path, signed=signed) == [f"{path.parent} has no manifest.json: it is incomplete"]


def test_a_manifest_without_its_own_digest_is_read_if_asked(path):
    """Token caches of the first format have none."""
    content = json.loads(path.read_bytes())
    del content["manifest_sha256"]
    path.write_text(json.dumps(content))
    assert check(path, signed=False) == [] and "manifest_sha256" in check(path)[0]
    content["manifest_sha256"] = "0" * 64
    path.write_text(json.dumps(content))
    assert "does not match its own digest" in check(path, signed=False)[0]
