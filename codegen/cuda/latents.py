"""The first projections of attention and the norms behind them: one launch for one token.

The last block of a projection to finish norms its row. With more tokens one block would norm all of a tile's rows while
the others are gone: there the parts' own launches do better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.latent_norms import key_row, query_row, row_arguments
from v41c.codegen.cuda.product import constants, product_block, shared_sums, tiling
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel | None:
    """x [T, K], weights [Q, K] and [KV, K], cos and sin [T, P], to q' and kv'; None for more tokens than one."""
    frame = Frame(op, operands, results, bounds)
    tokens = frame.type_of("x").shape[0]
    weights = (frame.type_of("q_down"), frame.type_of("kv_down"))
    if frame.bound(tokens) > 1 or weights[0].dtype != weights[1].dtype:
        return None
    query, keys = (int(weight.shape[0]) for weight in weights)
    columns = int(weights[0].shape[1])
    tile = tiling(weights[0].dtype, (query, keys), columns, 1, target)
    buffers: Arguments = {
        name: frame.operand(name)
        for name in ("x", "q_down", "kv_down", "q_scale", "kv_scale", "q_weight", "kv_weight", "cos", "sin")
    }
    q_partials, q_counters = shared_sums(frame, tile, query, tokens)
    kv_partials, kv_counters = shared_sums(frame, tile, keys, tokens)
    element = frame.result(1).element
    first = tile.tiles(query) * tile.splits
    blocks = first + tile.tiles(keys) * tile.splits
    frame.launch(
        latents_block,
        buffers
        | {"q": frame.workspace(query, element), "kv": frame.workspace(keys, element)}
        | {"q_partials": q_partials, "q_counters": q_counters, "kv_partials": kv_partials, "kv_counters": kv_counters}
        | {"finished": frame.counters(2), "FIRST": first, "BLOCKS": blocks}
        | constants(frame, tile, columns, tokens)
        | row_arguments(frame, query, keys, int(frame.type_of("cos").shape[1])),
        (blocks, frame.tiles(tokens)),
        warps=tile.warps,
        stages=tile.stages,
    )
    return frame.kernel()


@jit
def latents_block(
    x: tl.tensor,
    q_down: tl.tensor,
    kv_down: tl.tensor,
    q_scale: tl.tensor,
    kv_scale: tl.tensor,
    q_weight: tl.tensor,
    kv_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    q_partials: tl.tensor,
    kv_partials: tl.tensor,
    q_counters: tl.tensor,
    kv_counters: tl.tensor,
    finished: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    T: tl.tensor,
    FIRST: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    EPS: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    PAIRS: tl.constexpr,
    SHIFT: tl.constexpr,
    BQ: tl.constexpr,
    BKV: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    Q_GROUP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    KV_GROUP: tl.constexpr,
) -> None:
    """A block of one of the products; FIRST of BLOCKS are the query's. What differs is chosen: they share a loop."""
    block = tl.program_id(0)
    token = tl.program_id(1)
    is_query = block < FIRST
    scale = q_scale
    if kv_scale is not None:
        scale = tl.where(is_query, q_scale, kv_scale)
    partials = q_partials
    counters = q_counters
    if kv_partials is not None:
        partials = tl.where(is_query, q_partials, kv_partials)
        counters = tl.where(is_query, q_counters, kv_counters)
    product_block(
        x,
        tl.where(is_query, q_down, kv_down),
        scale,
        tl.where(is_query, q, kv),
        partials,
        counters,
        T,
        tl.where(is_query, block, block - FIRST),
        token,
        tl.where(is_query, Q, KV),
        K,
        1,
        SPLITS,
        BM,
        BT,
        BK,
        STAGES,
        SCALED,
        1,
        None,
    )
    # every thread's stores come before the count, and other blocks' stores before what is read after it
    tl.debug_barrier()
    mine = finished + tl.where(is_query, 0, 1)
    before = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu")
    if before == tl.where(is_query, FIRST, BLOCKS - FIRST) - 1:
        tl.store(mine, 0)
        if is_query:
            query_row(q, q_weight, query, token, EPS, Q, BQ, Q_GROUP, Q_FORMAT)
        else:
            key_row(kv, kv_weight, cos, sin, keys, token, EPS, KV, PAIRS, SHIFT, BKV, KV_GROUP, KV_FORMAT)
