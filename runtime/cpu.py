"""The CPU device: runs an engine's programs as one call of the compiled library per step."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from v41c.errors import ArtifactError, ContextError
from v41c.manifest import BufferEntry, Program
from v41c.runtime.artifact import Engine, cpu_name
from v41c.runtime.bounds import PARTIAL_INPUTS, bind, extent_bytes
from v41c.runtime.device import Observation, Observe, Programs, require_fit, require_rows, step_size
from v41c.runtime.journal import Journal
from v41c.runtime.states import NUMPY, Array, States, aligned_bytes

# A packed argument of a compiled function (TVMFFIAny): what it is, and an integer or an address.
_ARGUMENT = np.dtype([("type", np.int32), ("padding", np.uint32), ("value", np.int64)])
_INTEGER, _POINTER = 1, 4
# One entry of the command list that v41c_run walks.
_COMMAND = np.dtype([("function", np.uint64), ("arguments", np.uint64), ("count", np.int64)])
# One entry of the list of states that v41c_copy_rows walks: addresses of slot 0, bytes, rows and tokens.
_ROWS = np.dtype([(name, np.int64) for name in ("state", "journal", "row_bytes", "length", "ratio")])


class Library:
    """The compiled kernels of an engine."""

    def __init__(self, engine: Engine) -> None:
        """ArtifactError when the file is no shared library of this machine."""
        self.path = engine.kernels_path
        try:
            self._library = _open(self.path.resolve())
            self._run = self._library.v41c_run
            self._copy_rows = self._library.v41c_copy_rows
            self._set_threads = self._library.v41c_set_threads
            self._last_error = self._library.v41c_last_error
        except (OSError, AttributeError) as error:
            raise ArtifactError(
                f"{self.path}: cannot be loaded: {error}: compile the engine on this machine"
            ) from error
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._run.restype = ctypes.c_int64
        self._copy_rows.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 6, ctypes.c_int32]
        self._copy_rows.restype = None
        self._set_threads.argtypes = [ctypes.c_int32]
        self._set_threads.restype = ctypes.c_int32
        self._last_error.argtypes = []
        self._last_error.restype = ctypes.c_char_p

    def address(self, kernel: str) -> int:
        """Address of a kernel's packed entry; ArtifactError when the library has none of that name."""
        try:
            entry = getattr(self._library, f"__tvm_ffi_{kernel}")
        except AttributeError as error:
            raise ArtifactError(
                f"{self.path}: expected a kernel {kernel}, found none: compile the engine again"
            ) from error
        return ctypes.cast(entry, ctypes.c_void_p).value or 0

    def set_threads(self, count: int) -> int:
        """Threads of every session of this library from now on; returns how many there are: fewer if refused more."""
        return int(self._set_threads(count))

    def last_error(self) -> str:
        """Why the last command that failed in this thread did, in one line."""
        text: bytes = self._last_error() or b""
        return " ".join(text.decode(errors="replace").split())

    def run(self, address: int, count: int) -> int:
        """Run commands in order: 0, or the number (from 1) of the first that failed. Other threads run meanwhile."""
        return int(self._run(address, count))

    def copy_rows(
        self, address: int, count: int, journal_bytes: int, slot: int, span: range, begin: int, *, back: bool
    ) -> None:
        """Copy rows of `count` states to the journal or back: see `Rows.pieces`, of which this is the whole."""
        self._copy_rows(address, count, journal_bytes, slot, span.start, span.stop, begin, back)


def _open(path: Path) -> ctypes.CDLL:
    """The library in a file as it is now.

    The loader knows libraries by the path they were opened with, for as long as the process lives: an engine that was
    compiled anew in its old place would be given its old kernels. So each is opened under a name of its own.
    """
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        alias = Path(folder, path.name)
        alias.symlink_to(path)
        return ctypes.CDLL(str(alias))


