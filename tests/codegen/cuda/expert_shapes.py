"""Routers and mixtures of experts at the release's sizes, and the machine code that becomes of them."""

from __future__ import annotations

from pathlib import Path

from v41c.codegen.cuda import kernel_for
from v41c.codegen.cuda.build import Cubin, build_cubins
from v41c.ir.op import Op
from v41c.ir.ops.gate import Gate
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget

EXPERTS, CHOICES, WIDTH, INNER = 384, 6, 5120, 2304
Types = tuple[TensorType | None, ...]


def gate() -> tuple[Op, Types]:
    """The router, with biases for text and images."""
    bias = TensorType(DType.F32, (EXPERTS,))
    x, weight = TensorType(DType.BF16, ("T", WIDTH)), TensorType(DType.BF16, (EXPERTS, WIDTH))
    op = Gate(CHOICES, "sqrtsoftplus", 1.5, 1.0, True)
    return op, (x, weight, bias, bias, TensorType(DType.BOOL, ("T",)))


def layer(packed: bool = False) -> tuple[Op, Types]:
    """Routed experts of fp4 and a shared one of fp8, of inputs in bf16 or in packed rows."""
    x = TensorType(DType.U8, ("T", WIDTH + WIDTH // 32)) if packed else TensorType(DType.BF16, ("T", WIDTH))
    ids, weights = TensorType(DType.I32, ("T", CHOICES)), TensorType(DType.F32, ("T", CHOICES))
    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    stacks = tuple(TensorType(DType.F4E2M1, (EXPERTS, *shape)) for shape in shapes)
    scales = tuple(TensorType(DType.E8M0, (EXPERTS, rows, columns // 32)) for rows, columns in shapes)
    shared = tuple(TensorType(DType.F8E4M3, shape) for shape in shapes)
    shared_scales = tuple(TensorType(DType.E8M0, (rows // 32, columns // 32)) for rows, columns in shapes)
    op = MoeLayer(10.0, "fp8_e8m0_32", "fp8_e8m0_32", "bf16")
    return op, (x, ids, weights, *stacks, x, *shared, *scales, *shared_scales)


def compiled(case: tuple[Op, Types], target: CudaTarget, tokens: int, folder: Path) -> dict[str, Cubin]:
    """The cubins of an operation's launches, by function."""
    op, types = case
    kernel = kernel_for(op, types, op.infer_results(types), target, {"T": tokens})
    made = build_cubins([kernel], target, folder, folder / "cache")
    return {launch.function.name: made[launch.function.key()] for launch in kernel.launches}
