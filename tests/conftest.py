"""What every test runs under, and what several files share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Triton decides when it is imported whether its functions are compiled or interpreted: here, interpreted
os.environ["TRITON_INTERPRET"] = "1"
# many small operations: on a busy machine threads wait for each other far longer than they compute
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites what passes print."""
    parser.addoption("--update-golden", action="store_true", help="write the output parts of tests/golden/*.ir anew")


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Engines for contexts of 512 tokens by checkpoint folder, arithmetic and passes, compiled when first asked for."""
    from v41c.compile import CompileOptions, compile

    made: dict[tuple[Path, str, str], Path] = {}

    def engine(checkpoint: Path, arithmetic: str = "release", passes: str = "all") -> Path:
        key = (checkpoint, arithmetic, passes)
        if key not in made:
            folder = tmp_path_factory.mktemp("engines") / f"{checkpoint.name}-{arithmetic}"
            options = CompileOptions(arithmetic=arithmetic, passes=passes, max_context=512)  # type: ignore[arg-type]
            compile(checkpoint, folder, options)
            made[key] = folder
        return made[key]

    return engine
