"""A whole CUDA engine without a GPU: the runtime's CUDA device on a driver that interprets its launches.

Fed the same tokens, its logits are those of the CPU engine of the same checkpoint but for roundings, which grow with
depth as they do in the eager model; and every pointer of every launch lies in the buffer that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest

from tests.codegen.cuda.driver import HostDriver
from tests.codegen.cuda.uncompiled import CONTEXT, FEW, compile_uncompiled
from tests.variants import compile_variants
from v41c.compile import CompileOptions, compile
from v41c.init import init
from v41c.manifest import Argument, Command, LaunchEntry, Manifest, Program
from v41c.runtime import devices
from v41c.runtime.artifact import Engine, load
from v41c.runtime.device import Programs
from v41c.runtime.session import Session
from v41c.targets.cuda import SM_90, SM_100, CudaTarget

#: relative L2 of logits, twice the largest seen: 0.011, 0.014 and 0.017; that of the CPU engine against the eager model
#: is of the same size
ROUNDINGS = 0.035
#: states that are the CPU's to the last bit for these tokens: roundings are lost where values are packed
EXACT = ("layers.0.window", "layers.2.compressed", "layers.2.index_keys", "engram.history")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """Engines of one small random model, for this processor and for Hopper."""
    folder = tmp_path_factory.mktemp("cuda")
    init(folder / "model", "tiny", 5)
    with pytest.MonkeyPatch.context() as patch:
        compile_variants(patch, (1, FEW))
        compile(folder / "model", folder / "cpu", CompileOptions(max_context=CONTEXT))
    compile_uncompiled(folder / "model", folder / "cuda")
    return load(folder / "cpu"), load(folder / "cuda")


def open_session(engine: Engine, driver: HostDriver, patch: pytest.MonkeyPatch) -> Session:
    """A session of a CUDA engine on a driver without a GPU; memory that no token has written is NaN."""
    patch.setattr(devices, "CudaDriver", lambda: driver)
    return Session(engine, drafting=True, poison=True)


@pytest.fixture(scope="module")
def blackwell(engines: tuple[Engine, Engine]) -> Engine:
    """Of the same model, for tensor cores that apply the scales of packed rows."""
    folder = engines[1].path.parent
    compile_uncompiled(folder / "model", folder / "blackwell", target=SM_100)
    return load(folder / "blackwell")


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
def test_logits_and_states_of_the_cpu_engine(
    target: CudaTarget, engines: tuple[Engine, Engine], blackwell: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Session(engines[0], drafting=True, poison=True)
    engine = engines[1] if target == SM_90 else blackwell
    passes = {entry.name for entry in engine.manifest.passes}
    assert ("pack-activations" in passes) == target.has_block_scaled_mma
    theirs = open_session(engine, HostDriver(engine), monkeypatch)
    prompt = np.random.default_rng(1).integers(5, 250, 6)
    expected = [*ours.prefill_all(prompt, mode="full"), ours.decode(675)]
    found = [*theirs.prefill_all(prompt, mode="full"), theirs.decode(675)]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) < ROUNDINGS * np.linalg.norm(b)
    require_same(theirs, ours.states, EXACT)
    before = theirs.states  # copies
    for session in (ours, theirs):
        session.verify({0: [17, 3]})
        session.rewind(8)
    require_same(theirs, ours.states, EXACT)
    theirs.rewind(7)
    require_same(theirs, before, before)
    assert theirs.evaluated == ours.evaluated


def require_same(session: Session, states: Mapping[str, np.ndarray], names: Iterable[str]) -> None:
    """The bytes of some states."""
    for name in names:
        assert session.states[name].tobytes() == states[name].tobytes(), name


def test_every_pointer_lies_in_its_buffer(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole generation: prefill in two chunks, decode steps, drafts; launches are looked at, not run."""
    engine, manifest = engines[1], engines[1].manifest
    driver = HostDriver(engine, interpret=False)
    ran: list[tuple[Program, int]] = []
    smallest = Programs.smallest

    def noted(self: Programs, graph: str, tokens: int, rows: int) -> Program:
        ran.append((smallest(self, graph, tokens, rows), rows))
        return ran[-1][0]

    monkeypatch.setattr(Programs, "smallest", noted)
    session = open_session(engine, driver, monkeypatch)
    session.prefill(np.arange(5, 30), mode="ced")
    for token in (7, 8, 9):
        session.decode(token)
    session.draft({0: 10})
    assert {program.graph for program, _ in ran} == {"encoder", "decoder", "draft_context", "draft"}
    asked = iter(driver.launched)
    for command, launch in expected_launches(manifest, ran):
        launched = next(asked)
        assert launched.entry == manifest.cubins[launch.cubin]
        assert launched.threads == launched.entry.warps * 32
        assert launched.values[-2:] == (0, 0)
        for parameter, value in zip(launch.parameters, launched.values, strict=False):
            argument = command.arguments[parameter.argument]
            if argument.kind == "dim":
                assert 0 < value <= CONTEXT
            else:
                assert value in home(driver, manifest, argument)
                assert value % 16 == 0
    assert next(asked, None) is None


def test_logits_of_tables_in_host_memory(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tables on the device, to the bit: rows are looked up aside, as late as events allow."""
    engine = engines[1]
    found = []
    for room in (1 << 40, 0):
        driver = HostDriver(engine, room_bytes=room)
        session = open_session(engine, driver, monkeypatch)
        found.append([session.prefill(np.arange(5, 9)), session.decode(7)])
        lookups = [launched for launched in driver.launched if launched.aside]
        assert len(lookups) == (4 if driver.pinned else 0)
    for near, far in zip(*found, strict=True):
        assert not np.isnan(near).any()
        assert np.array_equal(near.view(np.uint32), far.view(np.uint32))


def test_packed_activations_move_no_bit(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, drafts and states of an engine whose boundaries pack are those of one whose boundaries do not."""
    plain = engines[1]
    folder = plain.path.parent
    compile_uncompiled(folder / "model", folder / "packed", "+pack-activations")
    packed = load(folder / "packed")
    assert packed.manifest.passes[-1].activation_bytes < plain.manifest.passes[-1].activation_bytes
    found, states = [], []
    for engine in (plain, packed):
        session = open_session(engine, HostDriver(engine), monkeypatch)
        found.append(
            [session.prefill(np.arange(5, 9)), session.decode(7), session.draft({0: 9}, logits=True)[0].logits]
        )
        states.append(session.states)
    for one, other in zip(*found, strict=True):
        assert not np.isnan(one).any()
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
    for name, state in states[0].items():
        assert state.tobytes() == states[1][name].tobytes(), name


def expected_launches(manifest: Manifest, ran: list[tuple[Program, int]]) -> Iterator[tuple[Command, LaunchEntry]]:
    """Every launch of the programs that ran, in order; none over the logit rows of a step without any."""
    for program, rows in ran:
        for command in program.commands:
            for launch in manifest.launches[command.kernel]:
                over_rows = any(axis.dim is not None and manifest.dims[axis.dim] == "R" for axis in launch.grid)
                if rows or not over_rows:
                    yield command, launch


def home(driver: HostDriver, manifest: Manifest, argument: Argument) -> range:
    """The addresses that an argument's buffer may have."""
    match argument.kind:
        case "arena":
            return driver.named["activations"]
        case "counters":
            return driver.named["counters"]
        case "state":
            return driver.named[f"state {manifest.states[argument.index].name}"]
        case _:
            return driver.named[f"weight {manifest.weights[argument.index].name}"]
