"""Kernels of the vision tower at sizes that examples lack, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject as CudaSubject
from tests.codegen.sparse_harness import Subject, build, same
from v41c.ir.op import Op, seeded
from v41c.ir.ops.gelu import Gelu
from v41c.ir.ops.image_attention import ImageAttention
from v41c.ir.ops.merge_patches import MergePatches
from v41c.ir.ops.rope_halves import RopeHalves
from v41c.targets import x86_64
from v41c.targets.cuda import SM_90

Operands = tuple[Tensor | None, ...]


def on_cpu(op: Op, operands: Operands) -> Tensor:
    target = x86_64.host()
    subject = Subject.of(op, operands, target, 512)
    return subject.call(build([subject], target), operands)[0]


def on_cuda(op: Op, operands: Operands) -> Tensor:
    return CudaSubject.of(op, operands, SM_90, 512).call(operands)[0]


def images(*lengths: int) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0).repeat_interleave(counts)
    return (ends - counts.repeat_interleave(counts)).int(), ends.int()


def independent(qkv: Tensor, begins: Tensor, ends: Tensor, scale: float) -> np.ndarray:
    """Softmax attention in f64, patch by patch, from the formula."""
    q, k, v = (part.double().numpy() for part in qkv.chunk(3, 1))
    out = np.empty(q.shape)
    for patch in range(len(q)):
        seen = slice(int(begins[patch]), int(ends[patch]))
        for head in range(q.shape[1]):
            scores = k[seen, head] @ q[patch, head] * scale
            weights = np.exp(scores - scores.max())
            out[patch, head] = weights @ v[seen, head] / weights.sum()
    return out


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
def test_attention_is_the_formula_in_double_precision(run: object) -> None:
    """f32, images of 1 to 200 patches that lie across tiles of queries and blocks of keys."""
    begins, ends = images(1, 64, 65, 3, 130)
    qkv = seeded(3)(len(begins), 6, 20, scale=2)
    found = run(ImageAttention(20**-0.5), (qkv, begins, ends)).double().numpy()  # type: ignore[operator]
    wanted = independent(qkv, begins, ends, 20**-0.5)
    assert np.abs(found - wanted).max() < 5e-6


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
def test_an_image_has_the_same_bits_in_any_company(run: object) -> None:
    normal = seeded(4)
    parts = [normal(length, 3, 16, scale=2, dtype="bf16") for length in (37, 90, 5)]
    op = ImageAttention(0.25)
    together = run(op, (torch.cat(parts), *images(37, 90, 5)))  # type: ignore[operator]
    alone = [run(op, (part, *images(len(part)))) for part in parts]  # type: ignore[operator]
    assert same(together, torch.cat(alone))


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
def test_gelu_keeps_its_precision_in_both_tails(run: object) -> None:
    x = torch.linspace(-9, 9, 4001).reshape(1, -1)
    found = run(Gelu(), (x,)).double().flatten().tolist()  # type: ignore[operator]
    for value, result in zip(x.double().flatten().tolist(), found, strict=True):
        wanted = value * math.erfc(-value * 0.5**0.5) / 2
        assert abs(result - wanted) <= 1e-5 * abs(wanted)


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
@pytest.mark.parametrize("width", [4, 16, 40, 64])
def test_halves_are_rotated_as_complex_numbers(run: object, width: int) -> None:
    normal = seeded(width)
    x, angle = normal(5, 6, width), normal(5, width // 2) * 3
    found = run(RopeHalves(4), (x, angle.cos(), angle.sin())).numpy()  # type: ignore[operator]
    real, imaginary = np.split(x.double().numpy(), 2, -1)
    turned = (real + 1j * imaginary)[:, :4] * np.exp(1j * angle.double().numpy())[:, None]
    assert np.abs(found[:, :4] - np.concatenate([turned.real, turned.imag], -1)).max() < 1e-5
    assert (found[:, 4:] == x[:, 4:].numpy()).all()


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
def test_merged_patches_are_a_pixel_unshuffle(run: object) -> None:
    """Of a padded 2x2 grid of 3x3 blocks, as torch has it for images."""
    rows, columns, width = 5, 4, 24
    grid = seeded(9)(rows, columns, width, dtype="bf16")
    padded = torch.nn.functional.pad(grid, (0, 0, 0, 2, 0, 1)).permute(2, 0, 1)[None]
    wanted = torch.nn.functional.pixel_unshuffle(padded.float(), 3)[0].flatten(1).T.bfloat16()
    number = torch.full((6, 6), -1, dtype=torch.int32)
    number[:rows, :columns] = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    sources = number.view(2, 3, 2, 3).transpose(1, 2).reshape(4, 9).contiguous()
    found = run(MergePatches(), (grid.reshape(-1, width), sources))  # type: ignore[operator]
    assert same(found, wanted.contiguous())
