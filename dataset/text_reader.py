"""Files of text in, documents out: every line is either a document, counted as empty, or named as wrong.

Reading is by bytes and b"\\n" alone, so U+2028, U+0085, form feeds and NULs inside a text survive. Nothing is repaired
silently: what cannot be read as it stands is collected, with file and line, and reported together at the end.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import DataError

BLOCK_BYTES = 1 << 20
EXAMPLES_KEPT = 10
SUFFIXES = {".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".txt": "txt", ".parquet": "parquet"}
SUFFIX_LIST = ", ".join(SUFFIXES)
JSON_NAMES = dict(
    zip(
        (type(None), bool, int, float, str, list, dict),
        ("null", "a boolean", "a number", "a number", "a string", "a list", "an object"),
        strict=True,
    )
)


@dataclass(frozen=True)
class SourceFile:
    """One file to read, with the size (bytes) and modification time (ns) it had when it was found."""

    path: Path
    kind: str  # a value of SUFFIXES
    size: int
    mtime_ns: int


@dataclass
class Document:
    """One text and its UTF-8 form, which is needed anyway (bytes, hash, proof that it holds no lone surrogate)."""

    text: str
    utf8: bytes


@dataclass
class ReadingLedger:
    """What became of every line; `rejected` counts wrong lines by reason, `examples` names the first ten of them."""

    files: int = 0
    source_bytes: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents handed out
    lines: int = 0
    blank_lines: int = 0
    empty_texts: int = 0
    duplicate_keys: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def reject(self, path: Path, line: int, reason: str, detail: str = "") -> None:
        self.rejected[reason] += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(f"{path}:{line}: {reason}{': ' + detail if detail else ''}")


# --- finding the files ---


def find_files(data_path: str | os.PathLike | list) -> list[SourceFile]:
    """Files behind a path or a list of paths, in order: files, folders (searched to the bottom) and globs.

    A file reached twice is read once. Raises DataError naming everything that is missing, unreadable or no text at all.
    """
    problems: list[str] = []
    found: dict[str, SourceFile] = {}
    for given in data_path if isinstance(data_path, list) else [data_path]:
        paths = _paths_of(os.fspath(given), problems)
        for path in paths:
            source = _inspect(path, problems)
            if source is not None:
                found.setdefault(os.path.realpath(path), source)
    if not found and not problems:
        problems.append(f"data path {data_path!r} is empty: name files, folders or globs of {SUFFIX_LIST}")
    if problems:
        raise DataError(problems)
    return list(found.values())


def _paths_of(path: str, problems: list[str]) -> list[Path]:
    """One part of --data_path as a sorted list of paths; a part that leads nowhere is a problem, not an empty list."""
    if os.path.isdir(path):
        names = sorted(p for p in Path(path).rglob("*") if not _hidden(p, Path(path)) and not p.is_dir() and _kind(p))
        if not names:
            problems.append(f"{path}: the folder holds no file ending in {SUFFIX_LIST}; name another folder")
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


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def _inspect(path: Path, problems: list[str]) -> SourceFile | None:
    """Look at a file before anything is read from it: opening a fifo, say, would wait for ever."""
    try:
        info = path.stat()
    except OSError as error:
        problems.append(f"{path}: cannot be looked at ({error.strerror}); check the link or the permissions")
        return None
    if not stat.S_ISREG(info.st_mode):
        problems.append(f"{path}: is a {_file_type(info.st_mode)}, not a file; write the text to a file first")
        return None
    kind = _kind(path)
    if kind is None:
        problems.append(
            f"{path}: unknown kind of file; name it *.jsonl if each line is a JSON object (known: {SUFFIX_LIST})"
        )
        return None
    if info.st_size == 0:
        problems.append(f"{path}: the file is empty (0 bytes); remove it from the data path or write it again")
        return None
    try:
        with open(path, "rb") as handle:
            head = handle.read(512)
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror}); check the permissions")
        return None
    trouble = _wrong_content(head, kind)
    if trouble:
        problems.append(f"{path}: {trouble}")
        return None
    return SourceFile(path, kind, info.st_size, info.st_mtime_ns)


def _file_type(mode: int) -> str:
    names = {stat.S_IFIFO: "named pipe (fifo)", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
    return names.get(stat.S_IFMT(mode), "device")


def _wrong_content(head: bytes, kind: str) -> str | None:
    """What a file's first bytes say against its name, in words, or None."""
    start = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the data; fetch the file itself (`git lfs pull`, or the site's download link)"
    if kind != "txt" and start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page (HTML), not data; download the file itself, not the page that shows it"
    gzipped = head.startswith(b"\x1f\x8b")
    if kind == "jsonl.gz" and not gzipped:
        return "is not gzip data in spite of its name; rename it to .jsonl or compress it"
    if kind in ("jsonl", "txt") and gzipped:
        return "is gzip data; rename it to .jsonl.gz"
    if kind == "parquet" and not head.startswith(b"PAR1"):
        return "is not a parquet file in spite of its name (no PAR1 at its start); fetch it again"
    return None


# --- reading them ---


class TextReader:
    """Iterate over the documents of `files`, once. Afterwards `ledger` and `digests` (path -> SHA-256) are complete.

    Wrong lines never stop the reading; `finish()` raises DataError for them unless `bad_lines` is "skip", and always
    for files that cannot be trusted as a whole (truncated gzip, changed while read).
    """

    def __init__(self, files: list[SourceFile], text_key: str = "text", bad_lines: str = "stop"):
        if bad_lines not in ("stop", "skip"):
            raise DataError(f"bad_lines {bad_lines!r}: is neither 'stop' nor 'skip'; choose one of the two")
        self.files, self.text_key, self.bad_lines = files, text_key, bad_lines
        self.ledger = ReadingLedger(files=len(files))
        self.digests: dict[str, str] = {}
        self.file_problems: list[str] = []

    def __iter__(self) -> Iterator[Document]:
        for source in self.files:
            try:
                yield from self._read(source)
            except _FileTrouble as trouble:
                self.file_problems.append(f"{source.path}: {trouble}")
            except OSError as error:
                self.file_problems.append(f"{source.path}: reading failed ({error}); check the disk and try again")

    def finish(self) -> None:
        """Raise DataError with all that was found wrong: files, then the first ten lines and the counts by reason."""
        problems = list(self.file_problems)
        if self.ledger.rejected and self.bad_lines == "stop":
            problems += bad_line_problems(dict(self.ledger.rejected), self.ledger.examples)
        if problems:
            raise DataError(problems)

    def _read(self, source: SourceFile) -> Iterator[Document]:
        with open(source.path, "rb", buffering=0) as raw:
            before = os.fstat(raw.fileno())
            hashing = _HashingFile(raw, self.ledger)
            read = {"jsonl": self._read_lines, "jsonl.gz": self._read_gzip, "txt": self._read_whole}
            yield from read.get(source.kind, self._read_parquet)(source, hashing)
            hashing.drain()
            after = os.stat(source.path)
        found = (source.size, source.mtime_ns)
        if any((info.st_size, info.st_mtime_ns) != found for info in (before, after)) or hashing.count != source.size:
            raise _FileTrouble("changed while it was being read; start again when nothing writes to it any more")
        self.digests[str(source.path)] = hashing.sha256.hexdigest()

    def _read_gzip(self, source: SourceFile, raw: _HashingFile) -> Iterator[Document]:
        try:
            with gzip.GzipFile(fileobj=io.BufferedReader(raw, BLOCK_BYTES)) as unpacked:
                yield from self._read_lines(source, unpacked)
        except EOFError:
            remedy = "it was cut off, fetch it again"
            raise _FileTrouble(f"the gzip data ends too early, at byte {raw.count} of the file; {remedy}") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            near = f"the gzip data is damaged before byte {raw.count} of the file"
            raise _FileTrouble(f"{near} ({error}); fetch it again") from None

    def _read_lines(self, source: SourceFile, handle: Any) -> Iterator[Document]:
        parser = _LineParser(self.text_key)
        utf16 = False
        number = 0
        for line, ended in _split_lines(handle):  # enumerate() would hold on to the last line
            number += 1
            self.ledger.lines += 1
            if number == 1:
                utf16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip(b" \t\r"):
                self.ledger.blank_lines += 1
                continue
            try:
                if utf16:
                    raise _WrongLine("UTF-16 text", "convert the file to UTF-8")
                text = parser.text_of(line, ended)
                document = _document(text)
            except _WrongLine as wrong:
                self.ledger.reject(source.path, number, wrong.reason, wrong.detail)
                continue
            self.ledger.duplicate_keys += parser.repeated
            del line, text  # a 50 MB line need not be held thrice
            yield from self._unless_empty(document)

    def _read_whole(self, source: SourceFile, handle: _HashingFile) -> Iterator[Document]:
        data = handle.readall()
        self.ledger.lines += 1
        try:
            if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise _WrongLine("UTF-16 text", "convert the file to UTF-8")
            utf8 = data.removeprefix(codecs.BOM_UTF8)
            document = Document(_decode(utf8), utf8)
        except _WrongLine as wrong:
            line = data[: wrong.byte].count(b"\n") + 1
            self.ledger.reject(source.path, line, wrong.reason, wrong.detail)
            return
        yield from self._unless_empty(document)

    def _read_parquet(self, source: SourceFile, handle: _HashingFile) -> Iterator[Document]:
        parquet = _import_parquet()
        try:
            table = parquet.ParquetFile(source.path)
            if self.text_key not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names[:20])
                raise _FileTrouble(f"has no column {self.text_key!r}; name one of these with --text_key: {names}")
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=[self.text_key]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    self.ledger.lines += 1
                    try:
                        document = _document(_checked_text(text, self.text_key))
                    except _WrongLine as wrong:
                        self.ledger.reject(source.path, number, wrong.reason, wrong.detail)
                        continue
                    yield from self._unless_empty(document)
        except (_FileTrouble, OSError):
            raise
        except Exception as error:  # pyarrow raises many kinds for a damaged file
            raise _FileTrouble(f"cannot be read as parquet ({error}); fetch it again") from None

    def _unless_empty(self, document: Document) -> Iterator[Document]:
        if document.text and not document.text.isspace():
            self.ledger.text_bytes += len(document.utf8)
            yield document
        else:
            self.ledger.empty_texts += 1


