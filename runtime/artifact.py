"""Loading an engine folder: every file is checked before anything in it is trusted."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from v41c.errors import ArtifactError, UsageError
from v41c.manifest import (
    CHAT_TEMPLATE_FILE,
    FORMAT_VERSION,
    KERNELS_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileEntry,
    Manifest,
    Program,
    decode,
    is_intact,
)
from v41c.runtime.bounds import check_manifest

Bytes = npt.NDArray[np.uint8]
#: kinds of devices that run engines
KINDS = ("cpu", "cuda")


class _Header(msgspec.Struct, frozen=True):
    """What must be read before the rest of a manifest can be: it may be of another version or machine."""

    format_version: int
    target: str
    cpu_features: list[str]


@dataclass(frozen=True, eq=False)
class Engine:
    """A checked engine. `weights` u8 [size of weights.bin] is mapped, not read; empty when compiled without weights."""

    path: Path
    manifest: Manifest
    weights: Bytes

    @property
    def kernels_path(self) -> Path:
        """The compiled kernels."""
        return self.path / KERNELS_FILE

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer, None when the checkpoint had none."""
        return self.path / TOKENIZER_FILE if TOKENIZER_FILE in self.manifest.files else None

    @property
    def chat_template_path(self) -> Path | None:
        """The chat template, None when the checkpoint had none."""
        return self.path / CHAT_TEMPLATE_FILE if CHAT_TEMPLATE_FILE in self.manifest.files else None

    def programs(self, graph: str) -> tuple[Program, ...]:
        """Programs of a graph by ascending `max_tokens`; empty when the engine has no such graph."""
        found = [program for program in self.manifest.programs if program.graph == graph]
        return tuple(sorted(found, key=lambda program: program.max_tokens))

    def blocks(self, graph: str) -> int:
        """Backbone layers that a graph evaluates per token: each layer owns one window ring."""
        states = self.manifest.states
        used = {
            states[argument.index].name
            for program in self.programs(graph)[:1]
            for command in program.commands
            for argument in command.arguments
            if argument.kind == "state"
        }
        return sum(name.startswith("layers.") and name.endswith(".window") for name in used)

    def require_weights(self) -> None:
        """ArtifactError for an engine compiled without weights."""
        if not self.manifest.has_weights:
            raise ArtifactError(
                f"{self.path / WEIGHTS_FILE}: this engine was compiled with --no-weights and cannot run: "
                "compile it from a checkpoint folder"
            )


def load(path: str | Path) -> Engine:
    """The engine in a folder.

    ArtifactError, one line naming the file, for a folder that is no engine; a file missing, extra, of another size or
    content than at compile time; another format version, an unknown kind of target, another processor; anything in the
    manifest that points outside what it indexes.
    """
    folder = Path(path)
    content = _read_manifest(folder)
    _check_header(folder / MANIFEST_FILE, content)
    if not is_intact(content):
        raise ArtifactError(f"{folder / MANIFEST_FILE}: damaged: its SHA-256 differs: compile the engine again")
    try:
        manifest = decode(content)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{folder / MANIFEST_FILE}: {error}: compile the engine again") from error
    _check_files(folder, manifest.files)
    check_manifest(folder / MANIFEST_FILE, manifest)
    return Engine(folder, manifest, _map_weights(folder, manifest))


def _read_manifest(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected an engine folder, found {'a file' if folder.exists() else 'nothing'}")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder}: expected an engine folder, found no {MANIFEST_FILE} in it") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error


def _check_header(path: Path, content: bytes) -> None:
    try:
        header = msgspec.json.decode(content, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged or not an engine's manifest: {error}") from error
    if header.format_version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: format version: expected {FORMAT_VERSION}, got {header.format_version}: "
            "compile the engine with this version of v41c"
        )
    if kind_of(header.target) not in KINDS:
        raise ArtifactError(f"{path}: target: expected one of {', '.join(KINDS)}, got {header.target!r}")
    present = cpu_features()
    lacking = [feature for feature in header.cpu_features if feature not in present]
    if lacking:
        raise ArtifactError(
            f"{path}: compiled for a processor with {', '.join(lacking)}, which this one lacks: "
            "compile the engine on this machine"
        )


def kind_of(target: str) -> str:
    """The kind of device that a target's name starts with: cpu of cpu:x86-64-v4."""
    return target.partition(":")[0]


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction sets of this processor as the kernel spells them (`avx2`, `fma`, `avx512f`); empty when unknown."""
    return frozenset(_cpu_line(cpuinfo, "flags", "Features").split())


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What this processor calls itself; empty when unknown."""
    return _cpu_line(cpuinfo, "model name")


def _cpu_line(cpuinfo: Path, *names: str) -> str:
    """The first value under one of the names; empty when there is none."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() in names), "")


def _check_files(folder: Path, files: dict[str, FileEntry]) -> None:
    found = {
        Path(parent, name).relative_to(folder).as_posix() for parent, _, names in os.walk(folder) for name in names
    } - {MANIFEST_FILE}
    for name in sorted(files.keys() - found):
        raise ArtifactError(f"{folder / name}: missing: compile the engine again")
    for name in sorted(found - files.keys()):
        raise ArtifactError(f"{folder / name}: not part of the engine: remove it")
    for name, entry in files.items():
        _check_file(folder / name, entry)


def _check_file(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: expected a file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size_bytes:
                raise ArtifactError(f"{path}: size: expected {entry.size_bytes} bytes, got {size}: compile it again")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    if digest != entry.sha256:
        raise ArtifactError(f"{path}: damaged: expected SHA-256 {entry.sha256}, got {digest}: compile it again")


def _map_weights(folder: Path, manifest: Manifest) -> Bytes:
    if not manifest.has_weights or not manifest.files[WEIGHTS_FILE].size_bytes:
        return np.empty(0, np.uint8)
    try:
        return np.memmap(folder / WEIGHTS_FILE, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ArtifactError(f"{folder / WEIGHTS_FILE}: cannot be mapped: {error.strerror}") from error
