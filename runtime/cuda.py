"""The CUDA device: an engine's cubins, its weights, states and activations on a GPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any, Protocol

import numpy as np

from v41c.errors import ContextError, DeviceError
from v41c.manifest import BufferEntry, Command, LaunchEntry, Program, StateEntry, capacities
from v41c.runtime.artifact import Engine
from v41c.runtime.bounds import PARTIAL_INPUTS, bind, extent_bytes
from v41c.runtime.device import Observation, Observe, Programs, require_fit, require_rows, step_size
from v41c.runtime.journal import Journal
from v41c.runtime.states import NUMPY, Array

#: programs for so many tokens are replayed as one recording: decode steps and verifications, which come in few sizes
RECORDED_TOKENS = 16
_THREADS_PER_WARP = 32


class Driver(Protocol):
    """What the device needs of a driver: see `CudaDriver`, which is one."""

    @property
    def capability(self) -> int: ...
    @property
    def hardware(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    def allocate(self, size: int, what: str) -> int: ...
    def register(self, array: Array) -> int: ...
    def fill(self, address: int, value: int, size: int) -> None: ...
    def upload(self, address: int, array: Array) -> None: ...
    def download(self, array: Array, address: int) -> None: ...
    def copy(self, target: int, source: int, size: int) -> None: ...
    def kernel(self, cubin: bytes, function: str, shared_bytes: int) -> Any: ...
    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        parameters: int,
        *,
        aside: bool = False,
    ) -> None: ...
    def event(self) -> Any: ...
    def mark(self, event: Any, *, aside: bool) -> None: ...
    def wait(self, event: Any, *, aside: bool) -> None: ...
    def begin_recording(self) -> None: ...
    def end_recording(self) -> Any: ...
    def replay(self, recording: Any) -> None: ...
    def synchronize(self) -> None: ...


class CudaDevice:
    """Runs the graphs of one engine on one GPU. Not for concurrent use: every step writes the same arena.

    Weights are copied to the GPU. Tables that are read by rows stay in pinned host memory when they do not fit. What
    reads those runs aside where its program allows it, so that the bus works while others compute.
    """

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        slots: int,
        max_context: int,
        *,
        poison: bool = False,
        saved_tokens: int = 0,
    ) -> None:
        """Load kernels and take memory, also to `save` up to `saved_tokens` tokens of each slot.

        With `poison`, states are full of NaN bytes. DeviceError for another GPU.
        """
        engine.require_weights()
        manifest = engine.manifest
        if driver.capability != manifest.cuda_capability:
            raise DeviceError(
                f"{engine.path}: compiled for {manifest.target}: expected such a GPU, found sm_{driver.capability}: "
                f"compile with --target cuda:sm_{driver.capability}"
            )
        self._engine = engine
        self._driver = driver
        self._poison = poison
        self._dims = {"S": slots, **capacities(manifest.dims, max_context)}
        self._sizes = {state.name: extent_bytes(state, self._dims) for state in manifest.states}
        self._journal = Journal(manifest, self._dims, saved_tokens)
        self._programs = Programs(engine)
        self._prepared: dict[tuple[str, int], _Prepared] = {}
        self._arena_bytes = max(program.arena_bytes for program in manifest.programs)
        self._arena = driver.allocate(self._arena_bytes, "activations")
        self._saved = driver.allocate(self._journal.size_bytes, "journal")
        self._counters = driver.allocate(manifest.counter_bytes, "counters")
        driver.fill(self._counters, 0, manifest.counter_bytes)
        self._states = {name: driver.allocate(size, f"state {name}") for name, size in self._sizes.items()}
        for name, size in self._sizes.items():
            driver.fill(self._states[name], 0xFF if poison else 0, size)
        self._kernels = {
            name: driver.kernel((engine.path / cubin.file).read_bytes(), cubin.function, cubin.shared_bytes)
            for name, cubin in manifest.cubins.items()
        }
        self._carried = {name: _Carried(value, driver) for name, value in self._programs.carried.items()}
        # last: of the tables that may stay in host memory it is now known whether they must
        self._weights, self._pinned = _place_weights(engine, driver)

    @property
    def hardware(self) -> str:
        """As `Device.hardware`."""
        return self._driver.hardware

    @property
    def memory_bytes(self) -> int:
        """As `Device.memory_bytes`: of the GPU."""
        states, counters = sum(self._sizes.values()), self._engine.manifest.counter_bytes
        carried = sum(carried.room for carried in self._carried.values())
        return states + self._journal.size_bytes + self._arena_bytes + counters + carried

    def execute(
        self,
        graph: str,
        inputs: Mapping[str, Array],
        *,
        read: Collection[str] | None = None,
        observe: Observe | None = None,
    ) -> dict[str, Array]:
        """As `Device.execute`; outputs are copies."""
        tokens, rows = step_size(inputs)
        program = self._programs.smallest(graph, tokens, rows)
        prepared = self._prepare(program)
        prepared.bind(tokens, rows)
        for index in program.inputs:
            self._feed(graph, program.values[index], prepared, inputs)
        if observe is not None:
            self._run_observed(prepared, observe)
        elif program.max_tokens <= RECORDED_TOKENS:
            prepared.replay()
        else:
            prepared.launch()
        found: dict[str, Array] = {}
        for value in (program.values[index] for index in program.outputs):
            if read is None or value.name in read:
                found[value.name] = self._download(value, prepared.dims)
            elif value.name in self._carried:
                self._carry(value, prepared.dims)
        return found

    def room(self, graph: str) -> tuple[int, int]:
        """As `Device.room`."""
        return self._programs.room(graph)

    def clear(self, slot: int) -> None:
        """As `Device.clear`: only poisoned states are written."""
        if self._poison:
            for name, size in self._sizes.items():
                part = size // self._dims["S"]
                self._driver.fill(self._states[name] + slot * part, 0xFF, part)

    def state(self, name: str) -> Array:
        """As `Device.state`: a copy."""
        entry = self._entry(name)
        array: Array = np.empty(bind(entry.shape, self._dims), NUMPY[entry.dtype])
        self._driver.download(array, self._states[name])
        return array

    def rows(self, name: str, slot: int, begin: int, end: int) -> Array:
        """As `Device.rows`."""
        entry = self._entry(name)
        array: Array = np.empty((end - begin, *bind(entry.shape[2:], self._dims)), NUMPY[entry.dtype])
        self._driver.download(array, self._address_of_row(entry, slot, begin, end))
        return array

    def put_rows(self, name: str, slot: int, begin: int, array: Array) -> None:
        """As `Device.put_rows`."""
        entry, end = self._entry(name), begin + len(array)
        view: Array = np.empty((end - begin, *bind(entry.shape[2:], self._dims)), NUMPY[entry.dtype])
        require_fit(f"state {name}", view, array)
        self._driver.upload(self._address_of_row(entry, slot, begin, end), np.ascontiguousarray(array))

    def save(self, slot: int, begin: int, end: int) -> None:
        """As `Device.save`."""
        for state, journal, size in self._pieces(slot, self._journal.begin(slot, begin, end), begin):
            self._driver.copy(journal, state, size)

    def restore(self, slot: int, begin: int) -> None:
        """As `Device.restore`."""
        for state, journal, size in self._pieces(slot, self._journal.span(slot, begin), begin):
            self._driver.copy(state, journal, size)

    def _pieces(self, slot: int, span: range, begin: int) -> Iterator[tuple[int, int, int]]:
        """As `Rows.pieces` of every state, with addresses in place of offsets."""
        saved = self._saved + slot * self._journal.slot_bytes
        for rows in self._journal.rows:
            state = self._states[rows.name] + slot * rows.slot_bytes
            for place, copy, size in rows.pieces(span, begin):
                yield state + place, saved + copy, size

    def _entry(self, name: str) -> StateEntry:
        return next(state for state in self._engine.manifest.states if state.name == name)

    def _address_of_row(self, entry: StateEntry, slot: int, begin: int, end: int) -> int:
        slots, length = bind(entry.shape[:2], self._dims)
        require_rows(entry.name, length, begin, end)
        return self._states[entry.name] + (slot * length + begin) * (self._sizes[entry.name] // (slots * length))

    def _prepare(self, program: Program) -> _Prepared:
        key = (program.graph, program.max_tokens)
        if key not in self._prepared:
            states = [self._states[state.name] for state in self._engine.manifest.states]
            bases = {"arena": [self._arena], "weight": self._weights, "state": states, "counters": [self._counters]}
            kernels, dims = self._kernels, self._dims
            self._prepared[key] = _Prepared(program, self._engine, self._driver, kernels, bases, self._pinned, dims)
        return self._prepared[key]

    def _feed(self, graph: str, value: BufferEntry, prepared: _Prepared, inputs: Mapping[str, Array]) -> None:
        shape = bind(value.shape, prepared.dims)
        if value.name in inputs:
            array = np.ascontiguousarray(inputs[value.name])
            if value.name in PARTIAL_INPUTS:
                shape = (min(len(array), shape[0]), *shape[1:])
            require_fit(f"graph {graph}: value {value.name}", np.empty(shape, NUMPY[value.dtype]), array)
            self._driver.upload(self._arena + value.offset, array)
            return
        carried = self._carried.get(value.name)
        size = extent_bytes(value, prepared.dims)
        if carried is None or carried.filled < size:
            raise ContextError(f"graph {graph}: input {value.name}: expected one, got {', '.join(inputs)}")
        self._driver.copy(self._arena + value.offset, carried.address, size)

    def _carry(self, value: BufferEntry, dims: Mapping[str, int]) -> None:
        """Keep an output for the next graph: the arena is one for all graphs."""
        carried = self._carried[value.name]
        carried.filled = extent_bytes(value, dims)
        self._driver.copy(carried.address, self._arena + value.offset, carried.filled)

    def _download(self, value: BufferEntry, dims: Mapping[str, int]) -> Array:
        array: Array = np.empty(bind(value.shape, dims), NUMPY[value.dtype])
        self._driver.download(array, self._arena + value.offset)
        return array

    def _run_observed(self, prepared: _Prepared, observe: Observe) -> None:
        program = prepared.program
        for number, command in enumerate(program.commands):
            prepared.launch_one(number)
            for value in (program.values[index] for index in command.results):
                array = self._download(value, prepared.dims)
                instead = observe(
                    Observation(program.graph, number, command.op, command.origin, value.name, value.dtype, array)
                )
                if instead is not None:
                    require_fit(f"graph {program.graph}: value {value.name}", array, instead)
                    self._driver.upload(self._arena + value.offset, np.ascontiguousarray(instead))


class _Carried:
    """Memory for one output that the next graph reads: `filled` bytes of `room`."""

    def __init__(self, most: BufferEntry, driver: Driver) -> None:
        """Room for the output at its largest, with nothing in it."""
        self.room = extent_bytes(most, {})
        self.address = driver.allocate(self.room, f"value {most.name}")
        self.filled = 0


def _place_weights(engine: Engine, driver: Driver) -> tuple[list[int], frozenset[int]]:
    """Address of every weight on the GPU, or of its pinned host memory; the numbers of those that are pinned."""
    weights, memory = engine.manifest.weights, engine.weights
    fits = sum(weight.size_bytes for weight in weights) <= driver.free_bytes
    pinned = {} if fits else _pin(engine, driver)
    places: list[int] = []
    for number, weight in enumerate(weights):
        if number in pinned:
            places.append(pinned[number])
        else:
            places.append(driver.allocate(weight.size_bytes, f"weight {weight.name}"))
            driver.upload(places[-1], memory[weight.offset : weight.offset + weight.size_bytes])
    return places, frozenset(pinned)


def _pin(engine: Engine, driver: Driver) -> dict[int, int]:
    """Addresses of the weights that are read by rows, by number, in pinned host memory.

    Whole pages are pinned. Weights that share one are pinned together: a driver takes no page twice.
    """
    weights = engine.manifest.weights
    groups: list[list[int]] = []
    last = -1
    for number in sorted(
        (n for n, weight in enumerate(weights) if weight.read_by_rows), key=lambda n: weights[n].offset
    ):
        if not groups or weights[number].offset // PAGESIZE > last:
            groups.append([])
        groups[-1].append(number)
        last = max(last, (weights[number].offset + weights[number].size_bytes - 1) // PAGESIZE)
    places: dict[int, int] = {}
    for group in groups:
        begin = weights[group[0]].offset // PAGESIZE * PAGESIZE
        end = max(weights[number].offset + weights[number].size_bytes for number in group)
        address = driver.register(engine.weights[begin : -(-end // PAGESIZE) * PAGESIZE])
        places |= {number: address + weights[number].offset - begin for number in group}
    return places


@dataclass(frozen=True)
class _Aside:
    """A command beside others: events of all before it, and of itself, which the command `joined` waits for."""

    begun: Any
    done: Any
    joined: int


class _Prepared:
    """A program with its launch parameters filled in; only what depends on T and R changes from step to step.

    Every parameter has eight bytes of `_values`, of which the driver reads as many as the kernel declares, and an
    address in `_addresses`. Kernels end with two pointers to scratch memory that none of ours uses.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        driver: Driver,
        kernels: Mapping[str, Any],
        bases: Mapping[str, list[int]],
        pinned: Set[int],
        dims: Mapping[str, int],
    ) -> None:
        self.program = program
        self.dims = dict(dims)
        self._driver = driver
        self._kernels = kernels
        self._manifest = engine.manifest
        self._bases = bases
        self._recordings: dict[tuple[int, int], Any] = {}
        self._places: dict[str, list[int]] = {}
        self._launches = [self._manifest.launches[command.kernel] for command in program.commands]
        self._asides = {
            number: _Aside(driver.event(), driver.event(), command.joined)
            for number, command in enumerate(program.commands)
            if command.joined is not None and any(a.kind == "weight" and a.index in pinned for a in command.arguments)
        }
        values: list[int] = []
        self._begins: list[list[int]] = []
        for command, launches in zip(program.commands, self._launches, strict=True):
            self._begins.append([self._append(values, command, launch) for launch in launches])
        self._values = np.array(values, np.uint64)
        self._addresses = self._values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        for dim, value in dims.items():
            self._set(dim, value)

    def _append(self, values: list[int], command: Command, launch: LaunchEntry) -> int:
        begin = len(values)
        for parameter in launch.parameters:
            argument = command.arguments[parameter.argument]
            match argument.kind:
                case "dim":
                    self._places.setdefault(self._manifest.dims[argument.index], []).append(len(values))
                    values.append(0)
                case "arena" | "counters":
                    values.append(self._bases[argument.kind][0] + argument.index + parameter.offset)
                case _:
                    values.append(self._bases[argument.kind][argument.index] + parameter.offset)
        values += [0, 0]
        return begin

    def bind(self, tokens: int, rows: int) -> None:
        """Set T and R."""
        self._set("T", tokens)
        self._set("R", rows)

    def _set(self, dim: str, value: int) -> None:
        self.dims[dim] = value
        self._values[self._places.get(dim, [])] = value

    def launch(self) -> None:
        """Launch all commands with the dimensions bound last, those that read pinned memory aside if they may."""
        for number in range(len(self.program.commands)):
            self._join(number)
            aside = self._asides.get(number)
            if aside is None:
                self.launch_one(number)
                continue
            self._driver.mark(aside.begun, aside=False)
            self._driver.wait(aside.begun, aside=True)
            self.launch_one(number, aside=True)
            self._driver.mark(aside.done, aside=True)
        self._join(len(self.program.commands))

    def _join(self, number: int) -> None:
        """Wait for what runs aside until a command."""
        for aside in self._asides.values():
            if aside.joined == number:
                self._driver.wait(aside.done, aside=False)

    def launch_one(self, number: int, *, aside: bool = False) -> None:
        """Launch one command with the dimensions bound last."""
        for launch, begin in zip(self._launches[number], self._begins[number], strict=True):
            grid = self._grid(launch)
            if 0 not in grid:
                cubin = self._manifest.cubins[launch.cubin]
                address = self._addresses.ctypes.data + 8 * begin
                threads = cubin.warps * _THREADS_PER_WARP
                kernel = self._kernels[launch.cubin]
                self._driver.launch(kernel, grid, threads, cubin.shared_bytes, address, aside=aside)

    def _grid(self, launch: LaunchEntry) -> tuple[int, int, int]:
        sizes = [
            axis.count * (1 if axis.dim is None else math.ceil(self.dims[self._manifest.dims[axis.dim]] / axis.tile))
            for axis in launch.grid
        ]
        return sizes[0], sizes[1], sizes[2]

    def replay(self) -> None:
        """Launch everything at once, recorded at the first step of these dimensions."""
        key = (self.dims["T"], self.dims["R"])
        if key not in self._recordings:
            self._driver.begin_recording()
            self.launch()
            self._recordings[key] = self._driver.end_recording()
        self._driver.replay(self._recordings[key])
