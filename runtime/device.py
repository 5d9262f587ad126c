"""What runs the graphs of an engine, whatever the hardware, and how its work may be watched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from v41c.errors import ArtifactError, ContextError
from v41c.manifest import BufferEntry, Program
from v41c.runtime.artifact import Engine
from v41c.runtime.bounds import bind
from v41c.runtime.states import Array


@dataclass(frozen=True)
class Observation:
    """A result of one command, copied: `array` in the numpy type that holds `dtype` (bf16 as uint16 bits)."""

    graph: str
    command: int
    op: str
    origin: str
    name: str
    dtype: str
    array: Array


#: called with every result; an array that it returns takes the result's place for all later commands
Observe = Callable[[Observation], Array | None]


class Device(Protocol):
    """Runs the graphs of one engine on the states of its sequences. Not for concurrent use."""

    @property
    def hardware(self) -> str:
        """What the graphs run on, in words: as long as they stay the same, so do times."""

    @property
    def memory_bytes(self) -> int:
        """States, activations and what passes between graphs, whatever the length of the prompt; not the weights."""

    def execute(
        self,
        graph: str,
        inputs: Mapping[str, Array],
        *,
        read: Collection[str] | None = None,
        observe: Observe | None = None,
    ) -> dict[str, Array]:
        """Run a graph on its inputs, by name; its outputs by name, as arrays that hold until the next call.

        `inputs` holds `positions` [T], `rows` [R] where the graph wants it, and whatever else the graph declares, in
        the declared dtypes (bf16 as uint16); more does no harm, and of `image_values` the first rows are enough. Only
        outputs in `read` are given back, all of them when it is None: the others stay where they are, and their first
        rows are the inputs of that name of the graphs that run next, where one has such an input. The smallest program
        with room for T tokens runs. States change in place.
        With `observe`, commands run one by one and every result is copied and shown as soon as it is there, and may be
        replaced. ContextError for inputs that do not fit the graph.
        """

    def room(self, graph: str) -> tuple[int, int]:
        """The most tokens and the most logit rows that one step of a graph takes; zeros for a graph it lacks."""

    def clear(self, slot: int) -> None:
        """Forget a sequence."""

    def state(self, name: str) -> Array:
        """A state of all slots as it is now: the memory itself or a copy of it."""

    def rows(self, name: str, slot: int, begin: int, end: int) -> Array:
        """Rows begin … end − 1 of one sequence's state, counted along axis 1, copied; ContextError beyond its end."""

    def put_rows(self, name: str, slot: int, begin: int, array: Array) -> None:
        """Put what `rows` gave into a state, as its rows from `begin` on; ContextError when it does not fit."""

    def save(self, slot: int, begin: int, end: int) -> None:
        """Remember what tokens at positions begin … end − 1 of a sequence will overwrite, until the slot's next `save`.

        ContextError for more positions than the device was opened for.
        """

    def restore(self, slot: int, begin: int) -> None:
        """Put back what the slot's last `save` remembered of positions from `begin` on.

        All states are then as if these positions had never been fed. ContextError for others than those remembered.
        """


def step_size(inputs: Mapping[str, Array]) -> tuple[int, int]:
    """T and R of a step: tokens and rows with logits, or of the vision tower patches and rows that it gives."""
    if "patches" in inputs:
        return len(inputs["patches"]), len(inputs["sources"])
    return len(inputs["positions"]), len(inputs.get("rows", ()))


class Programs:
    """The programs of an engine by graph, and which of them takes a step."""

    def __init__(self, engine: Engine) -> None:
        self._path = engine.path
        self._programs = {name: engine.programs(name) for name in {p.graph for p in engine.manifest.programs}}
        #: outputs that another graph takes in, by name, at the shape that the widest program gives them: a device keeps
        #: them outside of the arena, which is one for all graphs
        self.carried = {value.name: value for graph in self._programs.values() for value in _carried(engine, graph[-1])}

    def room(self, graph: str) -> tuple[int, int]:
        """As `Device.room`."""
        programs = self._programs.get(graph)
        return (programs[-1].max_tokens, programs[-1].max_rows) if programs else (0, 0)

    def smallest(self, graph: str, tokens: int, rows: int) -> Program:
        """The smallest program with room for a step; ContextError when there is none."""
        programs = self._programs.get(graph, ())
        if not programs:
            raise ArtifactError(f"{self._path}: expected a graph {graph}, found {', '.join(self._programs)}")
        for program in programs:
            if program.max_tokens >= tokens and program.max_rows >= rows:
                return program
        most = self.room(graph)
        raise ContextError(
            f"graph {graph}: expected a step of at most {most[0]} tokens and {most[1]} rows, got {tokens} and {rows}"
        )


def _carried(engine: Engine, program: Program) -> Iterator[BufferEntry]:
    """The outputs of a program that some graph takes in, at the most tokens and rows of a step."""
    fed = {p.values[index].name for p in engine.manifest.programs for index in p.inputs}
    most = {"T": program.max_tokens, "R": program.max_rows}
    for value in (program.values[index] for index in program.outputs):
        if value.name in fed:
            yield msgspec.structs.replace(value, shape=list(bind(value.shape, most)))


def require_fit(what: str, view: Array, array: Array) -> None:
    """ContextError for an array that has another type or shape than its place."""
    if array.dtype != view.dtype or array.shape != view.shape:
        raise ContextError(f"{what}: expected {view.dtype} {view.shape}, got {array.dtype} {array.shape}")


def require_rows(name: str, length: int, begin: int, end: int) -> None:
    """ContextError for rows that a state of `length` rows does not have."""
    if not 0 <= begin <= end <= length:
        raise ContextError(f"state {name}: expected rows within 0 to {length}, got {begin} to {end}")
