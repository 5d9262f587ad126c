"""Rows of a CUDA engine's kernels: sums of calls, bounds of time and occupancy, with figures worked out by hand."""

from __future__ import annotations

import pytest

from v41c.ir.op import Cost
from v41c.kernels import kernel_rows, occupancy
from v41c.manifest import CubinEntry, LaunchEntry
from v41c.operations import Operation
from v41c.targets.cuda import SM_89, SM_90, SM_100, CudaTarget


def function(registers: int, warps: int, shared_bytes: int = 0, spill_bytes: int = 0, **found: int) -> CubinEntry:
    return CubinEntry("kernels/f.cubin", "m", "f", [], {}, warps, shared_bytes, registers, spill_bytes, found)


def operation(kernel: str | None, cost: Cost) -> Operation:
    return Operation(
        graph="decoder",
        index=0,
        op="reshape" if kernel is None else kernel.partition("_")[0],
        module="layers.0",
        layer="0",
        made_by="trace",
        parts=[],
        kernel=kernel,
        view=kernel is None,
        attributes="",
        operands=[],
        roles=[],
        results=[],
        cost=cost,
    )


@pytest.mark.parametrize(
    ("target", "entry", "expected"),
    [
        # 168 x 32 registers a warp: 3 warps in a quarter of 16,384, so 3 blocks of 4
        (SM_90, function(168, 4, 45312), 12 / 64),
        # 255 round up to 256: 2 warps in a quarter
        (SM_90, function(255, 8), 8 / 64),
        (SM_90, function(32, 2), 1.0),
        # 228 KiB hold 4 blocks of 50,176 bytes and the driver's kibibyte
        (SM_90, function(32, 4, 50170), 16 / 64),
        # 24 blocks of a warp, though 48 warps would fit
        (SM_89, function(32, 1), 24 / 48),
        # what fits into no block's registers
        (SM_90, function(255, 16), 0.0),
    ],
)
def test_occupancy(target: CudaTarget, entry: CubinEntry, expected: float) -> None:
    assert occupancy(entry, target) == pytest.approx(expected)


def test_rows_of_a_step() -> None:
    """Two calls of a product of two launches, one of a copy, a view; the slowest first."""
    cubins = {
        "product": function(168, 4, 45312, wgmma=16, load_16_bytes=2),
        "sum": function(64, 4, spill_bytes=8, load_16_bytes=1),
        "copy": function(32, 2),
    }
    launches = {
        "linear_1": [LaunchEntry("product", [], []), LaunchEntry("sum", [], [])],
        "copy_1": [LaunchEntry("copy", [], [])],
    }
    step = [
        operation("copy_1", Cost(flops=670_000_000, activation_bytes=96_000, launches=1)),
        operation(None, Cost()),
        operation("linear_1", Cost(flops=4000, weight_bytes=40_000_000, activation_bytes=8_000_000, launches=1)),
        operation("linear_1", Cost(flops=4000, weight_bytes=40_000_000, state_bytes=8_000_000, launches=1)),
    ]
    linear, copy = kernel_rows(step, launches, cubins, SM_90)
    assert (linear.kernel, linear.op, linear.calls, linear.launches) == ("linear_1", "linear", 2, 4)
    assert (linear.bytes, linear.flops, linear.memory_bound) == (96_000_000, 8000, True)
    assert linear.bound_seconds == pytest.approx(20e-6)  # at 4.8 TB/s
    assert linear.occupancy == pytest.approx(12 / 64)
    assert (linear.registers, linear.shared_bytes, linear.spill_bytes) == (168, 45312, 8)
    assert linear.instructions == {"wgmma": 16, "load_16_bytes": 3}
    # without products of matrices, the peak is that of f32: 67 TFLOPS
    assert (copy.memory_bound, copy.bound_seconds) == (False, pytest.approx(10e-6))
    assert copy.to_json()["kernel"] == "copy_1"


@pytest.mark.parametrize(
    ("target", "instructions", "flops"),
    [
        (SM_90, {"mma": 1}, 989e12),
        (SM_100, {"tcgen05": 1}, 2250e12),
        (SM_100, {"tcgen05": 1, "block_scaled": 1}, 4500e12),
    ],
)
def test_products_have_the_tensor_cores_peak(target: CudaTarget, instructions: dict[str, int], flops: float) -> None:
    """Of fp8 where they apply the scales of what they multiply."""
    cubins = {"product": function(64, 4, **instructions)}
    step = [operation("linear_1", Cost(flops=int(flops * 1e-6), weight_bytes=1, launches=1))]
    (row,) = kernel_rows(step, {"linear_1": [LaunchEntry("product", [], [])]}, cubins, target)
    assert row.bound_seconds == pytest.approx(1e-6)
