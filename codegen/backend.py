"""What every folder of kernels offers to a compilation; `backend_of` finds the folder of a target."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from v41c.codegen.kernel import Kernel
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.manifest import CubinEntry, LaunchEntry


@dataclass(frozen=True)
class Built:
    """What the manifest must say of built kernels besides their names."""

    cubins: dict[str, CubinEntry] = field(default_factory=dict)
    launches: dict[str, list[LaunchEntry]] = field(default_factory=dict)


@dataclass(frozen=True)
class Workshop:
    """What a build may use: a folder that keeps what earlier builds made, and whom to tell how far it is."""

    cache: Path
    progress: Callable[[str], None]


class Backend(Protocol):
    """The kernels for one kind of target."""

    def kernel_for(
        self,
        op: Op,
        operands: Sequence[TensorType | None],
        results: Sequence[TensorType],
        target: Any,
        bounds: Mapping[str, int],
    ) -> Kernel:
        """The kernel of `op` at these types; UnsupportedError names operation, target and reason."""

    def build_kernels(
        self, kernels: Sequence[Any], target: Any, dims: Sequence[str], folder: Path, workshop: Workshop
    ) -> Built:
        """Write the kernels' files into an engine's folder; `dims` are the manifest's."""


def backend_of(target: Any) -> Backend:
    """The backend of a target."""
    return cast(Backend, importlib.import_module(f"v41c.codegen.{target.backend}"))
