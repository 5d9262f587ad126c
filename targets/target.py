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
    #: the most tokens of a step, for each program that is made of a graph
    variants: tuple[int, ...]
    #: compute capability times ten, which CUDA kernels are compiled for; None for a CPU
    capability: int | None
    #: weights that take no more than this stay in memory once they are read
    kept_bytes: int
    #: of one core of a CPU, of a whole GPU, from and to memory
    memory_bytes_per_second: float
    #: elements of packed fp4 rows that it makes floats of
    dequantised_per_second: float
    #: one more kernel in a step
    launch_seconds: float
    #: a kernel may run beside those that follow it, on a stream of its own
    runs_aside: bool
    #: one kernel makes both selections of an indexer from scores that are made once
    shares_index_scores: bool
    #: boundaries write, and products read, packed rows of activations
    packs_activations: bool
    #: matrix products that apply a power-of-two scale to every 32 elements themselves
    has_block_scaled_mma: bool
    #: feature names, as the kernel of the operating system spells them, without which an engine must not be run
    features: tuple[str, ...]


@dataclass(frozen=True)
class CpuTarget(Target):
    """A CPU: what its instructions and caches are."""

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


def all_targets() -> tuple[Target, ...]:
    """Every target, found in the modules of this folder, most capable last within a module."""
    return tuple(target for module in _modules() for target in module.TARGETS)


def find_target(spec: str) -> Target:
    """The target that `spec` names, in full, or by its kind: `cpu` and `cuda` are what this machine has."""
    for module in _modules():
        if spec == module.KIND:
            found: Target = module.host()
            return found
    for target in all_targets():
        if target.name == spec:
            return target
    names = [module.KIND for module in _modules()] + [target.name for target in all_targets()]
    raise UsageError(f"target: expected one of {', '.join(names)}, got {spec!r}")


def _modules() -> list[ModuleType]:
    package = importlib.import_module("v41c.targets")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "target")
    return [importlib.import_module(f"v41c.targets.{name}") for name in names]
