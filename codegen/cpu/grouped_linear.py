"""Matrix product in independent groups of rows (`ir.ops.grouped_linear`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from v41c.codegen.cpu.product import product_kernel
from v41c.codegen.kernel import CpuKernel

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
    """x [T, G, K] · weight [G · M, K]ᵀ, group by group."""
    x = operands[0]
    groups = 1 if x is None else int(x.shape[1])
    return product_kernel(op, operands, results, target, bounds, groups=groups)