def bad_line_problems(rejected: dict[str, int], examples: list[str]) -> list[str]:
    """The report on wrong lines: the first ten by name, then the counts by reason and what can be done about them."""
    counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items(), key=lambda item: -item[1]))
    total = sum(rejected.values())
    remedy = "correct them, or leave them out with --bad_lines skip"
    shown = f"; the first {len(examples)} are named above" if total > len(examples) else ""
    return [*examples, f"{total:,} wrong line{'s' if total != 1 else ''} ({counts}){shown}: {remedy}"]


class _FileTrouble(Exception):
    """A file cannot be trusted as a whole."""


class _WrongLine(Exception):
    def __init__(self, reason: str, detail: str = "", byte: int = 0):
        super().__init__(reason)
        self.reason, self.detail, self.byte = reason, detail, byte


class _HashingFile(io.RawIOBase):
    """A raw file that takes the SHA-256 of what is read through it, so that nothing is read twice."""

    def __init__(self, raw: io.FileIO, ledger: ReadingLedger):
        self.raw, self.ledger, self.count, self.sha256 = raw, ledger, 0, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer) or 0
        self.sha256.update(memoryview(buffer)[:count])
        self.count += count
        self.ledger.source_bytes += count
        return count

    def drain(self) -> None:
        while self.read(BLOCK_BYTES):
            pass


