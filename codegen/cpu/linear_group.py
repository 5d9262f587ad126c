"""Several projections of one input in one launch (`ir.ops.linear_group`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from v41c.codegen.cpu.product import product_kernel
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.linear_group import MOST

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.targets.target import CpuTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CpuTarget,
    bounds: Mapping[str, int],
) -> CpuKernel:
    """x [T, K] · every weight [M, K]ᵀ."""
    weights = [(1 + i, 1 + MOST + i) for i in range(len(results))]
    return product_kernel(op, operands, results, target, bounds, weights)
