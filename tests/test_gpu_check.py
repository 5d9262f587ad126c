"""tools/gpu_check.py without a GPU: what it says then, and its parts that need none."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.codegen.cuda.driver import LearningDriver
from tools import gpu_bench, gpu_check, gpu_text
from tools.gpu_bench import Bench
from tools.gpu_operands import operands_of
from tools.gpu_plan import BOUNDARIES, Case, boundary_bytes, boundary_cases, capped, case_of, release_cases
from tools.gpu_timing import MOST_LAUNCHES, Timing, copies, launches, measure, timing
from v41c.codegen.cuda import kernel_for
from v41c.errors import DeviceError
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.torch_types import type_of
from v41c.ir.types import DType, TensorType, f32
from v41c.runtime import cuda_driver
from v41c.targets.cuda import SM_90, SM_100, CudaTarget

CEILINGS = {
    "kind": "ceilings",
    "copy_bytes_per_second": 4e12,
    "bf16_flops_per_second": 8e14,
    "product": "H200 SXM",
    "sheet_bytes_per_second": 4.8e12,
}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> None:
        raise DeviceError("CUDA: expected a GPU, found none")

    monkeypatch.setattr(cuda_driver, "CudaDriver", none)
    assert gpu_check.main([]) == 1
    assert capsys.readouterr() == ("", "gpu_check: CUDA: expected a GPU, found none\n")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(gpu_check.PACKAGES, "no_such.module", "no-such-package")
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().err == (
        "gpu_check: Python packages: expected no-such-package, found none: pip install no-such-package\n"
    )


def test_other_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--steps", "facts,speed"])
    assert "--steps: expected some of facts, kernels, engines, compile, memcheck, racecheck, bench, got 'speed'" in (
        capsys.readouterr().err
    )


def test_steps_go_on_after_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(check: gpu_check.Check, left: float) -> gpu_check.Outcome:
        raise ValueError("no such thing")

    monkeypatch.setattr(gpu_check, "STEPS", {"facts": broken, "memcheck": gpu_check.memcheck})
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name, path=None: None)
    check = gpu_check.Check(tmp_path, time.monotonic() + 60)
    for step in ("facts", "memcheck"):
        gpu_check.run_step(check, step, tmp_path / "found.json")
    check.deadline = 0.0
    gpu_check.run_step(check, "facts", tmp_path / "found.json")
    assert [(one.status, one.detail) for one in check.outcomes] == [
        ("failed", "ValueError: no such thing"),
        ("skipped", "compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin"),
        ("skipped", "no time is left"),
    ]
    assert len(json.loads((tmp_path / "found.json").read_text())["steps"]) == 3


def test_a_command_is_ended_by_its_limit() -> None:
    done = gpu_check.run_limited([sys.executable, "-c", "print('begun', flush=True)\nwhile True: pass"], 3)
    assert done.late
    assert gpu_check.finished("kernels", done, gpu_check.last_line).detail == "ended by its time limit: begun"
    # what is skipped as a whole has not passed
    assert gpu_check.tested("kernels", ["--version"], 60).status == "failed"
    done = gpu_check.run_limited([sys.executable, "-c", "import tools.gpu_text\nraise SystemExit('why')"], 60)
    assert (done.status, done.output, done.late) == (1, "why\n", False)


class Watch:
    """A driver of which every launch takes `seconds`, and the clock that shows it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.launched: list[int] = []
        self.recorded: list[int] | None = None

    def run(self, number: int) -> None:
        if self.recorded is not None:
            self.recorded.append(number)
        else:
            self.launched.append(number)
            self.now += self.seconds

    def begin_recording(self) -> None:
        self.recorded = []

    def end_recording(self) -> list[int]:
        made, self.recorded = self.recorded or [], None
        return made

    def replay(self, recording: Sequence[int]) -> None:
        for number in recording:
            self.run(number)

    def synchronize(self) -> None:
        self.now += 20e-6


