"""The kinds of files that texts are read from, in one table, FORMATS: suffix -> format. A row adds a kind.

A format says how a file falls into records (its lines, its rows, or the file as a whole) and how a record becomes a
text. Reading is by bytes and b"\\n" alone, so U+2028, U+0085, form feeds and NULs inside a text survive.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20
JSON_NAMES = dict(
    zip(
        (type(None), bool, int, float, str, list, dict),
        ("null", "a boolean", "a number", "a number", "a string", "a list", "an object"),
        strict=True,
    )
)


class FileTrouble(Exception):
    """A file cannot be trusted as a whole."""


class WrongLine(Exception):
    """One record cannot be read; `reason` is counted, `detail` shown. `line`: which of the record's lines, from 0."""

    def __init__(self, reason: str, detail: str = "", line: int = 0):
        super().__init__(reason)
        self.reason, self.detail, self.line = reason, detail, line


class TextFormat:
    """How one file is read, from its start to its end."""

    content = "text"  # what such a file holds, in words
    magic = b""  # what every such file begins with
    has_keys = True  # its texts are chosen by --text_key

    def __init__(self, text_key: str):
        self.text_key = text_key
        self.duplicate_keys = 0  # records that name a key twice

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[Any]:
        """The records of `file`, which lies at `path`, in order. Raises FileTrouble."""
        raise NotImplementedError

    def text_of(self, record: Any) -> str | None:
        """The text of a record; None for a blank line. Raises WrongLine."""
        raise NotImplementedError

    @classmethod
    def trouble(cls, path: Path) -> str | None:
        """What the start of a file says against reading it like this, in words, or None."""
        return None


class JsonLines(TextFormat):
    """A JSON object a line. The byte order mark of the first line is dropped."""

    def __init__(self, text_key: str):
        super().__init__(text_key)
        self.at_start, self.is_utf16, self.repeated = True, False, False
        # strict=False: raw control characters in a string are unambiguous. parse_int: int() refuses endless numbers.
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=float, strict=False)

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[tuple[bytes, bool]]:
        return split_lines(file)

    def text_of(self, record: tuple[bytes, bool]) -> str | None:
        line, ended = record
        if self.at_start:
            self.at_start, self.is_utf16 = False, is_utf16(line)
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip(b" \t\r"):
            return None
        if self.is_utf16:
            raise utf16_text()
        value = self._parse(line, ended)
        if not isinstance(value, dict):
            raise WrongLine("not an object", f"the line is {JSON_NAMES[type(value)]}")
        if self.text_key not in value:
            keys = ", ".join(map(repr, list(value)[:5])) or "no key at all"
            raise WrongLine(f"key {self.text_key!r} missing", f"it has {keys[:120]}; choose with --text_key")
        text = checked_text(value[self.text_key], self.text_key)
        self.duplicate_keys += self.repeated
        return text

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        self.repeated = len(value) != len(pairs)  # the outermost object is closed last, so its answer stays
        return value

    def _parse(self, line: bytes, ended: bool) -> Any:
        try:
            return self.decoder.decode(decode(line))
        except json.JSONDecodeError as error:
            if line.count(b"\0") > len(line) // 4:
                raise utf16_text() from None
            if error.msg == "Extra data":
                where = f"the second at character {error.pos + 1}"
                raise WrongLine("more than one JSON value on a line", where) from None
            if line.startswith(codecs.BOM_UTF8):
                raise WrongLine("byte order mark inside the file", "were two files joined here?") from None
            at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
            if at_end and not ended:
                raise WrongLine("cut short", "the last line ends in the middle of its JSON") from None
            raise WrongLine("invalid JSON", f"{error.msg} at character {error.pos + 1}") from None
        except RecursionError:
            raise WrongLine("invalid JSON", "nested too deeply") from None


class GzipJsonLines(JsonLines):
    content, magic = "gzip data", b"\x1f\x8b"

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[tuple[bytes, bool]]:
        try:
            with gzip.GzipFile(fileobj=io.BufferedReader(file, BLOCK_BYTES)) as unpacked:
                yield from split_lines(unpacked)
        except EOFError:
            remedy = "it was cut off, fetch it again"
            raise FileTrouble(f"the gzip data ends too early, at byte {file.tell()} of the file; {remedy}") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            near = f"the gzip data is damaged before byte {file.tell()} of the file"
            raise FileTrouble(f"{near} ({error}); fetch it again") from None


class PlainText(TextFormat):
    """The whole file is one text."""

    has_keys = False

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[bytes]:
        yield file.readall()

    def text_of(self, record: bytes) -> str:
        if is_utf16(record):
            raise utf16_text()
        return decode(record.removeprefix(codecs.BOM_UTF8))


class Parquet(TextFormat):
    """A column of texts."""

    content, magic = "a parquet file", b"PAR1"

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[Any]:
        parquet = _import_parquet()
        try:
            table = parquet.ParquetFile(path)
            if self.text_key not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names[:20])
                raise FileTrouble(f"has no column {self.text_key!r}; name one of these with --text_key: {names}")
            for batch in table.iter_batches(batch_size=1024, columns=[self.text_key]):
                yield from batch.column(0).to_pylist()
        except (FileTrouble, OSError):
            raise
        except Exception as error:  # pyarrow raises many kinds for a damaged file
            raise FileTrouble(f"cannot be read as parquet ({error}); fetch it again") from None

    def text_of(self, record: Any) -> str:
        return checked_text(record, self.text_key)


FORMATS: dict[str, type[TextFormat]] = {
    ".jsonl": JsonLines,
    ".jsonl.gz": GzipJsonLines,
    ".txt": PlainText,
    ".parquet": Parquet,
}


def known_suffixes() -> str:
    return ", ".join(FORMATS)


# --- what formats share ---


def split_lines(file: io.RawIOBase | io.BufferedIOBase) -> Iterator[tuple[bytes, bool]]:
    """(line without its b"\\n", whether it had one). A line may span many blocks; its parts are joined once."""
    parts: list[bytes] = []
    while block := file.read(BLOCK_BYTES):
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


def utf16_text() -> WrongLine:
    return WrongLine("UTF-16 text", "convert the file to UTF-8")


def is_utf16(data: bytes) -> bool:
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if data.count(b"\0") > len(data) // 4:
            raise utf16_text() from None
        where = f"byte {error.start + 1} is 0x{data[error.start]:02x}"
        raise WrongLine("invalid UTF-8", where, data[: error.start].count(b"\n")) from None


def checked_text(value: Any, key: str) -> str:
    if isinstance(value, str):
        return value
    raise WrongLine(f"{key!r} is {JSON_NAMES.get(type(value), type(value).__name__)}, not a string")


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        remedy = "`pip install pyarrow`, or write the texts as .jsonl"
        raise FileTrouble(f"parquet needs pyarrow, which is not installed; {remedy}") from None
    return parquet
