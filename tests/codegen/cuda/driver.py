"""A CUDA driver without a GPU: memory of this process, and launches in Triton's interpreter or only looked at."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.codegen.cuda.harness import TORCH_TYPES
from tests.codegen.cuda.interpreter import install
from v41c.codegen.cuda.build import Cubin
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.lower import cubin_entry
from v41c.manifest import CubinEntry
from v41c.runtime.artifact import Engine
from v41c.runtime.states import Array


@dataclass(frozen=True)
class Launched:
    """One launch as the driver was asked for it: pointers as integers, the last two are the scratch pointers."""

    entry: CubinEntry
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    values: tuple[int, ...]
    aside: bool = False


@dataclass(frozen=True)
class Marked:
    """An event that happens when all that was asked of a stream before is done."""

    event: int
    aside: bool


@dataclass(frozen=True)
class Waited:
    """All that is asked of a stream later begins after an event."""

    event: int
    aside: bool


@dataclass(frozen=True)
class Moved:
    """A copy, from and to memory of the device; None is the host's."""

    read: range | None
    written: range | None


Asked = Launched | Marked | Waited | Moved


@dataclass
class HostDriver:
    """Runs launches of an engine, or of given `entries`, on memory of this process.

    What is launched aside runs as late as it may: when the main stream waits for an event behind it. `launched` has
    every launch in the order in which they ran, `asked` everything in the order in which it was asked for. With
    `interpret` launches run in Triton's interpreter; without, they are only looked at. `entries`: by the cubins'
    content. Of `room_bytes` of memory what was allocated is taken; `pinned` has what was registered instead.
    """

    engine: Engine | None
    interpret: bool = True
    launched: list[Launched] = field(default_factory=list)
    blocks: dict[int, Array] = field(default_factory=dict)
    named: dict[str, range] = field(default_factory=dict)
    recording: list[Asked] | None = None
    asked: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)
    events: int = 0
    entries: dict[bytes, CubinEntry] = field(default_factory=dict)
    room_bytes: int = 1 << 40
    pinned: list[range] = field(default_factory=list)

    @property
    def capability(self) -> int | None:
        """That of the engine."""
        return None if self.engine is None else self.engine.manifest.cuda_capability

    @property
    def hardware(self) -> str:
        """None."""
        return "Triton's interpreter"

    @property
    def free_bytes(self) -> int:
        """What is left of the room."""
        return self.room_bytes - sum(map(len, self.named.values()))

    def allocate(self, size: int, what: str) -> int:
        """Memory full of NaN bytes; its addresses are kept in `named`."""
        room = np.full(size + 256, 0xFF, np.uint8)
        block = room[-room.ctypes.data % 256 :][:size]
        self.blocks[block.ctypes.data] = block
        self.named[what] = range(block.ctypes.data, block.ctypes.data + size)
        return block.ctypes.data

    def register(self, array: Array) -> int:
        """The memory itself; a copy of what cannot be written, which torch does not take."""
        block = (array if array.flags.writeable else np.array(array)).reshape(-1).view(np.uint8)
        self.blocks[block.ctypes.data] = block
        self.pinned.append(range(block.ctypes.data, block.ctypes.data + block.nbytes))
        return block.ctypes.data

    def fill(self, address: int, value: int, size: int) -> None:
        """Set every byte."""
        if size:
            self.inside(address)[:size] = value

    def upload(self, address: int, array: Array) -> None:
        """Copy an array into a block."""
        if array.nbytes:
            self.asked.append(Moved(None, range(address, address + array.nbytes)))
            self.inside(address)[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def download(self, array: Array, address: int) -> None:
        """Copy from a block."""
        if array.nbytes:
            self.asked.append(Moved(range(address, address + array.nbytes), None))
            array.reshape(-1).view(np.uint8)[:] = self.inside(address)[: array.nbytes]

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy between blocks."""
        if size:
            self.asked.append(Moved(range(source, source + size), range(target, target + size)))
            self.inside(target)[:size] = self.inside(source)[:size]

    def kernel(self, cubin: bytes, function: str, shared_bytes: int) -> Any:
        """The manifest's entry of a cubin, found by its content."""
        entries = dict(self.entries)
        if self.engine is not None:
            entries |= {(self.engine.path / e.file).read_bytes(): e for e in self.engine.manifest.cubins.values()}
        if cubin not in entries or entries[cubin].function != function:
            raise ValueError(f"{function}: expected a cubin of the engine or one of the entries")
        return entries[cubin]

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        parameters: int,
        *,
        aside: bool = False,
    ) -> None:
        """Read the parameters as the driver would, and launch or record."""
        count = len(kernel.parameters) + 2
        addresses = (ctypes.c_uint64 * count).from_address(parameters)
        kinds = [kind for _, kind in kernel.parameters] + ["*u8", "*u8"]
        readers = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
        values = tuple(
            readers.get(kind, ctypes.c_uint64).from_address(address).value
            for kind, address in zip(kinds, addresses, strict=True)
        )
        self._ask(Launched(kernel, grid, threads, shared_bytes, values, aside))

    def event(self) -> int:
        """A number."""
        self.events += 1
        return self.events

    def mark(self, event: int, *, aside: bool) -> None:
        """Asked for, or recorded."""
        self._ask(Marked(event, aside))

    def wait(self, event: int, *, aside: bool) -> None:
        """Asked for, or recorded."""
        self._ask(Waited(event, aside))

    def begin_recording(self) -> None:
        """Keep launches from now on."""
        self.recording = []

    def end_recording(self) -> Any:
        """What was kept."""
        recorded, self.recording = self.recording, None
        return recorded

    def replay(self, recording: Any) -> None:
        """Do what was kept."""
        for asked in recording:
            self._do(asked)

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def inside(self, address: int) -> Array:
        """The rest of the block that an address lies in; ValueError outside of all."""
        for begin, block in self.blocks.items():
            if begin <= address < begin + block.nbytes:
                return block[address - begin :]
        raise ValueError(f"address {address:#x}: expected one inside a block")

    def _ask(self, asked: Asked) -> None:
        if self.recording is not None:
            self.recording.append(asked)
        else:
            self._do(asked)

    def _do(self, asked: Asked) -> None:
        self.asked.append(asked)
        match asked:
            case Launched(aside=False):
                self._run(asked)
            case Launched() | Marked(aside=True):
                self.late.append(asked)
            case Waited(aside=False):
                self._catch_up(Marked(asked.event, aside=True))

    def _catch_up(self, mark: Marked) -> None:
        """Run what was launched aside before a mark."""
        while mark in self.late:
            asked = self.late.pop(0)
            if isinstance(asked, Launched):
                self._run(asked)

    def _run(self, launched: Launched) -> None:
        self.launched.append(launched)
        if not self.interpret:
            return
        install()
        entry = launched.entry
        arguments = {
            name: self._tensor(value, kind) if kind.startswith("*") else value
            for (name, kind), value in zip(entry.parameters, launched.values, strict=False)
        }
        function = getattr(importlib.import_module(entry.module), entry.function)
        function[launched.grid](**arguments, **entry.constants)

    def _tensor(self, address: int, kind: str) -> torch.Tensor:
        dtype = TORCH_TYPES[kind.removeprefix("*")]
        rest = self.inside(address)
        return torch.from_numpy(rest[: rest.nbytes // dtype.itemsize * dtype.itemsize]).view(dtype)


class LearningDriver(HostDriver):
    """A driver of single kernels: it learns of their cubins, which hold nothing but their names, by giving them."""

    def code(self, kernel: CudaKernel) -> dict[str, tuple[CubinEntry, bytes]]:
        """Entry and content of the kernel's cubins by function."""
        functions = {launch.function.key(): launch.function for launch in kernel.launches}
        made = {
            key: cubin_entry(function, key, Cubin(function.name, function.warps, 0, 32, 0, {}))
            for key, function in functions.items()
        }
        self.entries |= {key.encode(): entry for key, entry in made.items()}
        return {key: (entry, key.encode()) for key, entry in made.items()}
