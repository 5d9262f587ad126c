"""A whole mixture of experts behind its router: routed experts, shared expert, their sum (DeepSeek-V4.1 release)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from v41c.ir import formats, packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import FLOATS, Example
from v41c.ir.ops.add import Add
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.ops.swiglu import Swiglu
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MoeLayer(FusedOp):
    """out[t] = moe_experts(x[t], ids[t], weights[t]) + shared_w2 · q(swiglu(shared_w1 · u[t], shared_w3 · u[t]))

    u is `shared_x`; q is the round trip `shared_format` ("none": the identity). The composition of `moe_experts`,
    `linear`, `swiglu`, `round_trip` and `add`, with their roundings; the shared expert's products give `out`.
    The shared weights have scales iff the routed ones have.
    """

    limit: float
    format: str
    shared_format: str
    out: str
    packable: ClassVar[tuple[str, ...]] = ("x", "shared_x")
    #: as in `moe_experts`
    exchangeable: ClassVar[tuple[tuple[tuple[str, int], ...], ...]] = MoeExperts.exchangeable

    def infer(
        self,
        x: TensorType,
        ids: TensorType,
        weights: TensorType,
        w1: TensorType,
        w3: TensorType,
        w2: TensorType,
        shared_x: TensorType,
        shared_w1: TensorType,
        shared_w3: TensorType,
        shared_w2: TensorType,
        w1_scale: TensorType | None = None,
        w3_scale: TensorType | None = None,
        w2_scale: TensorType | None = None,
        shared_w1_scale: TensorType | None = None,
        shared_w3_scale: TensorType | None = None,
        shared_w2_scale: TensorType | None = None,
    ) -> TensorType:
        scales = (w1_scale, w3_scale, w2_scale, shared_w1_scale, shared_w3_scale, shared_w2_scale)
        shared = (shared_x, shared_w1, shared_w3, shared_w2)
        (total,) = self.inferred(x, ids, weights, w1, w3, w2, *shared, *scales)
        self.require_dtype("shared_x", shared_x, x.dtype)
        alike = (w1.dtype in FLOATS) == (shared_w1.dtype in FLOATS)
        self.require(alike, "shared_w1 dtype", f"scaled iff {w1.dtype} is", shared_w1.dtype)
        return total

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        x, ids, weights, w1, w3, w2, u, s1, s3, s2, *scales = operands
        routed, shared = scales[:3], scales[3:]
        (total,) = run(MoeExperts(self.limit, self.format), x, ids, weights, w1, w3, w2, *routed)
        product = Linear(self.out)
        (gate,), (up,) = run(product, u, s1, shared[0]), run(product, u, s3, shared[1])
        (hidden,) = run(Swiglu(self.limit), gate, up)
        if self.shared_format != "none":
            (hidden,) = run(RoundTrip(self.shared_format), hidden)
        (y,) = run(product, hidden, s2, shared[2])
        return run(Add(self.out), total, y)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        from v41c.ir.torch_types import type_of

        for example in MoeExperts.examples():
            x, ids, weights, w1, w3, w2, *scales = example.operands
            if x is None or w1 is None or w3 is None or w2 is None:
                raise TypeError("an example without experts")
            shared = [_shared(stack, scale) for stack, scale in zip((w1, w3, w2), scales, strict=True)]
            attributes = example.op.attributes()
            op = cls(**attributes, shared_format=attributes["format"], out=str(type_of(packed.values(x)).dtype))
            matrices = [weight for weight, _ in shared]
            yield Example(op, (x, ids, weights, w1, w3, w2, x, *matrices, *scales, *(scale for _, scale in shared)))


def _shared(stack: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight for the shared expert like those of a stack, fp8 for fp4."""
    import torch

    if scale is None:
        return stack[1], None
    values = formats.dequantize(stack[1], scale[1])
    weight = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = [-(-size // 32) for size in weight.shape]
    return weight, torch.full(blocks, 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)
