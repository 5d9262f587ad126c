"""The engine folder's schema: the only thing that code generation and the runtime share.

manifest.json        this schema
graphs/NN_<pass>.ir  text of every graph after each pass
kernels/kernels.so   compiled kernels of a CPU engine
kernels/*.cubin      compiled kernels of a CUDA engine
weights.bin          weights as the kernels want them, each at a 64-byte aligned offset
tokenizer.json       when the checkpoint has one
quantization.json    when weights were quantised: how near each of them stayed
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
KERNELS_FOLDER = "kernels"
KERNELS_FILE = f"{KERNELS_FOLDER}/kernels.so"
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
QUANTIZATION_FILE = "quantization.json"
#: offsets of weights and of arena values are multiples of this many bytes
ALIGNMENT_BYTES = 64
#: storage of an element in bytes, by IR dtype name; packed formats are u8
ITEM_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "i64": 8, "bool": 1, "u8": 1}


class FileEntry(msgspec.Struct, frozen=True):
    """A file of the engine: size in bytes and SHA-256."""

    size_bytes: int
    sha256: str


class WeightEntry(msgspec.Struct, frozen=True):
    """A packed weight: where it lies in weights.bin and what it was made of.

    `read_by_rows`: a step reads a few of its rows, so that it need not be in the memory that kernels are fast with.
    """

    name: str
    layout: str
    offset: int
    size_bytes: int
    read_by_rows: bool = False


class StateEntry(msgspec.Struct, frozen=True):
    """A state: dtype and shape with symbolic dimensions. Where a token writes follows from its position alone.

    Axis 0 is the slot, axis 1 counts rows. With a capacity dimension `C{r}` there, the token at a position that closes
    a group of r tokens writes row position // r, and the state grows with the context. With a number L, every token
    writes row position mod L: the state is a ring. No ring of an engine with a draft head is shorter than a block of
    drafts and the token before it, so that no token of a verification overwrites what another one wrote.
    """

    name: str
    dtype: str
    shape: list[int | str]


class BufferEntry(msgspec.Struct, frozen=True):
    """A tensor in a program's arena: name of the IR value, dtype, shape with symbolic dimensions, byte offset."""

    name: str
    dtype: str
    shape: list[int | str]
    offset: int


class Argument(msgspec.Struct, frozen=True):
    """One kernel argument.

    kind "arena": `index` is a byte offset; "weight": an index into `Manifest.weights`; "state": an index into
    `Manifest.states`; "counters": a byte offset into memory that is zero between kernels; "dim": an index into
    `Manifest.dims`, passed as an integer.
    """

    kind: Literal["arena", "weight", "state", "counters", "dim"]
    index: int


class Command(msgspec.Struct, frozen=True):
    """One kernel call; `results` are indices into `Program.values` of what it defines, `origin` its eager module.

    Its last argument in the arena is a workspace where it has `workspace_bytes`, before that come the results.
    With `joined` it may run beside the commands that follow, up to that number: those write nothing that it reads, and
    do not touch what it writes. It uses neither states nor counters.
    """

    kernel: str
    op: str
    arguments: list[Argument]
    results: list[int]
    origin: str
    workspace_bytes: int = 0
    joined: int | None = None


class Program(msgspec.Struct, frozen=True):
    """The commands of one graph for steps of up to `max_tokens` tokens (dimension T) and `max_rows` logit rows (R).

    `inputs` and `outputs` are indices into `values`; the runtime writes inputs into and reads outputs from the arena.
    """

    graph: str
    max_tokens: int
    max_rows: int
    arena_bytes: int
    values: list[BufferEntry]
    inputs: list[int]
    outputs: list[int]
    commands: list[Command]


class CubinEntry(msgspec.Struct, frozen=True):
    """A compiled CUDA function: where it is, what a launch needs, what it was made from and of.

    `parameters` are names and Triton types of what is passed at run time, `constants` what was settled before.
    `instructions` counts machine instructions of note.
    """

    file: str
    module: str
    function: str
    parameters: list[tuple[str, str]]
    constants: dict[str, int | float | bool | str | None]
    warps: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    instructions: dict[str, int]


class LaunchParameter(msgspec.Struct, frozen=True):
    """A runtime parameter: the number of one of the command's arguments, moved by `offset` bytes."""

    argument: int
    offset: int = 0


class GridAxis(msgspec.Struct, frozen=True):
    """Blocks along an axis: count · ceil(dim / tile), with an index into `Manifest.dims`, or `count` alone."""

    count: int
    dim: int | None
    tile: int


class LaunchEntry(msgspec.Struct, frozen=True):
    """One launch of a kernel: a key of `Manifest.cubins`, its parameters in order, three axes of blocks."""

    cubin: str
    parameters: list[LaunchParameter]
    grid: list[GridAxis]


class PassEntry(msgspec.Struct, frozen=True):
    """A ledger row: what one pass left behind, summed over the graphs at `Manifest.ledger_dims`."""

    name: str
    operations: int
    launches: int
    flops: int
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    seconds: float | None = None


class Manifest(msgspec.Struct, frozen=True):
    """Everything the runtime needs to know of an engine."""

    format_version: int
    v41c_version: str
    target: str
    cpu_features: list[str]
    arithmetic: Literal["release", "exact"]
    config: dict[str, object]
    max_context: int
    slots: int
    dims: list[str]
    files: dict[str, FileEntry]
    weights: list[WeightEntry]
    states: list[StateEntry]
    programs: list[Program]
    passes: list[PassEntry]
    has_weights: bool
    window: int
    causal_encoder_decoder: bool
    why_not_ced: str
    vocabulary: int
    eos_tokens: list[int]
    bos_token: int | None
    draft_block: int
    draft_noise_token: int | None = None
    cuda_capability: int | None = None
    counter_bytes: int = 0
    cubins: dict[str, CubinEntry] = {}
    launches: dict[str, list[LaunchEntry]] = {}


def capacities(dims: Iterable[str], max_context: int) -> dict[str, int]:
    """Rows of each compressed cache: dimension "C{r}" holds the groups of r tokens that a context can close."""
    ratios = {dim: int(dim[1:]) for dim in dims if re.fullmatch("C[1-9][0-9]*", dim)}
    return {dim: max(1, max_context // ratio) for dim, ratio in ratios.items()}


def encode(manifest: Manifest) -> bytes:
    """Content of manifest.json: one field a line; the first is the SHA-256 of every byte after its own line."""
    fields = msgspec.structs.asdict(manifest)
    encoder = msgspec.json.Encoder(order="deterministic")
    lines = [encoder.encode(name) + b": " + encoder.encode(value) for name, value in fields.items()]
    body = b",\n".join(lines) + b"\n}\n"
    return _seal(body) + body


def is_intact(content: bytes) -> bool:
    """Whether the content of a manifest.json is byte for byte what `encode` wrote."""
    head, newline, body = content.partition(b",\n")
    return head + newline == _seal(body)


def decode(content: bytes) -> Manifest:
    """The manifest in an intact manifest.json; msgspec.ValidationError names a field that does not fit the schema."""
    return msgspec.json.decode(content, type=Manifest)


def _seal(body: bytes) -> bytes:
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n'
