"""The CUDA device on a driver that only looks at launches: what memory it takes, when, and whether it says so."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE, mmap

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.cuda.driver import HostDriver
from tests.runtime.fake_engine import BLOCK, CONTEXT, SLOTS, Built, write_engine
from v41c.manifest import Manifest, WeightEntry
from v41c.runtime import cuda
from v41c.runtime.artifact import Engine, load
from v41c.runtime.cpu import CpuDevice
from v41c.runtime.cuda import CudaDevice
from v41c.runtime.states import States


@pytest.fixture(scope="module")
def engine(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The toy engine with kernels of no launches; its second weight is read by rows."""

    def change(manifest: Manifest) -> Manifest:
        unused, table = manifest.weights
        return msgspec.structs.replace(
            manifest,
            weights=[unused, msgspec.structs.replace(table, read_by_rows=True)],
            launches={command.kernel: [] for program in manifest.programs for command in program.commands},
        )

    return load(write_engine(built, tmp_path_factory.mktemp("cuda") / "engine", change=change))


def opened(engine: Engine, driver: HostDriver, saved_tokens: int = 0) -> CudaDevice:
    return CudaDevice(engine, driver, SLOTS, CONTEXT, saved_tokens=saved_tokens)  # type: ignore[arg-type]


def test_all_memory_is_taken_before_the_weights_and_stated(engine: Engine) -> None:
    driver = HostDriver(engine, interpret=False)
    device = opened(engine, driver, BLOCK + 1)
    taken = dict(driver.named)
    weights = [name for name in taken if name.startswith("weight ")]
    assert list(taken)[-len(weights) :] == weights
    assert device.memory_bytes == sum(len(place) for name, place in taken.items() if name not in weights)
    run_both_graphs(device)
    assert driver.named == taken


def run_both_graphs(device: CudaDevice) -> None:
    """A full step of the encoder, and of the decoder with what stayed of it on the device."""
    positions = np.arange(8, dtype=np.int32)
    zeros = np.zeros_like(positions)
    inputs = {"tokens": zeros, "positions": positions, "slots": zeros, "first": zeros, "kept": zeros, "rows": zeros}
    assert device.execute("encoder", inputs, read=()) == {}
    assert list(device.execute("decoder", inputs, read=("logits",))) == ["logits"]


def test_both_devices_state_the_same_for_what_passes_between_graphs(engine: Engine) -> None:
    arena = max(program.arena_bytes for program in engine.manifest.programs)
    states = States.allocate(engine.manifest, SLOTS, CONTEXT)
    # stream bf16 [8, 64], ids i32 [8] and main_hidden i32 [8, 3]: widest steps
    carried = 8 * 64 * 2 + 8 * 4 + 8 * 3 * 4
    for device in (opened(engine, HostDriver(engine, interpret=False)), CpuDevice(engine, states)):
        assert device.memory_bytes == states.size_bytes + arena + carried


@pytest.mark.parametrize("missing", [0, 1])
def test_a_table_stays_in_host_memory_when_a_byte_is_missing_for_all_else(engine: Engine, missing: int) -> None:
    driver = HostDriver(engine, interpret=False)
    opened(engine, driver)
    less = HostDriver(engine, interpret=False, room_bytes=driver.room_bytes - driver.free_bytes - missing)
    opened(engine, less)
    table = engine.manifest.weights[1]
    assert [len(place) for place in less.pinned] == [table.offset + table.size_bytes] * missing
    assert (f"weight {table.name}" in less.named) is not bool(missing)
    assert "weight unused" in less.named


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4 * PAGESIZE), st.booleans()), min_size=1, max_size=8))
def test_no_page_is_pinned_twice_and_every_table_is_found(engine: Engine, sizes: list[tuple[int, bool]]) -> None:
    """Weights of random sizes one after the other, some read by rows: their bytes are at the addresses given."""
    weights, offset = [], 0
    for size, read_by_rows in sizes:
        weights.append(WeightEntry(f"w{offset}", "plain", offset, size, read_by_rows))
        offset += -(-size // 64) * 64
    memory = np.frombuffer(mmap(-1, offset), np.uint8)
    manifest = msgspec.structs.replace(engine.manifest, weights=weights)
    driver = HostDriver(engine)
    places = cuda._pin(replace(engine, manifest=manifest, weights=memory), driver)  # type: ignore[arg-type]
    begin = memory.ctypes.data
    pinned = [page for span in driver.pinned for page in range(span.start // PAGESIZE, -(-span.stop // PAGESIZE))]
    assert len(pinned) == len(set(pinned))
    assert all((span.start - begin) % PAGESIZE == 0 for span in driver.pinned)
    assert places == {n: begin + weight.offset for n, weight in enumerate(weights) if weight.read_by_rows}
    for number, place in places.items():
        last = place + weights[number].size_bytes - 1
        assert any(place in span and last in span for span in driver.pinned)
