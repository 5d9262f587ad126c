"""The two arithmetics of a model: the release's, and exact arithmetic for checking.

`release`: bf16 activations and every quantisation round trip, which is what the checkpoint was trained for. `exact`:
f32 everywhere, no round trip of activations or caches, dequantised weights; end-to-end equality can be demanded there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from v41c.errors import UsageError
from v41c.frontend.apply import apply
from v41c.ir.ops.round_trip import RoundTrip

ACTIVATION, INDEX = "fp8_e8m0_32", "fp4_e8m0_32"


@dataclass(frozen=True)
class Arithmetic:
    """`activation` is the dtype between operations, `round_trips` whether activations and caches are quantised."""

    name: str
    activation: str
    round_trips: bool

    def quantize(self, x: Tensor, format: str = ACTIVATION) -> Tensor:
        """`x` after the round trip of `format`, or `x` itself in exact arithmetic."""
        return apply(RoundTrip(format), x) if self.round_trips else x


_ARITHMETICS = {
    "release": Arithmetic("release", "bf16", True),
    "exact": Arithmetic("exact", "f32", False),
}


def arithmetic_named(name: str) -> Arithmetic:
    """The arithmetic of that name; UsageError otherwise."""
    if name not in _ARITHMETICS:
        raise UsageError(f"arithmetic: expected {' or '.join(_ARITHMETICS)}, got {name}")
    return _ARITHMETICS[name]
