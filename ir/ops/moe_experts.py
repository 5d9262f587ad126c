"""The routed experts of a token (DeepSeek-V4.1 release: SwiGLU experts, fp4 weights)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir import formats, packed
from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.ops.swiglu import gated
from v41c.ir.types import DType, TensorType, f32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MoeExperts(Op):
    """out[t] = Σ_i expert_i(x[t], w_i);  expert(u, w) = w2 · q(w · silu(min(w1·u, L)) · clamp(w3·u, −L, L))

    Products accumulate in f32 over ascending k; w1·u, w3·u, the activation and each expert's output are rounded to the
    dtype of x, of packed rows bf16; q is the round trip `format` ("none": the identity). Outputs are summed in f32 in
    ascending expert order.
    Weights are stacks [E, M, K]: f4e2m1 with e8m0 [E, M, K/32], f8e4m3 with e8m0 [E, M/32, K/32], bf16 or f32.
    """

    limit: float
    format: str
    packable: ClassVar[tuple[str, ...]] = ("x",)
    #: a token's experts in any order, with their weights: the sum is in the order of the experts
    exchangeable: ClassVar[tuple[tuple[tuple[str, int], ...], ...]] = ((("ids", 1), ("weights", 1)),)

    def infer(
        self,
        x: TensorType,
        ids: TensorType,
        weights: TensorType,
        w1: TensorType,
        w3: TensorType,
        w2: TensorType,
        w1_scale: TensorType | None = None,
        w3_scale: TensorType | None = None,
        w2_scale: TensorType | None = None,
    ) -> TensorType:
        x = packed.values_type(self, "x", x)
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        tokens, width = x.shape
        self.require_dtype("ids", ids, DType.I32)
        self.require_shape("ids", ids, tokens, ids.shape[-1])
        self.require_dtype("weights", weights, DType.F32)
        self.require_shape("weights", weights, *ids.shape)
        self.require_rank("w1", w1, 3)
        experts, inner, _ = w1.shape
        self.require_shape("w1", w1, experts, inner, width)
        self.require_shape("w3", w3, experts, inner, width)
        self.require_shape("w2", w2, experts, width, inner)
        for name, weight, scale in (("w1", w1, w1_scale), ("w3", w3, w3_scale), ("w2", w2, w2_scale)):
            self.require_dtype(name, weight, w1.dtype)
            self._check_scale(f"{name}_scale", weight, scale)
        return f32(tokens, width)

    def _check_scale(self, name: str, weight: TensorType, scale: TensorType | None) -> None:
        self.require_dtype(name.removesuffix("_scale"), weight, *FLOATS, DType.F8E4M3, DType.F4E2M1)
        self.require((scale is None) == (weight.dtype in FLOATS), name, "absent iff the weight is bf16 or f32", scale)
        if scale is not None:
            experts, rows, columns = (int(dim) for dim in weight.shape)
            rows = rows if weight.dtype == DType.F4E2M1 else -(-rows // 32)
            self.require_dtype(name, scale, DType.E8M0)
            self.require_shape(name, scale, experts, rows, -(-columns // 32))

    def reference(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        w1_scale: Tensor | None = None,
        w3_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
    ) -> Tensor:
        import torch

        x = packed.values(x)

        def product_with(u: Tensor, stack: Tensor, scale: Tensor | None, expert: int) -> Tensor:
            weight = formats.dequantize(stack[expert], None if scale is None else scale[expert])
            return torch.nn.functional.linear(u.float(), weight).to(x.dtype)

        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, place = torch.where(ids == expert)
            u = x[rows]
            gate, up = product_with(u, w1, w1_scale, expert), product_with(u, w3, w3_scale, expert)
            h = (gated(gate, up, self.limit) * weights[rows, place].unsqueeze(1)).to(x.dtype)
            if self.format != "none":
                h = formats.round_trip(h, self.format)
            out.index_add_(0, rows, product_with(h, w2, w2_scale, expert).float())
        return out

    def flops(
        self,
        x: TensorType,
        ids: TensorType,
        weights: TensorType,
        w1: TensorType,
        w3: TensorType,
        w2: TensorType,
        w1_scale: TensorType | None = None,
        w3_scale: TensorType | None = None,
        w2_scale: TensorType | None = None,
    ) -> int:
        return 6 * ids.elements * product(*w1.shape[1:])

    def touched(
        self,
        x: TensorType,
        ids: TensorType,
        weights: TensorType,
        w1: TensorType,
        w3: TensorType,
        w2: TensorType,
        w1_scale: TensorType | None = None,
        w3_scale: TensorType | None = None,
        w2_scale: TensorType | None = None,
    ) -> Mapping[str, int]:
        active = min(int(w1.shape[0]), ids.elements)
        stacks = {"w1": w1, "w3": w3, "w2": w2, "w1_scale": w1_scale, "w3_scale": w3_scale, "w2_scale": w2_scale}
        return {
            name: TensorType(stack.dtype, (active, *stack.shape[1:])).size_bytes
            for name, stack in stacks.items()
            if stack is not None
        }

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(21)
        for kind, tokens, experts, chosen, width, inner, rows_packed in (
            ("f4e2m1", 1, 5, 2, 64, 96, False),
            ("f4e2m1", 9, 4, 3, 96, 64, False),
            ("f8e4m3", 7, 3, 1, 64, 32, False),
            ("bf16", 3, 4, 2, 40, 24, False),
            ("f32", 5, 4, 2, 40, 24, False),
            ("f4e2m1", 9, 4, 3, 96, 64, True),
            ("f8e4m3", 7, 3, 1, 64, 32, True),
        ):
            stacks: list[Tensor] = []
            scales: list[Tensor | None] = []
            for rows, columns in ((inner, width), (inner, width), (width, inner)):
                values = normal(experts, rows, columns)
                if kind == "f4e2m1":
                    stacks.append(formats.pack_nibbles(formats.encode_e2m1(values * 2)).view(torch.int8))
                    codes = (normal(experts, rows, columns // 32) + 122).to(torch.uint8)
                    scales.append(codes.view(torch.float8_e8m0fnu))
                elif kind == "f8e4m3":
                    stacks.append((values * 60).to(torch.float8_e4m3fn))
                    codes = (normal(experts, rows // 32, columns // 32) + 117).to(torch.uint8)
                    scales.append(codes.view(torch.float8_e8m0fnu))
                else:
                    values = values * columns**-0.5
                    stacks.append(values.bfloat16() if kind == "bf16" else values)
                    scales.append(None)
            ids = normal(tokens, experts).argsort(1)[:, :chosen].sort(1).values.int()
            quantized = kind.startswith("f4") or kind.startswith("f8")
            x = normal(tokens, width, dtype="f32" if kind == "f32" else "bf16")
            if quantized:
                x = formats.pack(x, packed.FORMAT) if rows_packed else formats.round_trip(x, packed.FORMAT)
            weights = normal(tokens, chosen).sigmoid()
            yield Example(cls(2.0, "fp8_e8m0_32" if quantized else "none"), (x, ids, weights, *stacks, *scales))
