"""Memory of an engine's steps as it is, to be held against what the engine states."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from v41c.runtime import cpu
from v41c.runtime.artifact import Engine
from v41c.runtime.cpu import CpuDevice
from v41c.runtime.states import States

#: bytes behind an arena that nothing may touch
GUARD_BYTES = 1 << 20
#: what nothing writes twice in the same place: whatever is written differs from one of them
CANARIES = (0xA5, 0x5A)

_PREFILL = """
import json, sys
import numpy as np
from v41c.runtime.artifact import load
from v41c.runtime.session import Session

def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {key: int(lines[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon")}

engine = load(sys.argv[1])
engine.weights.sum()  # pages of a mapped file count once they are touched
before = memory()
# states are written, so that their pages count; one thread: which of several takes what is chance
session = Session(engine, poison=True, threads=1)
tokens = np.random.default_rng(0).integers(5, engine.manifest.vocabulary - 4, int(sys.argv[2]))
session.prefill(tokens, mode=sys.argv[3])
after = memory()
print(json.dumps({key: after[key] - before[key] for key in after} | {"stated": session.memory_bytes}))
"""


@dataclass(frozen=True)
class Growth:
    """By how many bytes a process grew that opened a session and fed a prompt, and what its session states.

    `peak_bytes`: the most it ever had. `allocated_bytes`: what it has at the end and did not map from a file.
    """

    peak_bytes: int
    allocated_bytes: int
    stated_bytes: int


def highest_touched(engine: Engine, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes from the arena's begin to the last one that a full chunk touches, by graph of the backbone."""
    graphs = ("encoder", "decoder") if engine.programs("encoder") else ("model",)
    ends = dict.fromkeys(graphs, 0)
    for canary in CANARIES:
        device, arena = _guarded_device(engine, canary, patch)
        count = engine.programs(graphs[0])[-1].max_tokens
        # a second chunk reads what the first one wrote to the caches, and selects
        for start in (0, count):
            inputs = _batch(engine, start, count, engine.programs(graphs[-1])[-1].max_rows)
            for graph in graphs:
                arena.fill(canary)
                outputs = device.execute(graph, inputs)
                inputs |= {name: array.copy() for name, array in outputs.items()}
                ends[graph] = max(ends[graph], int(np.flatnonzero(arena != canary)[-1]) + 1)
    return ends


def _batch(engine: Engine, start: int, count: int, rows: int) -> dict[str, npt.NDArray[np.generic]]:
    """Random tokens at consecutive positions of slot 0, logits of the first ones."""
    positions = np.arange(start, start + count, dtype=np.int32)
    tokens = np.random.default_rng(start).integers(5, engine.manifest.vocabulary - 4, count, np.int32)
    zeros = np.zeros_like(positions)
    batch = {"tokens": tokens, "positions": positions, "slots": zeros, "first": zeros, "kept": zeros}
    return batch | {"rows": np.arange(rows, dtype=np.int32)}


def _guarded_device(engine: Engine, canary: int, patch: pytest.MonkeyPatch) -> tuple[CpuDevice, npt.NDArray[np.uint8]]:
    """A device, and its arena with what lies behind it."""
    taken: list[npt.NDArray[np.uint8]] = []
    take = cpu.aligned_bytes

    def guarded(size: int, what: str) -> npt.NDArray[np.uint8]:
        block = take(size + GUARD_BYTES, what)
        if what != "activations":
            return block[:size]
        block.fill(canary)
        taken.append(block)
        return block[:size]

    states = States.allocate(engine.manifest, 1, engine.manifest.max_context, poison=True)
    with patch.context() as patched:
        patched.setattr(cpu, "aligned_bytes", guarded)
        device = CpuDevice(engine, states)
    (arena,) = taken
    return device, arena


def measured_prefill(engine: Path, count: int, mode: str) -> Growth:
    """What a prefill of so many tokens takes in a process of its own."""
    command = [sys.executable, "-c", _PREFILL, str(engine), str(count), mode]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout)
    return Growth(found["VmHWM"], found["RssAnon"], found["stated"])
