"""The first projections of attention into the workspace, and the norms that read them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu import packed
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.latent_norms import LatentRows
from v41c.codegen.cpu.product import Product, launch, matrix_of, weight_layouts
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import STORAGE, flat
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.latents import Latents
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Latents, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x, q_down, kv_down, cos = required(operands, 0, 1, 2, 5)
    rank, width, pairs = int(q_down.shape[0]), int(kv_down.shape[0]), int(cos.shape[1])
    bound, dtype = bound_of(x.shape[0], bounds), DType(op.out)

    def emit(body: Body) -> None:
        tokens, latents = body.size(x.shape[0]), flat(body.words.data, STORAGE[dtype])
        scales = body.operands[7:]
        products = [
            Product([matrix_of(kind, body.operands[1 + i], scales[i], target)], body.operands[0], latents, starts=at)
            for i, (kind, at) in enumerate(((q_down, (0, 0)), (kv_down, (0, bound * rank))))
        ]
        launch(products, tokens, bound)
        weights, tables = body.operands[3:5], body.operands[5:7]
        sources = (latents, latents)
        rows = LatentRows(
            sources, (weights[0], weights[1]), (tables[0], tables[1]), body.results, (rank, width), pairs, bound * rank
        )
        rows.emit(tokens, bound, op.norms)

    layouts = weight_layouts(op, q_down, target, 1, 7) | weight_layouts(op, kv_down, target, 2, 8)
    storage = {1: packed.WORDS[q_down.dtype], 2: packed.WORDS[kv_down.dtype]}
    words = -(-max(1, bound) * (rank + width) * dtype.bits // 32)
    return build_kernel(emit, op, operands, results, bounds, scratch_words=words, layouts=layouts, storage=storage)
