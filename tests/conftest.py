"""What every test runs under, and what several files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# many small operations: on a busy machine threads wait for each other far longer than they compute
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites what passes print."""
    parser.addoption("--update-golden", action="store_true", help="write the output parts of tests/golden/*.ir anew")


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Engines for contexts of 512 tokens by checkpoint folder and arithmetic, compiled when first asked for."""
    from v41c.compile import CompileOptions, compile

    made: dict[tuple[Path, str], Path] = {}

    def engine(checkpoint: Path, arithmetic: str = "release") -> Path:
        key = (checkpoint, arithmetic)
        if key not in made:
            folder = tmp_path_factory.mktemp("engines") / f"{checkpoint.name}-{arithmetic}"
            compile(checkpoint, folder, CompileOptions(arithmetic=arithmetic, max_context=512))  # type: ignore[arg-type]
            made[key] = folder
        return made[key]

    return engine
