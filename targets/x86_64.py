"""x86-64 processors by micro-architecture level (x86-64 psABI, section 3.1.1): v3 is AVX2, v4 is AVX-512."""

from __future__ import annotations

from pathlib import Path

from v41c.errors import UsageError
from v41c.targets.target import CpuTarget

_V3_FEATURES = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4_FEATURES = (*_V3_FEATURES, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

KIND = "cpu"
#: one token of decode, and chunks of prefill
_VARIANTS = (1, 512)
#: an eighth of the memory of the smallest machines with such processors, 8 GiB
_KEPT_BYTES = 1 << 30
#: measured on a Sapphire Rapids: gathering 512 rows of 512 elements takes 80 to 134 us, of which dequantising is 48
_MEMORY_BYTES_PER_SECOND = 18e9
_LAUNCH_SECONDS = 0.5e-6

V3 = CpuTarget(
    name="cpu:x86-64-v3",
    backend="cpu",
    variants=_VARIANTS,
    capability=None,
    mcpu="x86-64-v3",
    vector_bits=256,
    vector_registers=16,
    has_avx512=False,
    has_f16c=True,
    l1d_bytes=32 << 10,  # Haswell to Zen 4
    l2_bytes=256 << 10,  # Haswell
    kept_bytes=_KEPT_BYTES,
    memory_bytes_per_second=_MEMORY_BYTES_PER_SECOND,
    dequantised_per_second=4.0e9,  # AVX2 kernels on the Sapphire Rapids below
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=False,
    shares_index_scores=True,
    packs_activations=False,
    has_block_scaled_mma=False,
    features=_V3_FEATURES,
)
V4 = CpuTarget(
    name="cpu:x86-64-v4",
    backend="cpu",
    variants=_VARIANTS,
    capability=None,
    mcpu="x86-64-v4",
    vector_bits=512,
    vector_registers=32,
    has_avx512=True,
    has_f16c=True,
    l1d_bytes=32 << 10,  # Skylake-X, Zen 4; 48 KiB since Ice Lake and Zen 5
    l2_bytes=1 << 20,  # Skylake-X, Zen 4, Zen 5
    kept_bytes=_KEPT_BYTES,
    memory_bytes_per_second=_MEMORY_BYTES_PER_SECOND,
    dequantised_per_second=5.5e9,
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=False,
    shares_index_scores=True,
    packs_activations=False,
    has_block_scaled_mma=False,
    features=_V4_FEATURES,
)
TARGETS = (V3, V4)


def host(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuTarget:
    """The most capable target that the processor described by `cpuinfo` runs; UsageError where it runs none."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    present = set(flags.split())
    for target in reversed(TARGETS):
        if present.issuperset(target.features):
            return target
    names = ", ".join(target.name for target in TARGETS)
    raise UsageError(f"target: expected a processor of {names}, this machine is none; name a target to cross-compile")
