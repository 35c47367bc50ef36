"""Rows of a token cache as training batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.packing import RowOrder, RowPlan, plan_rows
from dataset.token_cache import METADATA, TokenCache, cache_errors
from errors import DataError
from storage.arrays import read_array, write_arrays
from storage.folders import new_folder
from storage.locks import locked
from storage.manifests import check_folder, write_manifest

IGNORED = -100  # target of a position that has nothing to predict
MISSING_ROW = -1
PLAN_VERSION = 1
PLAN_DTYPES = {
    "piece_start": np.int64,
    "piece_length": np.int32,
    "row_offsets": np.int64,
    "row_targets": np.int32,
}


@dataclass
class Batch:
    """The rows of one micro-batch: int64 [batch, seq] each, on one device.

    targets: the next token, -100 where there is none to predict. position_ids restart with every segment.
    segment_ids: number of the segment within its row, -1 for padding; attention never crosses from one to another.
    boundaries: int32 [segments + 1], where segments and runs of padding begin in the flattened batch, and its length;
    longest: positions of the longest of them. Kernels ask for these two, and the host knows them for nothing.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    boundaries: torch.Tensor
    longest: int

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; the host does not wait for copies from pinned memory."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> Batch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        ids, targets, positions, segments = map(change, self._tensors())
        return Batch(ids, targets, positions, segments, change(self.boundaries), self.longest)

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError on ids or positions that cannot be. On the host, before the batch goes to a device; takes a
        thousandth of a step."""
        shape = self.input_ids.shape
        for field, tensor in zip(fields(self), self._tensors(), strict=False):
            if tensor.ndim != 2 or tensor.shape != shape or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{field.name} is {found}, not int64 {list(shape)} on the host like the rest")
        if not self.input_ids.numel():
            return
        least, most = self.input_ids.aminmax()
        if least < 0 or most >= vocab_size:
            raise ValueError(f"input_ids span {least}..{most}, outside the vocabulary of {vocab_size} ids")
        if self.targets.max() >= vocab_size or bool(((self.targets < 0) & (self.targets != IGNORED)).any()):
            raise ValueError(f"targets hold ids outside the vocabulary of {vocab_size} that are not {IGNORED}")
        if self.position_ids.min() < 0 or self.position_ids.max() >= shape[1] or self.segment_ids.min() < -1:
            raise ValueError(f"position_ids must lie in 0..{shape[1] - 1}, segment_ids at or above -1")
        if bool(((self.segment_ids < 0) & (self.targets != IGNORED)).any()):
            raise ValueError("padding (segment_ids -1) holds targets")

    def inputs(self) -> dict[str, Any]:
        """What the model's forward takes, by its names."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "longest"}

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input_ids, self.targets, self.position_ids, self.segment_ids


