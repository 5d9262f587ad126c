"""Writing the engine folder: programs from planned graphs, packed weights, checksums; complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from v41c.codegen.kernel import Kernel
from v41c.errors import ArtifactError, UsageError
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.manifest import (
    ALIGNMENT_BYTES,
    CHAT_TEMPLATE_FILE,
    KERNELS_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Argument,
    BufferEntry,
    Command,
    FileEntry,
    Manifest,
    Program,
    StateEntry,
    WeightEntry,
    encode,
)

Array = npt.NDArray[Any]
ReadPieces = Callable[[Value], Iterator[Array]]
Pack = Callable[[str, Array, str], Array]
#: layout of a weight that kernels read as stored, row by row
PLAIN = "plain"
_COPY_BYTES = 64 << 20
#: younger temporary folders are left alone: their process may be about to lock them
_FRESH_SECONDS = 60


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder beside `destination` that takes its place when the block succeeds, and is removed when not.

    An engine that is already there is replaced; anything else that is there is refused.
    """
    destination = destination.absolute()
    _require_free(destination)
    made = [parent for parent in destination.parents if not parent.exists()]
    folder: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(destination)
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        folder.chmod(0o755)
        with _locked(folder):
            yield folder
            _take_place(folder, destination)
    except OSError as error:
        elsewhere = error.filename and (folder is None or not str(error.filename).startswith(str(folder)))
        place = error.filename if elsewhere else destination
        raise ArtifactError(f"{place}: cannot be written: {error.strerror}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in made:  # those that hold the engine now are not empty and stay
                parent.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder, which ends with the process however that ends; gives whether it could be had."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        had = True
    except OSError:  # held by another process, or a file system without locks
        had = False
    try:
        yield had
    finally:
        os.close(handle)


#: files of an engine that are written before its manifest
_FILES = (KERNELS_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE)


def _remove_abandoned(destination: Path) -> None:
    """Remove temporary folders of this destination whose process was killed.

    They are older than a minute, nobody locks them, and they hold parts of an engine and no manifest: that comes last.
    """
    parts = {"graphs", *(file.partition("/")[0] for file in _FILES)}
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.????????"):
        with contextlib.suppress(OSError):
            is_part = not folder.is_symlink() and {path.name for path in folder.iterdir()} <= parts
            if not is_part or time.time() - folder.stat().st_mtime < _FRESH_SECONDS:
                continue
            with _locked(folder) as abandoned:
                if abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


def _require_free(destination: Path) -> None:
    """Refuse a place that holds anything but nothing, an empty folder, or an engine and nothing else."""
    if destination.is_symlink():
        raise UsageError(f"{destination}: expected a folder or a free name, found a symbolic link")
    if not destination.exists() or (destination.is_dir() and _is_engine_or_empty(destination)):
        return
    raise UsageError(f"{destination}: expected an engine folder to replace or a free name, found something else")


def _is_engine_or_empty(folder: Path) -> bool:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if not found:
        return not any(folder.iterdir())
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
        return isinstance(manifest["format_version"], int) and found <= {MANIFEST_FILE, *manifest["files"]}
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return False


def _take_place(folder: Path, destination: Path) -> None:
    """Put the finished folder in place; what was there stays until it is, and comes back if it cannot be."""
    if not destination.exists():
        os.rename(folder, destination)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old.", dir=destination.parent))
    try:
        os.rename(destination, aside / "engine")
        os.rename(folder, destination)
    except BaseException:
        if not destination.exists() and (aside / "engine").exists():
            os.rename(aside / "engine", destination)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class ProgramWriter:
    """Lowers planned graphs to programs, sharing weights and states over all of them."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.weights: dict[tuple[str, str], Value] = {}
        #: weights that some operation reads as a whole
        self.whole: set[tuple[str, str]] = set()
        self.states: dict[str, Value] = {}
        self.dims: list[str] = ["T", "R", "S"]

    def programs(self, module: Module) -> list[Program]:
        """One program per graph variant."""
        for graph in module:
            for state in graph.states:
                self.states.setdefault(state.name, state)
                self.dims += [dim for dim in state.type.symbols if dim not in self.dims]
        return [self._program(graph) for graph in module]

    def _program(self, graph: Graph) -> Program:
        lowering = _Lowering(self, graph)
        commands = [lowering.command(node) for node in graph.nodes if node.kernel is not None]
        tokens = graph.bounds["T"]
        return Program(
            graph=graph.name.partition(":")[0],
            max_tokens=tokens,
            max_rows=graph.bounds.get("R", tokens),
            arena_bytes=lowering.arena_bytes,
            values=[_buffer(value) for value in lowering.values],
            inputs=[lowering.values[value] for value in graph.inputs],
            outputs=[lowering.values[value] for value in graph.outputs],
            commands=commands,
        )


class _Lowering:
    def __init__(self, writer: ProgramWriter, graph: Graph) -> None:
        self.writer = writer
        self.graph = graph
        self.versions = graph.state_versions
        self.weights = set(graph.weights)
        stored = [*graph.inputs, *(r for node in graph.nodes for r in node.results if r not in self.versions)]
        self.values = {value: index for index, value in enumerate(stored)}
        self.arena_bytes = self._arena_bytes()
        #: number of each node's command, of a view's the one that follows, and last that of the end
        self.numbers = [0, *accumulate(node.kernel is not None for node in graph.nodes)]

    def _arena_bytes(self) -> int:
        ends = [0]
        for value in self.values:
            ends.append((value.offset or 0) + value.type.bind(self.graph.bounds).size_bytes)
        for node in self.graph.nodes:
            if node.kernel is not None and node.kernel.workspace_bytes:
                ends.append((node.kernel.workspace_offset or 0) + node.kernel.workspace_bytes)
        return -(-max(ends) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def command(self, node: Node) -> Command:
        """The kernel call of a node: operands that are there, results, workspace, counters, dimensions."""
        if node.kernel is None:
            raise ArtifactError(f"{node.op.name()} of {node.origin.module}: expected a selected kernel")
        kernel = self.writer.kernels[node.kernel.symbol]
        bound = tuple(None if value is None else value.type.bind(self.graph.bounds) for value in node.operands)
        by_rows = node.op.touched(*bound)
        arguments = []
        for index, (declared, value) in enumerate(zip(node.op.operands(), node.operands, strict=True)):
            if value is None:
                continue
            layout = kernel.layouts.get(index, PLAIN)
            if value in self.weights and declared.name not in by_rows:
                self.writer.whole.add((value.name, layout))
            arguments.append(self._argument(value, layout))
        results = node.results[len(node.op.states) :]
        arguments += [self._argument(result, "") for result in results]
        if node.kernel.workspace_bytes:
            arguments.append(Argument("arena", node.kernel.workspace_offset or 0))
        if kernel.counter_bytes:
            arguments.append(Argument("counters", 0))
        arguments += [Argument("dim", self.writer.dims.index(dim)) for dim in kernel.dims]
        return Command(
            kernel=node.kernel.symbol,
            op=node.op.name(),
            arguments=arguments,
            results=[self.values[result] for result in results],
            origin=node.origin.module,
            workspace_bytes=node.kernel.workspace_bytes,
            joined=self.numbers[self.graph.joins[node]] if node.kernel.aside else None,
        )

    def _argument(self, value: Value, layout: str) -> Argument:
        if value in self.versions:
            return Argument("state", list(self.writer.states).index(self.versions[value]))
        if value in self.weights:
            key = (value.name, layout)
            self.writer.weights.setdefault(key, value)
            return Argument("weight", list(self.writer.weights).index(key))
        return Argument("arena", value.offset or 0)


def _buffer(value: Value) -> BufferEntry:
    return BufferEntry(value.name, str(value.type.dtype), list(value.type.shape), value.offset or 0)


def state_entries(states: Mapping[str, Value]) -> list[StateEntry]:
    """Manifest entries of states, in order."""
    return [StateEntry(name, str(state.type.dtype), list(state.type.shape)) for name, state in states.items()]


def write_weights(
    path: Path,
    writer: ProgramWriter,
    read: ReadPieces,
    pack: Pack,
    progress: Callable[[str], None],
) -> list[WeightEntry]:
    """Pack every weight in turn into one file; only one is in memory at a time, of a plain one a piece.

    `read` gives a weight as consecutive parts of its leading axis.
    """
    weights = writer.weights
    entries: list[WeightEntry] = []
    offset = 0
    with path.open("wb") as file:
        for number, ((name, layout), value) in enumerate(weights.items()):
            progress(f"packing weight {number + 1} of {len(weights)}")
            pieces = read(value)
            if layout != PLAIN:
                pieces = iter((pack(layout, _whole(pieces), str(value.type.dtype)),))
            padding = -offset % ALIGNMENT_BYTES
            file.write(b"\0" * padding)
            offset += padding
            size = 0
            for piece in pieces:
                _write_array(file, piece)
                size += piece.nbytes
                progress(f"packing weight {number + 1} of {len(weights)}, {(offset + size) / 1e9:.1f} GB")
            entries.append(WeightEntry(name, layout, offset, size, (name, layout) not in writer.whole))
            offset += size
    return entries


def _whole(pieces: Iterator[Array]) -> Array:
    parts = list(pieces)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _write_array(file: object, array: Array) -> None:
    """Write an array piece by piece: a mapped table never becomes resident as a whole."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, _COPY_BYTES):
        file.write(flat[begin : begin + _COPY_BYTES].data)  # type: ignore[attr-defined]


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below `folder`, by relative path."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.relative_to(folder).as_posix()] = FileEntry(path.stat().st_size, digest)
    return entries


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of an engine."""
    (folder / MANIFEST_FILE).write_bytes(encode(manifest))
