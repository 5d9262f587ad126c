"""A toy engine for tests of the runtime, and what it must compute, written a second time in Python.

The model is two blocks of integer hashes (`fake_kernels.c`): the first is the encoder, the second the decoder. Each
looks at a window of 4 positions through a ring and at one compressed row per two tokens.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from v41c.manifest import (
    FORMAT_VERSION,
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

WINDOW, WIDTH, VOCABULARY, CONTEXT, SLOTS, BLOCK, NOISE = 4, 64, 31, 64, 3, 3, 5
#: rows of the other rings
RING = 5
DIMS = ["T", "R", "S", "C2"]
_TABLE = (np.arange(VOCABULARY, dtype=np.int32) * 7919 + 13).astype(np.int32)
_STATES = [
    StateEntry("layers.0.window", "i32", ["S", WINDOW]),
    StateEntry("layers.0.compressed", "i32", ["S", "C2"]),
    StateEntry("layers.0.partial", "i32", ["S", RING]),
    StateEntry("engram.history", "i32", ["S", RING]),
    StateEntry("layers.1.window", "i32", ["S", WINDOW]),
    StateEntry("mtp.0.window", "i32", ["S", WINDOW]),
]
_TYPES: dict[str, tuple[str, list[int | str]]] = {
    "tokens": ("i32", ["T"]),
    "positions": ("i32", ["T"]),
    "slots": ("i32", ["T"]),
    "first": ("i32", ["T"]),
    "kept": ("i32", ["T"]),
    "rows": ("i32", ["R"]),
    "embedded": ("i32", ["T"]),
    "stream": ("bf16", ["T", WIDTH]),
    "ids": ("i32", ["T"]),
    "scratch": ("u8", [64]),
    "logits": ("f32", ["R", VOCABULARY]),
    "main_hidden": ("i32", ["T", 3]),
    "draft_logits": ("f32", ["T", VOCABULARY]),
    "drafts": ("i32", ["T"]),
    "confidence": ("f32", ["T", 1]),
}
#: kernel, eager module, arguments (arena values, states with !, the weight as *, dimensions), results
_EMBED = ("embed", "embed", "tokens * embedded T", ["embedded"])
_ENCODE = (
    "encode",
    "layers.0",
    "embedded positions slots first kept layers.0.window! layers.0.compressed! layers.0.partial! engram.history! "
    "stream ids scratch T C2 S",
    ["stream", "ids"],
)
_FINISH = (
    "finish",
    "layers.1",
    "stream ids positions slots first rows layers.1.window! layers.0.compressed! logits main_hidden T R C2",
    ["logits", "main_hidden"],
)
_DRAFT_CONTEXT: tuple[str, str, str, list[str]] = (
    "draft_context",
    "mtp.0",
    "main_hidden positions slots mtp.0.window! T",
    [],
)
_DRAFT = (
    "draft",
    "mtp.0",
    "tokens positions slots first mtp.0.window! draft_logits drafts confidence T",
    ["draft_logits", "drafts", "confidence"],
)
_BATCH = ["tokens", "positions", "slots", "first"]
#: inputs, outputs and commands of each graph
_GRAPHS = {
    "encoder": ([*_BATCH, "kept"], ["stream", "ids"], [_EMBED, _ENCODE]),
    "decoder": ([*_BATCH[1:], "rows", "stream", "ids"], ["logits", "main_hidden"], [_FINISH]),
    "model": ([*_BATCH, "kept", "rows"], ["logits", "main_hidden"], [_EMBED, _ENCODE, _FINISH]),
    "draft_context": (["main_hidden", "positions", "slots"], [], [_DRAFT_CONTEXT]),
    "draft": (_BATCH, ["draft_logits", "drafts", "confidence"], [_DRAFT]),
}


def _program(graph: str, max_tokens: int) -> Program:
    inputs, outputs, kernels = _GRAPHS[graph]
    names = list(dict.fromkeys([*inputs, *(n for k in kernels for n in k[2].split() if n in _TYPES)]))
    values: list[BufferEntry] = []
    offset = 0
    for name in names:
        dtype, shape = _TYPES[name]
        # Inside the draft graph the logits are simply called so.
        values.append(BufferEntry(name.removeprefix("draft_"), dtype, shape, offset))
        rows = [max_tokens if dim in ("T", "R") else int(dim) for dim in shape]
        offset += -(-int(np.prod(rows)) * 8 // 64) * 64
    place = {name: index for index, name in enumerate(names)}
    states = [state.name for state in _STATES]

    def argument(spelled: str) -> Argument:
        if spelled == "*":
            return Argument("weight", 1)
        if spelled in DIMS:
            return Argument("dim", DIMS.index(spelled))
        if spelled.endswith("!"):
            return Argument("state", states.index(spelled[:-1]))
        return Argument("arena", values[place[spelled]].offset)

    commands = [
        Command(
            kernel,
            kernel,
            [argument(a) for a in arguments.split()],
            [place[r] for r in results],
            module,
            workspace_bytes=64 * ("scratch" in arguments),
        )
        for kernel, module, arguments, results in kernels
    ]
    ins, outs = [place[name] for name in inputs], [place[name] for name in outputs]
    return Program(graph, max_tokens, max_tokens, offset, values, ins, outs, commands)


@dataclass(frozen=True)
class Built:
    """The compiled kernels, shared by every engine of a test run."""

    library: Path


def compile_kernels(folder: Path) -> Built:
    """Compile the toy kernels with the system's C compiler."""
    library = folder / "kernels.so"
    source = Path(__file__).with_name("fake_kernels.c")
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return Built(library)


