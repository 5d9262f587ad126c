"""Operations on torch tensors through their CPU kernels: types made symbolic, weights packed, outputs poisoned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.codegen.harness import Array, Library, aligned, poisoned
from v41c.codegen.cpu import kernel_for, layouts, needs_packed
from v41c.codegen.kernel import CpuKernel
from v41c.ir import formats
from v41c.ir.op import Example, Op
from v41c.ir.torch_types import type_of
from v41c.ir.types import TensorType
from v41c.targets.target import CpuTarget

Operands = tuple[Tensor | None, ...]

#: operands whose sizes are fixed
_WEIGHTS = {
    "q_down",
    "kv_down",
    "q_scale",
    "kv_scale",
    "sink",
    "bias",
    "image_bias",
    "table",
    "scale",
    "embed",
    "head",
    "q_weight",
    "k_weight",
    "start",
    "newline",
    "end",
} | {
    *("weight", "w1", "w3", "w2", "w1_scale", "w3_scale", "w2_scale", "fn", "base", "kv_weight"),
    *(f"{name}_{i}" for name in ("weight", "scale") for i in (2, 3, 4)),
    *(f"shared_{name}" for name in ("w1", "w3", "w2", "w1_scale", "w3_scale", "w2_scale")),
}
#: symbolic leading sizes of states
_STATES = {
    "window": ("S",),
    "partial": ("S",),
    "history": ("S",),
    "cache": ("S", "C"),
    "compressed": ("S", "C"),
    "keys": ("S", "C"),
}


def symbolic_types(op: Op, operands: Operands) -> tuple[tuple[TensorType | None, ...], dict[str, int]]:
    """Operand types with the sizes that change made symbolic, and the sizes."""
    types: list[TensorType | None] = []
    sizes: dict[str, int] = {}
    for declared, operand in zip(op.operands(), operands, strict=True):
        if operand is None:
            types.append(None)
            continue
        kind = type_of(operand)
        names = _STATES.get(declared.name, () if declared.name in _WEIGHTS else ("T",))
        sizes |= {name: int(size) for name, size in zip(names, kind.shape, strict=False)}
        types.append(TensorType(kind.dtype, (*names, *kind.shape[len(names) :])))
    return tuple(types), sizes


@dataclass(frozen=True)
class Subject:
    """The kernel of an operation for operands like these, at most `tokens` of them."""

    op: Op
    types: tuple[TensorType | None, ...]
    kernel: CpuKernel

    @classmethod
    def of(cls, op: Op, operands: Operands, target: CpuTarget, tokens: int) -> Subject:
        """The kernel for `target`; every other size is bounded by what the operands have."""
        types, sizes = symbolic_types(op, operands)
        bounds = {name: max(size, 1) for name, size in sizes.items()} | {"T": tokens}
        return cls(op, types, kernel_for(op, types, op.infer_results(types), target, bounds))

    def call(self, library: Library, operands: Operands) -> tuple[Tensor, ...]:
        """States, updated, then the other results. The operands stay as they are."""
        _, sizes = symbolic_types(self.op, operands)
        inputs = {
            declared.name: self._packed(i, as_array(operand), operand)
            for i, (declared, operand) in enumerate(zip(self.op.operands(), operands, strict=True))
            if operand is not None
        }
        kinds = [kind.bind(sizes) for kind in self.op.infer_results(self.types)]
        states = self.op.states
        outputs = [poisoned([int(dim) for dim in kind.shape], kind.dtype) for kind in kinds[len(states) :]]
        library.call(self.kernel, [*inputs.values(), *outputs], sizes)
        arrays = [*(inputs[name] for name in states), *outputs]
        return tuple(as_tensor(array, kind) for array, kind in zip(arrays, kinds, strict=True))

    def _packed(self, index: int, array: Array, operand: Tensor) -> Array:
        layout = self.kernel.layouts.get(index)
        return array if layout is None else aligned(layouts.pack(layout, array, type_of(operand).dtype))


def examples_without_packed(op: type[Op]) -> tuple[Example, ...]:
    """The examples of an operation that CPUs have kernels for: none with packed rows of activations."""
    return tuple(e for e in op.examples() if not needs_packed(e.op, symbolic_types(e.op, e.operands)[0]))


def build(subjects: Iterable[Subject], target: CpuTarget) -> Library:
    """A library of the kernels of some subjects."""
    return Library([subject.kernel for subject in subjects], target)


def reference(op: Op, operands: Operands) -> tuple[Tensor, ...]:
    """What the operation means, computed on copies."""
    results = op.reference(*(None if operand is None else operand.clone() for operand in operands))
    return results if isinstance(results, tuple) else (results,)


def rows_of(op: Op, operands: Operands, rows: slice | Sequence[int]) -> Operands:
    """Operands with some of the tokens only; states, weights, and what rows are gathered from, whole."""
    whole = _WEIGHTS | set(_STATES) | ({"x"} if op.name() in ("gather_rows", "merge_patches") else set())
    return tuple(
        operand if operand is None or declared.name in whole else operand[rows]
        for declared, operand in zip(op.operands(), operands, strict=True)
    )


def exact_index(tokens: int, heads: int, width: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, weights, packed keys of two sequences whose scores are exact in f32 in any order, with many ties.

    Elements are multiples of 1/2 up to 2 and weights multiples of 1/2 up to 2, so that scores are multiples of 2^-3
    below 2^21 for up to 2^18 products.
    """
    generator = torch.Generator().manual_seed(heads * width + count)

    def halves(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator) / 2

    q, weights = halves(tokens, heads, width).bfloat16(), halves(tokens, heads).bfloat16()
    keys = halves(2, count, width)
    keys[..., ::32] = 6.0  # the group maximum that makes every scale one
    return q, weights, formats.pack(keys, "fp4_e8m0_32")


def same(left: Tensor, right: Tensor) -> bool:
    """Equal type, shape and bits."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


#: of f32 results of an operation's examples, which are of magnitude ten at most, sums of up to 400 terms
_ABSOLUTE = 400 * 2.0**-24 * 10
#: a bf16 result may round to its neighbour, and a product of such results move by a few of those steps
_RELATIVE = 2.0**-6


def close(ours: Tensor, theirs: Tensor) -> None:
    """Results of an example whose sums may be of another order: floats within a bound, anything else to the bit."""
    if ours.dtype in (torch.float32, torch.bfloat16):
        relative = _RELATIVE if ours.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(ours, theirs, rtol=relative, atol=_ABSOLUTE)
    else:
        assert same(ours, theirs)


def as_array(tensor: Tensor) -> Array:
    """A copy in the numpy type that holds the tensor's: bf16 as its bits, one-byte types as bytes."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
    array: Array = tensor.numpy()
    return aligned(array.view("u2") if tensor.dtype == torch.int16 else array)


def as_tensor(array: Array, kind: TensorType) -> Tensor:
    """An array as the tensor of an IR type that it holds."""
    views = {"bf16": torch.bfloat16, "bool": torch.bool, "f8e4m3": torch.float8_e4m3fn}
    tensor = torch.from_numpy(array.view("i2") if kind.dtype == "bf16" else array)
    return tensor.view(views[kind.dtype]) if kind.dtype in views else tensor
