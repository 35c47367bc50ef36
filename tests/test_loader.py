"""Which rows a step trains, which rank gets them, and that looking ahead changes nothing."""

from __future__ import annotations

import itertools
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from dataset.lm_dataset import PretrainDataset
from dataset.loader import load_batches, steps_from
from dataset.packing import RowOrder
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import build_or_open


class Rows:
    """As many rows as asked for, each with as many targets as its number."""

    def __init__(self, rows):
        self.row_targets = np.arange(rows, dtype=np.int32)

    def __len__(self):
        return len(self.row_targets)


@pytest.fixture
def dataset(corpus, tmp_path) -> PretrainDataset:
    tokenizer = TextTokenizer.load(ROOT / "model")
    return PretrainDataset(build_or_open(str(corpus), tokenizer, cache_dir=tmp_path / "c", progress=False), 64)


def epoch_of(rows, window, position=0, seed=5):
    """The steps of one epoch from `position` on."""
    steps = steps_from(Rows(rows), position, window, seed)
    first = next(steps)
    return [first, *itertools.takewhile(lambda step: step.epoch == first.epoch, steps)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("window, batch", [(1, 1), (8, 2), (7, 2), (10, 3), (5, 8), (64, 4), (200, 3)])
@pytest.mark.parametrize("rows", [1, 37, 100])
def test_ranks_together_see_every_row_once_in_equal_turns(rows, window, batch, ranks):
    seen = []
    for step in epoch_of(rows, window):
        by_rank = [step.micro_batches(batch, rank, ranks) for rank in range(ranks)]
        assert {len(each) for each in by_rank} == {step.micro_batch_count(batch, ranks)}
        assert all(len(ids) == batch for each in by_rank for ids in each)
        seen += [row for each in by_rank for ids in each for row in ids if row >= 0]
    assert sorted(seen) == list(range(rows))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_micro_batch_m_of_a_step_goes_to_rank_m_mod_ranks(ranks):
    order, window, batch = RowOrder(50, 5, 0), 14, 3
    for step in epoch_of(50, window):
        ids = step.ids.tolist()
        assert ids == order[step.position : step.position + window].tolist()
        by_rank = [step.micro_batches(batch, rank, ranks) for rank in range(ranks)]
        turns = step.micro_batch_count(batch, ranks)
        assert turns == math.ceil(math.ceil(len(ids) / batch) / ranks)
        dealt = [by_rank[rank][turn] for turn in range(turns) for rank in range(ranks)]
        parts = [ids[m * batch : (m + 1) * batch] for m in range(len(dealt))]
        assert dealt == [part + [-1] * (batch - len(part)) for part in parts]


def test_starting_anywhere_gives_the_tail_of_the_whole():
    whole = list(itertools.islice(steps_from(Rows(53), 0, 10, 5), 15))
    for index, step in enumerate(whole):
        again = next(steps_from(Rows(53), step.position, 10, 5))
        assert again.ids.tolist() == step.ids.tolist()
        assert (again.position, again.epoch, again.ends_epoch) == (step.position, step.epoch, step.ends_epoch)
        assert step.ends_epoch == (index % 6 == 5) and step.epoch == index // 6


def test_a_step_knows_its_targets():
    for step in epoch_of(53, 10):
        assert step.target_count == int(step.ids.sum())


def test_another_global_batch_takes_over_at_any_row():
    first = [row for step in epoch_of(101, 8)[:3] for row in step.ids]
    rest = [row for step in epoch_of(101, 15, position=24) for row in step.ids]
    assert sorted(first + rest) == list(range(101))


def test_starting_late_in_ten_million_rows_looks_up_one_step(monkeypatch):
    looked_up = []
    permuted = RowOrder._permuted
    monkeypatch.setattr(RowOrder, "_permuted", lambda self, at: looked_up.append(len(at)) or permuted(self, at))
    step = next(steps_from(Rows(10_000_000), 9_000_000, 512, 1))
    assert looked_up == [512] and len(step.ids) == 512


def test_rows_of_the_file_order_come_in_it():
    steps = steps_from(Rows(10), 0, 4, seed=3, shuffle=False)
    assert [next(steps).ids.tolist() for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def batches_of(dataset, steps, look_ahead, ready=lambda batch: batch):
    steps = itertools.islice(steps_from(dataset, 0, 10, 1), steps)
    return [
        (step.position, [batch.input_ids for batch in batches])
        for step, batches in load_batches(dataset, steps, 3, 0, 2, ready, look_ahead)
    ]


def test_looking_ahead_gives_the_same_batches(dataset):
    ahead, plain = batches_of(dataset, 9, True), batches_of(dataset, 9, False)
    assert [position for position, _ in ahead] == [position for position, _ in plain]
    for (_, mine), (_, other) in zip(ahead, plain, strict=True):
        assert len(mine) == len(other) and all(map(torch.equal, mine, other))


def test_looking_ahead_works_in_one_thread_that_ends(dataset):
    names = set()
    batches_of(dataset, 5, True, ready=lambda batch: names.add(threading.current_thread().name) or batch)
    assert names == {"look-ahead_0"}
    assert "look-ahead_0" not in {thread.name for thread in threading.enumerate()}


def test_closing_early_ends_the_thread(dataset):
    batches = load_batches(dataset, steps_from(dataset, 0, 10, 1), 3, 0, 1, lambda batch: batch, True)
    next(batches)
    batches.close()
    assert "look-ahead_0" not in {thread.name for thread in threading.enumerate()}


def test_a_mistake_in_the_thread_reaches_the_loop(dataset):
    def fail(batch):
        raise ValueError("outside the vocabulary")

    with pytest.raises(ValueError, match="outside the vocabulary"):
        batches_of(dataset, 2, True, ready=fail)


def test_little_is_made_before_it_is_asked_for(dataset):
    made = []
    stand_in = SimpleNamespace(row_targets=dataset.row_targets, batch=lambda rows: made.append(rows) or len(made))
    stand_in_rows = type("D", (SimpleNamespace,), {"__len__": lambda self: len(dataset)})(**vars(stand_in))
    batches = load_batches(stand_in_rows, steps_from(stand_in_rows, 0, 6, 1), 1, 0, 1, lambda batch: batch, False)
    _, first = next(batches)
    assert len(made) == 1
    next(first)
    next(first)
    assert len(made) == 2
