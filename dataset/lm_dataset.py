"""Rows of a token cache as training batches, and the order in which a rank meets them.

Nothing here asks whether it is distributed: rank and world size are two integers; one process is a world of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from dataset.packing import RowOrder, RowPlan, plan_rows
from dataset.token_cache import TokenCache
from errors import DataError
from storage.folders import disk_errors, locked, new_folder, read_array, read_metadata, write_arrays, write_metadata

IGNORED = -100  # target of a position that has nothing to predict
MISSING_ROW = -1
PLAN_VERSION = 1
PLAN_DTYPES = {  # file names, in the order of RowPlan's fields; on disk segments keep their older name
    "piece_start": np.int64,
    "piece_length": np.int32,
    "row_offsets": np.int64,
    "row_targets": np.int32,
}


@dataclass
class Batch:
    """int64 [batch, seq] each, on one device.

    targets: the next token, -100 where there is none to predict. position_ids restart with every piece of a document.
    segment_ids: number of the piece within its row, -1 for padding; attention never crosses from one to another.
    boundaries: where documents begin in the flattened batch, for kernels that ask for it; made on the host.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    boundaries: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: Any = None) -> Batch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        ids, targets, positions, documents = map(change, self._tensors())
        return Batch(ids, targets, positions, documents, None if self.boundaries is None else change(self.boundaries))

    def validate(self, vocab_size: int, max_seq_len: int) -> None:
        """Raise ValueError on a wrong shape, dtype or device; on CPU also on wrong values (CUDA would have to sync)."""
        shape, device = self.input_ids.shape, self.input_ids.device
        for field, tensor in zip(fields(self), self._tensors(), strict=False):
            if tensor.ndim != 2 or tensor.shape != shape or tensor.shape[1] != max_seq_len:
                raise ValueError(f"{field.name} is {list(tensor.shape)}, not [batch, {max_seq_len}] like the rest")
            if tensor.dtype != torch.int64 or tensor.device != device:
                raise ValueError(f"{field.name} is {tensor.dtype} on {tensor.device}, not int64 on {device}")
        if device.type == "cpu" and self.input_ids.numel():
            self._validate_values(vocab_size, max_seq_len)

    def _validate_values(self, vocab_size: int, max_seq_len: int) -> None:
        least, most = (value.item() for value in self.input_ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise ValueError(f"input_ids span {least}..{most}, outside the vocabulary of {vocab_size} ids")
        if self.targets.max() >= vocab_size or bool(((self.targets < 0) & (self.targets != IGNORED)).any()):
            raise ValueError(f"targets hold ids outside the vocabulary of {vocab_size} that are not {IGNORED}")
        if self.position_ids.min() < 0 or self.position_ids.max() >= max_seq_len or self.segment_ids.min() < -1:
            raise ValueError(f"position_ids must lie in 0..{max_seq_len - 1}, segment_ids at or above -1")
        if bool(((self.segment_ids < 0) & (self.targets != IGNORED)).any()):
            raise ValueError("padding (segment_ids -1) holds targets")

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input_ids, self.targets, self.position_ids, self.segment_ids


class PretrainDataset(Dataset):
    """The rows of a token cache; len() of them. Picklable: a copy in another process maps the same files.

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

    def __getitem__(self, row: int) -> Batch:
        """One row as a batch of one."""
        return self.__getitems__([range(len(self))[row]])

    def __getitems__(self, rows: list[int]) -> Batch:
        """Rows by number, in this order; -1 stands for a missing row: padding without a target. O(tokens) work."""
        row = np.asarray(rows, np.int64)
        size, plan = self.max_seq_len, self.plan
        filled = np.flatnonzero(row != MISSING_ROW)
        first = plan.row_offsets[row[filled]]
        pieces = plan.row_offsets[row[filled] + 1] - first  # [filled rows]
        piece = _ranges(first, pieces)  # indices into the plan, row by row
        length = plan.segment_length[piece].astype(np.int64)  # targets of each piece
        where = np.repeat(filled * size, pieces) + _before_within(length, pieces)  # its place in the flat batch
        flat = np.repeat(where, length) + (position := _ranges(np.zeros_like(length), length))
        source = np.repeat(plan.segment_start[piece], length) + position
        batch = _empty_batch(len(row), size, self.cache.pad_id)
        input_ids, targets, position_ids, segment_ids = (array.reshape(-1) for array in batch)
        input_ids[flat] = self.tokens[source]
        targets[flat] = self.tokens[source + 1]
        position_ids[flat] = position
        segment_ids[flat] = np.repeat(_ranges(np.zeros_like(pieces), pieces), length)
        if not self.packing:  # MiniMind's row shows its last token too, with nothing to predict after it; always eos
            last = where + length
            targets[last - 1] = input_ids[last] = self.cache.eos_id
            position_ids[last], segment_ids[last] = length, 0
        return Batch(*(torch.from_numpy(array) for array in batch))

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
        document = np.searchsorted(offsets, self.plan.segment_start, side="right") - 1
        begins = offsets[document] == self.plan.segment_start
        if not self.packing:
            begins &= offsets[document + 1] - offsets[document] <= self.max_seq_len
        weights = np.where(begins, self.cache.document_bytes[document], 0)
        return np.add.reduceat(weights, self.plan.row_offsets[:-1]) if len(self) else np.zeros(0, np.int64)

    def most_documents(self, rows: int) -> int:
        """No batch of so many rows holds more pieces of documents, each row's padding counted as one."""
        pieces = np.diff(self.plan.row_offsets)
        rows_counted = min(rows, len(pieces))
        fullest = np.partition(pieces, len(pieces) - rows_counted)[len(pieces) - rows_counted :]
        return int(fullest.sum()) + rows

    def _count(self) -> dict[str, Any]:
        lengths = np.diff(self.cache.document_offsets)
        lengths = lengths if self.documents is None else lengths[self.documents]
        rows, targets = len(self), int(self.row_targets.sum(dtype=np.int64))
        long = lengths - 1 > self.max_seq_len if self.packing else lengths > self.max_seq_len
        positions = rows * self.max_seq_len
        used = targets if self.packing else targets + rows
        return {
            **self.cache.ledger,
            "documents": len(lengths),
            "rows": rows,
            "positions": positions,
            "targets": targets,
            "padding_share": 1 - used / positions if positions else 0.0,
            "documents_split": int(long.sum()) if self.packing else 0,
            "documents_cut": 0 if self.packing else int(long.sum()),
            "tokens_cut": 0 if self.packing else int((lengths[long] - self.max_seq_len).sum()),
        }


def collate(batch: Batch) -> Batch:
    """For a DataLoader: __getitems__ has made the batch already."""
    return batch


def _empty_batch(rows: int, size: int, pad_id: int) -> tuple[np.ndarray, ...]:
    shape = (rows, size)
    fills = (pad_id, IGNORED, 0, -1)
    return tuple(np.full(shape, fill, np.int64) for fill in fills)


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
        with disk_errors(folder):
            folder.parent.mkdir(exist_ok=True)
        with locked(folder.parent / f"{folder.name}.lock"):
            plan = _stored_plan(folder, cache)
            if plan is None:
                plan = _plan(cache, size, packing, documents)
                with disk_errors(folder), new_folder(folder) as temporary:
                    files = write_arrays(temporary, dict(zip(PLAN_DTYPES, vars(plan).values(), strict=True)))
                    metadata = {"version": PLAN_VERSION, "fingerprint": cache.fingerprint, "files": files}
                    write_metadata(temporary, metadata)
            return plan
    except DataError:
        return plan or _plan(cache, size, packing, documents)


def _digest(documents: np.ndarray) -> str:
    return hashlib.sha256(documents.tobytes()).hexdigest()[:16]


def _stored_plan(folder: Path, cache: TokenCache) -> RowPlan | None:
    metadata, trouble = read_metadata(folder, PLAN_VERSION, verify=True)  # a plan is small and read whole anyway
    if trouble is not None or metadata.get("fingerprint") != cache.fingerprint:
        return None
    return RowPlan(*(read_array(folder / f"{name}.bin", dtype) for name, dtype in PLAN_DTYPES.items()))


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


# --- which rows, when ---


class SkipBatchSampler(Sampler[list[int]]):
    """Row ids of one rank's micro-batches, from any position of an epoch, without walking there.

    A step is the next `global_batch_size` rows of `order`, counted from `start` (rows of this epoch consumed already).
    Micro-batch m of a step, its rows m * batch_size onwards, goes to rank m mod world_size. Every rank runs the same
    number of micro-batches a step; what is missing is filled with -1, so each list has exactly batch_size entries.
    """

    def __init__(
        self, order: Any, global_batch_size: int, batch_size: int, rank: int = 0, world_size: int = 1, start: int = 0
    ):
        if min(global_batch_size, batch_size, world_size) < 1 or not 0 <= rank < world_size or start < 0:
            given = f"global_batch_size={global_batch_size}, batch_size={batch_size}, rank={rank}, start={start}"
            raise ValueError(f"{given}: sizes must be 1 or more, rank below world_size {world_size}, start 0 or more")
        self.order, self.global_batch_size, self.batch_size = order, global_batch_size, batch_size
        self.rank, self.world_size, self.start = rank, world_size, start

    def window(self, position: int) -> np.ndarray:
        """Row ids, over all ranks, of the step that begins at this position of the epoch."""
        return self.order[position : position + self.global_batch_size]

    def micro_batches(self, rows_in_window: int) -> int:
        """Micro-batches that each rank runs in a step of so many rows."""
        return -(-rows_in_window // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for position in range(self.start, len(self.order), self.global_batch_size):
            window = self.window(position)
            for turn in range(self.micro_batches(len(window))):
                begin = (turn * self.world_size + self.rank) * self.batch_size
                rows = window[begin : begin + self.batch_size].tolist()
                yield rows + [MISSING_ROW] * (self.batch_size - len(rows))

    def __len__(self) -> int:
        windows, rest = divmod(max(0, len(self.order) - self.start), self.global_batch_size)
        return windows * self.micro_batches(self.global_batch_size) + self.micro_batches(rest)