class CpuDevice:
    """Runs the graphs of one engine on one set of states. Not for concurrent use: every step writes the same arena."""

    def __init__(self, engine: Engine, states: States, *, threads: int | None = None, saved_tokens: int = 0) -> None:
        """Map the kernels and take memory for activations, and to `save` up to `saved_tokens` tokens of each slot.

        threads: see `Library.set_threads`, None leaves them.
        """
        engine.require_weights()
        self._engine = engine
        self._states = states
        self._library = Library(engine)
        self._threads = None if threads is None else self._library.set_threads(threads)
        size = max(program.arena_bytes for program in engine.manifest.programs)
        self._arena = aligned_bytes(size, "activations")
        self._programs = Programs(engine)
        self._prepared: dict[tuple[str, int], _Prepared] = {}
        self._room_of = {name: _room(value) for name, value in self._programs.carried.items()}
        self._carried: dict[str, Array] = {}
        self._journal = Journal(engine.manifest, states.dims, saved_tokens)
        self._saved = _SavedRows(self._journal, states, self._library)

    @property
    def hardware(self) -> str:
        """As `Device.hardware`."""
        threads = "" if self._threads is None else f", {self._threads} threads"
        return f"{cpu_name()}, {len(os.sched_getaffinity(0))} processors{threads}"

    @property
    def memory_bytes(self) -> int:
        """As `Device.memory_bytes`; weights are mapped from the engine's file."""
        rooms = [self._arena, self._saved.memory, *self._room_of.values()]
        return self._states.size_bytes + sum(room.nbytes for room in rooms)

    def execute(
        self,
        graph: str,
        inputs: Mapping[str, Array],
        *,
        read: Collection[str] | None = None,
        observe: Observe | None = None,
    ) -> dict[str, Array]:
        """As `Device.execute`; outputs are views of the arena."""
        tokens, rows = step_size(inputs)
        prepared = self._prepare(self._programs.smallest(graph, tokens, rows))
        prepared.bind(tokens, rows)
        for name, view in prepared.inputs.items():
            array = inputs.get(name)
            if array is None and name in self._carried:
                array = self._carried[name][: len(view)]
            if array is None:
                raise ContextError(f"graph {graph}: input {name}: expected one, got {', '.join(inputs)}")
            _fill(graph, name, view[: len(array)] if name in PARTIAL_INPUTS else view, array)
        if observe is None:
            self._run(prepared, 0, len(prepared.program.commands))
        else:
            self._run_observed(prepared, observe)
        if read is None:
            return dict(prepared.outputs)
        # the arena is one for all graphs: what the next one shall find must leave it
        for name in self._room_of.keys() & prepared.outputs.keys() - read:
            view = prepared.outputs[name]
            self._carried[name] = self._room_of[name][: len(view)]
            self._carried[name][...] = view
        return {name: view for name, view in prepared.outputs.items() if name in read}

    def room(self, graph: str) -> tuple[int, int]:
        """As `Device.room`."""
        return self._programs.room(graph)

    def clear(self, slot: int) -> None:
        """As `Device.clear`."""
        self._states.clear(slot)

    def state(self, name: str) -> Array:
        """As `Device.state`: the memory itself."""
        return self._states.arrays[name]

    def rows(self, name: str, slot: int, begin: int, end: int) -> Array:
        """As `Device.rows`."""
        return self._view(name, slot, begin, end).copy()

    def put_rows(self, name: str, slot: int, begin: int, array: Array) -> None:
        """As `Device.put_rows`."""
        view = self._view(name, slot, begin, begin + len(array))
        require_fit(f"state {name}", view, array)
        view[...] = array

    def save(self, slot: int, begin: int, end: int) -> None:
        """As `Device.save`."""
        self._saved.copy(slot, self._journal.begin(slot, begin, end), begin, back=False)

    def restore(self, slot: int, begin: int) -> None:
        """As `Device.restore`."""
        self._saved.copy(slot, self._journal.span(slot, begin), begin, back=True)

    def _view(self, name: str, slot: int, begin: int, end: int) -> Array:
        rows: Array = self._states.arrays[name][slot]
        require_rows(name, len(rows), begin, end)
        return rows[begin:end]

    def _prepare(self, program: Program) -> _Prepared:
        key = (program.graph, program.max_tokens)
        if key not in self._prepared:
            self._prepared[key] = _Prepared(program, self._engine, self._library, self._arena, self._states)
        return self._prepared[key]

    def _run_observed(self, prepared: _Prepared, observe: Observe) -> None:
        graph, values = prepared.program.graph, prepared.program.values
        for number, command in enumerate(prepared.program.commands):
            self._run(prepared, number, 1)
            for value in (values[index] for index in command.results):
                view = prepared.view(value)
                instead = observe(
                    Observation(graph, number, command.op, command.origin, value.name, value.dtype, view.copy())
                )
                if instead is not None:
                    _fill(graph, value.name, view, instead)

    def _run(self, prepared: _Prepared, begin: int, count: int) -> None:
        failed = self._library.run(prepared.address(begin), count)
        if failed:
            number = begin + failed - 1
            command = prepared.program.commands[number]
            raise ArtifactError(
                f"{self._library.path}: graph {prepared.program.graph}: command {number} ({command.op} of "
                f"{command.origin}): kernel {command.kernel} failed: {self._library.last_error()}: "
                "compile the engine again"
            )