def test_times_are_of_long_recordings_through_all_buffers() -> None:
    watch = Watch(10e-6)
    runs = [lambda number=number: watch.run(number) for number in range(3)]  # type: ignore[misc]
    found = measure(watch, runs, lambda: watch.now)  # type: ignore[arg-type]
    # a wait of 20 us after some 120 launches of 10 us
    assert found.seconds == pytest.approx(10e-6, rel=0.02)
    assert found.spread < 1e-6
    assert watch.launched == [0, 1, 2] * (len(watch.launched) // 3)


def test_how_much_is_launched() -> None:
    assert launches(1e-6, 1) == MOST_LAUNCHES
    assert launches(1e-6, 5) == 515
    assert launches(1.0, 7) == 7
    assert copies(touched_bytes=1 << 20, held_bytes=1 << 20, cache_bytes=16 << 20, room_bytes=1 << 40) == 32
    assert copies(touched_bytes=1, held_bytes=1, cache_bytes=1 << 20, room_bytes=1 << 40) == 64
    assert copies(touched_bytes=1 << 20, held_bytes=1 << 30, cache_bytes=16 << 20, room_bytes=3 << 30) == 3
    assert copies(touched_bytes=1 << 30, held_bytes=1 << 33, cache_bytes=1 << 20, room_bytes=1) == 1
    assert timing([3.0, 1.0, 2.0]) == Timing(2.0, 1.0)
    assert timing([2.0]) == Timing(2.0, 0.0)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Those of the shipped model, which are a release's but for their sizes."""
    return cases_for(SM_90)


def cases_for(target: CudaTarget) -> list[Case]:
    return release_cases(TRAINED_CHECKPOINT / "config.json", target, lambda text: None)


def test_every_kernel_of_the_steps_is_planned(cases: list[Case]) -> None:
    assert sorted({case.tokens for case in cases}) == list(SM_90.variants)
    assert {case.op.name() for case in cases if case.tokens == 1} >= {"attend", "moe_layer", "mhc_boundary", "linear"}
    one, few = ([case for case in cases if case.tokens == tokens] for tokens in (1, 16))
    assert sum(case.calls for case in one) == sum(case.calls for case in few)
    boundaries = boundary_cases(cases, SM_90)
    assert [case.tokens for case in boundaries] == list(BOUNDARIES)
    streams = [case.types[0].shape for case in boundaries if case.types[0] is not None]
    assert streams == [(64, 4, 192), (4096, 4, 192)]
    least = 4096 * 10 * 192 * 2 + 24 * 4 * 192 * 4
    assert boundary_bytes(boundaries[1]) == least
    # and the next input once more, quantised; the shares of the copies, read and written
    assert boundaries[1].bytes == pytest.approx(least + 4096 * (192 * 2 + 2 * 24 * 4), rel=1e-4)


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
def test_operands_are_in_range(cases: list[Case], target: CudaTarget) -> None:
    """References take them, index with them, and give finite numbers; packed rows of activations among them."""
    given = cases if target == SM_90 else cases_for(target)
    for case in [case for case in given if case.tokens == 16]:
        operands = operands_of(case, "cpu")
        for operand, kind in zip(operands, case.types, strict=True):
            assert (operand is None) == (kind is None)
            assert operand is None or kind is None or type_of(operand) == kind
        with torch.inference_mode():
            made = case.op.reference(*operands)
        for result in made if isinstance(made, tuple) else (made,):
            assert not result.is_floating_point() or bool(result.isfinite().all()), case.name


def test_huge_tables_are_cut() -> None:
    table = TensorType(DType.F8E4M3, (384_006_168, 256))
    assert capped(table).size_bytes == 8 << 30
    assert capped(f32(3, 5)) == f32(3, 5)


def case_of_update() -> Case:
    op, tokens = HcUpdate(), TensorType(DType.BF16, ("T", 64))
    types = (TensorType(DType.BF16, ("T", 4, 64)), tokens, f32("T", 4), f32("T", 4, 4))
    kernel = kernel_for(op, types, op.infer_results(types), SM_90, {"T": 16})
    return case_of(op, types, {"T": 5}, kernel)


def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver that interprets launches: the numbers mean nothing, the results do."""
    case, driver, placed = case_of_update(), LearningDriver(None), gpu_bench.places

    def known(case: Case, operands: gpu_bench.Operands, outputs: Sequence[torch.Tensor]) -> dict[str, int]:
        for tensor in (*operands, *outputs):
            if tensor is not None:
                driver.register(tensor.view(torch.uint8).numpy())
        return placed(case, operands, outputs)

    monkeypatch.setattr(gpu_bench, "places", known)
    bench = Bench(driver, driver.code, "cpu", 2 * case.bytes)
    line = bench.kernel(case)
    assert "error" not in line
    assert line["sets"] == 4
    assert line["apart"] < 0.01
    assert line["eager_seconds"] > 0
    assert line["bytes_per_second"] == case.bytes / line["seconds"]


def test_results_that_are_wrong_are_said() -> None:
    """Here those of launches that are only looked at: the results stay NaN."""
    case = case_of_update()
    driver = LearningDriver(None, interpret=False)
    line = Bench(driver, driver.code, "cpu", 1).kernel(case)
    assert line["error"] == "its results are inf apart"
    assert line["apart"] is None
    assert line["seconds"] > 0
    assert list(gpu_text.notes_of(line)) == [f"{case.name}, 5 tokens: wrong: its results are inf apart"]
    one, other = torch.arange(10), torch.tensor([3.0, 4.0])
    assert gpu_bench.difference([one, other], [one, other]) == 0
    assert gpu_bench.difference([one, other + 0.1], [one, other]) == pytest.approx(2**0.5 * 0.1 / 5)
    assert gpu_bench.difference([torch.zeros(10, dtype=torch.int64), other], [one, other]) == pytest.approx(0.9)
    chosen = torch.tensor([[1, 3, 5, 7], [2, 4, 6, -1]], dtype=torch.int32)
    others = torch.tensor([[2, 3, 5, 7], [1, 2, 4, 6]], dtype=torch.int32)
    assert gpu_bench.difference([chosen], [others]) == pytest.approx(2 / 8)


def test_what_cannot_be_measured_is_said() -> None:
    driver = LearningDriver(None)  # which knows none of the memory that PyTorch has allocated
    bench = Bench(driver, driver.code, "cpu", 1)
    assert bench.kernel(case_of_update())["error"].startswith("ValueError: address 0x")


def test_the_report_says_what_was_found(tmp_path: Path) -> None:
    one = {"kind": "kernel", "name": "linear 8x4", "symbol": "a", "tokens": 1, "calls": 40, "bytes": 4e7, "flops": 8e7}
    two = one | {"name": "gate 8x4", "symbol": "b", "error": "UnsupportedError: does not compile"}
    timed = {"seconds": 20e-6, "spread": 0.01, "bytes_per_second": 2e12, "flops_per_second": 4e12, "apart": 1e-3}
    lines = [
        CEILINGS,
        one | timed | {"least_bytes": 9e6} | {"eager_seconds": None, "why_not_eager": "operands of 6.8 GiB"},
        two,
    ]
    lines.append(one | {"kind": "compile", "compile_seconds": 50e-6})
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "ker'
    check = gpu_check.Check(tmp_path, 0.0, bench=gpu_text.bench_lines(text))
    check.outcomes.append(gpu_check.Outcome("bench", "failed", 3.0, "1 kernels measured, 1 not"))
    report = gpu_text.report_text(check)
    row = next(line for line in report.splitlines() if line.startswith("linear 8x4")).split()
    assert row[2:] == ["1", "40", "20", "1%", "2000", "50%", "4.00", "0%", "8.33", "50", "1.0e-03"]
    assert "1 tokens takes 20 us; (2n + 2) d values a token and the weight take 1.88 us by the data sheet" in report
    assert "gate 8x4, 1 tokens: not measured: UnsupportedError: does not compile" in report
    assert "linear 8x4, 1 tokens: eager: operands of 6.8 GiB" in report
    assert "a step of" not in report  # a kernel of it is missing
    whole = gpu_text.step_sums([one | timed, one | timed | {"calls": 10}])
    assert list(whole) == ["a step of 1 tokens: 50 kernels take 1.00 ms one by one"]
