"""Which rows a step trains, and how they become this rank's batches: one iterator, one position.

A step is the next `global_batch_size` rows of an order that depends on seed and epoch alone; an epoch's last one may be
shorter. Nothing here asks whether it is distributed: rank and number of ranks are two integers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dataset.lm_dataset import MISSING_ROW, Batch, PretrainDataset
from dataset.packing import RowOrder

Job = TypeVar("Job")
Made = TypeVar("Made")

BATCHES_AHEAD = 2  # one being trained on, one ready, one being made


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step over all ranks. `ids` int64 [rows], in training order; `position`: rows seen before it."""

    position: int
    epoch: int
    ids: np.ndarray
    target_count: int  # valid targets in them, known on every rank without a collective
    ends_epoch: bool

    def micro_batch_count(self, batch_size: int, ranks: int) -> int:
        """Micro-batches on each rank."""
        return -(-len(self.ids) // (batch_size * ranks))

    def micro_batches(self, batch_size: int, rank: int, ranks: int) -> list[list[int]]:
        """Row ids of one rank's micro-batches: micro-batch m, ids m * batch_size onwards, goes to rank m mod ranks.

        Every rank gets equally many, each of exactly batch_size entries: what is missing is -1.
        """
        count = self.micro_batch_count(batch_size, ranks)
        padded = np.full(count * ranks * batch_size, MISSING_ROW, np.int64)
        padded[: len(self.ids)] = self.ids
        return padded.reshape(count, ranks, batch_size)[:, rank].tolist()


def steps_from(
    dataset: PretrainDataset, position: int, global_batch_size: int, seed: int, shuffle: bool = True
) -> Iterator[StepRows]:
    """The steps from `position` (rows seen since step 0) on, without end, without walking there."""
    rows = len(dataset)
    for epoch in itertools.count(position // rows):
        order = RowOrder(rows, seed, epoch, shuffle)
        for start in range(position - epoch * rows, rows, global_batch_size):
            ids = order[start : start + global_batch_size]
            targets = int(dataset.row_targets[ids].sum(dtype=np.int64))
            yield StepRows(position, epoch, ids, targets, ends_epoch=start + len(ids) == rows)
            position += len(ids)


def load_batches(
    dataset: PretrainDataset,
    steps: Iterable[StepRows],
    batch_size: int,
    rank: int,
    ranks: int,
    ready: Callable[[Batch], Batch],
    look_ahead: bool,
) -> Generator[tuple[StepRows, Iterator[Batch]], None, None]:
    """Each step with this rank's batches of it, on the host, as `ready` leaves them (checked, pinned ...).

    `look_ahead`: a thread makes them before they are asked for, which pays where rows come from a slow disk; the
    batches are the same either way. Closing the iterator ends the thread.
    """

    def make(job: tuple[StepRows, list[int]]) -> tuple[StepRows, Batch]:
        step, rows = job
        return step, ready(dataset.batch(rows))

    jobs = ((step, rows) for step in steps for rows in step.micro_batches(batch_size, rank, ranks))
    with contextlib.closing(_ahead(make, jobs) if look_ahead else (make(job) for job in jobs)) as made:
        for step, group in itertools.groupby(made, key=lambda pair: pair[0]):
            yield step, (batch for _, batch in group)


def _ahead(make: Callable[[Job], Made], jobs: Iterable[Job]) -> Generator[Made, None, None]:
    """What `make` gives for each job, in order, made in one thread up to BATCHES_AHEAD before it is asked for."""
    with ThreadPoolExecutor(1, thread_name_prefix="look-ahead") as thread:
        coming: deque[Future[Made]] = deque()
        try:
            for job in jobs:
                coming.append(thread.submit(make, job))
                if len(coming) > BATCHES_AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()
