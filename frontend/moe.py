"""The mixture of experts: router, routed experts as one stack, shared expert (DeepSeek-V4.1 release)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import ACTIVATION, Arithmetic
from v41c.frontend.config import ModelConfig
from v41c.frontend.layers import Format, Linear, Step, parameter, stored
from v41c.ir.ops.add import Add
from v41c.ir.ops.linear import Linear as LinearOp
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.route import Route
from v41c.ir.ops.swiglu import Swiglu


class Moe(nn.Module):
    """One FFN sublayer: Σ routed experts + shared expert."""

    def __init__(
        self,
        config: ModelConfig,
        arithmetic: Arithmetic,
        name: str,
        experts: tuple[int, int],
        dense: Format,
        expert: Format,
    ) -> None:
        super().__init__()
        c = config
        count, chosen = experts
        self.name = name
        self.quantized = {"dense": dense == "fp8", "expert": expert in ("fp4", "fp8")}
        self.route = Route(chosen, c.score_func, c.route_scale, c.gate_temp, c.norm_topk_prob)
        requantize = ACTIVATION if arithmetic.round_trips and self.quantized["expert"] else "none"
        self.combine = MoeExperts(c.swiglu_limit, requantize)
        self.swiglu = Swiglu(c.swiglu_limit)
        self.out = arithmetic.activation
        self.gate = Gate(count, c.dim, c.has_vision)
        self.experts = Experts(count, c.dim, c.moe_inter_dim, expert)
        self.shared_experts = nn.ModuleDict(
            {
                "w1": Linear(c.moe_inter_dim, c.dim, dense, self.out),
                "w2": Linear(c.dim, c.moe_inter_dim, dense, self.out),
                "w3": Linear(c.moe_inter_dim, c.dim, dense, self.out),
            }
        )

    def forward(self, u: Tensor, step: Step) -> Tensor:
        """[T, D] → [T, D]."""
        logits = apply(LinearOp("f32"), u, self.gate.weight, None)
        image = (self.gate.bias_vl, step.image) if step.image is not None else (None, None)
        ids, weights = apply(self.route, logits, self.gate.bias, *image)
        step.record(f"{self.name}.experts", ids)
        x = step.arithmetic.quantize(u) if any(self.quantized.values()) else u
        routed = apply(self.combine, x if self.quantized["expert"] else u, ids, weights, *self.experts.operands())
        return apply(Add(self.out), routed, self._shared(x if self.quantized["dense"] else u, step))  # type: ignore[no-any-return]

    def _shared(self, x: Tensor, step: Step) -> Tensor:
        w = self.shared_experts
        h = apply(self.swiglu, w["w1"](x), w["w3"](x))
        return w["w2"](step.arithmetic.quantize(h) if self.quantized["dense"] else h)  # type: ignore[no-any-return]


class Gate(nn.Module):
    """Router weight and selection biases, the second one for tokens of an image."""

    def __init__(self, experts: int, width: int, has_vision: bool) -> None:
        super().__init__()
        self.weight = parameter(torch.bfloat16, experts, width)
        self.bias = parameter(torch.float32, experts)
        if has_vision:
            self.bias_vl = parameter(torch.float32, experts)


class Experts(nn.Module):
    """Routed experts stacked over their number; `state_dict` spells them per expert, as checkpoints do."""

    def __init__(self, count: int, width: int, inner: int, format: Format) -> None:
        super().__init__()
        self.count = count
        for name, rows, columns in (("w1", inner, width), ("w3", inner, width), ("w2", width, inner)):
            self.add_module(name, Stack(count, rows, columns, format))

    def operands(self) -> list[Tensor | None]:
        """w1, w3, w2 and their scales, as `moe_experts` takes them."""
        parts: list[Any] = [self.w1, self.w3, self.w2]
        return [*(part.weight for part in parts), *(part.scale for part in parts)]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Per-expert views, named `{expert}.w1.weight` and so on."""
        destination = {} if destination is None else destination
        for name, stack in self.named_parameters():
            for expert in range(self.count):
                destination[f"{prefix}{expert}.{name}"] = stack[expert] if keep_vars else stack[expert].detach()
        return destination


class Stack(nn.Module):
    """One matrix of every expert: weight [E, M, K] and its scale."""

    def __init__(self, count: int, rows: int, columns: int, format: Format) -> None:
        super().__init__()
        self.weight, self.scale = stored(format, count, rows, columns)
