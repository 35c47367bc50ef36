"""The files behind a data path: found, looked at from outside, and refused in words where they can hold no text."""

from __future__ import annotations

import codecs
import dataclasses
import glob
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dataset.text_formats import FORMATS, known_suffixes
from errors import DataError

SAMPLES, SAMPLE_BYTES = 16, 1 << 16
SAMPLED_WHOLE = SAMPLES * SAMPLE_BYTES  # files up to this are in their sample from end to end


@dataclass(frozen=True)
class SourceFile:
    """One file to read, with the size (bytes) and times (ns) it had when it was found."""

    path: Path
    suffix: str  # a key of FORMATS
    size: int
    mtime_ns: int
    ctime_ns: int  # moves with every change of the file, and no program can set it; Windows: when it was made
    times_given: int = 1  # how often the data path leads to it, under whatever names

    def sample_digest(self) -> str:
        """SHA-256 of 16 blocks of 64 KiB spread evenly from its first byte to its last: all of it, up to 1 MiB."""
        digest = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            for number in range(SAMPLES):
                file.seek(max(0, self.size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


def find_files(data_path: str | os.PathLike | list) -> list[SourceFile]:
    """Files behind a path or a list of paths, in order: files, folders (searched to the bottom) and globs.

    A file reached twice is read once. Raises DataError naming everything that is missing, unreadable or no text at all.
    """
    problems: list[str] = []
    found: dict[str, SourceFile] = {}
    for given in data_path if isinstance(data_path, list) else [data_path]:
        for path in _paths_of(os.fspath(given), problems):
            source = _inspect(path, problems)
            if source is not None:
                name = os.path.realpath(path)
                known = found.get(name, dataclasses.replace(source, times_given=0))
                found[name] = dataclasses.replace(known, times_given=known.times_given + 1)
    if not found and not problems:
        problems.append(f"data path {data_path!r} is empty: name files, folders or globs of {known_suffixes()}")
    if problems:
        raise DataError(problems)
    return list(found.values())


def _paths_of(path: str, problems: list[str]) -> list[Path]:
    """One part of --data_path as a sorted list of paths; a part that leads nowhere is a problem, not an empty list."""
    if os.path.isdir(path):
        names = sorted(p for p in Path(path).rglob("*") if not _hidden(p, Path(path)) and not p.is_dir() and _suffix(p))
        if not names:
            problems.append(f"{path}: the folder holds no file ending in {known_suffixes()}; name another folder")
        return names
    if os.path.lexists(path):
        return [Path(path)]
    if any(sign in path for sign in "*?["):
        names = sorted(p for p in map(Path, glob.glob(path, recursive=True)) if not p.is_dir())
        if not names:
            problems.append(f"{path}: no file matches this pattern; check it with `ls` (quote it in the shell)")
        return names
    problems.append(f"{path}: no such file or folder; check the spelling, relative paths start at {os.getcwd()}")
    return []


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), None)


def _inspect(path: Path, problems: list[str]) -> SourceFile | None:
    """Look at a file before anything is read from it: opening a fifo, say, would wait for ever."""
    try:
        info = path.stat()
    except OSError as error:
        problems.append(f"{path}: cannot be looked at ({error.strerror}); check the link or the permissions")
        return None
    suffix = _suffix(path)
    trouble = _wrong_kind(info, suffix)
    if suffix is not None and trouble is None:
        try:
            trouble = _wrong_content(path, suffix)
        except OSError as error:
            trouble = f"cannot be read ({error.strerror}); check the permissions"
    if suffix is None or trouble is not None:
        problems.append(f"{path}: {trouble}")
        return None
    return SourceFile(path, suffix, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _wrong_kind(info: os.stat_result, suffix: str | None) -> str | None:
    """What speaks against a file before it is opened, in words, or None."""
    if not stat.S_ISREG(info.st_mode):
        names = {stat.S_IFIFO: "named pipe (fifo)", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
        kind = names.get(stat.S_IFMT(info.st_mode), "device")
        return f"is a {kind}, not a file; write the text to a file first"
    if suffix is None:
        return f"unknown kind of file; name it *.jsonl if each line is a JSON object (known: {known_suffixes()})"
    if info.st_size == 0:
        return "the file is empty (0 bytes); remove it from the data path or write it again"
    return None


def _wrong_content(path: Path, suffix: str) -> str | None:
    """What a file's first bytes say against its name, in words, or None."""
    with open(path, "rb") as handle:
        head = handle.read(512)
    start = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the data; fetch the file itself (`git lfs pull`, or the site's download link)"
    named = FORMATS[suffix]
    if named.has_keys and start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page (HTML), not data; download the file itself, not the page that shows it"
    if not head.startswith(named.magic):
        return f"is not {named.content} in spite of its name; give it its right name or fetch it again"
    for other, form in FORMATS.items():
        if form.magic and not named.magic and head.startswith(form.magic):
            return f"is {form.content}; rename it to {other}"
    return named.trouble(path)
