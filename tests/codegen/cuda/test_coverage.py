"""A CUDA engine of any configuration can be made: every operation that the passes leave has a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traced import traced
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.kernel import Kernel
from v41c.compile import CompileOptions, pass_context, read_source
from v41c.init import init
from v41c.passes.pipeline import choose_passes, run_pipeline
from v41c.targets.cuda import SM_90
from v41c.traces import kept_trace


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        ("tiny-v41", "all"),
        ("tiny-v41", "remove-quantization,select-kernels"),
        ("release-config-only", "all"),
        ("release-config-only", "+pack-activations"),
    ],
)
def test_every_operation_of_an_engine(model: str, passes: str, tmp_path: Path) -> None:
    """Fused as far as the passes go, and not at all; the release's caches at a million tokens pass 2^31 bytes."""
    if model == "tiny-v41":
        source, module = traced(model)
    else:
        init(tmp_path / model, model, 1)
        source = read_source(tmp_path / model, no_weights=True)
        module = kept_trace(source)
    kernels: dict[str, Kernel] = {}
    options = CompileOptions(passes=passes, max_context=1 << 20)
    for _ in run_pipeline(module, pass_context(source.config, options, SM_90, kernels), choose_passes(passes)):
        pass
    assert kernels
    for kernel in kernels.values():
        assert isinstance(kernel, CudaKernel)
        assert kernel.launches, kernel.symbol
        for launch in kernel.launches:
            assert all(axis.count <= 65535 for axis in launch.grid[1:]), kernel.symbol
