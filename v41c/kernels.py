"""What the kernels of a CUDA engine are made of, and the least time that they can take on the target's hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from v41c.ir.op import Cost
from v41c.manifest import CubinEntry, LaunchEntry
from v41c.operations import Operation
from v41c.targets.cuda import CudaTarget

#: instructions that multiply matrices
_PRODUCTS = ("wgmma", "tcgen05", "mma")
#: registers are given to a warp, shared memory to a block, in multiples of these
_REGISTER_UNIT, _SHARED_UNIT = 256, 128
#: of every block's shared memory, for the driver
_RESERVED_SHARED_BYTES = 1024
#: quarters of a multiprocessor, each with its warps and a quarter of the registers
_PARTITIONS = 4


@dataclass(frozen=True)
class KernelRow:
    """All calls of one kernel in a step.

    `bytes` and `flops` are the operations' own, so that `bound_seconds` is what no kernel for them can beat: the longer
    of memory traffic at full bandwidth and arithmetic at the peak of the units that the kernel computes on, launches
    aside. Of its functions, `occupancy` is the least share of a multiprocessor's warps, `registers` and `shared_bytes`
    are the most, `spill_bytes` the sum.
    """

    kernel: str
    op: str
    calls: int
    launches: int
    bytes: int
    flops: int
    bound_seconds: float
    memory_bound: bool
    occupancy: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The row as an object."""
        return asdict(self)


def kernel_rows(
    operations: Iterable[Operation],
    launches: Mapping[str, Sequence[LaunchEntry]],
    cubins: Mapping[str, CubinEntry],
    target: CudaTarget,
) -> list[KernelRow]:
    """A row for every kernel of a step's operations, those with the longest bound first; views have none."""
    costs: dict[str, Cost] = {}
    names: dict[str, str] = {}
    for operation in operations:
        if operation.kernel is not None:
            costs[operation.kernel] = costs.get(operation.kernel, Cost()) + operation.cost
            names[operation.kernel] = operation.op
    rows = [
        _row(kernel, names[kernel], cost, [cubins[launch.cubin] for launch in launches[kernel]], target)
        for kernel, cost in costs.items()
    ]
    return sorted(rows, key=lambda row: (-row.bound_seconds, row.kernel))


def _row(kernel: str, op: str, cost: Cost, functions: Sequence[CubinEntry], target: CudaTarget) -> KernelRow:
    instructions: dict[str, int] = {}
    for function in functions:
        for name, count in function.instructions.items():
            instructions[name] = instructions.get(name, 0) + count
    traffic = cost.weight_bytes + cost.state_bytes + cost.activation_bytes
    moving, computing = traffic / target.memory_bytes_per_second, cost.flops / _peak(instructions, target)
    return KernelRow(
        kernel=kernel,
        op=op,
        calls=cost.launches,
        launches=cost.launches * len(functions),
        bytes=traffic,
        flops=cost.flops,
        bound_seconds=max(moving, computing),
        memory_bound=moving >= computing,
        occupancy=min((occupancy(function, target) for function in functions), default=0.0),
        registers=max((function.registers for function in functions), default=0),
        spill_bytes=sum(function.spill_bytes for function in functions),
        shared_bytes=max((function.shared_bytes for function in functions), default=0),
        instructions=instructions,
    )


def _peak(instructions: Mapping[str, int], target: CudaTarget) -> float:
    """Operations per second of the fastest units that instructions are for; fp4 is multiplied at the rate of fp8."""
    if "block_scaled" in instructions:
        return target.f8_flops
    return target.bf16_flops if any(name in instructions for name in _PRODUCTS) else target.f32_flops


def occupancy(function: CubinEntry, target: CudaTarget) -> float:
    """Share of a multiprocessor's warps that a function's blocks can fill at a time.

    Registers, shared memory and the count of blocks limit it (CUDA C++ Best Practices Guide, "Calculating Occupancy").
    """
    warp_registers = _rounded(32 * function.registers, _REGISTER_UNIT)
    resident_warps = target.registers_per_multiprocessor // _PARTITIONS // warp_registers * _PARTITIONS
    shared = _rounded(function.shared_bytes, _SHARED_UNIT) + _RESERVED_SHARED_BYTES
    blocks = min(
        target.blocks_per_multiprocessor,
        min(resident_warps, target.warps_per_multiprocessor) // function.warps,
        (target.shared_bytes_per_block + _RESERVED_SHARED_BYTES) // shared,
    )
    return blocks * function.warps / target.warps_per_multiprocessor


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
