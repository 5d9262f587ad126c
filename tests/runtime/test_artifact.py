"""Loading an engine: whatever is wrong with the folder is one line that names the file, and nothing runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.runtime.fake_engine import Built, entry, write_engine
from v41c.errors import ArtifactError, UsageError
from v41c.manifest import KERNELS_FILE, MANIFEST_FILE, WEIGHTS_FILE, FileEntry, Manifest, encode
from v41c.runtime.artifact import Engine, cpu_features, load
from v41c.runtime.bounds import check_manifest
from v41c.runtime.cpu import Library
from v41c.runtime.session import Session
from v41c.runtime.states import as_float, bytes_per_token

FILES = [MANIFEST_FILE, KERNELS_FILE, WEIGHTS_FILE]


def refused(folder: Path, match: str) -> None:
    """Loading fails with one line."""
    with pytest.raises(ArtifactError, match=match) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_an_engine_loads_and_maps_its_weights(engine: Engine) -> None:
    weight = engine.manifest.weights[1]
    table = engine.weights[weight.offset : weight.offset + weight.size_bytes].view(np.int32)
    assert table[:2].tolist() == [13, 7932]
    assert not engine.weights.flags.writeable
    assert engine.weights.ctypes.data % 64 == 0
    assert [program.max_tokens for program in engine.programs("encoder")] == [1, 8]
    assert engine.programs("model") == ()
    assert (engine.blocks("encoder"), engine.blocks("decoder"), engine.blocks("draft")) == (1, 1, 0)
    assert engine.tokenizer_path is None


def test_folders_that_are_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: expected an engine folder, found nothing"):
        load(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: expected an engine folder, found a file"):
        load(tmp_path / "file")
    refused(tmp_path, "expected an engine folder, found no manifest.json in it")
    (tmp_path / MANIFEST_FILE).mkdir()
    refused(tmp_path, "manifest.json: cannot be read: Is a directory")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format_version": "1"}', b"[" * 100_000])
def test_manifests_that_are_none(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(content)
    refused(folder, r"manifest.json: damaged or not an engine's manifest: ")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), data=st.data())
def test_a_flipped_bit_anywhere_is_refused(folder: Path, name: str, data: st.DataObject) -> None:
    path = folder / name
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    refused(folder, name)
    path.write_bytes(content)
    load(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_grown_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], content + b"\n"):
        (folder / name).write_bytes(changed)
        refused(folder, f"{name}: (damaged|size: expected {len(content)} bytes, got {len(changed)})")


def test_missing_extra_and_misnamed_files_are_named(folder: Path) -> None:
    (folder / "graphs").mkdir()
    (folder / "graphs" / "00_trace.ir").write_text("graph")
    refused(folder, r"toy/graphs/00_trace.ir: not part of the engine: remove it")
    shutil.rmtree(folder / "graphs")
    (folder / WEIGHTS_FILE).rename(folder / "weight.bin")
    refused(folder, r"toy/weights.bin: missing: compile the engine again")
    (folder / "weight.bin").unlink()
    (folder / WEIGHTS_FILE).mkdir()
    refused(folder, r"toy/weights.bin: missing")


def test_a_dangling_link_is_no_file(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to("nowhere")
    refused(folder, r"toy/weights.bin: expected a file")


def test_version_target_and_processor_come_first(built: Built, tmp_path: Path) -> None:
    newer = write_engine(built, tmp_path / "newer", format_version=99)
    refused(newer, "manifest.json: format version: expected 3, got 99: compile the engine with this version")
    other = write_engine(built, tmp_path / "other", target="tpu:v5")
    refused(other, "manifest.json: target: expected one of cpu, cuda, got 'tpu:v5'")
    features = write_engine(built, tmp_path / "features", cpu_features=["avx1024", "sse9"])
    refused(features, "compiled for a processor with avx1024, sse9, which this one lacks: compile the engine on this")
    # Edited by hand, the version is still what is reported.
    content = json.loads((newer / MANIFEST_FILE).read_bytes()) | {"format_version": 7, "programs": "elsewhere"}
    (newer / MANIFEST_FILE).write_text(json.dumps(content))
    refused(newer, "format version: expected 3, got 7")


def test_processor_features_are_read_as_the_kernel_spells_them(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_features(cpuinfo) == {"fpu", "avx2", "fma"}
    cpuinfo.write_text("Features\t: asimd fphp\n")
    assert cpu_features(cpuinfo) == {"asimd", "fphp"}
    cpuinfo.write_text("nothing of the kind\n")
    assert cpu_features(cpuinfo) == cpu_features(tmp_path / "absent") == frozenset()


def test_an_engine_without_weights_loads_but_does_not_run(built: Built, tmp_path: Path) -> None:
    def drop(manifest: Manifest) -> Manifest:
        files = {name: file for name, file in manifest.files.items() if name != WEIGHTS_FILE}
        return msgspec.structs.replace(manifest, files=files)

    folder = write_engine(built, tmp_path / "bare", has_weights=False, change=drop)
    (folder / WEIGHTS_FILE).unlink()
    engine = load(folder)
    assert engine.weights.size == 0
    with pytest.raises(ArtifactError, match=r"bare/weights.bin: this engine was compiled with --no-weights"):
        Session(engine)


def test_kernels_of_another_machine_are_refused(built: Built, tmp_path: Path) -> None:
    folder = write_engine(built, tmp_path / "foreign")
    manifest = load(folder).manifest
    (folder / KERNELS_FILE).write_bytes(b"\x7fELF of another machine")
    files = manifest.files | {KERNELS_FILE: entry(folder / KERNELS_FILE)}
    (folder / MANIFEST_FILE).write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(ArtifactError, match=r"kernels.so: cannot be loaded: .*: compile the engine on this machine"):
        Session(load(folder))


def test_a_kernel_that_the_library_lacks_is_named(engine: Engine) -> None:
    with pytest.raises(ArtifactError, match=r"kernels.so: expected a kernel conv_2d, found none"):
        Library(engine).address("conv_2d")


def test_growth_per_token_comes_from_the_states(engine: Engine) -> None:
    assert bytes_per_token(engine.manifest) == 4 / 2


def test_bf16_bits_become_floats() -> None:
    np.testing.assert_array_equal(
        as_float(np.array([0x3F80, 0xC000], np.uint16), "bf16"), np.array([1, -2], np.float32)
    )
    assert as_float(np.array([3], np.int32), "i32").dtype == np.int32


Edit = Callable[[Manifest], Manifest]
replace = msgspec.structs.replace


def fields(**changes: object) -> Edit:
    return lambda manifest: replace(manifest, **changes)


def first(collection: str, **changes: object) -> Edit:
    """Change fields of the first entry of a list of the manifest."""

    def edit(manifest: Manifest) -> Manifest:
        head, *rest = getattr(manifest, collection)
        return replace(manifest, **{collection: [replace(head, **changes), *rest]})

    return edit


def in_program(number: int, collection: str, index: int, **changes: object) -> Edit:
    """Change fields of an entry of a list of a program."""

    def edit(manifest: Manifest) -> Manifest:
        programs = list(manifest.programs)
        entries = list(getattr(programs[number], collection))
        entries[index] = replace(entries[index], **changes)
        programs[number] = replace(programs[number], **{collection: entries})
        return replace(manifest, programs=programs)

    return edit


def argument(place: int, **changes: object) -> Edit:
    """Change an argument of the first command of the encoder: tokens, the table, the result, T."""

    def edit(manifest: Manifest) -> Manifest:
        arguments = list(manifest.programs[0].commands[0].arguments)
        arguments[place] = replace(arguments[place], **changes)
        return in_program(0, "commands", 0, arguments=arguments)(manifest)

    return edit


def graph(name: str, edit: Callable[[Manifest], list[int]], collection: str) -> Edit:
    """Change the inputs or outputs of every program of a graph."""

    def apply(manifest: Manifest) -> Manifest:
        programs = [
            replace(program, **{collection: edit(manifest)}) if program.graph == name else program
            for program in manifest.programs
        ]
        return replace(manifest, programs=programs)

    return apply


def without(*names: str) -> Edit:
    return lambda manifest: replace(manifest, programs=[p for p in manifest.programs if p.graph not in names])


# Programs in order: encoder 1, encoder 8, decoder 1, decoder 8, draft_context 1, 8, draft 1, 8. Values of the encoder:
# tokens, positions, slots, first, embedded, stream, ids, scratch.
BROKEN: dict[str, tuple[Edit, str]] = {
    "context": (fields(max_context=0), "max_context: expected at least 1, got 0"),
    "slots": (fields(slots=-1), "slots: expected at least 1, got -1"),
    "window": (fields(window=0), "window: expected at least 1"),
    "block": (fields(draft_block=-3), "draft_block: expected at least 0, got -3"),
    "end token": (fields(eos_tokens=[3, 31]), "eos_tokens: expected an index below 31, got 31"),
    "begin token": (fields(bos_token=-1), "bos_token: expected an index below 31, got -1"),
    "dims twice": (fields(dims=["T", "T", "R", "S"]), "dims: expected distinct entries, got T twice"),
    "strange dim": (fields(dims=["T", "R", "S", "C2", "Q"]), "dims: expected T, R, S or C and a ratio, got Q"),
    "weight beyond the file": (
        first("weights", size_bytes=10**9),
        "unused: expected an end within the 188 bytes of weights.bin",
    ),
    "weight before the file": (
        first("weights", offset=-64),
        "unused: expected an offset that is a multiple of 64",
    ),
    "weight misaligned": (
        first("weights", offset=4),
        "unused: expected an offset that is a multiple of 64, got 4",
    ),
    "weight of negative size": (first("weights", size_bytes=-1), "weight unused: expected a size of at least 0"),
    "state twice": (first("states", name="layers.1.window"), "states: expected distinct .* layers.1.window twice"),
    "state dtype": (first("states", dtype="f64"), "state layers.0.window: expected a dtype of f32, .*, got f64"),
    "state without slots": (first("states", shape=[4]), r"layers.0.window: expected a leading dimension S, got \[4\]"),
    "state without rows": (first("states", shape=["S"]), r"layers.0.window: expected rows by position .*, got \['S'\]"),
    "state of no rows": (
        first("states", shape=["S", 0]),
        r"layers.0.window: expected rows by position .* got \['S', 0",
    ),
    "state of slots": (first("states", shape=["S", "S"]), "layers.0.window: expected rows by position along axis 1"),
    "short ring": (first("states", shape=["S", 3]), "layers.0.window: expected at least 4 rows, .*, got 3"),
    "state of tokens": (
        first("states", shape=["S", "T"]),
        "layers.0.window: expected dimensions .* C2, S, got T",
    ),
    "state of negative size": (
        first("states", shape=["S", -4]),
        "layers.0.window: expected dimensions .* got -4",
    ),
    "program twice": (first("programs", max_tokens=8, arena_bytes=10**6), "programs: expected distinct .*encoder', 8"),
    "no tokens": (
        first("programs", max_tokens=0),
        "encoder for 0 tokens: max_tokens: expected at least 1",
    ),
    "no rows": (first("programs", max_rows=0), "max_rows: expected at least 1, got 0"),
    "small arena": (first("programs", arena_bytes=64), "value positions: expected an end within 64 bytes, got 68"),
    "grown program": (first("programs", max_tokens=600), "for 600 tokens: value .*: expected an end within"),
    "unknown graph": (first("programs", graph="speech"), "programs: expected graphs of model, encoder, .*, got speech"),
    "value beyond the arena": (in_program(1, "values", 6, offset=2**40), "value stream: expected an end within"),
    "value before the arena": (in_program(1, "values", 6, offset=-64), "value stream: expected an offset"),
    "value misaligned": (in_program(1, "values", 6, offset=2), "value stream: expected an offset that is a multiple"),
    "value dim": (in_program(1, "values", 6, shape=["T", "Z"]), "value stream: expected dimensions .*, got Z"),
    "value twice": (in_program(1, "values", 6, name="ids"), "values: expected distinct entries, got ids twice"),
    "input index": (first("programs", inputs=[0, 1, 2, 9]), "inputs: expected an index below 9, got 9"),
    "output index": (first("programs", outputs=[-1]), "outputs: expected an index below 9, got -1"),
    "output twice": (first("programs", outputs=[5, 5]), "outputs: expected distinct entries, got 5 twice"),
    "arena argument": (argument(0, index=2**40), r"command 0 \(embed\): argument 0 \(arena\): expected an index below"),
    "misaligned argument": (argument(0, index=8), "argument 0: expected an offset that is a multiple of 64, got 8"),
    "negative argument": (argument(0, index=-64), "argument 0: expected an offset that is a multiple of 64, got -64"),
    "argument at no value": (
        lambda m: argument(0, index=m.programs[0].arena_bytes - 64)(m),
        r"command 0 \(embed\): expected arguments at the places of values, got",
    ),
    "argument at another result": (
        argument(2, index=0),
        r"command 0 \(embed\): expected results at \[\d+\], got \[0, 0\]",
    ),
    "weight argument": (argument(1, index=2), r"argument 1 \(weight\): expected an index below 2, got 2"),
    "state argument": (argument(1, kind="state", index=6), r"argument 1 \(state\): expected an index below 6, got 6"),
    "dim argument": (argument(3, index=-1), r"argument 3 \(dim\): expected an index below 4, got -1"),
    "kernel name": (in_program(0, "commands", 0, kernel="a b"), "command 0: expected a kernel's name, got 'a b'"),
    "waited for before": (
        in_program(0, "commands", 0, joined=0),
        "command 0: joined: expected a later one, up to 2, got",
    ),
    "waited for never": (
        in_program(0, "commands", 1, joined=3),
        "command 1: joined: expected a later one, up to 2, got",
    ),
    "aside with states": (
        in_program(0, "commands", 1, joined=2),
        "expected neither states nor counters of what may run",
    ),
    "result index": (in_program(0, "commands", 0, results=[9]), "results: expected an index below 9, got 9"),
    "variants differ": (first("programs", outputs=[6]), "graph encoder: expected programs with the same inputs"),
    "no encoder": (without("encoder"), "programs: expected graphs encoder and decoder, or model, got decoder, draft"),
    "half a draft": (without("draft"), "programs: expected graphs draft and draft_context, got one"),
    "no noise": (fields(draft_noise_token=None), "draft: expected a noise token and a block .*, got None and 3"),
    "long block": (fields(draft_block=9), "draft: expected .* a block that one step takes, got 5 and 9"),
    "foreign input": (graph("encoder", lambda m: [0, 1, 5], "inputs"), "input embedded: expected a step's input or an"),
    "unfed decoder": (
        graph("encoder", lambda m: [7], "outputs"),
        "decoder: input stream: expected a step's input",
    ),
    "output of no tokens": (
        graph("encoder", lambda m: [6, 7, 8], "outputs"),
        "encoder: output scratch: expected a leading T",
    ),
    "no logits": (graph("decoder", lambda m: [], "outputs"), "graph decoder: output logits: expected one, got none"),
    "vocabulary": (fields(vocabulary=30), r"output logits: expected f32\['R', 30\], got f32\['R', 31\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_index_and_shape_is_checked(built: Built, tmp_path: Path, name: str) -> None:
    change, match = BROKEN[name]
    refused(write_engine(built, tmp_path / "toy", change=change), match)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), index=st.one_of(st.integers(-(2**62), 2**62), st.integers(-2, 40).map(lambda n: 64 * n)))
def test_kernels_are_told_places_of_values_only(engine: Engine, data: st.DataObject, index: int) -> None:
    told = [(n, c) for n, p in enumerate(engine.manifest.programs) for c in p.commands]
    number, command = data.draw(st.sampled_from(told))
    program = engine.manifest.programs[number]
    arguments = list(command.arguments)
    place = data.draw(st.sampled_from([i for i, given in enumerate(arguments) if given.kind == "arena"]))
    is_workspace = command.workspace_bytes and not any(given.kind == "arena" for given in arguments[place + 1 :])
    most = program.arena_bytes - command.workspace_bytes
    fits = index % 64 == 0 and 0 <= index <= most if is_workspace else index in {v.offset for v in program.values}
    assume(not fits)
    arguments[place] = replace(arguments[place], index=index)
    edit = in_program(number, "commands", program.commands.index(command), arguments=arguments)
    with pytest.raises(ArtifactError, match=rf"graph {program.graph} for {program.max_tokens} tokens: command "):
        check_manifest(Path("manifest.json"), edit(engine.manifest))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "kernels/../kernels/kernels.so"])
def test_names_that_lead_elsewhere_are_no_files_of_the_engine(built: Built, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"")
    listed = FileEntry(0, hashlib.sha256(b"").hexdigest())
    folder = write_engine(built, tmp_path / "toy", change=lambda m: replace(m, files={**m.files, name: listed}))
    refused(folder, "missing: compile the engine again")


def test_has_weights_and_their_file_must_agree(built: Built, tmp_path: Path) -> None:
    refused(write_engine(built, tmp_path / "toy", has_weights=False), "files: expected weights.bin exactly when")