def _split_lines(handle: Any) -> Iterator[tuple[bytes, bool]]:
    """(line without its b"\\n", whether it had one). A line may span many blocks; its parts are joined once."""
    parts: list[bytes] = []
    while block := handle.read(BLOCK_BYTES):
        *lines, rest = block.split(b"\n")
        for line in lines:
            parts.append(line)
            yield _joined(parts), True
        parts.append(rest)
    if any(parts):
        yield _joined(parts), False


def _joined(parts: list[bytes]) -> bytes:
    """The parts as one, and the list emptied: a generator that kept them would hold a 50 MB line twice."""
    whole = b"".join(parts)
    parts.clear()
    return whole


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if data.count(b"\0") > len(data) // 4:
            raise _WrongLine("UTF-16 text", "convert the file to UTF-8") from None
        raise _WrongLine("invalid UTF-8", f"byte {error.start + 1} is 0x{data[error.start]:02x}", error.start) from None


def _document(text: str) -> Document:
    try:
        return Document(text, text.encode("utf-8"))
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise _WrongLine("lone surrogate", f"\\u{code:04x} at character {error.start + 1} of the text") from None


def _checked_text(text: Any, key: str) -> str:
    if isinstance(text, str):
        return text
    raise _WrongLine(f"{key!r} is {JSON_NAMES.get(type(text), type(text).__name__)}, not a string")


class _LineParser:
    """JSON object in, its text out; `repeated`: the last object named a key twice (its last value counts)."""

    def __init__(self, text_key: str):
        self.text_key, self.repeated = text_key, False
        # strict=False: raw control characters in a string are unambiguous. parse_int: int() refuses endless numbers.
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=float, strict=False)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        self.repeated = len(value) != len(pairs)  # the outermost object is closed last, so its answer stays
        return value

    def text_of(self, line: bytes, ended: bool) -> str:
        value = self._parse(line, ended)
        if not isinstance(value, dict):
            raise _WrongLine("not an object", f"the line is {JSON_NAMES[type(value)]}")
        if self.text_key not in value:
            keys = ", ".join(map(repr, list(value)[:5])) or "no key at all"
            raise _WrongLine(f"key {self.text_key!r} missing", f"it has {keys[:120]}; choose with --text_key")
        return _checked_text(value[self.text_key], self.text_key)

    def _parse(self, line: bytes, ended: bool) -> Any:
        try:
            return self.decoder.decode(_decode(line))
        except json.JSONDecodeError as error:
            if line.count(b"\0") > len(line) // 4:
                raise _WrongLine("UTF-16 text", "convert the file to UTF-8") from None
            if error.msg == "Extra data":
                where = f"the second at character {error.pos + 1}"
                raise _WrongLine("more than one JSON value on a line", where) from None
            if line.startswith(codecs.BOM_UTF8):
                raise _WrongLine("byte order mark inside the file", "were two files joined here?") from None
            at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
            if at_end and not ended:
                raise _WrongLine("cut short", "the last line ends in the middle of its JSON") from None
            raise _WrongLine("invalid JSON", f"{error.msg} at character {error.pos + 1}") from None
        except RecursionError:
            raise _WrongLine("invalid JSON", "nested too deeply") from None


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        remedy = "`pip install pyarrow`, or write the texts as .jsonl"
        raise _FileTrouble(f"parquet needs pyarrow, which is not installed; {remedy}") from None
    return parquet
