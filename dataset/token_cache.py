"""Text files to one memory-mapped folder of token ids, built once and found again.

The folder holds raw little arrays and a description:
    tokens.bin             uint16 (uint32 for vocabularies over 65,536): bos + ids + eos of each document, in file order
    document_offsets.bin   int64 [documents + 1]: where each document starts in tokens
    document_bytes.bin     int64 [documents]: UTF-8 bytes of its text
    document_hashes.bin    uint64 [documents]: BLAKE2b of its text, for duplicates and held-out documents
    metadata.json          written last: sizes and SHA-256 of the files, sources, tokenizer, ledger
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dataset.text_reader import SourceFile, TextReader, bad_line_problems, find_files
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from storage.arrays import read_array
from storage.files import HashedFile, disk_errors, file_digest
from storage.folders import new_folder
from storage.locks import locked, silent
from storage.manifests import check_folder, write_manifest

METADATA = "metadata.json"
VERSION = 1
BATCH_BYTES = 1 << 20  # of text per call of the tokenizer: enough for many cores, little enough to hold three of them
BATCH_PIECES = 1 << 13
ENCODERS = 2  # calls in flight: while one call's last text is being encoded, the cores work on the next


class TokenCache:
    """A finished cache folder, opened for reading. Picklable; arrays are mapped from disk when first asked for."""

    def __init__(self, folder: Path, metadata: dict):
        self.folder, self.metadata = folder, metadata
        self.fingerprint: str = metadata["fingerprint"]
        self.eos_id: int = metadata["tokenizer"]["eos_id"]
        self.pad_id: int = metadata["tokenizer"]["pad_id"]
        self.ledger: dict[str, Any] = metadata["ledger"]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        return read_array(self.folder / "tokens.bin", self.metadata["dtype"])

    @functools.cached_property
    def document_offsets(self) -> np.ndarray:
        return read_array(self.folder / "document_offsets.bin", np.int64)

    @functools.cached_property
    def document_bytes(self) -> np.ndarray:
        return read_array(self.folder / "document_bytes.bin", np.int64)

    @functools.cached_property
    def document_hashes(self) -> np.ndarray:
        return read_array(self.folder / "document_hashes.bin", np.uint64)

    @property
    def documents(self) -> int:
        return self.ledger["documents"]

    def __reduce__(self):
        return TokenCache, (self.folder, self.metadata)


def build_or_open(
    data_path: str | os.PathLike | list,
    tokenizer: TextTokenizer,
    *,
    text_key: str = "text",
    cache_dir: str | Path,
    bad_lines: str = "stop",
    val_fraction: float = 0.0,
    part: str = "train",
    verify: bool = False,
    progress: bool = True,
) -> TokenCache:
    """The token cache of these files under this tokenizer, built if need be. Safe to call from many processes at once.

    `val_fraction` of the documents, chosen by a hash of their text, belong to part "val" and never to "train".
    `verify` rehashes sources and cache. `progress`: print notices and a bar (main process only). Raises DataError.
    """
    say = functools.partial(print, flush=True) if progress else silent
    if part not in ("train", "val") or not 0.0 <= val_fraction < 1.0 or (part == "val" and val_fraction == 0.0):
        raise DataError(
            f"val_fraction {val_fraction} for part {part!r}: must lie in [0, 1), and above 0 for part 'val'"
        )
    request = _Request(find_files(data_path), tokenizer, text_key, bad_lines, val_fraction, part)
    cache_dir = Path(cache_dir).expanduser()
    folder = cache_dir / request.key
    cache, trouble = _open(folder, request, verify=False)
    if cache is None or verify:  # a good cache on a read-only disk needs no lock
        with cache_errors(cache_dir), locked(cache_dir / f"{request.key}.lock", say):
            cache, trouble = _open(folder, request, verify)  # another process may have built it meanwhile
            if cache is None:
                if folder.exists():
                    say(f"token cache {folder} is not used: {trouble}; building it again")
                _build(folder, request, say, progress)
                cache, trouble = _open(folder, request, verify=False)
                if cache is None:
                    raise DataError(f"token cache {folder}: {trouble} right after it was built; check the disk")
    if cache.ledger["rejected"] and bad_lines == "stop":  # it was built with "skip"
        raise DataError(bad_line_problems(cache.ledger["rejected"], cache.metadata["rejected_examples"]))
    return cache


def count_shared(cache: TokenCache, other: TokenCache) -> int:
    """Documents of `other` whose text also occurs in `cache` (by 64-bit hash)."""
    return int(np.isin(other.document_hashes, cache.document_hashes).sum())


def cache_errors(where: Path) -> contextlib.AbstractContextManager[None]:
    """Turn what a full, read-only or foreign disk raises into a DataError."""
    return disk_errors(lambda why: DataError(f"token cache {where}: {why}; free space or move it with --cache_dir"))


# --- which cache ---


@dataclass(frozen=True)
class _Request:
    files: list[SourceFile]
    tokenizer: TextTokenizer
    text_key: str
    bad_lines: str
    val_fraction: float
    part: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @functools.cached_property
    def options(self) -> list:
        """Everything but the files that decides which tokens come out; bad_lines is checked when a cache is opened."""
        split = [self.val_fraction, self.part] if self.val_fraction else []
        return [VERSION, self.tokenizer.digest, self.tokenizer.parse_special, self.text_key, split]

    @functools.cached_property
    def key(self) -> str:
        files = [[os.path.abspath(file.path), file.size, file.mtime_ns] for file in self.files]
        return _sha256_json([files, self.options, self.tokenizer.pad_id])[:24]

    def fingerprint(self, digests: dict[str, str]) -> str:
        """Of what was read, wherever it lay: contents in order, tokenizer and reading options."""
        contents = [[file.kind, digests[str(file.path)]] for file in self.files]
        return _sha256_json([contents, self.options])

    def belongs(self, document_hash: int) -> bool:
        if not self.val_fraction:
            return True
        held_out = document_hash < int(self.val_fraction * 2.0**64)
        return held_out == (self.part == "val")


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogateescape")).hexdigest()


def _open(folder: Path, request: _Request, verify: bool) -> tuple[TokenCache | None, str | None]:
    if not folder.exists():
        return None, None
    metadata, problems = check_folder(folder / METADATA, {"version": VERSION}, rehash=verify, signed=False)
    trouble = "; ".join(problems) or None
    try:
        if trouble is None and verify:
            trouble = _changed_source(metadata, request)
        if trouble is not None:
            return None, trouble
        cache = TokenCache(folder, metadata)
        whole = cache.document_offsets[-1] == len(cache.tokens) == cache.ledger["tokens"]
    except (KeyError, ValueError, IndexError, TypeError, OSError) as error:
        return None, f"it cannot be read ({error})"
    return (cache, None) if whole else (None, "its offsets and tokens disagree")


def _changed_source(metadata: dict, request: _Request) -> str | None:
    stored = [source["sha256"] for source in metadata["sources"]]
    for file, sha256 in zip(request.files, stored, strict=True):
        if file_digest(file.path) != sha256:
            return f"the content of {file.path} has changed though its size and time have not"
    return None


# --- building ---


def _build(folder: Path, request: _Request, say: Callable[[str], None], progress: bool) -> None:
    reader = TextReader(request.files, request.text_key, request.bad_lines)
    with new_folder(folder) as temporary:
        writer = _Writer(temporary, request, say)
        started = time.perf_counter()
        batches = _encoded(_batches(reader, request), request.tokenizer)
        try:
            with contextlib.closing(batches), _progress_bar(request.size, progress) as bar:
                for batch in batches:
                    writer.write(batch, reader)
                    bar.update(reader.ledger.source_bytes - bar.n)
        finally:
            writer.close()
        reader.finish()
        seconds = time.perf_counter() - started
        ledger = _ledger(reader, writer, temporary)
        if not ledger["documents"]:
            raise DataError(_no_document(request, ledger))
        entries = {f"{name}.bin": file.entry for name, file in writer.files.items()}
        write_manifest(temporary / METADATA, _metadata(request, reader, ledger, entries))
    text_mb = ledger["bytes"] / 1e6
    speed = f"{seconds:.1f} s, {text_mb / max(seconds, 1e-9):.1f} MB/s"
    say(f"tokenised {ledger['documents']:,} documents, {text_mb:,.1f} MB, into {ledger['tokens']:,} tokens ({speed})")


def _progress_bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    hidden = not (progress and sys.stderr.isatty())
    return tqdm(total=total, desc="tokenising", unit="B", unit_scale=True, disable=hidden, mininterval=0.5, leave=False)


def _no_document(request: _Request, ledger: dict) -> str:
    names = ", ".join(str(file.path) for file in request.files[:3])
    counts = f"{ledger['lines']:,} lines, {ledger['blank_lines']:,} blank, {ledger['empty_texts']:,} empty texts"
    if request.val_fraction:
        counts += f", {ledger['other_part']:,} documents in the other part of val_fraction {request.val_fraction}"
    part = f" in part {request.part!r}" if request.val_fraction else ""
    return f"{names}: no document to use{part} ({counts}); give more text or another val_fraction"


@dataclass
class _Batch:
    """Texts for one call of the tokenizer. A long text comes as several pieces, perhaps over several batches."""

    pieces: list[str] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)  # piece starts a document
    closes: list[bool] = field(default_factory=list)  # piece ends one
    document_bytes: list[int] = field(default_factory=list)  # of documents closed here
    document_hashes: list[int] = field(default_factory=list)
    text_bytes: int = 0
    other_part: int = 0  # documents passed over because the other part holds them

    def full(self) -> bool:
        return self.text_bytes >= BATCH_BYTES or len(self.pieces) >= BATCH_PIECES


@dataclass
class _Encoded:
    batch: _Batch
    tokens: np.ndarray
    piece_lengths: list[int]


def _batches(reader: TextReader, request: _Request) -> Iterator[_Batch]:
    batch = _Batch()
    for document in reader:
        size = len(document.utf8)
        number = int.from_bytes(hashlib.blake2b(document.utf8, digest_size=8).digest(), "little")
        if not request.belongs(number):
            batch.other_part += 1
            continue
        text, document.utf8 = document.text, b""  # the reader still holds the document
        pieces = iter([text]) if size <= BATCH_BYTES else request.tokenizer.pieces(text)
        piece = next(pieces, None)
        opens = True
        while piece is not None:
            following = next(pieces, None)
            batch.pieces.append(piece)
            batch.opens.append(opens)
            batch.closes.append(following is None)
            batch.text_bytes += len(piece) if size == len(text) else size * len(piece) // len(text)
            piece, opens = following, False
            if piece is None:
                batch.document_bytes.append(size)
                batch.document_hashes.append(number)
            if batch.full():
                yield batch
                batch = _Batch()
    yield batch


def _encoded(batches: Iterator[_Batch], tokenizer: TextTokenizer) -> Generator[_Encoded, None, None]:
    """Encode batches in order, some ahead: the tokenizer uses all cores and releases the GIL to reading and writing."""
    pool = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode, batch, tokenizer))
            del batch
            if len(waiting) > ENCODERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(batch: _Batch, tokenizer: TextTokenizer) -> _Encoded:
    dtype = token_dtype(tokenizer.vocab_size)
    flat = array.array("H" if dtype == np.uint16 else "I")
    lengths = []
    for ids, opens, closes in zip(tokenizer.encode_batch(batch.pieces), batch.opens, batch.closes, strict=True):
        before = len(flat)
        if ids or not (opens and closes):  # a text that normalises to nothing is no document
            if opens:
                flat.append(tokenizer.bos_id)
            flat.fromlist(ids)
            if closes:
                flat.append(tokenizer.eos_id)
        lengths.append(len(flat) - before)
    return _Encoded(batch, np.frombuffer(flat, dtype), lengths)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class _Writer:
    """Appends encoded batches to the files of the cache; what it holds in memory does not grow with the corpus."""

    NAMES = ("tokens", "document_offsets", "document_bytes", "document_hashes")

    def __init__(self, folder: Path, request: _Request, say: Callable[[str], None]):
        self.request, self.say, self.folder = request, say, folder
        self.files = {name: HashedFile(folder / f"{name}.bin") for name in self.NAMES}
        self.files["document_offsets"].write(np.zeros(1, np.int64))
        self.tokens = self.documents = self.text_bytes = self.empty = self.other_part = 0
        self.open_length = 0  # tokens of the document whose last piece has not come yet
        self.longest = 0

    def write(self, encoded: _Encoded, reader: TextReader) -> None:
        batch = encoded.batch
        if not self.files["tokens"].size and len(encoded.tokens):
            self._announce(encoded, reader)
        self.files["tokens"].write(encoded.tokens)
        lengths = []
        for length, closes in zip(encoded.piece_lengths, batch.closes, strict=True):
            self.open_length += length
            if closes:
                lengths.append(self.open_length)
                self.open_length = 0
        self._write_documents(np.array(lengths, np.int64), batch)

    def _write_documents(self, lengths: np.ndarray, batch: _Batch) -> None:
        kept = lengths > 0
        sizes = np.array(batch.document_bytes, np.int64)[kept]
        hashes = np.array(batch.document_hashes, np.uint64)[kept]
        lengths = lengths[kept]
        self.files["document_offsets"].write(self.tokens + np.cumsum(lengths))
        self.files["document_bytes"].write(sizes)
        self.files["document_hashes"].write(hashes)
        self.tokens += int(lengths.sum())
        self.documents += len(lengths)
        self.text_bytes += int(sizes.sum())
        self.empty += int((~kept).sum())
        self.other_part += batch.other_part
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def _announce(self, encoded: _Encoded, reader: TextReader) -> None:
        """Say what is coming before it is written, judged by the first texts."""
        total = self.request.size
        per_text_byte = len(encoded.tokens) * encoded.tokens.itemsize / max(1, encoded.batch.text_bytes)
        unpacked = max(1.0, reader.ledger.text_bytes / max(1, reader.ledger.source_bytes))  # above 1 for gzip
        expected = total * per_text_byte * unpacked
        free = shutil.disk_usage(self.folder).free
        size = f"about {expected / 1e6:,.1f} MB, {free / 1e9:,.1f} GB are free"
        self.say(f"tokenising {total / 1e6:,.1f} MB; the cache in {self.folder.parent} will take {size}")

    def close(self) -> None:
        """Close every file, also where closing another fails: its last bytes may find the disk full."""
        with contextlib.ExitStack() as stack:
            for file in self.files.values():
                stack.callback(file.close)


def _ledger(reader: TextReader, writer: _Writer, folder: Path) -> dict[str, Any]:
    read = reader.ledger
    hashes = np.fromfile(folder / "document_hashes.bin", np.uint64)
    hashes.sort()
    duplicates = int((hashes[1:] == hashes[:-1]).sum())
    text_tokens = writer.tokens - 2 * writer.documents
    return {
        "files": read.files,
        "source_bytes": read.source_bytes,
        "lines": read.lines,
        "documents": writer.documents,
        "bytes": writer.text_bytes,
        "tokens": writer.tokens,  # bos and eos included
        "bytes_per_token": writer.text_bytes / text_tokens if text_tokens else 0.0,  # of the text alone
        "longest_document": writer.longest,  # tokens
        "exact_duplicates": duplicates,
        "blank_lines": read.blank_lines,
        "empty_texts": read.empty_texts + writer.empty,
        "duplicate_keys": read.duplicate_keys,
        "other_part": writer.other_part,
        "rejected": dict(read.rejected),
    }


def _metadata(request: _Request, reader: TextReader, ledger: dict, entries: dict[str, dict]) -> dict[str, Any]:
    tokenizer = request.tokenizer
    return {
        "version": VERSION,
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).name,
        "fingerprint": request.fingerprint(reader.digests),
        "tokenizer": {
            "digest": tokenizer.digest,
            "parse_special": tokenizer.parse_special,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "pad_id": tokenizer.pad_id,
        },
        "options": {"text_key": request.text_key, "val_fraction": request.val_fraction, "part": request.part},
        "sources": [
            {
                "path": str(file.path),
                "bytes": file.size,
                "mtime_ns": file.mtime_ns,
                "sha256": reader.digests[str(file.path)],
            }
            for file in request.files
        ],
        "ledger": ledger,
        "rejected_examples": reader.ledger.examples,
        "files": entries,
    }
