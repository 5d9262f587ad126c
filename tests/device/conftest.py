"""Tests that need a GPU: skipped, with the reason, where there is none that v41c has a target for."""

from __future__ import annotations

import pytest

from v41c.errors import DeviceError
from v41c.runtime.cuda_driver import CudaDriver
from v41c.targets.cuda import TARGETS, CudaTarget


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    """The GPU's driver."""
    try:
        return CudaDriver()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def target(driver: CudaDriver) -> CudaTarget:
    """The target of the GPU."""
    found = [target for target in TARGETS if target.capability == driver.capability]
    if not found:
        names = ", ".join(target.name for target in TARGETS)
        pytest.skip(f"CUDA: expected a GPU of {names}, found sm_{driver.capability}")
    return found[0]
