"""Speed of the dense kernels against the limits of the machine, measured in turn: run alone, `-s` shows figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.codegen.harness import Library, aligned, poisoned, to_bf16
from v41c.codegen.cpu import kernel_for, layouts
from v41c.ir.op import Op
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.types import DType, TensorType
from v41c.machine import Limits
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

ROWS, COLUMNS = 2304, 5120  # an expert of the release
TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]

Kinds = tuple[TensorType | None, ...]


def kind(dtype: str, *shape: int | str) -> TensorType:
    return TensorType(DType(dtype), shape)


def stored(what: TensorType, generator: np.random.Generator) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random elements: finite codes, scales about one."""
    size = what.size_bytes
    low, high = (118, 123) if what.dtype == "e8m0" else (0, 120 if what.dtype == "f8e4m3" else 256)
    rows = [int(dim) for dim in what.shape[:-1]]
    return generator.integers(low, high, size, dtype=np.uint8).reshape(*rows, -1)


def seconds(work: Sequence[Callable[[], None]], repeats: int) -> float:
    """The best time of one of the calls, all made in turn."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        for call in work:
            call()
        took.append((time.perf_counter() - began) / len(work))
    return min(took)


def report(target: CpuTarget, what: str, measured: float, limit: float, unit: str) -> float:
    print(f"{target.name} {what}: {measured / 1e9:.1f} of {limit / 1e9:.1f} {unit}, {measured / limit:.0%}")
    return measured / limit


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_fp8_products(target: CpuTarget) -> None:
    limits, generator = Limits(), np.random.default_rng(0)
    op = Linear("bf16")
    kinds = (kind("bf16", "T", COLUMNS), kind("f8e4m3", ROWS, COLUMNS), kind("e8m0", ROWS // 32, COLUMNS // 32))
    token, chunk = (kernel_for(op, kinds, op.infer_results(kinds), target, {"T": bound}) for bound in (1, 512))
    library = Library([token, chunk], target)
    # together far more than the last-level cache holds
    copies = [
        [aligned(layouts.pack(token.layouts[i], stored(kinds[i], generator), kinds[i].dtype)) for i in (1, 2)]
        for _ in range(16)
    ]
    x, out = to_bf16(generator.standard_normal((512, COLUMNS), np.float32)), poisoned((512, ROWS), "bf16")
    limits.sample()
    single = seconds([library.command(token, [x, *weights, out], {"T": 1}) for weights in copies], 10)
    limits.sample()
    assert report(target, "fp8, 1 row", ROWS * COLUMNS / single, limits.best().read_bytes_per_second, "GB/s") > 0.5
    for rows in (4, 32, 128, 512):
        took = seconds([library.command(chunk, [x, *weights, out], {"T": rows}) for weights in copies[:4]], 4)
        limits.sample()
        flops = 2 * rows * ROWS * COLUMNS / took
        reached = report(target, f"fp8, {rows} rows", flops, limits.best().flops_per_second, "GFLOP/s of numpy")
        assert reached > 0.7 or rows < 128


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_fp4_experts(target: CpuTarget) -> None:
    limits, generator = Limits(), np.random.default_rng(0)
    experts, chosen = 12, 6
    op: Op = MoeExperts(10.0, "fp8_e8m0_32")
    up, down = (experts, ROWS, COLUMNS), (experts, COLUMNS, ROWS)
    shapes = (up, up, down)
    weights = [kind("f4e2m1", *shape) for shape in shapes]
    scales = [kind("e8m0", *shape[:2], shape[2] // 32) for shape in shapes]
    kinds = (kind("bf16", "T", COLUMNS), kind("i32", "T", chosen), kind("f32", "T", chosen), *weights, *scales)
    token, chunk = (kernel_for(op, kinds, op.infer_results(kinds), target, {"T": bound}) for bound in (1, 512))
    library = Library([token, chunk], target)
    packed = [aligned(layouts.pack(token.layouts[i], stored(kinds[i], generator), kinds[i].dtype)) for i in range(3, 9)]
    active_bytes = sum(array.nbytes for array in packed) * chosen // experts
    for rows in (1, 4, 128, 512):
        x = to_bf16(generator.standard_normal((rows, COLUMNS), np.float32))
        ids = np.sort(np.stack([generator.permutation(experts)[:chosen] for _ in range(rows)]), 1).astype(np.int32)
        buffers = [x, ids, generator.random((rows, chosen), np.float32), *packed, poisoned((rows, COLUMNS), "f32")]
        limits.sample()
        took = seconds([library.command(token if rows == 1 else chunk, buffers, {"T": rows})], 4)
        limits.sample()
        if rows == 1:
            limit = limits.best().read_bytes_per_second
            reached = report(target, "fp4 experts, 1 row", active_bytes / took, limit, "GB/s")
            # decoding bounds fp4 on AVX2: about 16 G weights/s a core, 8 GB/s
            assert reached > 0.5 or not target.has_avx512
        else:
            flops = 2 * rows * chosen * 3 * ROWS * COLUMNS / took
            what = f"fp4 experts, {rows} rows"
            reached = report(target, what, flops, limits.best().flops_per_second, "GFLOP/s of numpy")
            assert reached > 0.7 or rows < 512
