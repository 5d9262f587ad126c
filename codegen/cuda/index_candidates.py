"""Selection of compressed rows among those of a token's candidate blocks, the only ones that are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.index_choice import add_choice
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """The kernel; a token's pool holds distinct blocks in ascending order, negative entries anywhere."""
    frame, attributes = Frame(op, operands, results, bounds), op.attributes()
    return add_choice(frame, target, int(attributes["topk"]), 1, True)
