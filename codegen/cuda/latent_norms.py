"""The norms behind the first projections of attention: a block a row of the query's latent, and one a row of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import round_groups
from v41c.codegen.cuda.packed_rows import write_row
from v41c.codegen.cuda.rms_norm import normed
from v41c.codegen.cuda.rope import rotated_pairs
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.formats import FORMATS
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
    """q [T, Q] and kv [T, KV], cos and sin [T, P], to q' and kv'."""
    frame = Frame(op, operands, results, bounds)
    tokens, query = frame.type_of("q").shape
    keys, pairs = int(frame.type_of("kv").shape[1]), int(frame.type_of("cos").shape[1])
    buffers: Arguments = {name: frame.operand(name) for name in ("q", "q_weight", "kv", "kv_weight", "cos", "sin")}
    frame.launch(latent_rows, buffers | row_arguments(frame, int(query), keys, pairs), (frame.tiles(tokens), 2))
    return frame.kernel()


def row_arguments(frame: Frame, query: int, keys: int, pairs: int) -> Arguments:
    """What rows of `query` and `keys` elements, the last 2 x `pairs` of them rotated, are rounded to, and where."""
    attributes = frame.op.attributes()
    formats = {name: str(attributes[name]) for name in ("q_format", "kv_format")}
    groups = {name: FORMATS[format].group if format != "none" else 1 for name, format in formats.items()}
    shift = (keys - 2 * pairs) % 2
    found: Arguments = {"query": frame.result(0), "keys": frame.result(1), "EPS": float(attributes["eps"])}
    found |= {"Q": query, "KV": keys, "PAIRS": pairs, "SHIFT": shift}
    found |= {"BQ": power_of_two(query), "BKV": power_of_two(keys + shift)}
    found |= {"Q_FORMAT": formats["q_format"], "Q_GROUP": groups["q_format"]}
    return found | {"KV_FORMAT": formats["kv_format"], "KV_GROUP": groups["kv_format"]}


@jit
def latent_rows(
    q: tl.tensor,
    q_weight: tl.tensor,
    kv: tl.tensor,
    kv_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
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
    """A row of one of both. SHIFT is what the row of keys starts later by, so that pairs lie at even elements."""
    if tl.program_id(1) == 0:
        query_row(q, q_weight, query, tl.program_id(0), EPS, Q, BQ, Q_GROUP, Q_FORMAT)
    else:
        key_row(kv, kv_weight, cos, sin, keys, tl.program_id(0), EPS, KV, PAIRS, SHIFT, BKV, KV_GROUP, KV_FORMAT)


@jit
def query_row(
    q: tl.tensor,
    weight: tl.tensor,
    query: tl.tensor,
    token: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """A token's row of the query latent, normed and rounded; a `query` of u8 takes packed rows of bf16."""
    token = token.to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = _normed_row(q + token * WIDTH, weight, column, EPS, WIDTH)
    if query.dtype.element_ty == tl.uint8:
        rows = query + token * (WIDTH + WIDTH // GROUP)
        write_row(rows, values.to(tl.bfloat16).to(tl.float32), FORMAT, GROUP, WIDTH, BLOCK)
    else:
        rounded = _rounded(values, query.dtype.element_ty, BLOCK, GROUP, FORMAT)
        tl.store(query + token * WIDTH + column, rounded, mask=column < WIDTH)


@jit
def key_row(
    kv: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    token: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """A token's row of window keys, normed, rotated and rounded."""
    token = token.to(tl.int64)
    column = tl.arange(0, BLOCK) - SHIFT
    row = _normed_row(kv + token * WIDTH, weight, column, EPS, WIDTH)
    pair = tl.arange(0, BLOCK // 2) - (WIDTH - 2 * PAIRS + SHIFT) // 2
    inside = (pair >= 0) & (pair < PAIRS)
    cosine = tl.load(cos + token * PAIRS + pair, mask=inside, other=1.0)
    sine = tl.load(sin + token * PAIRS + pair, mask=inside, other=0.0)
    pairs = tl.reshape(row.to(keys.dtype.element_ty).to(tl.float32), (BLOCK // 2, 2))
    turned = tl.where(inside[:, None], rotated_pairs(pairs, cosine, sine), pairs)
    rounded = _rounded(tl.reshape(turned, (BLOCK,)), keys.dtype.element_ty, BLOCK, GROUP, FORMAT)
    tl.store(keys + token * WIDTH + column, rounded, mask=(column >= 0) & (column < WIDTH))


@jit
def _normed_row(
    x: tl.tensor, weight: tl.tensor, column: tl.tensor, EPS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    inside = (column >= 0) & (column < WIDTH)
    # past the first-level cache, where other blocks' stores are not seen
    values = tl.load(x + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return normed(values, tl.load(weight + column, mask=inside, other=0.0).to(tl.float32), EPS, WIDTH)


@jit
def _rounded(
    values: tl.tensor, kind: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr
) -> tl.tensor:
    """f32 values rounded to a type, then to a format and back where there is one."""
    rounded = values.to(kind)
    if FORMAT != "none":
        groups = tl.reshape(rounded.to(tl.float32), (BLOCK // GROUP, GROUP))
        rounded = tl.reshape(round_groups(groups, FORMAT), (BLOCK,)).to(kind)
    return rounded
