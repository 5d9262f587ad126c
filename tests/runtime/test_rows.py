"""Rows of one sequence's states, taken out and put back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.fake_engine import SLOTS, WINDOW
from v41c.errors import ContextError
from v41c.runtime.artifact import Engine
from v41c.runtime.device import Device
from v41c.runtime.devices import open_device


@pytest.fixture
def device(engine: Engine) -> Device:
    """A device whose states hold something else in every row."""
    device = open_device(engine, SLOTS, 16, threads=1, poison=False, saved_tokens=0)
    for state in engine.manifest.states:
        memory = device.state(state.name)
        memory[...] = np.arange(memory.size).reshape(memory.shape)
    return device


def test_rows_are_copies_and_go_where_they_are_put(device: Device) -> None:
    before = device.state("layers.0.compressed").copy()
    taken = device.rows("layers.0.compressed", 1, 2, 5)
    np.testing.assert_array_equal(taken, before[1, 2:5])
    device.put_rows("layers.0.compressed", 2, 0, taken)
    taken[...] = 0
    before[2, :3] = before[1, 2:5]
    np.testing.assert_array_equal(device.state("layers.0.compressed"), before)
    assert device.rows("layers.0.window", 0, WINDOW, WINDOW).shape == (0,)


def test_rows_that_a_state_does_not_have_are_refused(device: Device) -> None:
    with pytest.raises(ContextError, match=r"state layers.0.window: expected rows within 0 to 4, got 3 to 5"):
        device.rows("layers.0.window", 0, 3, 5)
    with pytest.raises(ContextError, match=r"state layers.0.window: expected rows within 0 to 4, got 2 to 5"):
        device.put_rows("layers.0.window", 0, 2, np.zeros(3, np.int32))
    with pytest.raises(ContextError, match=r"state layers.0.window: expected int32 \(2,\), got float32 \(2,\)"):
        device.put_rows("layers.0.window", 0, 2, np.zeros(2, np.float32))
