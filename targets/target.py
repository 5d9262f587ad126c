"""What a kind of hardware has, as passes and kernels may ask it; and finding a target by how the user spells it."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType

from v41c.errors import UsageError


@dataclass(frozen=True)
class Target:
    """Capabilities of one kind of processor. Passes and kernels ask these fields and never the name."""

    name: str
    #: which folder of `codegen` writes its kernels
    backend: str
    #: processor name for the code generator
    mcpu: str
    #: width of the widest floating-point register
    vector_bits: int
    #: architectural registers of that width
    vector_registers: int
    #: 16-lane float permutation with a register as the table
    has_avx512: bool
    #: half to single conversion
    has_f16c: bool
    #: caches assumed when tiles are chosen; the least of the processors covered, so that engines do not depend on
    #: the machine that compiled them
    l1d_bytes: int
    l2_bytes: int
    #: weights that take no more than this stay in memory once they are read
    kept_bytes: int
    #: of one core, from and to memory
    memory_bytes_per_second: float
    #: elements of packed fp4 rows that one core makes f32 of
    dequantised_per_second: float
    #: one more kernel in a step
    launch_seconds: float
    #: feature names, as the kernel of the operating system spells them, without which an engine must not be run
    features: tuple[str, ...]


def all_targets() -> tuple[Target, ...]:
    """Every target, found in the modules of this folder, most capable last within a module."""
    return tuple(target for module in _modules() for target in module.TARGETS)


def host_target() -> Target:
    """The most capable CPU target that this machine can run; UsageError names what it lacks otherwise."""
    for module in _modules():
        target = module.host()
        if isinstance(target, Target):
            return target
    raise UsageError(
        f"target: expected a processor of {_names()}, this machine is none; name a target to cross-compile"
    )


def find_target(spec: str) -> Target:
    """The target that `spec` names: `cpu` is this machine, `cpu:x86-64-v3` and the like are fixed levels."""
    if spec == "cpu":
        return host_target()
    for target in all_targets():
        if target.name == spec:
            return target
    raise UsageError(f"target: expected cpu or one of {_names()}, got {spec!r}")


def _names() -> str:
    return ", ".join(target.name for target in all_targets())


def _modules() -> list[ModuleType]:
    package = importlib.import_module("v41c.targets")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "target")
    return [importlib.import_module(f"v41c.targets.{name}") for name in names]
