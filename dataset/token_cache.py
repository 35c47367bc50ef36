"""Text files to one memory-mapped folder of token ids, built once and found again.

The folder holds raw little arrays and a description:
    tokens.bin             uint16 (uint32 for vocabularies over 65,536): bos + ids + eos of each document, in file order
    document_offsets.bin   int64 [documents + 1]: where each document starts in tokens
    document_bytes.bin     int64 [documents]: UTF-8 bytes of its text
    document_hashes.bin    uint64 [documents]: BLAKE2b of its text, for duplicates and held-out documents
    metadata.json          written last: sizes and SHA-256 of the files, sources, tokenizer, ledger
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from dataset.cache_builder import build_cache, read_hashes
from dataset.cache_request import METADATA, VERSION, CacheRequest, cache_errors
from dataset.source_files import SAMPLED_WHOLE, SourceFile, find_files
from dataset.text_reader import bad_line_problems
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from storage.arrays import read_array
from storage.files import file_digest
from storage.locks import locked, silent
from storage.manifests import check_folder

HASHED_BYTES = 1 << 25  # files up to this are hashed at every start: 0.03 s each
PLACES, PLACE_TOKENS = 64, 1 << 14  # looked at in larger ones


class TokenCache:
    """A finished cache folder, opened for reading. Picklable; arrays are mapped from disk when first asked for."""

    def __init__(self, folder: Path, metadata: dict):
        self.folder, self.metadata = folder, metadata
        self.fingerprint: str = metadata["fingerprint"]
        tokenizer: dict[str, int] = metadata["tokenizer"]
        self.vocab_size, self.bos_id = tokenizer["vocab_size"], tokenizer["bos_id"]
        self.eos_id, self.pad_id = tokenizer["eos_id"], tokenizer["pad_id"]
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

    def damaged(self, what: str) -> DataError:
        """The error to raise when, in the middle of work, the files turn out to hold what cannot be."""
        remedy = "delete this folder or start with --verify_data 1: it is then built again from the texts"
        return DataError(f"token cache {self.folder}: {what}; its files were damaged on the disk, {remedy}")

    def find_damage(self) -> str | None:
        """What is wrong in the files, in words, as far as can be told in less than a second; None if nothing is seen.

        Files up to 32 MiB are hashed: every changed bit shows. Of larger ones, 64 places spread evenly from the first
        document to the last are looked at: offsets that grow, bos and eos around documents, ids inside the vocabulary.
        That finds zeros left by a crash, an interrupted copy, another file's content; not a few wrong ids between
        those places, nor ids exchanged for valid ones: `--verify_data 1` hashes everything.
        """
        for name, entry in self.metadata["files"].items():
            if entry["bytes"] <= HASHED_BYTES and file_digest(self.folder / name) != entry["sha256"]:
                return f"the content of {name} has changed"
        if not self.document_offsets[-1] == len(self.tokens) == self.ledger["tokens"]:
            return "its offsets and tokens disagree"
        for first in np.linspace(0, self.documents - 1, PLACES).astype(int).tolist():
            offsets = self.document_offsets[first : first + 3]  # two documents, a cheap read each
            starts, lasts = offsets[:-1], offsets[1:] - 1
            if starts[0] < 0 or lasts[-1] >= len(self.tokens) or (lasts <= starts).any():
                return f"document_offsets.bin is damaged near document {first + 1:,}"
            whole = (self.tokens[starts] == self.bos_id).all() and (self.tokens[lasts] == self.eos_id).all()
            if not whole or self.tokens[starts[0] : lasts[-1]][:PLACE_TOKENS].max() >= self.vocab_size:
                return f"tokens.bin is damaged near document {first + 1:,}"
        return None


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
    request = CacheRequest(find_files(data_path), tokenizer, text_key, bad_lines, val_fraction, part)
    cache_dir = Path(cache_dir).expanduser()
    folder = cache_dir / request.key
    cache, trouble = _open(folder, request, verify=False)
    if cache is None or verify:  # a good cache on a read-only disk needs no lock
        with cache_errors(cache_dir), locked(cache_dir / f"{request.key}.lock", say):
            cache, trouble = _open(folder, request, verify)  # another process may have built it meanwhile
            if cache is None:
                if folder.exists():
                    say(f"token cache {folder} is not used: {trouble}; building it again")
                build_cache(folder, request, say, progress)
                cache, trouble = _open(folder, request, verify=False)
                if cache is None:
                    raise DataError(f"token cache {folder}: {trouble} right after it was built; check the disk")
    doubtful = [] if verify else [file for file in _touched(cache.metadata, request) if file.size > SAMPLED_WHOLE]
    if doubtful:
        names = f"{doubtful[0].path}{f' and {len(doubtful) - 1:,} more' if len(doubtful) > 1 else ''}"
        say(f"{names}: touched since the cache was built; samples are unchanged, --verify_data 1 compares everything")
    if cache.ledger["rejected"] and bad_lines == "stop":  # it was built with "skip"
        raise DataError(bad_line_problems(cache.ledger["rejected"], cache.metadata["rejected_examples"]))
    return cache


def count_shared(cache: TokenCache, other: TokenCache) -> int:
    """Documents of `other` whose text also occurs in `cache` (by 64-bit hash). Memory grows with `other` alone."""
    hashes, counts = np.unique(other.document_hashes, return_counts=True)
    shared = np.zeros(len(hashes), bool)
    for part in read_hashes(cache.folder / "document_hashes.bin"):
        place = np.searchsorted(hashes[:-1], part)  # the last one also stands for what lies beyond all
        shared[place[hashes[place] == part]] = True
    return int(counts[shared].sum())


def _open(folder: Path, request: CacheRequest, verify: bool) -> tuple[TokenCache | None, str | None]:
    if not folder.exists():
        return None, None
    metadata, problems = check_folder(folder / METADATA, {"version": VERSION}, rehash=verify, signed=False)
    trouble = "; ".join(problems) or None
    try:
        trouble = trouble or _changed_source(metadata, request, verify)
        if trouble is not None:
            return None, trouble
        cache = TokenCache(folder, metadata)
        trouble = cache.find_damage()
    except (KeyError, ValueError, IndexError, TypeError, OSError) as error:
        return None, f"it cannot be read ({error})"
    cache.ledger["given_twice"] = sum(file.times_given > 1 for file in request.files)
    return (cache, None) if trouble is None else (None, trouble)


def _changed_source(metadata: dict, request: CacheRequest, verify: bool) -> str | None:
    """A file that no longer holds what was tokenised though size and time say so: all of it is hashed to `verify`, else
    samples are, and only where the system says that something happened to the file."""
    touched = _touched(metadata, request)
    for file, stored in zip(request.files, metadata["sources"], strict=True):
        if verify:
            same = file_digest(file.path) == stored["sha256"]
        else:
            same = file not in touched or file.sample_digest() == stored["sample_sha256"]
        if not same:
            return f"the content of {file.path} has changed though its size and time have not"
    return None


def _touched(metadata: dict, request: CacheRequest) -> list[SourceFile]:
    """Files moved, copied, written or given other permissions since they were tokenised. Caches built by an earlier
    release do not know."""
    pairs = zip(request.files, metadata["sources"], strict=True)
    return [file for file, stored in pairs if stored.get("ctime_ns", file.ctime_ns) != file.ctime_ns]
