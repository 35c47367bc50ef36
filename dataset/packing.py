"""Documents to rows, and rows to an order: both pure functions of a few integers.

A document of L tokens t takes L - 1 positions (inputs t[:-1], targets t[1:]). What of it lies in one row is a segment;
a document longer than a row is split into several. Each further segment begins with the last token of the one before,
so every target occurs exactly once. Segments are packed best-fit decreasing (Johnson, 1974): the longest first, each
into the fullest row that still has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowPlan:
    """Which segments of which documents lie in which row. Row r holds row_offsets[r] .. row_offsets[r + 1] - 1.

    segment_start int64 [segments]: first input token of the segment, an index into the cache's tokens
    segment_length int32 [segments]: its positions; the targets are the tokens one further on
    row_offsets int64 [rows + 1], row_targets int32 [rows]: targets to predict in each row
    """

    segment_start: np.ndarray
    segment_length: np.ndarray
    row_offsets: np.ndarray
    row_targets: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.row_targets)


def plan_rows(
    document_lengths: np.ndarray, max_seq_len: int, packing: bool = True, document_starts: np.ndarray | None = None
) -> RowPlan:
    """Rows for documents of these lengths (tokens, bos and eos included), in file order.

    Rows are numbered by the first document they hold, segments within a row stand in document order. `document_starts`:
    where each document begins in the cache's tokens; one after the other if absent. Time is linear in documents, plus
    a part that depends on max_seq_len alone. packing=False: one document a row, cut to max_seq_len (MiniMind's rows).
    """
    lengths = np.asarray(document_lengths, np.int64)
    least = 2 if packing else 3  # without packing a row holds bos, a token and eos at least
    if max_seq_len < least:
        raise ValueError(f"max_seq_len {max_seq_len}: a row needs at least {least} positions; choose a larger one")
    if lengths.size and lengths.min() < 2:
        raise ValueError("a document without a target: every document holds at least two tokens")
    starts = np.cumsum(lengths) - lengths if document_starts is None else np.asarray(document_starts, np.int64)
    if not packing:
        return _one_document_a_row(lengths, starts, max_seq_len)
    segment_start, segment_length = _split(lengths, starts, max_seq_len)
    row = _number_by_first_segment(_best_fit(segment_length, max_seq_len))
    order = np.argsort(row, kind="stable")  # segments of a row together, in document order
    rows = int(row.max()) + 1 if row.size else 0
    row_offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=row_offsets[1:])
    row_targets = np.bincount(row, weights=segment_length, minlength=rows).astype(np.int32)
    return RowPlan(segment_start[order], segment_length[order], row_offsets, row_targets)


def _one_document_a_row(lengths: np.ndarray, starts: np.ndarray, max_seq_len: int) -> RowPlan:
    targets = (np.minimum(lengths, max_seq_len) - 1).astype(np.int32)
    return RowPlan(starts, targets, np.arange(len(lengths) + 1, dtype=np.int64), targets)


def _split(lengths: np.ndarray, starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and positions of every segment, in document order; all but the last segment of a document fill a row."""
    positions = lengths - 1
    segments = (positions + size - 1) // size
    first = np.cumsum(segments) - segments  # index of each document's first segment
    within = np.arange(int(segments.sum())) - np.repeat(first, segments)
    segment_start = np.repeat(starts, segments) + within * size
    segment_length = np.minimum(np.repeat(positions, segments) - within * size, size).astype(np.int32)
    return segment_start, segment_length


def _best_fit(segment_length: np.ndarray, size: int) -> np.ndarray:
    """Row of each segment, int32. Segments of one length, and rows with the same room, are handled together.

    Going from the longest segments down, a row with room r takes r // length of them before another row is fuller:
    exactly what placing the segments one by one, each into the fullest row that fits, would do.
    """
    by_length = np.argsort(size - segment_length, kind="stable")  # longest first, file order within a length
    counts = np.bincount(segment_length, minlength=size + 1)
    row = np.empty(len(segment_length), np.int32)
    shelves: list[list[np.ndarray]] = [[] for _ in range(size + 1)]  # shelves[room]: rows with that much room left
    occupied = 0  # bit r is set when shelves[r] is not empty
    done = rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        segments = by_length[done : done + counts[length]]
        done += len(segments)
        while len(segments):
            candidates = occupied >> length
            if candidates:
                room = length + (candidates & -candidates).bit_length() - 1
                fit, open_rows = room // length, shelves[room].pop()
                if not shelves[room]:
                    occupied &= ~(1 << room)
            else:
                room, fit = size, size // length
                needed = -(-len(segments) // fit)
                open_rows = np.arange(rows, rows + needed, dtype=np.int32)
                rows += needed
            taken = open_rows[: -(-len(segments) // fit)]  # rows that get a segment
            placed = segments[: len(taken) * fit]
            row[placed] = np.repeat(taken, fit)[: len(placed)]
            missing = len(taken) * fit - len(placed)  # segments that the last of these rows could still take
            full, partly = (taken[:-1], taken[-1:]) if missing else (taken, taken[:0])
            emptier = room - (fit - missing) * length
            for left, members in ((room, open_rows[len(taken) :]), (room - fit * length, full), (emptier, partly)):
                if left and len(members):
                    shelves[left].append(members)
                    occupied |= 1 << left
            segments = segments[len(placed) :]
    return row


def _number_by_first_segment(row: np.ndarray) -> np.ndarray:
    """Rename rows so that they are numbered in the order in which their first segments occur."""
    rows = int(row.max()) + 1 if row.size else 0
    first = np.full(rows, len(row), np.int64)
    first[row[::-1]] = np.arange(len(row) - 1, -1, -1)  # the last write, of the smallest index, stays
    name = np.empty(rows, np.int32)
    name[np.argsort(first)] = np.arange(rows, dtype=np.int32)
    return name[row]


# --- the order of rows ---

ROUNDS = 8


class RowOrder:
    """A permutation of range(rows) that needs no memory: a pure function of (seed, epoch, position).

    `order[position]`, `order[start:stop]` and `order[array]` give row ids. A Feistel network over the next even number
    of bits is a bijection; walking on until the value lies below `rows` keeps it one for any size (Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002). Without shuffle it is the identity.
    """

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True):
        self.rows, self.shuffle = rows, shuffle
        self.half_bits = np.uint64(max(1, (max(rows - 1, 1).bit_length() + 1) // 2))
        self.mask = np.uint64((1 << int(self.half_bits)) - 1)
        self.keys = _round_keys(seed, epoch)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, positions):
        if isinstance(positions, slice):
            return self._permuted(np.arange(*positions.indices(self.rows), dtype=np.int64))
        array = np.asarray(positions, np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.rows):
            raise IndexError(f"position outside the {self.rows:,} rows of an epoch")
        rows = self._permuted(array.reshape(-1)).reshape(array.shape)
        return rows if array.ndim else int(rows)

    def _permuted(self, positions: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return positions
        value = self._feistel(positions.astype(np.uint64))
        outside = np.flatnonzero(value >= self.rows)
        while outside.size:
            value[outside] = self._feistel(value[outside])
            outside = outside[value[outside] >= self.rows]
        return value.astype(np.int64)

    def _feistel(self, value: np.ndarray) -> np.ndarray:
        left, right = value >> self.half_bits, value & self.mask
        for key in self.keys:
            left, right = right, left ^ (_mixed(right + key) & self.mask)
        return (left << self.half_bits) | right


def _mixed(value: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, 2014) on uint64, wrapping."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    golden = 0x9E3779B97F4A7C15
    start = _mixed(np.array([seed % 2**64], np.uint64)) + _mixed(np.array([(epoch * golden + 1) % 2**64], np.uint64))
    steps = np.array([(golden * (i + 1)) % 2**64 for i in range(ROUNDS)], np.uint64)
    return _mixed(_mixed(start) + steps)