class _SavedRows:
    """The memory of a journal, and all that v41c_copy_rows is told of it and of the states."""

    def __init__(self, journal: Journal, states: States, library: Library) -> None:
        self.memory = aligned_bytes(journal.size_bytes, "journal")
        self._library = library
        self._slot_bytes = journal.slot_bytes
        begin = self.memory.ctypes.data
        places = [states.arrays[rows.name].ctypes.data for rows in journal.rows]
        self._rows = np.array(
            [
                (place, begin + rows.offset, rows.row_bytes, rows.length, rows.ratio)
                for place, rows in zip(places, journal.rows, strict=True)
            ],
            _ROWS,
        )
        self._address = self._rows.ctypes.data

    def copy(self, slot: int, span: range, begin: int, *, back: bool) -> None:
        """Copy the rows that positions of `span` from `begin` on write into the journal, or back from there."""
        self._library.copy_rows(self._address, len(self._rows), self._slot_bytes, slot, span, begin, back=back)


def _room(value: BufferEntry) -> Array:
    """Memory for a tensor whose dimensions are numbers."""
    memory = aligned_bytes(extent_bytes(value, {}), f"value {value.name}")
    array: Array = memory.view(NUMPY[value.dtype]).reshape(bind(value.shape, {}))
    return array


def _fill(graph: str, name: str, view: Array, array: Array) -> None:
    require_fit(f"graph {graph}: value {name}", view, array)
    view[...] = array


class _Prepared:
    """A program with its argument arrays filled in; only what depends on T and R changes from step to step.

    `inputs` and `outputs` are views of the arena by name, at the dimensions bound last.
    """

    def __init__(
        self, program: Program, engine: Engine, library: Library, arena: npt.NDArray[np.uint8], states: States
    ) -> None:
        self.program = program
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        self._arena = arena
        self._dims = dict(states.dims)
        self._places: dict[str, list[int]] = {}
        self._arguments = self._fill_arguments(engine, states)
        self._commands = self._list_commands(library)
        self._begin = self._commands.ctypes.data
        for dim, value in states.dims.items():
            self._set(dim, value)

    def _fill_arguments(self, engine: Engine, states: States) -> npt.NDArray[np.void]:
        weights = [engine.weights.ctypes.data + weight.offset for weight in engine.manifest.weights]
        pools = [states.arrays[state.name].ctypes.data for state in engine.manifest.states]
        base = self._arena.ctypes.data
        values: list[int] = []
        integers: list[int] = []
        for argument in (argument for command in self.program.commands for argument in command.arguments):
            match argument.kind:
                case "arena":
                    values.append(base + argument.index)
                case "weight":
                    values.append(weights[argument.index])
                case "state":
                    values.append(pools[argument.index])
                case "dim":
                    self._places.setdefault(engine.manifest.dims[argument.index], []).append(len(values))
                    integers.append(len(values))
                    values.append(0)
        filled = np.zeros(len(values), _ARGUMENT)
        filled["type"] = _POINTER
        filled["type"][integers] = _INTEGER
        filled["value"] = values
        return filled

    def _list_commands(self, library: Library) -> npt.NDArray[np.void]:
        commands = self.program.commands
        entries = {kernel: library.address(kernel) for kernel in {command.kernel for command in commands}}
        counts = np.array([len(command.arguments) for command in commands], np.int64)
        begins = np.cumsum(counts) - counts
        listed = np.zeros(len(commands), _COMMAND)
        listed["function"] = [entries[command.kernel] for command in commands]
        listed["arguments"] = (self._arguments.ctypes.data + begins * _ARGUMENT.itemsize).astype(np.uint64)
        listed["count"] = counts
        return listed

    def address(self, command: int) -> int:
        """Where the list of commands from this one on lies."""
        return self._begin + command * _COMMAND.itemsize

    def view(self, value: BufferEntry) -> Array:
        """A value's place in the arena, at the dimensions bound last."""
        return np.ndarray(bind(value.shape, self._dims), NUMPY[value.dtype], self._arena, value.offset)

    def bind(self, tokens: int, rows: int) -> None:
        """Set T and R, in every argument and view that depends on them."""
        if self._dims.get("T") == tokens and self._dims.get("R") == rows:
            return
        self._set("T", tokens)
        self._set("R", rows)
        values = self.program.values
        self.inputs = {values[index].name: self.view(values[index]) for index in self.program.inputs}
        self.outputs = {values[index].name: self.view(values[index]) for index in self.program.outputs}

    def _set(self, dim: str, value: int) -> None:
        self._dims[dim] = value
        self._arguments["value"][self._places.get(dim, [])] = value
