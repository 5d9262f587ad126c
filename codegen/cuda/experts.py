"""Mixtures of experts in two launches: gate, up and activation; down and the sum over a token's experts.

A block takes some rows of one expert's weights and the tokens that chose it:

- one token: a block for each of its experts, on the vector units (memory-bound; `fp4` has the arithmetic);
- up to 16: a block for each pair of a token and a choice. The first pair with an expert takes every token that chose
  it, the others end at once, so that weights are read once and nothing has to be sorted;
- more: pairs are sorted by expert in a launch of their own, integers only, and cut into tiles of one expert's tokens.
  Tile i of expert e is number ⌊start(e) / BT⌋ + e + i, which no two tiles share.

The shared expert is one more expert that every token chose. Outputs of pairs lie in the workspace, as the operation
rounds them, until the last block of some rows adds them up in the order of the experts. A token's experts are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from v41c.codegen.cuda.expert_tiles import assigned, products, sort_pairs
from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import Axis, CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import round_groups
from v41c.codegen.cuda.packed_rows import write_tile
from v41c.codegen.cuda.rows import power_of_two
from v41c.codegen.cuda.swiglu import gated
from v41c.errors import UnsupportedError
from v41c.ir import formats, packed
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget

#: token counts up to which pairs are matched in the blocks themselves
_FEW = 16


@dataclass(frozen=True)
class Tile:
    """Rows of weights, tokens and columns of a block's step; columns of the shared expert's."""

    m: int
    t: int
    k: int
    shared_k: int
    #: the tensor cores apply the scales of packed rows and of the weights
    scaled: bool = False


def tile_of(weight: TensorType, tokens: int, packed: bool, target: CudaTarget) -> Tile:
    """The tile for a stack of weights at up to `tokens` tokens, 4 warps a block.

    One token: 32 rows, a group of the activation's format. A thread has 4 loads of 16 bytes of fp4 in flight for each
    matrix, and release experts make 504 blocks. More: 64 rows fill the tensor cores' first operand. A release step of
    512 tokens gives an expert 8 of them on average, so that tiles wider than 32 would multiply zeros. Tensor cores that
    apply the scales of packed rows take 128 rows where accumulators lie in tensor memory.
    """
    if tokens == 1:
        return Tile(32, 1, 512 if weight.dtype == DType.F4E2M1 else 128, 128)
    columns = 32 if weight.dtype == DType.F32 else 128
    scaled = packed and weight.dtype in (DType.F4E2M1, DType.F8E4M3) and target.has_block_scaled_mma
    rows = 128 if scaled and target.has_tcgen05 else 64
    return Tile(rows, 16 if tokens <= _FEW else 32, columns, columns, scaled)


@dataclass(frozen=True)
class Experts:
    """The launches of `moe_experts`; of `moe_layer`, if there is a `shared_format`."""

    frame: Frame
    limit: float
    format: str
    shared_format: str | None = None
    #: dtype of the shared expert's products
    shared_out: str = "f32"

    def kernel(self, target: CudaTarget) -> CudaKernel:
        """The kernel, or UnsupportedError for widths that are no whole groups."""
        self._check(target)
        frame, stack = self.frame, self.frame.type_of("w1")
        width, inner = int(stack.shape[2]), int(stack.shape[1])
        tile = tile_of(stack, self._bound, self._packed, target)
        inputs: Arguments = {"x": frame.operand("x"), "weights": frame.operand("weights")}
        inputs |= {"M": inner, "K": width, "LIMIT": self.limit} | _format("", self.format)
        outputs: Arguments = {"out": frame.result(0), "M": width, "K": inner}
        outputs["SLOTS"] = power_of_two(self._choices)
        pairs, element = self._bound * self._choices, _element(frame.type_of("x").dtype)
        between = self._hidden("", pairs, inner, element, self.format)
        inputs |= between | self._weights("w1", "w3")
        outputs |= between | {"parts": frame.workspace(pairs * width, element)} | self._weights("w2")
        rows = max(inner, self._add_shared(inputs, outputs))
        common = self._common(tile)
        frame.launch(expert_hidden, common | inputs, self._grid(rows, tile), stages=3)
        outputs["counters"] = frame.counters(-(-width // tile.m))
        frame.launch(expert_outputs, common | outputs, self._grid(width, tile), stages=3)
        return frame.kernel()

    @property
    def _bound(self) -> int:
        return self.frame.bound(self.frame.type_of("ids").shape[0])

    @property
    def _choices(self) -> int:
        return int(self.frame.type_of("ids").shape[1])

    def _check(self, target: CudaTarget) -> None:
        for prefix, name in (("", self.format), ("shared_", self.shared_format)):
            if name is None:
                continue
            kind = self.frame.type_of(f"{prefix}w1")
            inner, width = (int(dim) for dim in kind.shape[-2:])
            unit = 32 if kind.dtype in (DType.F4E2M1, DType.F8E4M3) else 1
            if inner % max(_group(name), unit) or width % unit:
                raise UnsupportedError(
                    f"{self.frame.op.name()} on {target.name}: {prefix}w1: expected whole groups of its formats, "
                    f"got {inner} rows of {width}"
                )

    @property
    def _packed(self) -> bool:
        return self.frame.type_of("x").dtype == DType.U8

    def _hidden(self, prefix: str, rows: int, inner: int, element: str, format: str) -> Arguments:
        """Inputs of the last products: packed rows where x has them and the format is theirs, from 16 bytes to 16."""
        name, stride = f"{prefix.lower()}hidden", inner
        if self._packed and format == packed.FORMAT:
            element, stride = "u8", -(-formats.FORMATS[format].row_bytes(inner) // 16) * 16
        return {name: self.frame.workspace(rows * stride, element), f"{prefix}HIDDEN_ROW": stride}

    def _weights(self, *names: str) -> Arguments:
        """Weights and their scales; fp4 as words of eight values."""
        found: Arguments = {}
        for name in names:
            weight = self.frame.operand(name)
            words = weight is not None and self.frame.type_of(name).dtype == DType.F4E2M1
            found[name] = weight.cast("i32") if weight is not None and words else weight
            found[f"{name}_scale"] = self.frame.operand(f"{name}_scale")
        return found

    def _add_shared(self, inputs: Arguments, outputs: Arguments) -> int:
        """The shared expert's arguments of both launches; how many rows its first products have."""
        frame = self.frame
        if self.shared_format is None:
            names = [f"shared_{name}{scale}" for name in ("w1", "w3") for scale in ("", "_scale")]
            inputs |= dict.fromkeys(("shared_x", "shared_hidden", *names)) | {"SHARED_INNER": 0}
            inputs |= _format("SHARED_", "none") | {"SHARED_HIDDEN_ROW": 0}
            outputs |= dict.fromkeys(("shared_hidden", "shared_w2", "shared_w2_scale", "shared_parts"))
            outputs |= {"SHARED_INNER": 0, "SHARED_HIDDEN_ROW": 0}
            return 0
        inner, width = (int(dim) for dim in frame.type_of("shared_w1").shape)
        element = _element(DType(self.shared_out))
        made = self._hidden("SHARED_", self._bound, inner, element, self.shared_format) | {"SHARED_INNER": inner}
        inputs |= made | self._weights("shared_w1", "shared_w3") | _format("SHARED_", self.shared_format)
        inputs["shared_x"] = frame.operand("shared_x")
        outputs |= made | self._weights("shared_w2")
        outputs["shared_parts"] = frame.workspace(self._bound * width, element)
        return inner

    def _common(self, tile: Tile) -> Arguments:
        """Arguments of both launches, and the launch that sorts pairs if there are many."""
        frame, stack = self.frame, self.frame.type_of("w1")
        experts, tokens = int(stack.shape[0]), self.frame.type_of("ids").shape[0]
        given: Arguments = {"ids": frame.operand("ids"), "T": frame.extent(tokens)}
        given |= {"CHOICES": self._choices, "EXPERTS": experts}
        made: Arguments = {"starts": None, "order": None}
        if self._bound > _FEW:
            pairs = self._bound * self._choices
            made = {"starts": frame.workspace(experts + 1, "i32"), "order": frame.workspace(pairs, "i32")}
            blocks = -(-(experts + 1 + pairs) // 128)
            sizes: Arguments = {"BLOCK": 128, "STEP": 32}
            frame.launch(sort_pairs, given | made | sizes, (blocks, frame.tiles(tokens, self._bound)))
        tiles: Arguments = {"BM": tile.m, "BT": tile.t, "BK": tile.k, "SHARED_BK": tile.shared_k, "SCALED": tile.scaled}
        tiles["BOUND"] = power_of_two(self._choices if self._bound <= _FEW else experts)
        return given | made | tiles | {"FP4": stack.dtype == DType.F4E2M1, "SHARED": self._shared_places(tile)}

    def _shared_places(self, tile: Tile) -> int:
        """Places of the shared expert: one for every token, or one for every tile of sorted ones."""
        if self.shared_format is None:
            return 0
        return 1 if self._bound <= _FEW else -(-self._bound // tile.t)

    def _grid(self, rows: int, tile: Tile) -> tuple[Axis | int, ...]:
        tokens, row_tiles = self.frame.type_of("ids").shape[0], -(-rows // tile.m)
        if self._bound <= _FEW:
            return row_tiles, self.frame.tiles(tokens, 1, self._choices + self._shared_places(tile))
        tiles = self._bound * self._choices // tile.t + int(self.frame.type_of("w1").shape[0])
        return row_tiles, tiles + self._shared_places(tile), self.frame.tiles(tokens, self._bound)


def _element(dtype: DType) -> str:
    return "fp32" if dtype == DType.F32 else "bf16"


def _group(format: str) -> int:
    return 1 if format == "none" else formats.FORMATS[format].group


def _format(prefix: str, name: str) -> Arguments:
    return {f"{prefix}FORMAT": name, f"{prefix}GROUP": _group(name)}


@jit
def _store_hidden(
    gate: tl.tensor,
    up: tl.tensor,
    gain: tl.tensor,
    hidden: tl.tensor,
    rows: tl.tensor,
    m: tl.tensor,
    M: tl.constexpr,
    ROW: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """hidden[rows, m] = gain · silu(min(gate, LIMIT)) · clamp(up, ±LIMIT), rounded to its dtype, then to FORMAT.

    gate and up are [BT, BM]. A `hidden` of u8 takes packed rows, ROW bytes apart, of bf16 that was rounded.
    """
    PACKED: tl.constexpr = hidden.dtype.element_ty == tl.uint8
    dtype = tl.bfloat16 if PACKED else hidden.dtype.element_ty
    h = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), LIMIT)
    if gain is not None:
        h = h * gain[:, None]
    h = h.to(dtype)
    place = hidden + rows * ROW
    if PACKED:
        write_tile(place, rows >= 0, m, m < M, h.to(tl.float32), FORMAT, GROUP, M)
    else:
        if FORMAT != "none":
            groups = tl.reshape(h.to(tl.float32), (BT * BM // GROUP, GROUP))
            h = tl.reshape(round_groups(groups, FORMAT), (BT, BM)).to(dtype)
        tl.store(place[:, None] + m[None, :], h, mask=(rows[:, None] >= 0) & (m[None, :] < M))


@jit
def expert_hidden(
    x: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    w1: tl.tensor,
    w1_scale: tl.tensor,
    w3: tl.tensor,
    w3_scale: tl.tensor,
    hidden: tl.tensor,
    shared_x: tl.tensor,
    shared_w1: tl.tensor,
    shared_w1_scale: tl.tensor,
    shared_w3: tl.tensor,
    shared_w3_scale: tl.tensor,
    shared_hidden: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    T: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    BOUND: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    HIDDEN_ROW: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    SHARED_HIDDEN_ROW: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED_FORMAT: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SHARED_BK: tl.constexpr,
    SCALED: tl.constexpr,
    FP4: tl.constexpr,
) -> None:
    """The inputs of last products: hidden [pairs, M] of routed experts, shared_hidden [T, SHARED_INNER]."""
    ROW: tl.constexpr = K + (K // 32 if x.dtype.element_ty == tl.uint8 else 0)
    routed, shared, expert, rows = assigned(
        ids, starts, order, T, tl.program_id(1), CHOICES, EXPERTS, SHARED, BT, BOUND
    )
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    if routed & (tl.program_id(0) * BM < M):
        inputs = tl.where(rows >= 0, rows // CHOICES, -1)
        gate, up = products(x, inputs, w1, w1_scale, w3, w3_scale, expert, m, M, K, ROW, BM, BT, BK, FP4, SCALED)
        gain = tl.load(weights + rows, mask=rows >= 0, other=0.0)
        _store_hidden(gate, up, gain, hidden, rows, m, M, HIDDEN_ROW, BT, BM, LIMIT, FORMAT, GROUP)
    if shared_x is not None:
        own = shared & (tl.program_id(0) * BM < SHARED_INNER)
        if own:
            gate, up = products(
                *(shared_x, rows, shared_w1, shared_w1_scale, shared_w3, shared_w3_scale),
                *(tl.zeros((), tl.int32), m, SHARED_INNER, K, ROW, BM, BT, SHARED_BK, False, SCALED),
            )
            _store_hidden(
                *(gate, up, None, shared_hidden, rows, m, SHARED_INNER, SHARED_HIDDEN_ROW),
                *(BT, BM, LIMIT, SHARED_FORMAT, SHARED_GROUP),
            )


@jit
def expert_outputs(
    hidden: tl.tensor,
    ids: tl.tensor,
    w2: tl.tensor,
    w2_scale: tl.tensor,
    parts: tl.tensor,
    shared_hidden: tl.tensor,
    shared_w2: tl.tensor,
    shared_w2_scale: tl.tensor,
    shared_parts: tl.tensor,
    out: tl.tensor,
    counters: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    T: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    BOUND: tl.constexpr,
    SLOTS: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    HIDDEN_ROW: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    SHARED_HIDDEN_ROW: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SHARED_BK: tl.constexpr,
    SCALED: tl.constexpr,
    FP4: tl.constexpr,
) -> None:
    """parts [pairs, M] and shared_parts [T, M] by products; out [T, M] by the last block of a tile of rows."""
    routed, shared, expert, rows = assigned(
        ids, starts, order, T, tl.program_id(1), CHOICES, EXPERTS, SHARED, BT, BOUND
    )
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (rows[:, None] >= 0) & (m[None, :] < M)
    if routed:
        y, _ = products(hidden, rows, w2, w2_scale, None, None, expert, m, M, K, HIDDEN_ROW, BM, BT, BK, FP4, SCALED)
        tl.store(parts + rows[:, None] * M + m[None, :], y.to(parts.dtype.element_ty), mask=inside)
    if shared_hidden is not None:
        place = shared_parts + rows[:, None] * M + m[None, :]
        if shared:
            y, _ = products(
                *(shared_hidden, rows, shared_w2, shared_w2_scale, None, None),
                *(tl.zeros((), tl.int32), m, M, SHARED_INNER, SHARED_HIDDEN_ROW, BM, BT, SHARED_BK, False, SCALED),
            )
            tl.store(place, y.to(shared_parts.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    done = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(1) - 1:
        tl.debug_barrier()
        _add_up(ids, parts, shared_parts, out, T, m, CHOICES, SLOTS, M, BM, BT)
        tl.store(counters + tl.program_id(0), 0)


@jit
def _add_up(
    ids: tl.tensor,
    parts: tl.tensor,
    shared_parts: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    m: tl.tensor,
    CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """out[t, m] = Σ parts[t, choice, m], experts ascending, + shared_parts[t, m] in f32: what blocks wrote just now."""
    slot = tl.arange(0, SLOTS)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        inside = (t[:, None] < T) & (m[None, :] < M)
        chosen = (t[:, None] < T) & (slot[None, :] < CHOICES)
        expert = tl.load(ids + t[:, None] * CHOICES + slot[None, :], mask=chosen, other=2**31 - 1)
        rank = tl.sum((expert[:, None, :] < expert[:, :, None]).to(tl.int32), axis=2)
        total = tl.zeros((BT, BM), tl.float32)
        for number in tl.static_range(CHOICES):
            choice = tl.max(tl.where(rank == number, slot[None, :], 0), axis=1)
            place = parts + (t * CHOICES + choice)[:, None] * M + m[None, :]
            total += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if shared_parts is not None:
            place = shared_parts + t[:, None] * M + m[None, :]
            total += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + t[:, None] * M + m[None, :], total.to(out.dtype.element_ty), mask=inside)
