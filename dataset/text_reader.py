"""Files of text in, documents out: every line is either a document, counted as empty, or named as wrong.

Nothing is repaired silently: what cannot be read as it stands is collected, with file and line, and reported together
at the end.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset.source_files import SourceFile
from dataset.text_formats import BLOCK_BYTES, FORMATS, FileTrouble, TextFormat, WrongLine
from errors import DataError

EXAMPLES_KEPT = 10


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

    def reject(self, path: Path, line: int, wrong: WrongLine) -> None:
        self.rejected[wrong.reason] += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(f"{path}:{line}: {wrong.reason}{': ' + wrong.detail if wrong.detail else ''}")


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
            except FileTrouble as trouble:
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
        form = FORMATS[source.suffix](self.text_key)
        with open(source.path, "rb", buffering=0) as raw:
            before = os.fstat(raw.fileno())
            file = _HashingFile(raw, self.ledger)
            yield from self._documents(source.path, form, file)
            file.drain()
            after = os.stat(source.path)
        self.ledger.duplicate_keys += form.duplicate_keys
        found = (source.size, source.mtime_ns)
        if any((info.st_size, info.st_mtime_ns) != found for info in (before, after)) or file.count != source.size:
            raise FileTrouble("changed while it was being read; start again when nothing writes to it any more")
        self.digests[str(source.path)] = file.sha256.hexdigest()

    def _documents(self, path: Path, form: TextFormat, file: _HashingFile) -> Iterator[Document]:
        number = 0
        for record in form.records(file, path):  # enumerate() would hold on to the last one
            number += 1
            self.ledger.lines += 1
            try:
                text = form.text_of(record)
                del record  # a 50 MB line need not be held thrice
                document = None if text is None else _document(text)
                del text
            except WrongLine as wrong:
                if wrong.of_file and self.bad_lines == "stop":
                    raise FileTrouble(f"line {number} is {wrong.of_file}") from None
                self.ledger.reject(path, number + wrong.line, wrong)
                continue
            if document is None:
                self.ledger.blank_lines += 1
            elif not document.text or document.text.isspace():
                self.ledger.empty_texts += 1
            else:
                self.ledger.text_bytes += len(document.utf8)
                yield document


def bad_line_problems(rejected: dict[str, int], examples: list[str]) -> list[str]:
    """The report on wrong lines: the first ten by name, then the counts by reason and what can be done about them."""
    counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items(), key=lambda item: -item[1]))
    total = sum(rejected.values())
    remedy = "correct them, or leave them out with --bad_lines skip"
    shown = f"; the first {len(examples)} are named above" if total > len(examples) else ""
    return [*examples, f"{total:,} wrong line{'s' if total != 1 else ''} ({counts}){shown}: {remedy}"]


def _document(text: str) -> Document:
    try:
        return Document(text, text.encode("utf-8"))
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise WrongLine("lone surrogate", f"\\u{code:04x} at character {error.start + 1} of the text") from None


class _HashingFile(io.RawIOBase):
    """A raw file that takes the SHA-256 of what is read through it, so that nothing is read twice."""

    def __init__(self, raw: io.FileIO, ledger: ReadingLedger):
        self.raw, self.ledger, self.count, self.sha256 = raw, ledger, 0, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.count

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer) or 0
        self.sha256.update(memoryview(buffer)[:count])
        self.count += count
        self.ledger.source_bytes += count
        return count

    def drain(self) -> None:
        while self.read(BLOCK_BYTES):
            pass
