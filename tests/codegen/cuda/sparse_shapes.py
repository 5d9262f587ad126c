"""Attention, the indexer and the writes of caches at the release's sizes, and the machine code that becomes of them."""

from __future__ import annotations

from pathlib import Path

from v41c.codegen.cuda import kernel_for
from v41c.codegen.cuda.build import Cubin, build_cubins
from v41c.ir.op import Op
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.types import DType, TensorType, f32, i32
from v41c.targets.cuda import CudaTarget

HEADS, WIDTH, WINDOW, PLACES, CONTEXT = 64, 512, 128, 512, 1 << 20
INDEX_SCALE = 128**-0.5


def cases() -> dict[str, tuple[Op, tuple[TensorType | None, ...]]]:
    """Operations and operand types by name."""
    row, kv = i32("T"), TensorType(DType.BF16, ("T", WIDTH))
    step = (TensorType(DType.BF16, ("T", HEADS, WIDTH)), kv, f32(HEADS))
    ring = TensorType(DType.U8, ("S", WINDOW, WIDTH + WIDTH // 32))
    tables = (f32("T", 32), f32("T", 32))
    compressed = TensorType(DType.U8, ("S", "C1", WIDTH // 2 + WIDTH // 16))
    index = (TensorType(DType.BF16, ("T", 32, 128)), TensorType(DType.BF16, ("T", 32)))
    keys = TensorType(DType.U8, ("S", "C1", 68))
    scale = WIDTH**-0.5
    exact_step = (f32("T", HEADS, WIDTH), f32("T", WIDTH), f32(HEADS), f32("S", WINDOW, WIDTH), row, row, row, row)
    exact_index = (f32("T", 32, 128), f32("T", 32), f32("S", "C1", 128))
    return {
        "attend": (Attend(scale), (*step, ring, row, row, row, row, *tables, compressed, i32("T", PLACES))),
        "draft": (Attention(scale, False), (*step, ring, row, row, row, row, None, None)),
        "exact attend": (Attend(scale), (*exact_step, *tables, f32("S", "C1", WIDTH), i32("T", PLACES))),
        "exact index_topk": (IndexTopk(1, PLACES, INDEX_SCALE, 8), (*exact_index, row, row, None)),
        "index_topk": (IndexTopk(1, PLACES, INDEX_SCALE, 8), (*index, keys, row, row, None)),
        "index_candidates": (IndexCandidates(1, PLACES, INDEX_SCALE, 8), (*index, keys, row, row, i32("T", 2048))),
        "candidate_blocks": (CandidateBlocks(1, 2048, 8, INDEX_SCALE), (*index, keys, row, row)),
        "cache_write": (CacheWrite(2, "fp4_e4m3_16"), (compressed, kv, row, row, row)),
        "compress_pool": (
            CompressPool(2, "bf16"),
            (f32("S", 6, 2, WIDTH), f32("T", WIDTH), f32("T", WIDTH), row, row, row),
        ),
    }


def compiled(name: str, target: CudaTarget, tokens: int, folder: Path) -> dict[str, Cubin]:
    """The cubins of a case's launches, by function."""
    op, types = cases()[name]
    bounds = {"T": tokens, "S": 64, "C1": CONTEXT}
    kernel = kernel_for(op, types, op.infer_results(types), target, bounds)
    # lists are bounded by tokens and places, splits by the processor: nothing grows with the context
    assert kernel.workspace_bytes <= 80 << 20
    made = build_cubins([kernel], target, folder, folder / "cache")
    return {launch.function.name: made[launch.function.key()] for launch in kernel.launches}