def write_engine(
    built: Built,
    folder: Path,
    *,
    graphs: Sequence[str] = ("encoder", "decoder", "draft_context", "draft"),
    variants: Sequence[int] = (1, 8),
    tokenizer: bytes | None = None,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    **fields: object,
) -> Path:
    """Write a toy engine; `fields` replace manifest fields, `change` then edits the whole, which is sealed again."""
    (folder / KERNELS_FILE).parent.mkdir(parents=True)
    (folder / KERNELS_FILE).write_bytes(built.library.read_bytes())
    (folder / WEIGHTS_FILE).write_bytes(b"\xff" * 64 + _TABLE.tobytes())
    if tokenizer is not None:
        (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        v41c_version="0",
        target="cpu:toy",
        cpu_features=[],
        arithmetic="release",
        config={},
        max_context=CONTEXT,
        slots=SLOTS,
        dims=DIMS,
        files={
            path.relative_to(folder).as_posix(): entry(path) for path in sorted(folder.rglob("*")) if path.is_file()
        },
        weights=[
            WeightEntry("unused", "plain", 0, 64),
            WeightEntry("engram.compressed_ids", "plain", 64, _TABLE.nbytes),
        ],
        states=_STATES,
        programs=[_program(graph, tokens) for graph in graphs for tokens in variants],
        passes=[],
        has_weights=True,
        window=WINDOW,
        causal_encoder_decoder=True,
        why_not_ced="",
        vocabulary=VOCABULARY,
        eos_tokens=[],
        bos_token=None,
        draft_block=BLOCK,
        draft_noise_token=NOISE,
    )
    manifest = change(msgspec.structs.replace(manifest, **fields))
    (folder / MANIFEST_FILE).write_bytes(encode(manifest))
    return folder


def entry(path: Path) -> FileEntry:
    """Size and digest of a file as a manifest lists them."""
    content = path.read_bytes()
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def _mix(a: int, b: int) -> int:
    h = (a * 31 + b * 17 + 12345) * 2654435761 % 2**32
    return h ^ (h >> 15)


def _window(keys: Sequence[int | None], position: int, first: int) -> int:
    seen = 0
    for p in range(max(0, first, position - WINDOW + 1), position + 1):
        key = keys[p]
        assert key is not None, f"key {p} is visible to {position} but was never written"
        seen = _mix(seen, key)
    return seen


@dataclass(frozen=True)
class Expected:
    """What the toy model computes for one sequence: logits by position (absent where the decoder never ran)."""

    logits: dict[int, np.ndarray]
    hidden: dict[int, list[int]]


def expected(tokens: Sequence[int], decoder_starts: Sequence[tuple[int, int, int]], encoder_first: int = 0) -> Expected:
    """The model on a whole sequence at once, without rings or chunks.

    `decoder_starts`: (begin, end, first) of each stretch of positions that the decoder runs over. `encoder_first`:
    where the encoder's window is cut; what it gives for earlier positions is not asked for.
    """
    table = [int(row) % 2**32 for row in _TABLE]
    embedded = [table[token] for token in tokens]
    compressed = [_mix(embedded[2 * j], embedded[2 * j + 1]) for j in range(len(tokens) // 2)]
    encoder_keys: list[int | None] = []
    decoder_keys: list[int | None] = [None] * len(tokens)
    streams, grams, fars = [], [], []
    for p in range(len(tokens)):
        gram = embedded[p]
        for back in (1, 2):
            gram = _mix(gram, embedded[p - back] if p >= back else 99)
        encoder_keys.append(_mix(gram, p))
        far = 7
        for row in compressed[: (p + 1) // 2]:
            far = _mix(far, row)
        h = _mix(_window(encoder_keys, p, encoder_first), far)
        streams.append([_mix(h, d) % 2**16 for d in range(WIDTH)])
        grams.append(gram)
        fars.append(far)
    logits: dict[int, np.ndarray] = {}
    hidden: dict[int, list[int]] = {}
    for begin, end, first in decoder_starts:
        for p in range(begin, end):
            key = grams[p]
            for element in streams[p]:
                key = _mix(key, element)
            decoder_keys[p] = key
            h = _mix(_window(decoder_keys, p, first), fars[p])
            hidden[p] = [_mix(h, d) for d in range(3)]
            logits[p] = np.array([_mix(hidden[p][0], v) % 1000 / 8 for v in range(VOCABULARY)], np.float32)
    return Expected(logits, hidden)


def expected_draft(hidden: dict[int, list[int]], token: int, start: int, first: int) -> list[int]:
    """The toy draft head's proposals for the block that begins at position `start`."""
    drafts = []
    for block_token in [token, *[NOISE] * (BLOCK - 1)]:
        h = block_token
        for p in range(max(0, first, start - WINDOW), start):
            context = 1
            for element in hidden[p]:
                context = _mix(context, element)
            h = _mix(h, context)
        drafts.append(h % VOCABULARY)
    return drafts
