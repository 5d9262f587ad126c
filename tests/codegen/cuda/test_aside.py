"""Rows of Engram tables in host memory are read beside the layers before them, and nothing is touched meanwhile.

On a driver without a GPU, which runs what is launched aside as late as events allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.codegen.cuda.driver import HostDriver, Launched
from tests.codegen.cuda.timeline import accesses, conflicts, touched, without
from tests.codegen.cuda.uncompiled import compile_uncompiled
from v41c.arena import overlaps
from v41c.init import init
from v41c.ir.graph import Graph, Module
from v41c.manifest import Program
from v41c.passes import plan_memory, reorder_sparse_gathers
from v41c.runtime import cuda, devices
from v41c.runtime.artifact import Engine, load
from v41c.runtime.device import Programs
from v41c.runtime.session import Session
from v41c.stages import WITHOUT_KERNELS, engine_stages

LOOKUP = "look_up_rows"
Ran = list[tuple[Program, int, int]]
Generate = Callable[[Engine, HostDriver], Ran]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A small random model with two Engrams, for Hopper, without machine code."""
    folder = tmp_path_factory.mktemp("aside")
    init(folder / "model", "tiny", 5)
    compile_uncompiled(folder / "model", folder / "engine")
    return load(folder / "engine")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Generate:
    """A generation: a prompt in two chunks, single tokens, drafts. Single tokens are replayed, the rest is launched."""
    ran: Ran = []
    smallest = Programs.smallest

    def noted(self: Programs, graph: str, tokens: int, rows: int) -> Program:
        ran.append((smallest(self, graph, tokens, rows), tokens, rows))
        return ran[-1][0]

    def run(engine: Engine, driver: HostDriver) -> Ran:
        monkeypatch.setattr(Programs, "smallest", noted)
        monkeypatch.setattr(cuda, "RECORDED_TOKENS", 1)
        monkeypatch.setattr(devices, "CudaDriver", lambda: driver)
        session = Session(engine, drafting=True, poison=True)
        session.prefill(np.arange(5, 30), mode="ced")
        for token in (7, 8, 9):
            session.decode(token)
        session.draft({0: 10})
        assert not driver.late
        return ran

    return run


def found_conflicts(engine: Engine, driver: HostDriver, ran: Ran, asked: list[object] | None = None) -> list[str]:
    told = touched(engine.manifest, ran, driver.named["activations"].start)
    return list(conflicts(accesses(driver.asked if asked is None else asked, told)))  # type: ignore[arg-type]


def asides(driver: HostDriver) -> list[str]:
    return [entry.entry.function for entry in driver.asked if isinstance(entry, Launched) and entry.aside]


def test_lookups_run_beside_others_and_touch_nothing_of_theirs(engine: Engine, generate: Generate) -> None:
    driver = HostDriver(engine, interpret=False, room_bytes=0)
    ran = generate(engine, driver)
    steps = [program.max_tokens for program, _, _ in ran if program.graph == "encoder"]
    assert set(steps) == {1, 16}
    assert asides(driver) == [LOOKUP] * 2 * len(steps)
    told = touched(engine.manifest, ran, driver.named["activations"].start)
    done = list(accesses(driver.asked, told))
    assert list(conflicts(done)) == []
    # that is not because nothing runs beside them: the second one overlaps with a whole layer and more
    beside = [sum(not a.comes_after(b) and not b.comes_after(a) for b in done) for a in done if a.aside]
    assert all(first >= 10 and second >= 40 for first, second in zip(beside[::2], beside[1::2], strict=True)), beside


@pytest.mark.parametrize("aside", [False, True])
def test_a_stream_that_does_not_wait_is_caught(engine: Engine, generate: Generate, aside: bool) -> None:
    driver = HostDriver(engine, interpret=False, room_bytes=0)
    ran = generate(engine, driver)
    found = found_conflicts(engine, driver, ran, list(without(driver.asked, aside=aside)))
    if aside:
        expected = "engram_lookup_ordered of layers.1.engram reads what is written by encoder:16 sort_rows"
    else:
        expected = "engram_lookup_ordered of layers.1.engram writes what is read by encoder:16 round_trip"
    assert any(expected in line for line in found)


def test_a_plan_that_does_not_know_of_it_is_caught(engine: Engine) -> None:
    """Memory planned as if operations ran in order: what a lookup reads is written over while it may still run."""
    stages = engine_stages(engine)
    assert [line for graph in stages[plan_memory.NAME] for line in overlaps(graph)] == []
    graph = stages[reorder_sparse_gathers.NAME]["encoder:16"]
    asides = {node.results[0].name for node in graph.joins}
    (planned,) = plan_memory.run(Module((marked(graph, set()),)), WITHOUT_KERNELS)
    assert list(overlaps(planned)) == []
    assert any("layers.3.engram_rows.places" in line for line in overlaps(marked(planned, asides)))


def marked(graph: Graph, names: set[str]) -> Graph:
    """The graph with these nodes aside and no others, by the names of their first results."""
    nodes = [
        node if node.kernel is None else replace(node, kernel=replace(node.kernel, aside=node.results[0].name in names))
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def test_tables_that_fit_are_read_in_order(engine: Engine, generate: Generate) -> None:
    driver = HostDriver(engine, interpret=False)
    generate(engine, driver)
    assert asides(driver) == []
    assert driver.events == 0
