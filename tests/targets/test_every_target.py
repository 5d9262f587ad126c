"""Every target: consistent capabilities, found by name; and the choice for a machine from what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41c.errors import UsageError
from v41c.targets import cuda, x86_64
from v41c.targets.cuda import CudaTarget
from v41c.targets.target import CpuTarget, Target, all_targets, find_target


@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_facts_fit_together(target: Target) -> None:
    assert find_target(target.name) == target
    assert target.name.startswith(f"{target.backend}:")
    assert list(target.variants) == sorted(set(target.variants))
    assert target.variants[0] == 1
    assert (target.capability is None) == (target.backend == "cpu")
    assert 1e9 < target.memory_bytes_per_second < 1e13
    assert 1e9 < target.dequantised_per_second < 1e14
    assert 1e-7 < target.launch_seconds < 1e-5
    assert target.kept_bytes >= 1 << 30


@pytest.mark.parametrize("target", x86_64.TARGETS, ids=lambda target: target.name)
def test_cpus(target: CpuTarget) -> None:
    assert target.vector_bits in (128, 256, 512)
    assert target.vector_registers in (16, 32)
    assert 16 << 10 <= target.l1d_bytes <= 1 << 20
    assert target.l1d_bytes < target.l2_bytes <= 64 << 20
    assert len(set(target.features)) == len(target.features)
    if target.has_avx512:
        assert target.vector_bits == 512
        assert "avx512f" in target.features
    if target.has_f16c:
        assert "f16c" in target.features


@pytest.mark.parametrize("target", cuda.TARGETS, ids=lambda target: target.name)
def test_gpus(target: CudaTarget) -> None:
    assert target.name == f"cuda:sm_{target.capability}"
    assert 48 << 10 <= target.shared_bytes_per_block <= 227 << 10
    assert target.registers_per_multiprocessor == 65536
    assert 100 <= target.multiprocessors <= 200
    assert target.f32_flops < target.bf16_flops < target.f8_flops
    assert not (target.has_wgmma and target.has_tcgen05)
    assert target.has_tma == (target.capability is not None and target.capability >= 90)


def test_names_differ() -> None:
    names = [target.name for target in all_targets()]
    assert len(set(names)) == len(names)


def test_a_kind_is_this_machine() -> None:
    assert find_target("cpu") == x86_64.host()
    assert find_target("cuda") == cuda.host()


@pytest.mark.parametrize("spec", ["", "cpu:", "cpu:x86-64-v9", "gpu", "CPU", "cuda:sm_70"])
def test_unknown_names_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=r"target: expected one of cuda, cpu, cuda:sm_89, .*, cpu:x86-64-v4, got"):
        find_target(spec)


def test_host_is_the_best_level_it_has(tmp_path: Path) -> None:
    def host(*flags: str) -> Target:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\nbugs\t\t: none\n")
        return x86_64.host(file)

    assert host(*x86_64.V4.features) == x86_64.V4
    assert host(*x86_64.V4.features[:-1]) == x86_64.V3
    assert host(*x86_64.V3.features) == x86_64.V3
    with pytest.raises(UsageError, match="expected a processor of cpu:x86-64-v3, cpu:x86-64-v4, this machine is none"):
        host(*x86_64.V3.features[1:])
    with pytest.raises(UsageError, match="this machine is none"):
        x86_64.host(tmp_path / "absent")
