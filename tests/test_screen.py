"""A screen that goes away costs a run nothing but the screen."""

from __future__ import annotations

import os
import subprocess

import pytest

from runs import ROOT, command, environment, final_weights, logged, replaced, same_bits, train


@pytest.fixture
def whole(arguments):
    train(replaced(arguments, save_weight="whole"))
    return final_weights(replaced(arguments, save_weight="whole"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_device_for_stdout_costs_only_the_screen(arguments, whole):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(arguments), stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT, timeout=240
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The screen is lost (No space left on device)") == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert same_bits(final_weights(arguments), whole)
    assert len(logged(arguments)) == 13


def test_a_reader_that_leaves_costs_only_the_screen(arguments, whole):
    process = subprocess.Popen(
        command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(240) == 0, error
    assert error.count("The screen is lost (Broken pipe)") == 1
    assert "Traceback" not in error and "Exception ignored" not in error
    assert same_bits(final_weights(arguments), whole)
