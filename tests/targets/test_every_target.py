"""Every target: consistent capabilities, found by name; and the choice for a machine from what its kernel reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41c.errors import UsageError
from v41c.targets import x86_64
from v41c.targets.target import Target, all_targets, find_target, host_target


@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_capabilities_fit_together(target: Target) -> None:
    assert find_target(target.name) == target
    assert target.name.startswith(f"{target.backend}:")
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


def test_names_differ() -> None:
    names = [target.name for target in all_targets()]
    assert len(set(names)) == len(names)


def test_cpu_is_this_machine() -> None:
    assert find_target("cpu") == host_target()


@pytest.mark.parametrize("spec", ["", "cpu:", "cpu:x86-64-v9", "gpu", "CPU"])
def test_unknown_names_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="target: expected cpu or one of cpu:x86-64-v3, cpu:x86-64-v4, got"):
        find_target(spec)


def test_host_is_the_best_level_it_has(tmp_path: Path) -> None:
    def host(*flags: str) -> Target | None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\nbugs\t\t: none\n")
        return x86_64.host(file)

    assert host(*x86_64.V4.features) == x86_64.V4
    assert host(*x86_64.V4.features[:-1]) == x86_64.V3
    assert host(*x86_64.V3.features) == x86_64.V3
    assert host(*x86_64.V3.features[1:]) is None
    assert x86_64.host(tmp_path / "absent") is None
