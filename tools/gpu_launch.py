"""CUDA kernels outside of engines: compiled, loaded on a driver, and bound to addresses as the runtime binds them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from v41c.cache import cache_folder
from v41c.codegen.cuda.build import build_cubins, functions_of
from v41c.codegen.cuda.kernel import CudaKernel, Launch
from v41c.codegen.cuda.lower import cubin_entry
from v41c.errors import UnsupportedError
from v41c.manifest import CubinEntry
from v41c.runtime.cuda import Driver
from v41c.targets.cuda import CudaTarget

#: groups that are compiled at a time, each by as many processes as there are processors
_TOGETHER = 4

#: what a launch of a function needs, and its machine code
Code = tuple[CubinEntry, bytes]


def compiled(kernels: Sequence[CudaKernel], target: CudaTarget) -> dict[str, Code]:
    """The code of the kernels' functions by key, from the cache of engines; UnsupportedError names one that fails."""
    functions = functions_of(kernels)
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        made = build_cubins(kernels, target, Path(folder), cache_folder() / "kernels")
        return {
            key: (cubin_entry(functions[key], f"{key}.cubin", cubin), Path(folder, f"{key}.cubin").read_bytes())
            for key, cubin in made.items()
        }


def compile_ahead(groups: Sequence[Sequence[CudaKernel]], target: CudaTarget) -> None:
    """Fill the cache with the code of all groups; what does not compile is left to whoever needs it.

    All at once, which keeps every processor busy; where that fails, what is left group by group.
    """

    def compile_group(kernels: Sequence[CudaKernel]) -> bool:
        try:
            compiled(kernels, target)
        except UnsupportedError:
            return False
        return True

    if not compile_group([kernel for group in groups for kernel in group]):
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(compile_group, groups))


class Loader:
    """Binds kernels on one driver; every function is loaded once. `code` gives the code of a kernel's functions."""

    def __init__(self, driver: Driver, code: Callable[[CudaKernel], Mapping[str, Code]]) -> None:
        self._driver = driver
        self._code = code
        self._loaded: dict[str, tuple[CubinEntry, Any]] = {}
        #: parameters that addresses point to
        self._kept: list[npt.NDArray[np.uint64]] = []

    def bind(self, kernel: CudaKernel, places: Mapping[str, int], dims: Mapping[str, int]) -> Callable[[], None]:
        """The kernel's launches as a function: `places` are the addresses of its buffers, by argument.

        Eight bytes per parameter, of which the driver reads as many as the function declares, and two null pointers
        after the last, as in `v41c.runtime.cuda`.
        """
        bound = [self._bind(kernel, launch, places, dims) for launch in kernel.launches]

        def run() -> None:
            for launch in bound:
                launch()

        return run

    def _bind(
        self, kernel: CudaKernel, launch: Launch, places: Mapping[str, int], dims: Mapping[str, int]
    ) -> Callable[[], None]:
        sizes = [axis.blocks(dims) for axis in launch.grid]
        if 0 in sizes:
            return lambda: None
        entry, function = self._load(kernel, launch)
        values = [
            places[p.argument] + p.offset if p.type.startswith("*") else dims[p.argument] for p in launch.parameters
        ]
        packed = np.array([*values, 0, 0], np.uint64)
        addresses = packed.ctypes.data + 8 * np.arange(len(packed), dtype=np.uint64)
        self._kept.append(packed)
        grid, threads = (sizes[0], sizes[1], sizes[2]), entry.warps * 32
        return lambda: self._driver.launch(function, grid, threads, entry.shared_bytes, addresses.ctypes.data)

    def _load(self, kernel: CudaKernel, launch: Launch) -> tuple[CubinEntry, Any]:
        key = launch.function.key()
        if key not in self._loaded:
            entry, cubin = self._code(kernel)[key]
            self._loaded[key] = entry, self._driver.kernel(cubin, entry.function, entry.shared_bytes)
        return self._loaded[key]
