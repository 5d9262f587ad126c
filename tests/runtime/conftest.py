"""The toy engine, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.fake_engine import Built, compile_kernels, write_engine
from v41c.runtime.artifact import Engine, load


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Compiled toy kernels."""
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def engine(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The toy engine with every graph, loaded."""
    return load(write_engine(built, tmp_path_factory.mktemp("engine") / "toy"))


@pytest.fixture
def folder(built: Built, tmp_path: Path) -> Path:
    """A toy engine's folder of one's own, to damage."""
    return write_engine(built, tmp_path / "toy")