class PretrainDataset(Dataset):
    """The rows of a token cache; len() of them. Picklable: a copy in another process maps the same files.

    Any DataLoader can take it: a row is a dict of int64 [seq] tensors, named as the model's forward names them. The
    trainer asks for whole batches, which is an order of magnitude faster.

    `documents`: indices of the documents to use (all if None). `row_targets` int32 [rows]: valid targets of each row.
    `row_bytes` int64 [rows]: UTF-8 bytes of the documents that begin in it. `ledger`: counts for people.
    """

    def __init__(self, cache: TokenCache, max_seq_len: int, packing: bool = True, documents: np.ndarray | None = None):
        self.cache, self.max_seq_len, self.packing = cache, max_seq_len, bool(packing)
        self.documents = None if documents is None else np.sort(np.asarray(documents, np.int64))
        self.plan = _load_or_plan(cache, max_seq_len, self.packing, self.documents)
        self.row_targets = self.plan.row_targets
        self.tokens = cache.tokens
        self.ledger = self._count()

    def __reduce__(self):
        return PretrainDataset, (self.cache, self.max_seq_len, self.packing, self.documents)

    def __len__(self) -> int:
        return self.plan.rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        batch = self.batch([range(len(self))[row]])
        return {field.name: tensor[0] for field, tensor in zip(fields(batch), batch._tensors(), strict=False)}

    def batch(self, rows: list[int]) -> Batch:
        """Rows by number, in this order; -1 stands for a missing row: padding without a target. O(tokens) work."""
        row = np.asarray(rows, np.int64)
        size, plan = self.max_seq_len, self.plan
        filled = np.flatnonzero(row != MISSING_ROW)
        first = plan.row_offsets[row[filled]]
        pieces = plan.row_offsets[row[filled] + 1] - first  # [filled rows]
        piece = _ranges(first, pieces)  # indices into the plan, row by row
        length = plan.piece_length[piece].astype(np.int64)  # targets of each piece
        where = np.repeat(filled * size, pieces) + _before_within(length, pieces)  # its place in the flat batch
        flat = np.repeat(where, length) + (position := _ranges(np.zeros_like(length), length))
        source = np.repeat(plan.piece_start[piece], length) + position
        arrays = _empty_batch(len(row), size, self.cache.pad_id)
        input_ids, targets, position_ids, segment_ids = (array.reshape(-1) for array in arrays)
        input_ids[flat] = self.tokens[source]
        targets[flat] = self.tokens[source + 1]
        position_ids[flat] = position
        segment_ids[flat] = np.repeat(_ranges(np.zeros_like(pieces), pieces), length)
        if not self.packing:  # MiniMind's row shows its last token too, with nothing to predict after it; always eos
            last = where + length
            targets[last - 1] = input_ids[last] = self.cache.eos_id
            position_ids[last], segment_ids[last] = length, 0
        boundaries = _boundaries(arrays[3])
        ids, next_ids, positions, segments, starts = map(torch.from_numpy, (*arrays, boundaries))
        return Batch(ids, next_ids, positions, segments, starts, longest=int(np.diff(boundaries).max()))

    @property
    def fingerprint(self) -> str:
        """Of the documents in use: their texts, tokenizer and reading options."""
        return self.cache.fingerprint + ("" if self.documents is None else f":{_digest(self.documents)}")

    @property
    def row_bytes(self) -> np.ndarray:
        """UTF-8 bytes of the documents whose first piece lies in each row, int64 [rows]; 0 for documents that are cut.

        Summed over all rows it is what bits per byte divide by, whether documents are split between rows or not.
        """
        offsets = self.cache.document_offsets
        document = np.searchsorted(offsets, self.plan.piece_start, side="right") - 1
        begins = offsets[document] == self.plan.piece_start
        if not self.packing:
            begins &= offsets[document + 1] - offsets[document] <= self.max_seq_len
        weights = np.where(begins, self.cache.document_bytes[document], 0)
        return np.add.reduceat(weights, self.plan.row_offsets[:-1]) if len(self) else np.zeros(0, np.int64)

    def _count(self) -> dict[str, Any]:
        lengths, ledger = np.diff(self.cache.document_offsets), self.cache.ledger
        if self.documents is not None:
            lengths = lengths[self.documents]
            ledger = ledger | self._counts_of_subset(lengths)
        rows, targets = len(self), int(self.row_targets.sum(dtype=np.int64))
        long = lengths - 1 > self.max_seq_len if self.packing else lengths > self.max_seq_len
        positions = rows * self.max_seq_len
        used = targets if self.packing else targets + rows
        return {
            **ledger,
            "documents": len(lengths),
            "rows": rows,
            "positions": positions,
            "targets": targets,
            "padding_share": 1 - used / positions if positions else 0.0,
            "documents_split": int(long.sum()) if self.packing else 0,
            "documents_cut": 0 if self.packing else int(long.sum()),
            "tokens_cut": 0 if self.packing else int((lengths[long] - self.max_seq_len).sum()),
        }

    def _counts_of_subset(self, lengths: np.ndarray) -> dict[str, Any]:
        """What the ledger says of texts, for the documents in use alone."""
        text_bytes, tokens = int(self.cache.document_bytes[self.documents].sum()), int(lengths.sum())
        text_tokens = tokens - 2 * len(lengths)  # without bos and eos
        return {
            "bytes": text_bytes,
            "tokens": tokens,
            "bytes_per_token": text_bytes / text_tokens if text_tokens else 0.0,
            "longest_document": int(lengths.max(initial=0)),
        }


