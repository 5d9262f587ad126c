"""What tests on GPUs run through, without one: launches are unpacked and interpreted, and writes that must not be are
found wherever they go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.codegen.cuda.driver import LearningDriver
from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, same
from tests.device.gpu import Gpu
from tests.device.test_every_kernel import FEW, cases, check_rows
from v41c.targets.cuda import SM_90

#: a product, one that keeps counters, and one that writes a state
NAMES = ("linear", "hc_coefficients", "cache_write")


@pytest.fixture
def gpu() -> Gpu:
    driver = LearningDriver(None)
    return Gpu(driver, driver.code)


def subject_of(name: str) -> tuple[Subject, Operands]:
    op, operands = next(iter(cases(name, FEW)))
    return Subject.of(op, operands, SM_90, FEW), operands


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_the_same_through_packed_parameters(name: str, gpu: Gpu) -> None:
    for op, operands in cases(name, FEW):
        subject = Subject.of(op, operands, SM_90, FEW)
        for ours, theirs in zip(gpu.call(subject, operands), subject.call(operands), strict=True):
            assert same(ours, theirs)
        check_rows(gpu, subject, operands)


def moved(subject: Subject, argument: str, to: str, offset: int = 0) -> Subject:
    """The same kernel with one of its pointers elsewhere."""
    kernel = subject.kernel
    launches = [
        replace(
            launch,
            parameters=tuple(
                replace(p, argument=to, offset=p.offset + offset) if p.argument == argument else p
                for p in launch.parameters
            ),
        )
        for launch in kernel.launches
    ]
    return replace(subject, kernel=replace(kernel, launches=tuple(launches)))


def test_writes_outside_of_results_are_found(gpu: Gpu) -> None:
    subject, operands = subject_of("linear")
    with pytest.raises(
        ValueError, match=r"linear_.*: \d+ bytes were written outside of .* 0 bytes after the end of re"
    ):
        gpu.call(moved(subject, "result 0", "result 0", 16), operands)
    with pytest.raises(ValueError, match=r"outside of all buffers, the first 16 bytes before result 0"):
        gpu.call(moved(subject, "result 0", "result 0", -16), operands)
    with pytest.raises(ValueError, match=r"written in weight, which must stay as it was, from byte 0 on"):
        gpu.call(moved(subject, "result 0", "weight"), operands)


def test_counters_that_are_not_left_at_zero_are_found(gpu: Gpu) -> None:
    subject, operands = subject_of("hc_coefficients")
    assert subject.kernel.counter_bytes
    with pytest.raises(ValueError, match=r"written in counters, which must stay as it was"):
        gpu.call(moved(subject, "result 1", "counters"), operands)


def test_a_result_that_is_not_written_is_found(gpu: Gpu) -> None:
    subject, operands = subject_of("linear")
    (found,) = gpu.call(replace(subject, kernel=replace(subject.kernel, launches=())), operands)
    assert found.isnan().all()
