"""The kinds of files that texts are read from, in one table, FORMATS: suffix -> format. A row adds a kind.

A format says how a file falls into records (its lines, its rows, or the file as a whole) and how a record becomes a
text. Reading is by bytes and b"\\n" alone, so U+2028, U+0085, form feeds and NULs inside a text survive.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
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
    """One record cannot be read; `reason` is counted, `detail` shown. `line`: which of the record's lines, from 0.
    `of_file`: what the record says of its whole file, where it is no slip of one line."""

    def __init__(self, reason: str, detail: str = "", line: int = 0, of_file: str = ""):
        super().__init__(reason)
        self.reason, self.detail, self.line, self.of_file = reason, detail, line, of_file


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

    opened: Callable[..., Any] = staticmethod(open)

    def __init__(self, text_key: str):
        super().__init__(text_key)
        self.at_start, self.is_utf16, self.repeated = True, False, False
        # strict=False: raw control characters in a string are unambiguous. parse_int: int() refuses endless numbers.
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_int=float, strict=False)

    def records(self, file: io.RawIOBase, path: Path) -> Iterator[tuple[bytes, bool]]:
        return split_lines(file)

    @classmethod
    def trouble(cls, path: Path) -> str | None:
        """JSON in another shape than an object a line, told by how it begins. Damage is for the reading to find."""
        try:
            with cls.opened(path, "rb") as file:
                shape = _other_shape(file)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return None
        if shape == "array":
            modules, opened = ("gzip, json, sys", "gzip.open") if cls.magic else ("json, sys", "open")
            script = f"import {modules}; [print(json.dumps(o)) for o in json.load({opened}(sys.argv[1], 'rb'))]"
            command = f'python -c "{script}" {shlex.quote(str(path))} > lines.jsonl'
            return f"is one JSON array, not one object a line; write its objects on lines: {command}"
        if shape == "object":
            return "has JSON objects spread over several lines; write each on a line of its own (`jq -c .` does)"
        return None

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
            for key in CHAT_KEYS:
                if isinstance(value.get(key), list):
                    raise chat_data(key)
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
    opened: Callable[..., Any] = staticmethod(gzip.open)

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
            names = table.schema_arrow.names
            if self.text_key not in names:
                for key in CHAT_KEYS:
                    if key in names:
                        raise FileTrouble(f"is {chat_data(key).of_file}")
                shown = ", ".join(names[:20])
                raise FileTrouble(f"has no column {self.text_key!r}; name one of these with --text_key: {shown}")
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
    if key in CHAT_KEYS and isinstance(value, list):
        raise chat_data(key)
    raise WrongLine(f"{key!r} is {JSON_NAMES.get(type(value), type(value).__name__)}, not a string")


CHAT_KEYS = ("conversations", "conversation", "messages")


def chat_data(key: str) -> WrongLine:
    """A record of turns where a text is asked for."""
    join = f"'\\n'.join(t.get('content') or t.get('value') or '' for t in json.loads(line)[{key!r}])"
    script = f"import json, sys; [print(json.dumps({{'text': {join}}})) for line in sys.stdin]"
    return WrongLine(
        "chat data",
        what := f"{key!r} holds the turns of a conversation",
        of_file=f"chat data: {what}, and this program learns from plain texts; join the turns of each into one text "
        f"under the key 'text', such as by python -c \"{script}\" < chat.jsonl > texts.jsonl",
    )


def _other_shape(file: Any) -> str | None:
    """ "array" or "object" for JSON that fills a file as one array, or spreads an object over lines."""
    start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    if re.match(rb"\{[ \t\r]*\n\s*[\"}]", start):
        return "object"
    if not re.match(rb"\[\s*[\[{\"]", start):
        return None
    line, ended, rest = start.partition(b"\n")
    while not ended and (block := file.read(BLOCK_BYTES)):  # of a long line the end is enough
        more, ended, rest = block.partition(b"\n")
        line = (line + more)[-BLOCK_BYTES:]
    while not rest.strip() and (block := file.read(BLOCK_BYTES)):
        rest = block
    return None if line.rstrip().endswith(b"]") and rest.strip() else "array"  # a list on each line is another mistake


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        remedy = "`pip install pyarrow`, or write the texts as .jsonl"
        raise FileTrouble(f"parquet needs pyarrow, which is not installed; {remedy}") from None
    return parquet
