"""Every golden unit against the references of the operations: integers and quantised values bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from v41c.ir import formats
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.ops.route import Route

UNITS = load_file(Path(__file__).parent / "data" / "golden" / "units.safetensors")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("iterations", [20, 1, 3])
def test_sinkhorn(iterations: int) -> None:
    """The mixes go in as a stream of root mean square 1 that `fn` reads them off again."""
    mixes, width = UNITS["sinkhorn.mixes"], 8192
    stream = torch.zeros(len(mixes), 4 * width)
    stream[:, :24] = mixes
    stream[:, 24] = (4 * width - mixes.square().sum(1)).sqrt()
    fn = torch.zeros(24, 4 * width)
    fn[:, :24] = torch.eye(24)
    op = HcCoefficients(0.0, 1e-6, iterations)
    found = op.reference(stream.view(-1, 4, width), fn, UNITS["sinkhorn.scale"], UNITS["sinkhorn.base"])
    for name, tensor in zip(("pre", "post", "comb"), found, strict=True):
        torch.testing.assert_close(tensor, UNITS[f"sinkhorn.i{iterations}.{name}"], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("unit", "name", "elements"),
    [
        ("act_quant", "fp8_e8m0_32", "q_bytes"),
        ("fp4_e8m0", "fp4_e8m0_32", "packed"),
        ("fp4_e4m3", "fp4_e4m3_16", "packed"),
    ],
)
def test_round_trips(unit: str, name: str, elements: str) -> None:
    """Ties, zeros, tiny and huge values: elements, scales and what they stand for."""
    x = UNITS[f"{unit}.x"].bfloat16()
    packed = torch.cat((UNITS[f"{unit}.{elements}"], UNITS[f"{unit}.scale_bytes"]), -1)
    assert torch.equal(formats.pack(x, name), packed)
    assert torch.equal(formats.round_trip(x, name).float(), UNITS[f"{unit}.inplace"])
    assert torch.equal(formats.unpack(packed, name, x.shape[-1]).bfloat16().float(), UNITS[f"{unit}.inplace"])
    groups = x.float().unflatten(-1, (-1, formats.FORMATS[name].group))
    assert torch.equal(formats.scales(groups, formats.FORMATS[name]).squeeze(-1), UNITS[f"{unit}.scale"])


def test_scales_at_exact_powers_of_two() -> None:
    """A maximum of 448·2^k has the scale 2^k, and the next number above it 2^(k+1)."""
    exponents = torch.arange(-10, 11)
    amax = 448.0 * 2.0**exponents
    format = formats.FORMATS["fp8_e8m0_32"]
    found = formats.scales(amax.unsqueeze(1), format).squeeze(1) / 2.0**exponents
    assert torch.equal(found, UNITS["act_quant.pow2_amax448"])
    above = torch.nextafter(amax, torch.tensor(torch.inf))
    assert torch.equal(formats.scales(above.unsqueeze(1), format).squeeze(1), 2.0 ** (exponents + 1))


def test_fp8_product() -> None:
    x = formats.round_trip(UNITS["fp8_gemm.x"].bfloat16(), "fp8_e8m0_32")
    weight = UNITS["fp8_gemm.w_bytes"].view(torch.float8_e4m3fn)
    scale = UNITS["fp8_gemm.w_scale_bytes"].view(torch.float8_e8m0fnu)
    assert relative(Linear("f32").reference(x, weight, scale), UNITS["fp8_gemm.y_f64"]) <= 1e-6
    assert torch.equal(Linear("bf16").reference(x, weight, scale).float(), UNITS["fp8_gemm.y"])


def test_fp4_product() -> None:
    x = formats.round_trip(UNITS["fp8_gemm.x"].bfloat16(), "fp8_e8m0_32")
    weight = formats.dequantize(UNITS["fp4_gemm.w_packed"], UNITS["fp4_gemm.w_scale_bytes"])
    assert torch.equal(Linear("bf16").reference(x, weight).float(), UNITS["fp4_gemm.y"])


@pytest.mark.parametrize(("dtype", "unit", "limit"), [("bf16", "out", 1e-2), ("f32", "out_f64", 1e-5)])
def test_sparse_attention(dtype: str, unit: str, limit: float) -> None:
    """−1 entries anywhere, a row of nothing but −1, the same entry twice. The window is shut by `first`."""
    q, kv, chosen = UNITS["sparse_attn.q"], UNITS["sparse_attn.kv"], UNITS["sparse_attn.idx"]
    batch, tokens, heads, width = q.shape
    q = q.flatten(0, 1).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    positions = torch.arange(tokens, dtype=torch.int32).repeat(batch)
    slots = torch.arange(batch, dtype=torch.int32).repeat_interleave(tokens)
    operands = (
        torch.full((batch * tokens, width), torch.nan, dtype=q.dtype),
        UNITS["sparse_attn.sink"],
        torch.full((batch, 8, width), torch.nan),
        positions,
        slots,
        slots * tokens,
        positions + 1,
        kv,
        chosen.flatten(0, 1),
    )
    out = Attention(width**-0.5, causal=True).reference(q, *operands)
    assert relative(out.view(batch, tokens, heads, width), UNITS[f"sparse_attn.{unit}"]) <= limit
    assert (out.view(batch, tokens, heads, width)[:, 2] == 0).all()


def attended(causal: bool, positions: list[int], window: int, seen_before: int) -> Tensor:
    """Positions that each token weighs, bool [T, positions]: uniform attention over keys that are unit vectors."""
    tokens, width = len(positions), 64
    identity = torch.eye(width)
    ring = torch.full((1, window, width), torch.nan)
    for position in range(seen_before):
        ring[0, position % window] = identity[position]
    at = torch.tensor(positions, dtype=torch.int32)
    zeros = torch.zeros_like(at)
    q, sink = torch.zeros(tokens, 1, width), torch.full((1,), -torch.inf)
    out = Attention(1.0, causal).reference(q, identity[at.long()], sink, ring, at, zeros, zeros, zeros)
    return out[:, 0] > 0


@pytest.mark.parametrize(("unit", "start", "count"), [("p5", 0, 5), ("p20", 0, 20)])
def test_window_of_a_prefill(unit: str, start: int, count: int) -> None:
    wanted = torch.zeros(count, 64, dtype=torch.bool)
    for token, row in enumerate(UNITS[f"window.{unit}"]):
        wanted[token, row[row >= 0].long()] = True
    assert torch.equal(attended(True, list(range(start, start + count)), 8, start), wanted)


@pytest.mark.parametrize("position", [3, 8, 21])
def test_window_of_a_decode_step(position: int) -> None:
    """The unit lists ring slots, oldest first: every position of the window is there once."""
    slots = UNITS[f"window.d{position}"][0]
    seen = attended(True, [position], 8, position)[0].nonzero().flatten()
    assert (seen % 8).tolist() == slots[slots >= 0].tolist()
    assert seen.tolist() == list(range(max(0, position - 7), position + 1))


@pytest.mark.parametrize(("unit", "start"), [("idx", 4), ("idx_full", 30)])
def test_draft_block_sees_itself_whole(unit: str, start: int) -> None:
    """After position `start`: min(8, start + 1) ring entries, then all three of the block, for every query of it."""
    seen = attended(False, [start + 1, start + 2, start + 3], 8, start + 1)
    for row, wanted in zip(seen, UNITS[f"dspark.{unit}"], strict=True):
        ring, block = row[: start + 1].nonzero().flatten(), row[start + 1 :].nonzero().flatten()
        assert ring.tolist() == list(range(max(0, start - 7), start + 1))
        assert sorted((ring % 8).tolist()) == wanted[:-3].tolist()
        assert block.tolist() == (wanted[-3:] - 8).tolist()


@pytest.mark.parametrize(("unit", "ratio", "blocks", "block"), [("r1", 1, 2, 3), ("r2", 2, 2, 2), ("d", 1, 3, 4)])
def test_candidate_blocks(unit: str, ratio: int, blocks: int, block: int) -> None:
    """Scores go in through two heads that read off the positive and the negative part of a key made for each token."""
    logits, keep = UNITS[f"cand.{unit}.logits"].flatten(0, 1), UNITS[f"cand.{unit}.keep"].flatten(0, 1).bool()
    tokens, rows = logits.shape
    positions = torch.full((tokens,), rows - 1) if unit == "d" else torch.arange(tokens)
    keys = torch.where(logits.isinf(), 7.0, logits)  # what is not visible must not count, however good it is
    keys = torch.stack((keys.relu(), (-keys).relu()), -1)
    q = torch.eye(2).expand(tokens, 2, 2)
    weights = torch.tensor([1.0, -1.0]).expand(tokens, 2)
    op = CandidateBlocks(ratio, blocks, block, 1.0)
    pool = op.reference(q, weights, keys, positions.int(), torch.arange(tokens, dtype=torch.int32))
    kept = (torch.arange(rows).view(1, -1, 1) // block == pool.unsqueeze(1)).any(-1)
    visible = torch.arange(rows) < ((positions + 1) // ratio).unsqueeze(1)
    assert torch.equal(kept & visible, keep & visible)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("chunks", [(7, 1, 1, 1, 1, 1), (12,), (1, 4, 2, 5)])
def test_compressor(ratio: int, chunks: tuple[int, ...]) -> None:
    """Latents before rope, whatever the grouping of the twelve tokens."""
    weights = {name: UNITS.get(f"compressor.r{ratio}.{name}.weight") for name in ("wkv", "wgate", "norm")}
    for row, x in enumerate(UNITS[f"compressor.r{ratio}.x"]):
        partial, latents, begin = torch.full((1, ratio + 1, 2, 32), torch.nan), [], 0
        for count in chunks:
            u = x[begin : begin + count].bfloat16()
            positions = torch.arange(begin, begin + count, dtype=torch.int32)
            zeros = torch.zeros_like(positions)
            pooled = Linear("bf16" if ratio == 1 else "f32").reference(u, weights["wkv"])
            if ratio > 1:
                gate = Linear("f32").reference(u, weights["wgate"])
                pool = CompressPool(ratio, "bf16")
                partial, pooled = pool.reference(partial, pooled, gate, positions, zeros, zeros)
            latent = RmsNorm(1e-20).reference(pooled, weights["norm"])
            latents.append(latent[positions % ratio == ratio - 1].float())
            begin += count
        found = torch.cat(latents)
        assert torch.equal(found, UNITS[f"compressor.r{ratio}.full"][row])
        stepwise = (UNITS[f"compressor.r{ratio}.prefill"][row], UNITS[f"compressor.r{ratio}.decode"][row])
        assert torch.equal(found, torch.cat(stepwise))


@pytest.mark.parametrize("mixed", [False, True])
def test_gate(mixed: bool) -> None:
    """The bias chooses and does not weigh; inside an image span another one chooses."""
    logits = Linear("f32").reference(UNITS["gate.x"].bfloat16(), UNITS["gate.weight"])
    image = (UNITS["gate.bias_vl"], UNITS["gate.mask"].bool()) if mixed else (None, None)
    ids, weights = Route(3, "sqrtsoftplus", 1.5, 1.0, True).reference(logits, UNITS["gate.bias"], *image)
    unit = "gate.mixed" if mixed else "gate.text"
    wanted, order = UNITS[f"{unit}.i"].sort(1)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, UNITS[f"{unit}.w"].gather(1, order), rtol=2e-6, atol=0)


def test_expert() -> None:
    """Clamps, and the routing weight before `w2`. One bf16 unit is allowed where the sums are ordered differently."""
    w1, w2, w3 = (UNITS[f"expert.w{n}.weight"].bfloat16().unsqueeze(0) for n in (1, 2, 3))
    x, weights = UNITS["expert.x"].bfloat16(), UNITS["expert.weights"]
    found = MoeExperts(2.0, "none").reference(x, torch.zeros(4, 1, dtype=torch.int32), weights, w1, w3, w2)
    torch.testing.assert_close(found, UNITS["expert.y"], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("chunks", [(22,), (15, *[1] * 7), (3, 4, 9, 6)])
@pytest.mark.parametrize("masked", [True, False])
def test_engram_rows(chunks: tuple[int, ...], masked: bool) -> None:
    """An image span cuts the look-back, and history crosses chunk boundaries."""
    wanted = UNITS["engram.hash_full" if masked else "engram.hash_nomask"]
    assert torch.equal(UNITS["engram.hash_full"], UNITS["engram.hash_split"])
    for row, tokens in enumerate(UNITS["engram.ids"]):
        ids = UNITS["engram.token_map"][tokens].int()
        if masked:
            ids[UNITS["engram.mask"][row] == 0] = -1
        for layer in range(2):
            op = EngramHash(
                tuple(UNITS["engram.multipliers"][layer].tolist()),
                tuple(UNITS["engram.primes"][layer].flatten().tolist()),
                tuple(UNITS["engram.offsets"][layer].tolist()),
                int(UNITS["engram.pad"]),
            )
            history, found, begin = torch.full((1, 3), 123456, dtype=torch.int32), [], 0
            for count in chunks:
                part = ids[begin : begin + count]
                positions = torch.arange(begin, begin + count, dtype=torch.int32)
                zeros = torch.zeros_like(positions)
                found.append(op.reference(part, history, positions, zeros, zeros))
                history[0, positions.long() % 3] = part
                begin += count
            assert torch.equal(torch.cat(found), wanted[row, :, layer])


RELEASE_WINDOW = RopeTable(64, 10000.0, 16.0, 0, 32.0, 1.0, 0)
RELEASE_COMPRESS = RopeTable(64, 160000.0, 16.0, 65536, 32.0, 1.0, 0)
TINY_COMPRESS = RopeTable(16, 160000.0, 16.0, 64, 32.0, 1.0, 0)


@pytest.mark.parametrize(
    ("unit", "op"),
    [("release_window", RELEASE_WINDOW), ("release_compress", RELEASE_COMPRESS), ("tiny_compress", TINY_COMPRESS)],
)
def test_rope_angles(unit: str, op: RopeTable) -> None:
    """Up to a position of a million: the angle is one fp32 product, not a double."""
    torch.testing.assert_close(op.frequencies(), UNITS[f"rope.{unit}.freqs"], rtol=1e-6, atol=0)
    positions = UNITS[f"rope.{unit}.pos"].int()
    cos, sin = op.reference(positions)
    torch.testing.assert_close(cos, UNITS[f"rope.{unit}.cos"], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, UNITS[f"rope.{unit}.sin"], rtol=0, atol=1e-6)


def test_rope_turns_adjacent_pairs() -> None:
    x = UNITS["rope.apply.x"][0].bfloat16()
    table = RopeTable(16, 10000.0, 1.0, 0, 32.0, 1.0, 0).reference(torch.arange(9, dtype=torch.int32))
    assert torch.equal(Rope(inverse=False).reference(x, *table).float(), UNITS["rope.apply.y"][0])
    assert torch.equal(Rope(inverse=True).reference(x, *table).float(), UNITS["rope.apply.yinv"][0])


def test_rms_norm() -> None:
    found = RmsNorm(1e-20).reference(UNITS["rmsnorm.x"].bfloat16(), UNITS["rmsnorm.w"])
    assert torch.equal(found.float(), UNITS["rmsnorm.y"])


def test_single_pass_mhc() -> None:
    """Coefficients, the collapse with another sublayer's `pre`, and the update with `comb` as [source, target]."""
    stream = UNITS["mhc.x"][0].bfloat16()
    op = HcCoefficients(1e-20, 1e-6, 20)
    pre, post, comb = op.reference(stream, UNITS["mhc.fn"], UNITS["mhc.scale"], UNITS["mhc.base"])
    for name, found in (("pre", pre), ("post", post), ("comb", comb)):
        torch.testing.assert_close(found, UNITS[f"mhc.{name}"][0], rtol=2e-6, atol=2e-6)
    assert torch.equal(HcMix().reference(stream, UNITS["mhc.pre_mix"][0]).float(), UNITS["mhc.hc_pre"][0])
    y = UNITS["mhc.y"][0].bfloat16()
    found = HcUpdate().reference(stream, y, UNITS["mhc.post"][0], UNITS["mhc.comb"][0])
    assert torch.equal(found.float(), UNITS["mhc.hc_post"][0])


def test_every_unit_is_read() -> None:
    """A unit that is added to the file and tested nowhere shows here; the release's constants have their own test."""
    tested = (
        "sinkhorn act_quant fp4_e8m0 fp4_e4m3 fp8_gemm fp4_gemm sparse_attn cand compressor gate expert engram release "
        "rope rmsnorm mhc window dspark"
    )
    assert {name.partition(".")[0] for name in UNITS} == set(tested.split())
