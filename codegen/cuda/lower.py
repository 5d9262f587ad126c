"""Kernels as the engine's manifest records them: names replaced by numbers of arguments and dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from v41c.codegen.cuda.build import Cubin
from v41c.codegen.cuda.kernel import CudaKernel, Function, Launch
from v41c.manifest import CubinEntry, GridAxis, LaunchEntry, LaunchParameter


def cubin_entry(function: Function, file: str, cubin: Cubin) -> CubinEntry:
    """The entry of a compiled function."""
    return CubinEntry(
        file=file,
        module=function.module,
        function=cubin.function,
        parameters=list(function.parameters),
        constants=dict(function.constants),
        warps=cubin.warps,
        shared_bytes=cubin.shared_bytes,
        registers=cubin.registers,
        spill_bytes=cubin.spill_bytes,
        instructions=cubin.instructions,
    )


def launch_entry(kernel: CudaKernel, launch: Launch, dims: Sequence[str]) -> LaunchEntry:
    """The entry of one launch of a kernel; `dims` are the manifest's."""
    return LaunchEntry(
        cubin=launch.function.key(),
        parameters=[LaunchParameter(kernel.arguments.index(p.argument), p.offset) for p in launch.parameters],
        grid=[
            GridAxis(axis.count, None if axis.dim is None else list(dims).index(axis.dim), axis.tile)
            for axis in launch.grid
        ],
    )
