"""Checkpoints in release format, memory-mapped through safetensors: nothing is read before it is asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from v41c.errors import CheckpointError
from v41c.frontend.tensor_names import TensorFormats, TensorSpec, expected_tensors
from v41c.ir.formats import decode_e8m0, dequantize

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

__all__ = ["Checkpoint", "TensorFormats", "TensorSpec", "expected_tensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LISTED_PROBLEMS = 4
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts


class Checkpoint:
    """The tensors of a folder: one model.safetensors, or shards named by model.safetensors.index.json.

    Opening reads headers only. CheckpointError, one line: a file is missing, truncated or no safetensors file, or index
    and shards disagree. Whether the tensors are those of a configuration is `verify`'s question.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        single, index = self.path / SINGLE_FILE, self.path / INDEX_FILE
        self._files: dict[str, Path] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._handles: dict[Path, Any] = {}
        if single.is_file():
            self._add(single, None)
        elif index.is_file():
            for shard, names in _read_index(index).items():
                self._add(shard, names)
        else:
            raise CheckpointError(f"{self.path}: expected {SINGLE_FILE} or {INDEX_FILE} in this folder, found neither")

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def original(self) -> Checkpoint:
        """The checkpoint as its files have it."""
        return self

    def spec(self, name: str) -> TensorSpec:
        """Stored dtype and shape of a tensor."""
        if name not in self._specs:
            raise CheckpointError(f"{self.path}: expected tensor {name}, found no such name")
        return self._specs[name]

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        self.spec(name)
        return self._files[name]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored (fp4 as int8 pairs, fp8 and e8m0 in torch's own types), backed by the mapped file."""
        self.spec(name)
        tensor: torch.Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The same as consecutive rows, one piece after the other; of a mapped tensor there is one piece."""
        yield self.tensor(name)

    def stack(self, pattern: str, count: int) -> torch.Tensor:
        """[count, ...]: the tensors whose names are `pattern` with its `{}` replaced by 0..count-1, copied together."""
        parts = [self.tensor(pattern.format(index)) for index in range(count)]
        return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)

    def rows(self, name: str, indices: Iterable[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Rows [len(indices), ...] of a tensor, in the order asked for; only their pages of the file are touched."""
        wanted = torch.as_tensor(indices if isinstance(indices, (np.ndarray, torch.Tensor)) else list(indices))
        table = self.tensor(name)
        # Gathering is not defined for every 8-bit float type; their bytes gather like any others.
        return table.view(torch.uint8)[wanted.to(torch.int64)].view(table.dtype)

    def dequantized(self, name: str) -> torch.Tensor:
        """A weight as fp32, its scales applied exactly; fp4 unpacked to its logical shape."""
        weight, scale_name = self.tensor(name), name.removesuffix("weight") + "scale"
        if not name.endswith(".weight") or scale_name not in self:
            return weight.float()
        scale = self.tensor(scale_name)
        if not name.endswith(".engram.embed.weight"):
            return dequantize(weight, scale)
        # A table has a scale per 32 elements of each row, not per block of rows.
        return weight.float() * decode_e8m0(scale).repeat_interleave(32, dim=-1)[:, : weight.shape[1]]

    def formats(self, config: ModelConfig) -> TensorFormats:
        """How this checkpoint stores what its configuration leaves open."""
        usual = TensorFormats.of(config)
        table = f"layers.{config.engram_layer_ids[0]}.engram.embed.weight" if config.has_engram else ""
        return TensorFormats(
            wo_a=self._stored("layers.0.attn.wo_a.weight", usual.wo_a),
            engram_table=self._stored(table, usual.engram_table),
        )

    def verify(self, config: ModelConfig) -> None:
        """Raise CheckpointError, one line, unless the tensors are exactly those of `config`.

        The line names the first few that are missing, extra, misshapen or of another dtype, and counts the rest.
        """
        expected = expected_tensors(config, self.formats(config))
        problems = []
        for name, spec in expected.items():
            if name not in self._specs:
                problems.append(f"{name}: expected {spec}, found nothing")
            elif self._specs[name] != spec:
                problems.append(f"{self._files[name].name}: {name}: expected {spec}, found {self._specs[name]}")
        for name in sorted(self._specs.keys() - expected.keys()):
            problems.append(f"{self._files[name].name}: {name}: expected no such tensor, found {self._specs[name]}")
        if problems:
            rest = len(problems) - _LISTED_PROBLEMS
            listed = "; ".join(problems[:_LISTED_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
            raise CheckpointError(f"{self.path}: the tensors are not those of the configuration: {listed}")

    def _stored(self, name: str, usual: Literal["fp8", "bf16"]) -> Literal["fp8", "bf16"]:
        stored = self._specs[name].dtype if name in self._specs else ""
        return "bf16" if stored == "BF16" else "fp8" if stored == "F8_E4M3" else usual

    def _add(self, file: Path, indexed: set[str] | None) -> None:
        """Map one file and take its header; with an index, the file must hold exactly the tensors `indexed`."""
        handle = _open(file)
        names = set(handle.keys())
        if indexed is not None and names != indexed:
            absent, extra = sorted(indexed - names), sorted(names - indexed)
            problem = f"expected tensor {absent[0]} of the index" if absent else f"expected no tensor {extra[0]}"
            found = "found no such name" if absent else f"which {INDEX_FILE} does not place here"
            raise CheckpointError(f"{file}: {problem}, {found} ({len(absent) + len(extra)} such tensors)")
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 - a file handle, not a mapping
            part = handle.get_slice(name)
            self._files[name] = file
            self._specs[name] = TensorSpec(part.get_dtype(), tuple(part.get_shape()))


def _open(file: Path) -> Any:
    _check_header(file)
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: expected a complete safetensors file, found a damaged one: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def _check_header(file: Path) -> None:
    """Refuse a header that names a tensor twice; every other damage is for safetensors to find and to describe."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
        json.loads(header, object_pairs_hook=_unique)
    except _RepeatedKeyError as error:
        raise CheckpointError(f"{file}: expected every tensor once in the header, found {error} twice") from None
    except (OSError, ValueError, RecursionError):
        return


class _RepeatedKeyError(Exception):
    """A JSON object has a key twice; the text is the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _RepeatedKeyError(repr(name))
    return keys


def _read_index(index: Path) -> dict[Path, set[str]]:
    """Tensor names by shard file, every shard present."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        shards: dict[str, Any] = dict(content["weight_map"].items())
    except _RepeatedKeyError as error:
        raise CheckpointError(f"{index}: expected every tensor once, found {error} twice") from None
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f'{index}: expected JSON with a "weight_map" of tensor names to shard files') from None
    files: dict[Path, set[str]] = {}
    for name, shard in shards.items():
        if not isinstance(shard, str) or shard != PurePath(shard).name or shard in ("", ".."):
            raise CheckpointError(f"{index}: tensor {name}: expected a file name in this folder, got {shard!r}")
        files.setdefault(index.parent / shard, set()).add(name)
    for file, names in files.items():
        if not file.is_file():
            raise CheckpointError(
                f"{file}: expected this shard with {len(names)} tensors of {index.name}, found no file"
            )
    return files
