"""Every index, offset and shape of a manifest, checked once at load: what passes cannot point outside its memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from v41c.errors import ArtifactError
from v41c.manifest import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    KERNELS_FILE,
    WEIGHTS_FILE,
    Argument,
    BufferEntry,
    Command,
    Manifest,
    Program,
    StateEntry,
    capacities,
)
from v41c.runtime.images import Rules

_GRID_AXES = 3
#: inputs that the runtime makes for each step, all i32: `rows` has dimension R, the others T
BATCH_INPUTS = {"tokens": "T", "positions": "T", "slots": "T", "first": "T", "kept": "T", "rows": "R"}
#: those that it makes for images: of the vision tower T counts patches, R the rows that it gives
BATCH_INPUTS |= {"image_rows": "T", "patch_rows": "T", "patch_columns": "T", "begins": "T", "ends": "T"}
#: inputs for images with a second axis, by the types that they may have
IMAGE_INPUTS = {"image_values": ("bf16", "f32"), "patches": ("bf16", "f32"), "sources": ("i32",)}
#: inputs of which the first rows may be given alone: what `image_rows` does not point at is not read
PARTIAL_INPUTS = ("image_values",)
#: inputs of each graph beyond those: outputs of the graph that runs before it
FED_BY = {
    "model": None,
    "encoder": None,
    "decoder": "encoder",
    "draft_context": "decoder",
    "draft": None,
    "vision": None,
}
#: outputs that the runtime reads by name, with their leading dimension
_READ_OUTPUTS = {
    "model": {"logits": "R"},
    "decoder": {"logits": "R"},
    "draft": {"logits": "T", "drafts": "T", "confidence": "T"},
    "vision": {"features": "R"},
}


def extent_bytes(entry: BufferEntry | StateEntry, dims: Mapping[str, int]) -> int:
    """Storage of a tensor at given dimensions, in bytes."""
    return math.prod(bind(entry.shape, dims)) * ITEM_BYTES[entry.dtype]


def bind(shape: Sequence[int | str], dims: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with every symbolic dimension replaced by its value."""
    return tuple(dims[dim] if isinstance(dim, str) else dim for dim in shape)


def check_manifest(path: Path, manifest: Manifest) -> None:
    """ArtifactError naming the manifest at `path` and the entry that breaks a bound."""
    _Check(path, manifest).run()