def _empty_batch(rows: int, size: int, pad_id: int) -> tuple[np.ndarray, ...]:
    shape = (rows, size)
    fills = (pad_id, IGNORED, 0, -1)
    return tuple(np.full(shape, fill, np.int64) for fill in fills)


def _boundaries(segment_ids: np.ndarray) -> np.ndarray:
    """Starts of the runs of equal segment_ids [batch, seq] in the flattened batch, and its length; a row is a new
    start."""
    starts = np.ones(segment_ids.shape, bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return np.append(np.flatnonzero(starts), segment_ids.size).astype(np.int32)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[s0, s0 + 1, .. s0 + c0 - 1, s1, ...] without a loop."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def _before_within(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sum of the earlier lengths of the same group; `groups` are the group sizes."""
    before = np.cumsum(lengths) - lengths
    return before - np.repeat(before[np.cumsum(groups) - groups], groups)


# --- row plans ---


def _load_or_plan(cache: TokenCache, size: int, packing: bool, documents: np.ndarray | None) -> RowPlan:
    """The row plan kept beside the tokens, or made and kept now; on a read-only disk it is made each time."""
    subset = "all" if documents is None else _digest(documents)
    folder = cache.folder / "plans" / f"{'packed' if packing else 'single'}_{size}_{subset}"
    plan = _stored_plan(folder, cache)
    if plan is not None:
        return plan
    try:
        with cache_errors(folder), locked(folder.parent / f"{folder.name}.lock"):
            plan = _stored_plan(folder, cache)
            if plan is None:
                plan = _plan(cache, size, packing, documents)
                with new_folder(folder) as temporary:
                    files = write_arrays(temporary, {name: getattr(plan, name) for name in PLAN_DTYPES})
                    write_manifest(temporary / METADATA, {**_plan_facts(cache), "files": files})
            return plan
    except DataError:
        return plan or _plan(cache, size, packing, documents)


def _digest(documents: np.ndarray) -> str:
    return hashlib.sha256(documents.tobytes()).hexdigest()[:16]


def _stored_plan(folder: Path, cache: TokenCache) -> RowPlan | None:
    _, problems = check_folder(folder / METADATA, _plan_facts(cache), signed=False)
    if problems:
        return None
    return RowPlan(*(read_array(folder / f"{name}.bin", dtype) for name, dtype in PLAN_DTYPES.items()))


def _plan_facts(cache: TokenCache) -> dict[str, Any]:
    """What makes a stored plan one of this cache."""
    return {"version": PLAN_VERSION, "fingerprint": cache.fingerprint}


def _plan(cache: TokenCache, size: int, packing: bool, documents: np.ndarray | None) -> RowPlan:
    offsets = cache.document_offsets
    if documents is None:
        return plan_rows(np.diff(offsets), size, packing)
    starts = offsets[documents]
    return plan_rows(offsets[documents + 1] - starts, size, packing, starts)


def choose_documents(cache: TokenCache, max_rows: int, max_seq_len: int) -> np.ndarray:
    """Indices of whole documents, drawn at random, that fill at most `max_rows` packed rows (0: all documents). Always
    the same ones, whatever the seed of a run: runs can be compared.

    Documents longer than all those rows are passed over; if every document is, the shortest is chosen.
    """
    total, positions = cache.documents, max_rows * max_seq_len
    needed = np.diff(cache.document_offsets) - 1  # positions of each document
    if max_rows <= 0:
        return np.arange(total)
    drawn = RowOrder(total, seed=0, epoch=0)[:]
    drawn = drawn[needed[drawn] <= positions]
    low, high = 0, int(np.searchsorted(np.cumsum(needed[drawn]), positions, side="right"))
    while low < high:  # look for the most documents that pack into max_rows rows; `low` of them do
        middle = (low + high + 1) // 2
        if plan_rows(needed[drawn[:middle]] + 1, max_seq_len).rows <= max_rows:
            low = middle
        else:
            high = middle - 1
    return np.sort(drawn[:low]) if low else np.array([needed.argmin()])
