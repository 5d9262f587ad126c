"""The base of every operation, and its cost.

An operation is a frozen dataclass whose fields are the attributes. `infer` is the only shape rule: the builder, the
verifier and the traced model's shape functions all call it. `reference` is the meaning, in plain PyTorch.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from v41c.errors import VerifyError
from v41c.ir.types import Dim, DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = (DType.F32, DType.BF16)


@dataclass(frozen=True)
class Cost:
    """Arithmetic and traffic of one or more operations, in floating-point operations and bytes."""

    flops: int = 0
    weight_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.activation_bytes + other.activation_bytes,
            self.launches + other.launches,
        )


@dataclass(frozen=True)
class Operand:
    """Name of an operand as `infer` declares it; `optional` operands may be absent, `state` ones are consumed."""

    name: str
    optional: bool
    state: bool


@dataclass(frozen=True)
class Example:
    """Operands for one use of an operation: types, or tensors of a fixed seed."""

    op: Op
    operands: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Op:
    """One operation. Subclasses add attributes as fields and define `infer`, `reference`, `flops` and `examples`."""

    #: operands that are states written by the operation; each is returned as a result, in this order, before the rest
    states: ClassVar[tuple[str, ...]] = ()
    #: the result is the operand's storage under another shape: no kernel, no memory
    view: ClassVar[bool] = False
    #: operands that may be packed rows of activations, of `v41c.ir.packed`
    packable: ClassVar[tuple[str, ...]] = ()
    #: groups of (operand, axis): one permutation of all axes of a group moves no bit of any result
    exchangeable: ClassVar[tuple[tuple[tuple[str, int], ...], ...]] = ()
    #: the eager model may use it; fused operations are made by passes only
    traced: ClassVar[bool] = True

    @classmethod
    def name(cls) -> str:
        """Operation name: the name of its file."""
        return cls.__module__.rsplit(".", 1)[-1]

    @classmethod
    def operands(cls) -> tuple[Operand, ...]:
        """The declared operands, in order."""
        return _operands(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__ for the class's

    def infer(self, *operands: Any) -> TensorType | tuple[TensorType, ...]:
        """Result types from operand types; raises VerifyError on operands the operation does not accept."""
        raise NotImplementedError

    def reference(self, *operands: Any) -> Any:
        """The results in PyTorch: a tensor or a tuple. State operands are updated in place and returned first."""
        raise NotImplementedError

    def packing(self) -> tuple[Op, int] | None:
        """The operation that gives packed rows in place of a result's round trip, and the result; None for none."""
        return None

    def flops(self, *operands: Any) -> int:
        """Multiplications and additions, from operand types without symbolic dimensions."""
        raise NotImplementedError

    def touched(self, *operands: Any) -> Mapping[str, int]:
        """Bytes read or written of operands that are not touched as a whole, by operand name."""
        return {}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Small uses of the operation with seeded, non-trivial tensors; every test of operations runs over them."""
        raise NotImplementedError

    @classmethod
    def result_count(cls) -> int:
        """How many results the operation has, states included."""
        hint = _hints_of_infer(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__ for the class's
        return len(hint.__args__) if hasattr(hint, "__args__") else 1

    def infer_results(self, operands: tuple[TensorType | None, ...]) -> tuple[TensorType, ...]:
        """`infer` as a tuple, after checking the operand count and the presence of required operands."""
        declared = self.operands()
        if len(operands) != len(declared):
            raise VerifyError(f"{self.name()}: operands: expected {len(declared)}, got {len(operands)}")
        for operand, actual in zip(declared, operands, strict=True):
            if actual is None and not operand.optional:
                raise VerifyError(f"{self.name()}: operand {operand.name}: expected a value, got none")
        try:
            result = self.infer(*operands)
        except VerifyError as error:  # a fused operation is refused by one of its parts
            own = str(error).startswith(f"{self.name()}:")
            raise error if own else VerifyError(f"{self.name()}: {error}") from None
        return result if isinstance(result, tuple) else (result,)

    def attributes(self) -> dict[str, Any]:
        """Attribute values by name, in declaration order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_attributes(cls, values: Mapping[str, Any]) -> Op:
        """The operation with attributes as parsed from text: lists become tuples, numbers take the declared type."""
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__ for the class's
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise VerifyError(f"{cls.name()}: attributes: expected {sorted(known)}, got {sorted(values)}")
        return cls(**{name: _coerce(value, hints[name]) for name, value in values.items()})

    def text(self) -> str:
        """Attributes as `{name=value, …}` in JSON values, empty without attributes."""
        items = [f"{name}={json.dumps(value)}" for name, value in self.attributes().items()]
        return "{" + ", ".join(items) + "}" if items else ""

    def require(self, condition: bool, what: str, expected: object, got: object) -> None:
        """Raise VerifyError `op: what: expected …, got …` unless `condition` holds."""
        if not condition:
            raise VerifyError(f"{self.name()}: {what}: expected {expected}, got {got}")

    def require_shape(self, operand: str, actual: TensorType, *shape: Dim) -> None:
        """Require an exact shape."""
        same = len(actual.shape) == len(shape) and all(a == b for a, b in zip(actual.shape, shape, strict=True))
        if not same:
            self.require(False, f"{operand} shape", list(shape), list(actual.shape))

    def require_rank(self, operand: str, actual: TensorType, rank: int) -> None:
        """Require a number of axes."""
        self.require(len(actual.shape) == rank, f"{operand} rank", rank, len(actual.shape))

    def require_dtype(self, operand: str, actual: TensorType, *dtypes: DType) -> None:
        """Require one of several element types."""
        self.require(actual.dtype in dtypes, f"{operand} dtype", " or ".join(dtypes), actual.dtype)


