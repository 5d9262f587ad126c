"""NVIDIA GPUs by compute capability, with the facts of one product each that bounds of time are stated for.

Shared memory and registers: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
Bandwidth and arithmetic (dense, at boost clock): NVIDIA's data sheets of the product named beside each target.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CudaTarget:
    """Capabilities of one kind of GPU. Passes and kernels ask these fields and never the name."""

    name: str
    #: which folder of `codegen` writes its kernels
    backend: str
    #: token counts that programs are made for
    variants: tuple[int, ...]
    #: compute capability times ten, which cubins are compiled for
    capability: int
    #: the product that the figures below are of
    product: str
    multiprocessors: int
    registers_per_multiprocessor: int
    shared_bytes_per_block: int
    l2_bytes: int
    memory_bytes_per_second: float
    f32_flops: float
    bf16_flops: float
    f8_flops: float
    #: warp-group products that read their operands from shared memory
    has_wgmma: bool
    #: products of the fifth generation, with accumulators in tensor memory
    has_tcgen05: bool
    #: products that apply a power-of-two scale to every 32 elements themselves
    has_block_scaled_mma: bool
    #: tensor memory accelerator
    has_tma: bool


_VARIANTS = (1, 16, 512)

SM_89 = CudaTarget(
    name="cuda:sm_89",
    backend="cuda",
    variants=_VARIANTS,
    capability=89,
    product="L40S",
    multiprocessors=142,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=99 << 10,
    l2_bytes=96 << 20,
    memory_bytes_per_second=864e9,
    f32_flops=91.6e12,
    bf16_flops=362e12,
    f8_flops=733e12,
    has_wgmma=False,
    has_tcgen05=False,
    has_block_scaled_mma=False,
    has_tma=False,
)
SM_90 = CudaTarget(
    name="cuda:sm_90",
    backend="cuda",
    variants=_VARIANTS,
    capability=90,
    product="H200 SXM",
    multiprocessors=132,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=227 << 10,
    l2_bytes=50 << 20,
    memory_bytes_per_second=4.8e12,
    f32_flops=67e12,
    bf16_flops=989e12,
    f8_flops=1979e12,
    has_wgmma=True,
    has_tcgen05=False,
    has_block_scaled_mma=False,
    has_tma=True,
)
SM_100 = CudaTarget(
    name="cuda:sm_100",
    backend="cuda",
    variants=_VARIANTS,
    capability=100,
    product="B200 SXM",
    multiprocessors=148,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=227 << 10,
    l2_bytes=126 << 20,
    memory_bytes_per_second=7.7e12,
    f32_flops=75e12,
    bf16_flops=2250e12,
    f8_flops=4500e12,
    has_wgmma=False,
    has_tcgen05=True,
    has_block_scaled_mma=True,
    has_tma=True,
)
SM_120 = CudaTarget(
    name="cuda:sm_120",
    backend="cuda",
    variants=_VARIANTS,
    capability=120,
    product="RTX PRO 6000 Blackwell",
    multiprocessors=188,
    registers_per_multiprocessor=65536,
    shared_bytes_per_block=99 << 10,
    l2_bytes=128 << 20,
    memory_bytes_per_second=1.792e12,
    f32_flops=125e12,
    bf16_flops=504e12,
    f8_flops=1008e12,
    has_wgmma=False,
    has_tcgen05=False,
    has_block_scaled_mma=True,
    has_tma=True,
)
CUDA_TARGETS = (SM_89, SM_90, SM_100, SM_120)
TARGETS = ()


def host() -> None:
    """No CUDA device is the host processor."""
