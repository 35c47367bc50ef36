"""A loss that rises for long is warned of, once."""

import pytest

from training.during.divergence import DivergenceWatch


def feed(watch, losses, every=10, first=0):
    """Feed a loss every few steps; returns the warnings with their steps."""
    warnings = []
    for index, loss in enumerate(losses):
        step = max(first + index * every, 1)
        text = watch.update(step, loss, lr=1e-3, grad_norm=2.5, last_good_step=300)
        warnings += [(step, text)] if text else []
    return warnings


def test_a_rise_of_more_than_5_percent_is_warned_of_once_with_the_figures():
    ((step, text),) = feed(DivergenceWatch(), [2.0] * 41 + [2.5] * 60)
    assert 410 < step < 610
    assert all(
        part in text for part in ("2.0000", "lr 0.00100000", "grad_norm 2.5000", "last good checkpoint: step 300")
    )


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 41 + [2.09] * 60,  # 4.5 %
        [3.0 - 0.01 * index for index in range(100)],
        [2.0] * 20 + [4.0] * 20,  # fewer than 400 steps seen
        [2.0, float("nan")] * 60,
        [2.0] * 41 + [float("nan")] * 80,  # other means count those
    ],
)
def test_no_warning_without_a_rise_of_5_percent_over_two_full_windows(losses):
    assert feed(DivergenceWatch(), losses) == []