@cache
def _operands(cls: type[Op]) -> tuple[Operand, ...]:
    parameters = list(inspect.signature(cls.infer).parameters.values())[1:]
    return tuple(
        Operand(p.name, optional=p.default is not inspect.Parameter.empty, state=p.name in cls.states)
        for p in parameters
    )


@cache
def _hints_of_infer(cls: type[Op]) -> Any:
    return get_type_hints(cls.infer)["return"]


@cache
def _hints(cls: type[Op]) -> dict[str, Any]:
    return get_type_hints(cls)


def _coerce(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        inner = hint.__args__[0]
        return tuple(_coerce(item, inner) for item in value)
    return float(value) if hint is float else value


def cost_of(
    op: Op,
    operands: tuple[TensorType | None, ...],
    results: tuple[TensorType, ...],
    roles: tuple[str, ...],
    dims: Mapping[str, int],
) -> Cost:
    """Cost of one operation at given dimensions.

    `roles` says for every operand whether it is a "weight", a "state" or an "activation". States that an operation
    writes count once, as what `touched` reports.
    """
    if op.view:
        return Cost()
    bound = tuple(None if operand is None else operand.bind(dims) for operand in operands)
    touched = op.touched(*bound)
    total = {"weight": 0, "state": 0, "activation": 0}
    for declared, role, operand in zip(op.operands(), roles, bound, strict=True):
        if operand is not None:
            total[role] += touched.get(declared.name, operand.size_bytes)
    total["activation"] += sum(result.bind(dims).size_bytes for result in results[len(op.states) :])
    return Cost(op.flops(*bound), total["weight"], total["state"], total["activation"], 1)


def product(*dims: Dim) -> int:
    """Product of dimensions that are already numbers."""
    return math.prod(int(dim) for dim in dims)


def seeded(seed: int) -> Callable[..., Tensor]:
    """A generator of standard normal f32 tensors `normal(*shape, scale=1.0, dtype="f32")` of a fixed seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: str = "f32") -> Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(torch.bfloat16) if dtype == "bf16" else values

    return normal
