"""Matrix product in groups and a round trip of what it gives (`ir.ops.grouped_linear_quantized`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.product import product_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: GroupedLinearQuantized,
    operands: Types,
    results: tuple[TensorType, ...],
    target: CpuTarget,
    bounds: Mapping[str, int],
) -> CpuKernel:
    """x [T, G, K] · weight [G · M, K]ᵀ, group by group; M is whole groups of the format."""
    groups = int(required(operands, 0)[0].shape[1])
    return product_kernel(op, operands, results, target, bounds, groups=groups, format=op.format)
