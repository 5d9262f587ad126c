"""Fused operations against the kernels of their parts: equal to the last bit, at any number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.codegen.harness import Library
from tests.codegen.sparse_harness import Operands, Subject, build, same, symbolic_types
from v41c.codegen.cpu import kernel_for
from v41c.ir import formats
from v41c.ir.fused import FusedOp
from v41c.ir.op import seeded
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.gate import Gate
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.ops.index_topk_blocks import IndexTopkBlocks
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.linear_group import LinearGroup
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]
#: (tokens of the step, most tokens of the kernel)
SIZES = ((0, 1), (1, 1), (0, 64), (1, 64), (3, 64), (17, 64), (50, 64))


def fp8(normal: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """An fp8 weight and its scales."""
    weight = (normal(*shape) * 60).to(torch.float8_e4m3fn)
    rows, columns = (-(-size // 32) for size in shape[-2:])
    codes = torch.arange(rows * columns).view(rows, columns) % 5 + 118
    return weight, codes.to(torch.uint8).view(torch.float8_e8m0fnu).expand(*shape[:-2], rows, columns).contiguous()


def runs(tokens: int) -> dict[str, Tensor]:
    """Positions, slots, starts and first of two sequences that share a step, the second deep in its context."""
    split = tokens // 3
    positions = torch.cat((torch.arange(split), torch.arange(40, 40 + tokens - split))).int()
    slots = (torch.arange(tokens) >= split).int()
    return {"positions": positions, "slots": slots, "starts": slots * split, "first": torch.zeros_like(positions)}


def linear_group(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(1)
    pairs = [fp8(normal, rows, 96) for rows in (80, 32, 200)]
    x = formats.round_trip(normal(tokens, 96, dtype="bf16"), "fp8_e8m0_32")
    return LinearGroup("bf16"), (x, *(w for w, _ in pairs), None, *(s for _, s in pairs), None)


def plain_group(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(2)
    weights = [normal(rows, 50, dtype="bf16") for rows in (19, 64)]
    return LinearGroup("f32"), (normal(tokens, 50, dtype="bf16"), *weights, *(None,) * 6)


def grouped(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(3)
    x = normal(tokens, 4, 64, dtype="bf16")
    return GroupedLinearQuantized("fp8_e8m0_32"), (x, *fp8(normal, 4 * 160, 64))


def latent_norms(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(4)
    angle = normal(tokens, 12) * 3
    latents = (normal(tokens, 96, dtype="bf16"), normal(96, dtype="bf16"), normal(tokens, 64, dtype="bf16"))
    op = LatentNorms(1e-20, "fp8_e8m0_32", "fp8_e8m0_32")
    return op, (*latents, normal(64, dtype="bf16"), angle.cos(), angle.sin())


def attend(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(5)
    step, angle = runs(tokens), normal(tokens, 8) * 3
    kv = formats.round_trip(normal(tokens, 64, dtype="bf16"), "fp8_e8m0_32")
    window, rows = formats.pack(normal(2, 16, 64), "fp8_e8m0_32"), formats.pack(normal(2, 60, 64), "fp4_e4m3_16")
    selection = torch.where(normal(tokens, 20) > 0.5, torch.arange(20) * 3, -1).int()
    q = (normal(tokens, 20, 64, dtype="bf16"), kv, normal(20))
    return Attend(0.125), (*q, window, *step.values(), angle.cos(), angle.sin(), rows, selection)


def exact_attend(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(6)
    step, angle = runs(tokens), normal(tokens, 5) * 3
    q = (normal(tokens, 3, 32), normal(tokens, 32), normal(3))
    return Attend(0.2), (*q, normal(2, 16, 32), *step.values(), angle.cos(), angle.sin(), None, None)


def index_candidates(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(7)
    q = formats.round_trip(normal(tokens, 16, 32, dtype="bf16"), "fp4_e8m0_32")
    keys = formats.pack(normal(2, 400, 32), "fp4_e8m0_32")
    step = runs(tokens)
    positions = step["positions"] + 300 * step["slots"]
    pool = (torch.arange(12) * 5).int().repeat(tokens, 1)
    pool[:, -1:] = -1
    return IndexCandidates(1, 20, 0.125, 4), (q, normal(tokens, 16, dtype="bf16"), keys, positions, step["slots"], pool)


def index_topk_blocks(tokens: int) -> tuple[FusedOp, Operands]:
    _, operands = index_candidates(tokens)
    return IndexTopkBlocks(1, 20, 9, 5, 0.125), operands[:5]


def gate(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(8)
    biases = (normal(40, scale=0.1), normal(40), torch.arange(tokens) % 3 == 1)
    weight = normal(40, 96, scale=0.1, dtype="bf16")
    return Gate(6, "sqrtsoftplus", 1.5, 1.0, True), (normal(tokens, 96, dtype="bf16"), weight, *biases)


def moe_layer(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(9)
    stacks: list[Tensor] = []
    scales: list[Tensor] = []
    for rows, columns in ((160, 96), (160, 96), (96, 160)):
        stacks.append(formats.pack_nibbles(formats.encode_e2m1(normal(12, rows, columns) * 2)).view(torch.int8))
        codes = (normal(12, rows, columns // 32) + 122).to(torch.uint8)
        scales.append(codes.view(torch.float8_e8m0fnu))
    shared = [fp8(normal, *shape) for shape in ((96, 96), (96, 96), (96, 96))]
    x = formats.round_trip(normal(tokens, 96, dtype="bf16"), "fp8_e8m0_32")
    ids = normal(tokens, 12).argsort(1)[:, :3].sort(1).values.int()
    op = MoeLayer(2.0, "fp8_e8m0_32", "fp8_e8m0_32", "bf16")
    matrices = (*stacks, x, *(weight for weight, _ in shared))
    return op, (x, ids, normal(tokens, 3).sigmoid(), *matrices, *scales, *(scale for _, scale in shared))


def plain_moe_layer(tokens: int) -> tuple[FusedOp, Operands]:
    normal = seeded(10)
    shapes = ((24, 40), (24, 40), (40, 24))
    stacks = [normal(5, *shape, scale=0.2) for shape in shapes]
    ids = normal(tokens, 5).argsort(1)[:, :2].sort(1).values.int()
    x, u = normal(tokens, 40), normal(tokens, 40)
    operands = (x, ids, normal(tokens, 2).sigmoid(), *stacks, u, *(normal(*shape, scale=0.2) for shape in shapes))
    return MoeLayer(2.0, "none", "none", "f32"), (*operands, *(None,) * 6)


Case = Callable[[int], tuple[FusedOp, Operands]]
CASES = (
    linear_group,
    plain_group,
    grouped,
    latent_norms,
    attend,
    exact_attend,
    index_candidates,
    index_topk_blocks,
    gate,
    moe_layer,
    plain_moe_layer,
)


class Parts:
    """The kernels of an operation's parts, run one after another."""

    def __init__(self, op: FusedOp, operands: Operands, target: CpuTarget, most: int) -> None:
        types, sizes = symbolic_types(op, operands)
        self.graph = op.parts(*types)
        bounds = {name: max(size, 1) for name, size in sizes.items()} | {"T": most}
        self.subjects = []
        for node in self.graph.nodes:
            kinds = tuple(None if value is None else value.type for value in node.operands)
            results = tuple(result.type for result in node.results)
            self.subjects.append(Subject(node.op, kinds, kernel_for(node.op, kinds, results, target, bounds)))

    def call(self, library: Library, operands: Operands) -> list[Tensor]:
        """The results of the composition."""
        values = dict(zip(self.graph.inputs, (x for x in operands if x is not None), strict=True))
        for node, subject in zip(self.graph.nodes, self.subjects, strict=True):
            given = tuple(None if value is None else values[value] for value in node.operands)
            values |= dict(zip(node.results, subject.call(library, given), strict=True))
        return [values[value] for value in self.graph.outputs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_an_operation_is_its_parts(case: Case, target: CpuTarget) -> None:
    for most in (1, 64):
        op, operands = case(min(most, 50))
        whole, parts = Subject.of(op, operands, target, most), Parts(op, operands, target, most)
        library = build([whole, *(part for part in parts.subjects if not part.op.view)], target)
        for tokens in (size for size, bound in SIZES if bound == most):
            _, operands = case(tokens)
            found, expected = whole.call(library, operands), parts.call(library, operands)
            assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), tokens
