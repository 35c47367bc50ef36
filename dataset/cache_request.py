"""Which cache a run needs: a request of files, tokenizer and reading options, its key and its fingerprint."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.source_files import SourceFile
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from storage.files import disk_errors

VERSION = 1  # of the cache folder
METADATA = "metadata.json"


def cache_errors(where: Path) -> AbstractContextManager[None]:
    """Turn what a full, read-only or foreign disk raises into a DataError."""
    return disk_errors(lambda why: DataError(f"token cache {where}: {why}; free space or move it with --cache_dir"))


@dataclass(frozen=True)
class CacheRequest:
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
        return _sha256_json([files, self.options, self.tokenizer.pad_id, *self.tokenizer.markup])[:24]

    def fingerprint(self, digests: dict[str, str], has_markup: bool) -> str:
        """Of what was read, wherever it lay: contents in order, tokenizer and reading options. Earlier releases parsed
        markup, so texts that hold some are other data than they were then; all others are the same."""
        contents = [[file.suffix[1:], digests[str(file.path)]] for file in self.files]
        return _sha256_json([contents, self.options, *["markup is text"] * has_markup])

    def belongs(self, document_hash: int) -> bool:
        if not self.val_fraction:
            return True
        held_out = document_hash < int(self.val_fraction * 2.0**64)
        return held_out == (self.part == "val")


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogateescape")).hexdigest()
