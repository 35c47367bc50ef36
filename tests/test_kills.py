"""kill -9 at chosen places: the resumed run is the run. `torture.py` does it at random instants."""

from __future__ import annotations

import pytest
from torture import Attempts, die_at_the_edges, saved_step, tortured_run, unfinished

from runs import run_folder
from training.saving.checkpoint import find_checkpoints, verify_checkpoint


@pytest.mark.parametrize(
    ("moe", "ranks", "times"),
    [
        (0, 1, 2),
        (1, 2, 1),
        pytest.param(1, 1, 2, marks=pytest.mark.slow),
        pytest.param(0, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_edge_it_ends_as_the_run_left_alone(tmp_path, moe, ranks, times):
    words = tortured_run(tmp_path, 130, use_moe=moe)
    whole = Attempts([*words, "--save_weight", "whole"], ranks, tmp_path)
    whole.attempt()
    steps = saved_step(whole.words)
    assert whole.finished
    assert sorted(whole.rows) == list(range(1, steps + 1))
    for epoch in (0, 1):
        rows = [row for step in range(steps // 2) for row in whole.rows[epoch * steps // 2 + step + 1]]
        assert sorted(rows) == list(range(len(rows)))
    assert 0 < len(whole.rows[steps]) < 12
    assert len(whole.rows[steps]) % 3 != 0  # the last window and its last micro-batch are partial
    run = Attempts(words, ranks, tmp_path)
    die_at_the_edges(run, steps // 2, times)
    assert run.kills == 10 * times + 1
    assert run.same_as(whole)
    assert unfinished(words) == set()  # what the killed left half written is gone
    assert all(verify_checkpoint(folder) == [] for _, folder in find_checkpoints(run_folder(words) / "resume"))
