"""NVIDIA GPUs by compute capability, with the facts of one product each that bounds of time are stated for.

Shared memory and registers: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
Bandwidth and arithmetic (dense, at boost clock): NVIDIA's data sheets of the product named beside each target.
Unpacking an fp4 element takes about eight operations, which bounds `dequantised_per_second`.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41c.targets.target import Target


@dataclass(frozen=True)
class CudaTarget(Target):
    """A GPU: what a block may use, and which matrix products it has."""

    #: the product that the figures of time are of
    product: str
    multiprocessors: int
    #: resident at a time
    warps_per_multiprocessor: int
    blocks_per_multiprocessor: int
    registers_per_multiprocessor: int
    shared_bytes_per_block: int
    l2_bytes: int
    f32_flops: float
    bf16_flops: float
    f8_flops: float
    #: warp-group products that read their operands from shared memory
    has_wgmma: bool
    #: products of the fifth generation, with accumulators in tensor memory
    has_tcgen05: bool
    #: tensor memory accelerator
    has_tma: bool


KIND = "cuda"
#: one token of decode, a verification or a small batch, chunks of prefill
_VARIANTS = (1, 16, 512)
#: from one kernel's end to the next one's start within a recorded graph
_LAUNCH_SECONDS = 1.5e-6

SM_89 = CudaTarget(
    name="cuda:sm_89",
    backend="cuda",
    variants=_VARIANTS,
    capability=89,
    kept_bytes=48 << 30,
    memory_bytes_per_second=864e9,
    dequantised_per_second=11.45e12,
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=True,
    shares_index_scores=False,
    packs_activations=True,
    has_block_scaled_mma=False,
    features=(),
    product="L40S",
    multiprocessors=142,
    warps_per_multiprocessor=48,
    blocks_per_multiprocessor=24,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=99 << 10,
    l2_bytes=96 << 20,
    f32_flops=91.6e12,
    bf16_flops=362e12,
    f8_flops=733e12,
    has_wgmma=False,
    has_tcgen05=False,
    has_tma=False,
)
SM_90 = CudaTarget(
    name="cuda:sm_90",
    backend="cuda",
    variants=_VARIANTS,
    capability=90,
    kept_bytes=141 << 30,
    memory_bytes_per_second=4.8e12,
    dequantised_per_second=8.375e12,
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=True,
    shares_index_scores=False,
    packs_activations=True,
    has_block_scaled_mma=False,
    features=(),
    product="H200 SXM",
    multiprocessors=132,
    warps_per_multiprocessor=64,
    blocks_per_multiprocessor=32,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=227 << 10,
    l2_bytes=50 << 20,
    f32_flops=67e12,
    bf16_flops=989e12,
    f8_flops=1979e12,
    has_wgmma=True,
    has_tcgen05=False,
    has_tma=True,
)
SM_100 = CudaTarget(
    name="cuda:sm_100",
    backend="cuda",
    variants=_VARIANTS,
    capability=100,
    kept_bytes=180 << 30,
    memory_bytes_per_second=7.7e12,
    dequantised_per_second=9.375e12,
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=True,
    shares_index_scores=False,
    packs_activations=True,
    has_block_scaled_mma=True,
    features=(),
    product="B200 SXM",
    multiprocessors=148,
    warps_per_multiprocessor=64,
    blocks_per_multiprocessor=32,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=227 << 10,
    l2_bytes=126 << 20,
    f32_flops=75e12,
    bf16_flops=2250e12,
    f8_flops=4500e12,
    has_wgmma=False,
    has_tcgen05=True,
    has_tma=True,
)
SM_120 = CudaTarget(
    name="cuda:sm_120",
    backend="cuda",
    variants=_VARIANTS,
    capability=120,
    kept_bytes=96 << 30,
    memory_bytes_per_second=1.792e12,
    dequantised_per_second=15.625e12,
    launch_seconds=_LAUNCH_SECONDS,
    runs_aside=True,
    shares_index_scores=False,
    packs_activations=True,
    has_block_scaled_mma=True,
    features=(),
    product="RTX PRO 6000 Blackwell",
    multiprocessors=188,
    warps_per_multiprocessor=48,
    blocks_per_multiprocessor=24,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=99 << 10,
    l2_bytes=128 << 20,
    f32_flops=125e12,
    bf16_flops=504e12,
    f8_flops=1008e12,
    has_wgmma=False,
    has_tcgen05=False,
    has_tma=True,
)
TARGETS = (SM_89, SM_90, SM_100, SM_120)


def host() -> CudaTarget:
    """The target of this machine's first GPU; Hopper where there is none, or none of these."""
    try:
        from cuda.bindings import driver

        kind = driver.CUdevice_attribute
        driver.cuInit(0)
        _, device = driver.cuDeviceGet(0)
        _, major = driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        _, minor = driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    except (ImportError, RuntimeError):  # no package; no driver's library
        return SM_90
    return next((target for target in TARGETS if target.capability == 10 * major + minor), SM_90)
