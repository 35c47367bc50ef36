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

from dataset.cache_builder import build_cache
from dataset.cache_request import METADATA, VERSION, CacheRequest, cache_errors
from dataset.source_files import find_files
from dataset.text_reader import bad_line_problems
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from storage.arrays import read_array
from storage.files import file_digest
from storage.locks import locked, silent
from storage.manifests import check_folder


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
    if cache.ledger["rejected"] and bad_lines == "stop":  # it was built with "skip"
        raise DataError(bad_line_problems(cache.ledger["rejected"], cache.metadata["rejected_examples"]))
    return cache


def count_shared(cache: TokenCache, other: TokenCache) -> int:
    """Documents of `other` whose text also occurs in `cache` (by 64-bit hash)."""
    return int(np.isin(other.document_hashes, cache.document_hashes).sum())


def _open(folder: Path, request: CacheRequest, verify: bool) -> tuple[TokenCache | None, str | None]:
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


def _changed_source(metadata: dict, request: CacheRequest) -> str | None:
    stored = [source["sha256"] for source in metadata["sources"]]
    for file, sha256 in zip(request.files, stored, strict=True):
        if file_digest(file.path) != sha256:
            return f"the content of {file.path} has changed though its size and time have not"
    return None
