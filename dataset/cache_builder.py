"""Texts to the files of a token cache: read, encoded on all cores some batches ahead, written in order."""

from __future__ import annotations

import array
import contextlib
import hashlib
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

from dataset.cache_request import METADATA, VERSION, CacheRequest
from dataset.text_reader import TextReader
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from storage.files import HashedFile
from storage.folders import new_folder
from storage.manifests import write_manifest

BATCH_BYTES = 1 << 20  # of text per call of the tokenizer: enough for many cores, little enough to hold three of them
BATCH_CHUNKS = 1 << 13
SORTED_HASHES = 1 << 22  # at a time, when duplicates are counted: 32 MiB
ENCODERS = 2  # calls in flight: while one call's last text is being encoded, the cores work on the next


def build_cache(folder: Path, request: CacheRequest, say: Callable[[str], None], progress: bool) -> None:
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
        write_manifest(temporary / METADATA, _metadata(request, reader, writer, ledger))
    text_mb = ledger["bytes"] / 1e6
    speed = f"{seconds:.1f} s, {text_mb / max(seconds, 1e-9):.1f} MB/s"
    say(f"tokenised {ledger['documents']:,} documents, {text_mb:,.1f} MB, into {ledger['tokens']:,} tokens ({speed})")


def _progress_bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    hidden = not (progress and sys.stderr.isatty())
    return tqdm(total=total, desc="tokenising", unit="B", unit_scale=True, disable=hidden, mininterval=0.5, leave=False)


def _no_document(request: CacheRequest, ledger: dict) -> str:
    names = ", ".join(str(file.path) for file in request.files[:3])
    counts = f"{ledger['lines']:,} lines, {ledger['blank_lines']:,} blank, {ledger['empty_texts']:,} empty texts"
    if request.val_fraction:
        counts += f", {ledger['other_part']:,} documents in the other part of val_fraction {request.val_fraction}"
    part = f" in part {request.part!r}" if request.val_fraction else ""
    return f"{names}: no document to use{part} ({counts}); give more text or another val_fraction"


@dataclass
class _Batch:
    """Texts for one call of the tokenizer. A long text comes as several chunks, perhaps over several batches."""

    chunks: list[str] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)  # chunk starts a document
    closes: list[bool] = field(default_factory=list)  # chunk ends one
    document_bytes: list[int] = field(default_factory=list)  # of documents closed here
    document_hashes: list[int] = field(default_factory=list)
    text_bytes: int = 0
    other_part: int = 0  # documents passed over because the other part holds them
    has_markup: bool = False  # here or before: a text holds an added token's name

    def full(self) -> bool:
        return self.text_bytes >= BATCH_BYTES or len(self.chunks) >= BATCH_CHUNKS


@dataclass
class _Encoded:
    batch: _Batch
    tokens: np.ndarray
    chunk_lengths: list[int]


def _batches(reader: TextReader, request: CacheRequest) -> Iterator[_Batch]:
    batch, has_markup = _Batch(), False
    for document in reader:
        size = len(document.utf8)
        number = int.from_bytes(hashlib.blake2b(document.utf8, digest_size=8).digest(), "little")
        if not request.belongs(number):
            batch.other_part += 1
            continue
        text, document.utf8 = document.text, b""  # the reader still holds the document
        batch.has_markup = has_markup = has_markup or request.tokenizer.holds_markup(text)
        chunks = iter([text]) if size <= BATCH_BYTES else request.tokenizer.chunks(text)
        chunk = next(chunks, None)
        opens = True
        while chunk is not None:
            following = next(chunks, None)
            batch.chunks.append(chunk)
            batch.opens.append(opens)
            batch.closes.append(following is None)
            batch.text_bytes += len(chunk) if size == len(text) else size * len(chunk) // len(text)
            chunk, opens = following, False
            if chunk is None:
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
    for ids, opens, closes in zip(tokenizer.encode_batch(batch.chunks), batch.opens, batch.closes, strict=True):
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

    def __init__(self, folder: Path, request: CacheRequest, say: Callable[[str], None]):
        self.request, self.say, self.folder = request, say, folder
        self.files = {name: HashedFile(folder / f"{name}.bin") for name in self.NAMES}
        self.files["document_offsets"].write(np.zeros(1, np.int64))
        self.tokens = self.documents = self.text_bytes = self.empty = self.other_part = 0
        self.open_length = 0  # tokens of the document whose last chunk has not come yet
        self.longest = 0
        self.has_markup = False

    def write(self, encoded: _Encoded, reader: TextReader) -> None:
        batch = encoded.batch
        if not self.files["tokens"].size and len(encoded.tokens):
            self._announce(encoded, reader)
        self.files["tokens"].write(encoded.tokens)
        lengths = []
        for length, closes in zip(encoded.chunk_lengths, batch.closes, strict=True):
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
        self.has_markup |= batch.has_markup
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
        "exact_duplicates": count_duplicates(folder / "document_hashes.bin"),
        "blank_lines": read.blank_lines,
        "empty_texts": read.empty_texts + writer.empty,
        "duplicate_keys": read.duplicate_keys,
        "other_part": writer.other_part,
        "rejected": dict(read.rejected),
    }


def count_duplicates(path: Path) -> int:
    """Hashes in a file of uint64 that occur earlier in it too. Memory is bounded: of many, those whose remainder is
    0, 1, .. are sorted in turn, each time reading the file."""
    turns = np.uint64(path.stat().st_size // (8 * SORTED_HASHES) + 1)
    duplicates = 0
    for turn in range(int(turns)):
        parts = [part[part % turns == turn] for part in read_hashes(path)]
        hashes = np.concatenate([np.empty(0, np.uint64), *parts])
        del parts
        hashes.sort()
        duplicates += int(np.count_nonzero(hashes[1:] == hashes[:-1]))
    return duplicates


def read_hashes(path: Path) -> Iterator[np.ndarray]:
    """A file of uint64 in parts of 1 MiB: read, not mapped, which leaves no pages in the process."""
    with open(path, "rb") as file:
        while len(part := np.fromfile(file, np.uint64, 1 << 17)):
            yield part


def _metadata(request: CacheRequest, reader: TextReader, writer: _Writer, ledger: dict) -> dict[str, Any]:
    tokenizer = request.tokenizer
    return {
        "version": VERSION,
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).name,
        "fingerprint": request.fingerprint(reader.digests, writer.has_markup),
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
                "ctime_ns": file.ctime_ns,
                "sample_sha256": file.sample_digest(),
                "sha256": reader.digests[str(file.path)],
            }
            for file in request.files
        ],
        "ledger": ledger,
        "rejected_examples": reader.ledger.examples,
        "files": {f"{name}.bin": file.entry for name, file in writer.files.items()},
    }