class _Check:
    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.dims = {"S": manifest.slots, **capacities(manifest.dims, max(1, manifest.max_context))}

    def require(self, condition: bool, where: str, expected: object, got: object) -> None:
        if not condition:
            raise ArtifactError(f"{self.path}: {where}: expected {expected}, got {got}: compile the engine again")

    def within(self, where: str, index: int, count: int) -> None:
        self.require(0 <= index < count, where, f"an index below {count}", index)

    def unique(self, where: str, names: Sequence[object]) -> None:
        seen: set[object] = set()
        for name in names:
            self.require(name not in seen, where, "distinct entries", f"{name} twice")
            seen.add(name)

    def run(self) -> None:
        manifest = self.manifest
        for name in ("max_context", "slots", "vocabulary", "window"):
            self.require(getattr(manifest, name) >= 1, name, "at least 1", getattr(manifest, name))
        self.require(manifest.draft_block >= 0, "draft_block", "at least 0", manifest.draft_block)
        for token in manifest.eos_tokens:
            self.within("eos_tokens", token, manifest.vocabulary)
        for name in ("bos_token", "draft_noise_token"):
            token = getattr(manifest, name)
            if token is not None:
                self.within(name, token, manifest.vocabulary)
        self.files()
        self.weights()
        self.states()
        self.programs()

    def files(self) -> None:
        for file in [cubin.file for cubin in self.manifest.cubins.values()] or [KERNELS_FILE]:
            self.require(file in self.manifest.files, "files", f"an entry {file}", "none")
        self.require(
            (WEIGHTS_FILE in self.manifest.files) == self.manifest.has_weights,
            "files",
            f"{WEIGHTS_FILE} exactly when has_weights is true",
            f"has_weights {self.manifest.has_weights}",
        )

    def weights(self) -> None:
        if not self.manifest.has_weights:
            return
        size = self.manifest.files[WEIGHTS_FILE].size_bytes
        for weight in self.manifest.weights:
            where = f"weight {weight.name}"
            self.aligned(where, weight.offset)
            self.require(weight.size_bytes >= 0, where, "a size of at least 0 bytes", weight.size_bytes)
            end = weight.offset + weight.size_bytes
            self.require(end <= size, where, f"an end within the {size} bytes of {WEIGHTS_FILE}", end)

    def aligned(self, where: str, offset: int) -> None:
        fits = offset >= 0 and offset % ALIGNMENT_BYTES == 0
        self.require(fits, where, f"an offset that is a multiple of {ALIGNMENT_BYTES}", offset)

    def states(self) -> None:
        known = {"T", "R", *self.dims}
        self.unique("dims", self.manifest.dims)
        for dim in self.manifest.dims:
            self.require(dim in known, "dims", "T, R, S or C and a ratio", dim)
        self.unique("states", [state.name for state in self.manifest.states])
        for state in self.manifest.states:
            where = f"state {state.name}"
            self.typed(where, state, self.dims)
            self.require(state.shape[:1] == ["S"], where, "a leading dimension S", state.shape)
            length = state.shape[1] if len(state.shape) > 1 else 0
            counted = length != "S" if isinstance(length, str) else length >= 1
            self.require(counted, where, "rows by position along axis 1", state.shape)

    def typed(self, where: str, entry: BufferEntry | StateEntry, dims: Mapping[str, int]) -> None:
        self.require(entry.dtype in ITEM_BYTES, where, f"a dtype of {', '.join(ITEM_BYTES)}", entry.dtype)
        for dim in entry.shape:
            known = dim in dims if isinstance(dim, str) else dim >= 0
            self.require(known, where, f"dimensions of at least 0 or {', '.join(sorted(dims))}", dim)

    def programs(self) -> None:
        programs = self.manifest.programs
        self.unique("programs", [(program.graph, program.max_tokens) for program in programs])
        for program in programs:
            self.program(program)
        widest = {program.graph: program for program in sorted(programs, key=lambda program: program.max_tokens)}
        for program in programs:
            same = _signature(program) == _signature(widest[program.graph])
            self.require(same, f"graph {program.graph}", "programs with the same inputs and outputs", "others")
        self.require(
            "model" in widest or ("encoder" in widest and "decoder" in widest),
            "programs",
            "graphs encoder and decoder, or model",
            ", ".join(widest) or "none",
        )
        self.require(
            ("draft" in widest) == ("draft_context" in widest), "programs", "graphs draft and draft_context", "one"
        )
        if "draft" in widest:
            block, noise = self.manifest.draft_block, self.manifest.draft_noise_token
            fits = noise is not None and 1 <= block <= widest["draft"].max_tokens
            self.require(fits, "draft", "a noise token and a block that one step takes", f"{noise} and {block}")
            self.rings(block + 1)
        for graph, program in widest.items():
            self.require(graph in FED_BY, "programs", f"graphs of {', '.join(FED_BY)}", graph)
            self.inputs(program, widest)
            self.outputs(program)
        self.vision(widest)

    def rings(self, verified: int) -> None:
        """What one verification writes can be taken back: no token of it writes over another one's row."""
        for state in self.manifest.states:
            length = state.shape[1]
            long = isinstance(length, str) or length >= verified
            self.require(long, f"state {state.name}", f"at least {verified} rows, those of a verification", length)

    def program(self, program: Program) -> None:
        where = f"graph {program.graph} for {program.max_tokens} tokens"
        for name in ("max_tokens", "max_rows"):
            self.require(getattr(program, name) >= 1, f"{where}: {name}", "at least 1", getattr(program, name))
        dims = {"T": program.max_tokens, "R": program.max_rows, **self.dims}
        self.unique(f"{where}: values", [value.name for value in program.values])
        for value in program.values:
            name = f"{where}: value {value.name}"
            self.typed(name, value, dims)
            self.aligned(name, value.offset)
            end = value.offset + extent_bytes(value, dims)
            self.require(end <= program.arena_bytes, name, f"an end within {program.arena_bytes} bytes", end)
        for name, indices in (("inputs", program.inputs), ("outputs", program.outputs)):
            for index in indices:
                self.within(f"{where}: {name}", index, len(program.values))
            self.unique(f"{where}: {name}", indices)
        self.commands(where, program)

    def commands(self, where: str, program: Program) -> None:
        limits: Mapping[str, int] = {
            "arena": program.arena_bytes + 1,  # an empty workspace may lie at the very end
            "weight": len(self.manifest.weights),
            "state": len(self.manifest.states),
            "counters": self.manifest.counter_bytes,
            "dim": len(self.manifest.dims),
        }
        offsets = {value.offset for value in program.values}
        for number, command in enumerate(program.commands):
            # A full message per argument would be built tens of thousands of times to be thrown away.
            if any(_outside(argument, limits[argument.kind]) for argument in command.arguments):
                self.refuse_argument(f"{where}: command {number} ({command.op})", command.arguments, limits)
            named = re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", command.kernel) is not None
            self.require(named, f"{where}: command {number}", "a kernel's name", repr(command.kernel))
            for result in command.results:
                self.within(f"{where}: command {number} ({command.op}): results", result, len(program.values))
            self.places(f"{where}: command {number} ({command.op})", program, command, offsets)
            self.launches(f"{where}: command {number} ({command.op})", command)
            if command.joined is not None:
                last = len(program.commands)
                fits = number < command.joined <= last
                self.require(fits, f"{where}: command {number}: joined", f"a later one, up to {last}", command.joined)
                self.aside(f"{where}: command {number} ({command.op})", command)

    def aside(self, where: str, command: Command) -> None:
        """A command that may run beside others does not use what they may write."""
        shared = [argument.kind for argument in command.arguments if argument.kind in ("state", "counters")]
        self.require(not shared, where, "neither states nor counters of what may run aside", ", ".join(shared))

    def places(self, where: str, program: Program, command: Command, offsets: Set[int]) -> None:
        """What a command is told of the arena: values at their places, its results last, behind them a workspace."""
        told = [argument.index for argument in command.arguments if argument.kind == "arena"]
        if command.workspace_bytes:
            begin = told.pop() if told else -1
            fits = begin >= 0 and 0 <= command.workspace_bytes <= program.arena_bytes - begin
            self.require(fits, where, f"a workspace within {program.arena_bytes} bytes", f"one at {begin}")
        results = [program.values[index].offset for index in command.results]
        operands = told[: max(0, len(told) - len(results))]
        self.require(told[len(operands) :] == results, where, f"results at {results}", told)
        for offset in operands:
            self.require(offset in offsets, where, "arguments at the places of values", offset)

    def launches(self, where: str, command: Command) -> None:
        """Of a CUDA engine: every kernel has launches, and they find their cubins, arguments and dimensions."""
        if not self.manifest.cubins:
            return
        self.require(command.kernel in self.manifest.launches, where, "launches of its kernel", "none")
        for launch in self.manifest.launches[command.kernel]:
            self.require(launch.cubin in self.manifest.cubins, where, "the cubin of a launch", launch.cubin)
            cubin = self.manifest.cubins[launch.cubin]
            same = len(launch.parameters) == len(cubin.parameters)
            self.require(same, where, f"{len(cubin.parameters)} parameters", len(launch.parameters))
            for parameter in launch.parameters:
                self.within(f"{where}: parameters", parameter.argument, len(command.arguments))
                self.require(parameter.offset >= 0, where, "an offset of at least 0 bytes", parameter.offset)
            self.require(len(launch.grid) == _GRID_AXES, where, f"{_GRID_AXES} axes of blocks", len(launch.grid))
            for axis in launch.grid:
                self.require(axis.count >= 0 and axis.tile >= 1, where, "an axis of blocks", axis)
                if axis.dim is not None:
                    self.within(f"{where}: grid", axis.dim, len(self.manifest.dims))

    def refuse_argument(self, where: str, arguments: Sequence[Argument], limits: Mapping[str, int]) -> None:
        for place, argument in enumerate(arguments):
            limit = limits[argument.kind]
            if argument.kind == "arena":
                self.aligned(f"{where}: argument {place}", argument.index)
            self.within(f"{where}: argument {place} ({argument.kind})", argument.index, limit)

    def inputs(self, program: Program, widest: Mapping[str, Program]) -> None:
        source = FED_BY[program.graph]
        # main_hidden comes from whichever graph computes the logits.
        feeder = widest.get("model", widest.get("decoder")) if source == "decoder" else widest.get(source or "")
        fed = {} if feeder is None else {feeder.values[i].name: feeder.values[i] for i in feeder.outputs}
        for index in program.inputs:
            value = program.values[index]
            where = f"graph {program.graph}: input {value.name}"
            if value.name in BATCH_INPUTS:
                self.same_type(where, value, "i32", [BATCH_INPUTS[value.name]])
            elif value.name in IMAGE_INPUTS:
                self.image_input(where, value)
            else:
                self.require(value.name in fed, where, "a step's input or an output of the graph before it", "neither")
                self.same_type(where, value, fed[value.name].dtype, fed[value.name].shape)
                self.require(value.shape[:1] == ["T"], where, "a leading dimension T", value.shape)

    def image_input(self, where: str, value: BufferEntry) -> None:
        """Patches, rows and sources are as wide as images are cut and as the model is."""
        rules = Rules.of(self.manifest.config)
        self.require(rules is not None, where, "a model with a vision tower", "one without")
        if rules is not None:
            widths = {"patches": 3 * rules.patch**2, "sources": rules.merged**2}
            width = widths.get(value.name, self.manifest.config.get("dim"))
            shape = ["R" if value.name == "sources" else "T", width]
            fits = value.dtype in IMAGE_INPUTS[value.name] and value.shape == shape
            self.require(fits, where, f"{' or '.join(IMAGE_INPUTS[value.name])}{shape}", f"{value.dtype}{value.shape}")

    def vision(self, widest: Mapping[str, Program]) -> None:
        """A tower whose rows the text model takes, in steps of any image."""
        first = widest.get("encoder") or widest["model"]
        places = [first.values[index] for index in first.inputs if first.values[index].name == "image_values"]
        self.require(bool(places) == ("vision" in widest), "programs", "a graph vision and who takes its rows", "one")
        if not places:
            return
        tower, rules = widest["vision"], Rules.of(self.manifest.config)
        features = [tower.values[index] for index in tower.outputs if tower.values[index].name == "features"]
        for value in features:
            self.same_type("graph vision: output features", value, places[0].dtype, ["R", *places[0].shape[1:]])
        if rules is not None:
            most = (rules.max_patches, rules.max_tokens)
            fits = tower.max_tokens >= most[0] and tower.max_rows >= most[1]
            found = f"{tower.max_tokens} and {tower.max_rows}"
            self.require(fits, "graph vision", f"steps of {most[0]} patches and {most[1]} rows", found)

    def outputs(self, program: Program) -> None:
        found = {program.values[index].name: program.values[index] for index in program.outputs}
        for name, value in found.items() if program.graph == "encoder" else ():
            self.require(value.shape[:1] == ["T"], f"graph encoder: output {name}", "a leading T", value.shape)
        for name, leading in _READ_OUTPUTS.get(program.graph, {}).items():
            where = f"graph {program.graph}: output {name}"
            self.require(name in found, where, "one", "none")
            if name == "logits":
                self.same_type(where, found[name], "f32", [leading, self.manifest.vocabulary])
            else:
                self.require(found[name].shape[:1] == [leading], where, f"a leading {leading}", found[name].shape)

    def same_type(self, where: str, value: BufferEntry, dtype: str, shape: Sequence[int | str]) -> None:
        same = value.dtype == dtype and value.shape == list(shape)
        self.require(same, where, f"{dtype}{list(shape)}", f"{value.dtype}{value.shape}")


def _outside(argument: Argument, limit: int) -> bool:
    misplaced = argument.kind == "arena" and argument.index % ALIGNMENT_BYTES != 0
    return misplaced or not 0 <= argument.index < limit


def _signature(program: Program) -> list[list[tuple[str, str, list[int | str]]]]:
    values = [(value.name, value.dtype, value.shape) for value in program.values]
    return [[values[index] for index in indices] for indices in (program.inputs, program.outputs)]
