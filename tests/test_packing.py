import itertools
import pickle
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.packing import RowOrder, RowPlan, plan_rows

lengths_lists = st.lists(st.integers(2, 80), max_size=60)


def rows_of(plan: RowPlan) -> list[list[tuple[int, int]]]:
    """(start, length) of each segment, row by row."""
    segments = list(zip(plan.segment_start.tolist(), plan.segment_length.tolist(), strict=True))
    offsets = plan.row_offsets.tolist()
    return [segments[begin:end] for begin, end in itertools.pairwise(offsets)]


def reference_best_fit(lengths: list[int], size: int) -> list[int]:
    """Rooms left by placing the segments one by one, the longest first, each into the fullest row that fits."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(size - length)
    return sorted(rooms)


# --- packed rows ---


@settings(max_examples=300, deadline=None)
@given(lengths_lists, st.integers(2, 40))
def test_every_target_of_every_document_occurs_exactly_once(lengths, size):
    plan = plan_rows(np.array(lengths, np.int64), size)
    starts = np.cumsum(lengths) - lengths if lengths else []
    expected = Counter(int(s) + i for s, n in zip(starts, lengths, strict=True) for i in range(1, n))
    segments = [segment for row in rows_of(plan) for segment in row]
    assert Counter(start + i + 1 for start, length in segments for i in range(length)) == expected


@settings(max_examples=300, deadline=None)
@given(lengths_lists, st.integers(2, 40))
def test_rows_are_never_overfull_and_are_numbered_by_first_segment_with_segments_in_order(lengths, size):
    plan = plan_rows(np.array(lengths, np.int64), size)
    rows = rows_of(plan)
    assert all(0 < sum(length for _, length in row) <= size for row in rows)
    assert [sum(length for _, length in row) for row in rows] == plan.row_targets.tolist()
    firsts = [row[0][0] for row in rows]
    assert firsts == sorted(firsts) and all(row == sorted(row) for row in rows)


@settings(max_examples=300, deadline=None)
@given(lengths_lists, st.integers(2, 40))
def test_rows_are_filled_as_by_placing_segments_one_by_one_best_fit(lengths, size):
    plan = plan_rows(np.array(lengths, np.int64), size)
    segments = [length for row in rows_of(plan) for _, length in row]
    rooms = sorted(size - sum(length for _, length in row) for row in rows_of(plan))
    assert rooms == reference_best_fit(segments, size)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 500), st.integers(2, 40))
def test_a_long_document_is_cut_into_full_segments_that_share_one_token_with_the_next(length, size):
    plan = plan_rows(np.array([length]), size)
    segments = sorted(segment for row in rows_of(plan) for segment in row)
    assert segments[0][0] == 0 and sum(n for _, n in segments) == length - 1
    for (start, n), (following, _) in itertools.pairwise(segments):
        assert n == size and following == start + n  # the last target of one is the first input of the next


def test_document_starts_move_the_segments_and_nothing_else():
    lengths = np.array([5, 30, 3, 9])
    starts = np.array([100, 7, 60, 1000])
    plan, moved = plan_rows(lengths, 10), plan_rows(lengths, 10, document_starts=starts)
    contiguous = np.cumsum(lengths) - lengths
    document = np.searchsorted(contiguous, plan.segment_start, side="right") - 1
    assert np.array_equal(moved.segment_start, plan.segment_start - contiguous[document] + starts[document])
    assert np.array_equal(moved.row_offsets, plan.row_offsets)


def test_the_plan_is_the_same_every_time():
    lengths = np.random.default_rng(0).integers(2, 600, 5000)
    first, second = plan_rows(lengths, 256), plan_rows(lengths, 256)
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in vars(first))


@pytest.mark.parametrize("packing", [True, False])
def test_no_documents_make_no_rows(packing):
    plan = plan_rows(np.array([], np.int64), 16, packing)
    assert plan.rows == 0 and plan.row_offsets.tolist() == [0]


def test_dtypes_are_as_stated_and_hold_starts_beyond_32_bits():
    plan = plan_rows(np.array([5, 7]), 16, document_starts=np.array([2**40, 2**41]))
    dtypes = [array.dtype for array in (plan.segment_start, plan.segment_length, plan.row_offsets, plan.row_targets)]
    assert dtypes == [np.int64, np.int32, np.int64, np.int32] and sorted(plan.segment_start) == [2**40, 2**41]


def test_impossible_sizes_and_documents_are_refused():
    with pytest.raises(ValueError, match="max_seq_len 1"):
        plan_rows(np.array([5]), 1)
    with pytest.raises(ValueError, match="max_seq_len 2"):
        plan_rows(np.array([5]), 2, packing=False)
    with pytest.raises(ValueError, match="without a target"):
        plan_rows(np.array([5, 1]), 16)


def test_padding_of_mixed_documents_stays_below_one_percent():
    lengths = np.exp(np.random.default_rng(0).normal(5, 1, 20_000)).astype(np.int64) + 3
    for size in (128, 512, 2048):
        plan = plan_rows(lengths, size)
        assert 1 - plan.row_targets.sum() / (plan.rows * size) < 0.01


def test_without_packing_each_document_is_a_row_of_its_own_in_order():
    plan = plan_rows(np.array([3, 10, 11, 12, 400]), 10, packing=False)
    assert plan.row_targets.tolist() == [2, 9, 9, 9, 9]
    assert rows_of(plan) == [[(0, 2)], [(3, 9)], [(13, 9)], [(24, 9)], [(36, 9)]]


@pytest.mark.slow
def test_a_million_documents_are_planned_in_time_linear_in_their_number():
    lengths = np.random.default_rng(0).integers(2, 2000, 1_000_000)
    seconds = []
    for count in (100_000, 1_000_000):
        started = time.perf_counter()
        plan = plan_rows(lengths[:count], 512)
        seconds.append(time.perf_counter() - started)
    assert 1 - plan.row_targets.sum() / (plan.rows * 512) < 0.01
    assert seconds[1] < 20 * seconds[0] + 1


# --- the order of rows ---


def test_the_order_is_a_bijection_for_every_size_up_to_2000_and_beyond():
    for rows in [*range(1, 2001), 2**16, 2**16 + 1, 1_000_003]:
        order = RowOrder(rows, seed=rows, epoch=rows % 3)[:]
        assert np.array_equal(np.sort(order), np.arange(rows)), rows


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_order_is_a_bijection_for_any_seed_and_epoch(rows, seed, epoch):
    assert np.array_equal(np.sort(RowOrder(rows, seed, epoch)[:]), np.arange(rows))


def test_single_positions_slices_and_arrays_agree():
    order = RowOrder(1000, seed=3, epoch=2)
    whole = order[:]
    assert [order[i] for i in range(0, 1000, 97)] == whole[::97].tolist()
    assert np.array_equal(order[250:270], whole[250:270]) and np.array_equal(order[990:2000], whole[990:])
    positions = np.array([[5, 999], [0, 5]])
    assert np.array_equal(order[positions], whole[positions]) and type(order[5]) is int
    assert len(order[1000:]) == 0 and len(order) == 1000


@pytest.mark.parametrize("position", [-1, 1000, np.array([0, 1000])])
def test_positions_outside_the_epoch_are_refused(position):
    with pytest.raises(IndexError):
        RowOrder(1000, 0, 0)[position]


def test_epochs_and_seeds_give_unrelated_orders():
    orders = [RowOrder(1000, seed, epoch)[:] for seed in (0, 1, 42, 2**63) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12  # about one in a random permutation


def test_the_order_is_the_same_on_every_machine_for_ever():
    assert RowOrder(10, seed=42, epoch=0)[:].tolist() == [6, 0, 5, 2, 8, 9, 1, 7, 4, 3]
    assert RowOrder(10**15, seed=42, epoch=1)[10**14] == 270940771603085


def test_rows_land_anywhere_with_equal_chance():
    rows, buckets = 20_000, 20
    for epoch in range(3):
        order = RowOrder(rows, seed=7, epoch=epoch)[:]
        counts = np.histogram2d(np.arange(rows), order, bins=buckets)[0]
        expected = rows / buckets**2
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < (buckets - 1) ** 2 + 5 * np.sqrt(2 * (buckets - 1) ** 2)
        displacement = np.abs(order - np.arange(rows)).mean() / rows
        assert abs(displacement - 1 / 3) < 0.01
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


def test_small_orders_reach_every_permutation():
    seen = Counter(tuple(RowOrder(4, seed, 0)[:].tolist()) for seed in range(2400))
    assert len(seen) == 24 and min(seen.values()) > 40


def test_without_shuffle_the_order_is_the_files():
    assert RowOrder(10, seed=1, epoch=5, shuffle=False)[:].tolist() == list(range(10))
    assert RowOrder(10, seed=1, epoch=5, shuffle=False)[7] == 7


def test_an_order_over_ten_million_rows_needs_no_memory_to_speak_of():
    order = RowOrder(10_000_000, seed=0, epoch=0)
    assert len(pickle.dumps(order)) < 2000 and 0 <= order[9_999_999] < 10_000_000
