"""The command line: what each verb prints, and one line and an exit code for everything a user can get wrong."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from v41c.cli import main
from v41c.frontend.presets import RELEASE_CONFIG, TRAINED_CHECKPOINT
from v41c.manifest import MANIFEST_FILE, Manifest, decode, encode
from v41c.passes.pipeline import pass_names

ROOT = Path(__file__).parents[1]
EngineOf = Callable[[Path, str], Path]


@dataclass(frozen=True)
class Done:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a failed command, which has printed nothing else."""
        assert self.code in (1, 2)
        assert self.out == ""
        assert self.err.startswith("v41c: error: ")
        assert self.err.count("\n") == 1
        return self.err.strip().removeprefix("v41c: error: ")

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output of a command that succeeded."""
        assert self.code == 0, self.err
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Run = Callable[..., Done]


@pytest.fixture
def v41c(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the preset tiny: never to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert main(["init", str(folder), "--preset", "tiny", "--seed", "3"]) == 0
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of that checkpoint, to be damaged."""
    folder: Path = shutil.copytree(tiny, tmp_path / "copy")
    return folder


@pytest.fixture
def engine(engine_of: EngineOf, tmp_path: Path) -> Path:
    """A copy of the shipped model's engine, to be damaged; its context is 512 tokens."""
    folder: Path = shutil.copytree(engine_of(TRAINED_CHECKPOINT, "release"), tmp_path / "engine")
    return folder


def left(folder: Path) -> set[str]:
    """Names in a folder, hidden ones too."""
    return {path.name for path in folder.iterdir()}


# --- what verbs print ---------------------------------------------------------------------------------------------


def test_help_teaches(v41c: Run) -> None:
    for arguments in ((), ("--help",)):
        done = v41c(*arguments)
        assert done.code == 0
        assert all(verb in done.out for verb in ("init", "compile", "run", "compare", "inspect", "bench", "demo"))
    for verb in ("compile", "run", "compare", "inspect", "bench"):
        assert "Examples:" in v41c(verb, "--help").out
    assert v41c("--version").out.startswith("v41c, version ")


def test_init_reports(v41c: Run, tmp_path: Path) -> None:
    report = v41c("init", tmp_path / "c", "--preset", "release-config-only", "--json").json
    assert (report["preset"], report["layers"]) == ("release-config-only", 40)
    assert left(tmp_path / "c") == {"config.json"}
    assert left(tmp_path) == {"c"}


def test_run_streams_text_to_stdout_and_figures_to_stderr(v41c: Run, engine: Path) -> None:
    command = ("run", engine, "--prompt", "And it came to pass,", "--max-new-tokens", 5)
    done = v41c(*command)
    assert (done.code, done.out) == (0, " when the people saw it\n")
    assert "prompt: 7 tokens" in done.err
    assert "generated: 5 tokens" in done.err
    report = v41c(*command, "--json").json
    assert report["text"] == " when the people saw it"
    assert report["finish_reason"] == "max new tokens"
    assert (report["prompt_tokens"], len(report["tokens"]), report["mode"]) == (7, 5, "ced")


def test_run_takes_a_prompt_from_a_file_or_as_tokens(v41c: Run, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("And it came to pass,", encoding="utf-8")
    few = ("--max-new-tokens", 5, "--json")
    by_file = v41c("run", engine, "--prompt-file", tmp_path / "prompt.txt", *few).json
    assert by_file["text"] == " when the people saw it"
    full = v41c("run", engine, "--prompt", "And it came to pass,", "--prefill", "full", *few).json
    assert (full["text"], full["mode"]) == (by_file["text"], "full")
    tokens = ",".join(map(str, by_file["tokens"]))
    assert v41c("run", engine, "--tokens", tokens, *few).json["prompt_tokens"] == 5


def test_run_continues_a_file_of_prompts(v41c: Run, engine: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "And it came to pass,", "max_new_tokens": 5},
        {"prompt": "And", "temperature": 1.5, "seed": 4, "max_new_tokens": 12},
        {"tokens": [9, 8, 7], "stop": None, "images": None},
        {"prompt": "And it came to pass,", "max_new_tokens": 5, "stop": ["people"]},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = v41c("run", engine, "--prompts", tmp_path / "prompts.jsonl", "--batch", 3, "--max-new-tokens", 2)
    assert done.code == 0
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [line["text"] for line in found[::3]] == [" when the people saw it", " when the "]
    assert [line["finish_reason"] for line in found] == ["max new tokens"] * 3 + ["stop string"]
    assert [len(line["tokens"]) for line in found[:3]] == [5, 12, 2]
    sampled = ("--temperature", 1.5, "--seed", 4, "--max-new-tokens", 12, "--json")
    assert found[1]["tokens"] == v41c("run", engine, "--prompt", "And", *sampled).json["tokens"]
    assert all(line["error"] is None for line in found)
    assert "4 prompts of 19 tokens, up to 3 at once" in done.err


def test_run_drafts(v41c: Run, engine: Path, tmp_path: Path) -> None:
    command = ("run", engine, "--prompt", "And it came to pass,", "--max-new-tokens", 20)
    plain = v41c(*command, "--json").json
    assert plain["drafts"] is None
    done = v41c(*command, "--draft", 3)
    assert re.search(r"drafts: \d\.\d\d tokens a step; accepted by place \d+% \d+% \d+% - -; verified .*3: ", done.err)
    for draft in (1, "auto"):
        report = v41c(*command, "--draft", draft, "--json").json
        assert report["tokens"] == plain["tokens"]
        assert report["drafts"]["steps"] == sum(report["drafts"]["lengths"])
    assert json.loads((engine.parent / f"{engine.name}.profile.json").read_text())["batches"] == [1]
    (tmp_path / "p.jsonl").write_text('{"prompt": "And it came to pass,"}\n' * 2, encoding="utf-8")
    done = v41c("run", engine, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 20, "--draft", 5)
    assert [json.loads(line)["tokens"] for line in done.out.splitlines()] == [plain["tokens"]] * 2
    assert "tokens a step; accepted by place" in done.err


def test_wrong_numbers_of_drafts(v41c: Run, engine: Path) -> None:
    command = ("run", engine, "--prompt", "And")
    for value in ("0", "some", "-1"):
        done = v41c(*command, "--draft", value)
        assert done.code == 2
        assert f"expected auto, off or a number of tokens, got '{value}'" in done.line
    done = v41c(*command, "--draft", "6")
    assert (done.code, done.out) == (2, "")
    assert "draft: expected at most 5 tokens, what the draft head gives, got 6" in done.line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "p.jsonl: line 2: expected {"),
        ('{"text": "a"}', "p.jsonl: line 1: .* unknown field `text`"),
        ('{"prompt": "a", "seed": "x"}', r"p.jsonl: line 1: .*Expected `int \| null`, got `str` - at `\$.seed`"),
        ('{"prompt": "a", "tokens": [1]}', "p.jsonl: line 1: expected exactly one of prompt and tokens"),
        ('\n{"prompt": "a", "top_p": 2}', "p.jsonl: line 2: top-p: expected more than 0"),
        ('{"tokens": [7, 2048]}', "p.jsonl: line 1: prompt: token 1: expected an id of 0 to 2047, got 2048"),
        ('{"tokens": [7], "top_k": 3}', "p.jsonl: line 1: temperature: expected above 0 beside top-p, top-k and"),
        ("\n", "p.jsonl: expected a prompt in every line, got none"),
        ("\xff", "p.jsonl: line 1: expected"),
    ],
)
def test_a_wrong_file_of_prompts(v41c: Run, engine_of: EngineOf, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content.encode("latin-1"))
    done = v41c("run", engine_of(TRAINED_CHECKPOINT, "release"), "--prompts", tmp_path / "p.jsonl")
    assert re.search(message, done.line)
    assert done.code == 2


def test_prompts_of_standard_input(v41c: Run, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, message in ((b"{", "standard input: line 1: expected {"), (b"", "standard input: expected a prompt")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert message in v41c("run", engine, "--prompts", "-").line


def test_run_begins_with_what_earlier_runs_left(
    v41c: Run, engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, few = tmp_path / "cache", ("--max-new-tokens", 5)
    cached = ("--prefix-cache", cache, *few)
    plain = v41c("run", engine, "--prompt", "And it came to pass,", *few, "--json").json
    for expected in (0, 6):
        report = v41c("run", engine, "--prompt", "And it came to pass,", *cached, "--json").json
        assert report["tokens"] == plain["tokens"]
        assert (report["cached_tokens"], report["replayed_tokens"]) == (expected, expected)
    done = v41c("run", engine, "--prompt", "And it came to pass,", *cached)
    assert "; 6 of them were cached, 6 replayed\n" in done.err
    (tmp_path / "p.jsonl").write_text('{"prompt": "And it came to pass,"}\n{"prompt": "And it came"}\n')
    done = v41c("run", engine, "--prompts", tmp_path / "p.jsonl", *cached)
    assert [json.loads(line)["cached_tokens"] for line in done.out.splitlines()] == [6, 2]
    assert "2 prompts of 11 tokens, up to 2 at once; 8 cached, 8 replayed" in done.err
    [entry] = cache.rglob("*.prefix")
    entry.write_bytes(b"")
    assert v41c("run", engine, "--prompt", "And it came to pass,", *cached).out == " when the people saw it\n"
    assert f"{entry}: not what its name says: removed, computed anew" in caplog.text
    done = v41c("run", engine, "--prompt", "And", "--prefix-cache", tmp_path / "p.jsonl")
    assert (done.code, done.out) == (2, "")
    assert f"prefix-cache: {tmp_path / 'p.jsonl'}: expected a folder, found a file" in done.line
    done = v41c("run", engine, "--prompt", "And", "--prefix-cache-bytes", 5)
    assert done.code == 2
    assert "expected --prefix-cache-bytes with --prefix-cache only" in done.line


def test_run_samples_the_same_with_the_same_seed(v41c: Run, engine: Path) -> None:
    def sampled(seed: int) -> Any:
        sampling = ("--temperature", 1.5, "--top-p", 0.95, "--top-k", 50, "--min-p", 0.01, "--seed", seed)
        return v41c("run", engine, "--prompt", "And", "--max-new-tokens", 12, *sampling, "--json").json["tokens"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_run_stops_at_the_context_limit(v41c: Run, engine: Path) -> None:
    tokens = ",".join(["9"] * 510)
    report = v41c("run", engine, "--tokens", tokens, "--max-new-tokens", 9, "--json").json
    assert report["finish_reason"] == "context limit"
    # the last token that is sampled need not be fed
    assert len(report["tokens"]) == 3


def test_inspect_sums_the_engine_up(v41c: Run, engine: Path) -> None:
    report = v41c("inspect", engine, "--json").json
    names = [entry["name"] for entry in report["passes"]]
    assert names == ["trace", *pass_names()]
    # sources at layers 2 and 4 (ratio 2) and 6 (ratio 1): rows of 64/2 + 64/16 bytes, index keys of 32/2 + 32/32
    assert report["state_bytes_per_token"] == (1 / 2 + 1 / 2 + 1) * (36 + 17)
    assert {program["graph"] for program in report["programs"]} == {"encoder", "decoder", "draft_context", "draft"}
    states = {state["name"]: state for state in report["states"]}
    assert states["layers.6.compressed"]["bytes_per_token"] == 36
    assert states["layers.0.window"]["slot_bytes"] == 32 * (64 + 2)
    text = v41c("inspect", engine).out
    assert all(name in text for name in (*names, *states))


def test_inspect_narrows_to_a_graph(v41c: Run, engine: Path) -> None:
    report = v41c("inspect", engine, "--graph", "decoder", "--json").json
    assert {program["graph"] for program in report["programs"]} == {"decoder"}
    assert "layers.0.window" not in {state["name"] for state in report["states"]}
    program = report["programs"][0]
    assert sum(program["operations"].values()) == program["commands"]
    assert program["operations"]["index_topk_blocks"] == 1  # layer 6 makes the pool


def test_inspect_prints_graphs_that_parse(v41c: Run, engine: Path) -> None:
    from v41c.ir.text import parse_module, print_module

    done = v41c("inspect", engine, "--pass", "plan-memory")
    assert done.out == next(engine.glob("graphs/*_plan-memory.ir")).read_text(encoding="utf-8")
    assert print_module(parse_module(done.out)) == done.out
    one = v41c("inspect", engine, "--pass", "split-encoder-decoder", "--graph", "encoder").out
    assert [graph.name for graph in parse_module(one)] == ["encoder"]
    assert [graph.name for graph in parse_module(v41c("inspect", engine, "--pass", "trace", "--graph", "model").out)]
    both = parse_module(v41c("inspect", engine, "--pass", "plan-memory", "--graph", "encoder").out)
    assert [graph.name for graph in both] == ["encoder:1", "encoder:512"]
    as_json = v41c("inspect", engine, "--pass", "trace", "--json").json
    assert as_json["text"].startswith("graph model {")


def test_a_closed_pipe_ends_quietly(engine: Path) -> None:
    command = f"{sys.executable} -m v41c inspect {engine} --pass plan-memory | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("graph ")
    assert done.stderr == ""


def test_compile_dumps_every_stage(v41c: Run, tiny: Path, tmp_path: Path) -> None:
    config, dump = tiny / "config.json", tmp_path / "dump"
    report = v41c("compile", config, "-o", tmp_path / "e", "--no-weights", "--dump-ir", dump, "--json").json
    assert report["passes"][0]["name"] == "trace"
    assert {path.name for path in dump.iterdir()} == {path.name for path in (tmp_path / "e" / "graphs").iterdir()}
    assert "cannot run" in v41c("run", tmp_path / "e", "--tokens", "5").line
    assert v41c("inspect", tmp_path / "e", "--json").json["has_weights"] is False


# --- wrong usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("frobnicate",), "No such command 'frobnicate'"),
        (("run",), "Missing argument 'ENGINE'"),
        (("run", "ENGINE"), "exactly one of --prompt, --prompt-file and --tokens"),
        (("run", "ENGINE", "--prompt", "a", "--tokens", "5"), "exactly one of --prompt"),
        (("run", "ENGINE", "--prompt", ""), "prompt: expected text, got none"),
        (("run", "ENGINE", "--tokens", ""), "prompt: expected token ids, got none"),
        (("run", "ENGINE", "--tokens", "5,x"), "expected token ids with commas between them"),
        (("run", "ENGINE", "--tokens", "5,,7"), "expected token ids with commas between them"),
        (
            ("run", "ENGINE", "--tokens", "5", "--temperature", "1", "--top-p", "2"),
            "top-p: expected more than 0 and at most 1, got 2.0",
        ),
        (("run", "ENGINE", "--tokens", "5", "--temperature", "-1"), "temperature: expected 0"),
        (("run", "ENGINE", "--tokens", "5", "--max-new-tokens", "-1"), "--max-new-tokens"),
        (("run", "ENGINE", "--tokens", "5", "--prefill", "half"), "'half' is not one of 'ced', 'full'"),
        (("run", "ENGINE", "--tokens", "5", "--replay", "0"), "--replay"),
        (("run", "ENGINE", "--tokens", "5", "--replay", "9", "--prefill", "full"), "replay: expected with prefill ced"),
        (("run", "ENGINE", "--tokens", "5", "--top-p", "0.5"), "temperature: expected above 0 beside top-p"),
        (("run", "ENGINE", "--tokens", "5", "--top-k", "5"), "temperature: expected above 0 beside top-p"),
        (("run", "ENGINE", "--tokens", "5", "--min-p", "0.5"), "temperature: expected above 0 beside top-p"),
        (
            ("run", "ENGINE", "--tokens", "5", "--prefix-cache", ""),
            "'--prefix-cache': expected a path, got an empty one",
        ),
        (("run", "nowhere", "--tokens", "5"), "nowhere: expected an engine folder, found nothing"),
        (("inspect", "nowhere"), "nowhere: expected an engine folder, found nothing"),
        (("bench", "nowhere"), "nowhere: expected an engine folder, found nothing"),
        (("compare", "nowhere"), "nowhere: expected an engine folder, found nothing"),
        (("compile", "nowhere", "-o", "e"), "nowhere: expected a checkpoint folder or a configuration, found nothing"),
        (("report", "nowhere"), "nowhere: expected a checkpoint folder or a configuration, found nothing"),
        (("run", "ENGINE", "--prompts", "nowhere"), "nowhere: cannot be read: No such file or directory"),
        (("run", "ENGINE", "--prompt-file", ""), "prompt: expected the name of a file, got an empty one"),
        (("run", "ENGINE", "--prompts", "p", "--prompt", "a"), "expected --prompts without --prompt,"),
        (("run", "ENGINE", "--prompts", "p", "--json"), "expected --prompts without --prompt,"),
        (("run", "ENGINE", "--tokens", "5", "--batch", "2"), "expected --batch with --prompts only"),
        (("run", "ENGINE", "--prompt-file", "nowhere"), "nowhere: cannot be read: No such file or directory"),
        (("inspect", "ENGINE", "--graph", "middle"), "graph: expected one of encoder, decoder, draft_context, draft"),
        (("inspect", "ENGINE", "--pass", "magic"), "pass: expected one of trace, "),
        (("inspect", "ENGINE", "--pass", "trace", "--graph", "encoder"), "graph: expected one of model, "),
        (("compile", "CHECKPOINT"), "Missing option '-o'"),
        (("compile", "CHECKPOINT", "-o", "e", "--passes", ""), "--passes: expected all, names to run, or changes"),
        (("compile", "CHECKPOINT", "-o", "e", "--passes", "magic"), "--passes: unknown pass magic: expected one of"),
        (("compile", "CHECKPOINT", "-o", "e", "--passes", "-select-kernels"), "select-kernels cannot be left out"),
        (("compile", "CHECKPOINT", "-o", "e", "--target", "cpu:6502"), "target: expected one of cuda, cpu, cuda:sm_89"),
        (("compile", "CHECKPOINT", "-o", "e", "--arithmetic", "vague"), "'vague' is not one of 'release', 'exact'"),
        (("compile", "CHECKPOINT", "-o", "e", "--max-context", "0"), "--max-context"),
        (("compile", "CHECKPOINT/config.json", "-o", "e"), "give --no-weights to compile a configuration alone"),
        (
            ("init", "d", "--preset", "huge"),
            "preset 'huge': expected one of tiny, small, small-bf16, release-config-only",
        ),
        (("init", "CHECKPOINT"), "expected a new or empty folder"),
        (("compare", "ENGINE", "--against", "rumour"), "'rumour' is not"),
        (("bench", "ENGINE", "--against", "rumour"), "expected eager, compile or eager,compile, got 'rumour'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_exits_with_2(
    v41c: Run, tiny: Path, engine: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(engine.parent)
    before = left(engine.parent)
    done = v41c(*(a.replace("ENGINE", str(engine)).replace("CHECKPOINT", str(tiny)) for a in arguments))
    assert message in done.line
    assert done.code == 2
    assert left(engine.parent) == before


def test_a_prompt_file_that_is_not_utf8(v41c: Run, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Où est-il?".encode("latin-1"))
    done = v41c("run", engine, "--prompt-file", tmp_path / "latin.txt")
    assert done.line.endswith("latin.txt: expected UTF-8, got byte 0xf9 at 1")
    assert done.code == 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("5,2048", "prompt: token 1: expected an id of 0 to 2047, got 2048"),
        ("-1", "prompt: token 0: expected an id of 0 to 2047, got -1"),
        (",".join(["7"] * 513), "prompt: 513 tokens do not fit: the context holds 512 and 0 are used"),
    ],
)
def test_tokens_that_do_not_fit(v41c: Run, engine: Path, tokens: str, message: str) -> None:
    done = v41c("run", engine, f"--tokens={tokens}")
    assert message in done.line
    assert done.code == 2


# --- damaged engines ----------------------------------------------------------------------------------------------


def test_a_flipped_byte_anywhere_is_found(v41c: Run, engine: Path) -> None:
    files = sorted(path for path in engine.rglob("*") if path.is_file())
    assert len(files) == 1 + len(pass_names()) + 4  # stages; kernels, weights, tokenizer, manifest
    for path in files:
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
            for verb in (("run", engine, "--tokens", "5"), ("inspect", engine)):
                line = v41c(*verb).line
                assert str(path) in line
                assert "damaged" in line
        path.write_bytes(content)
    assert v41c("run", engine, "--tokens", "5", "--json").code == 0


def edited(**fields: object) -> Callable[[Path], None]:
    """Replaces fields of a manifest and seals it again: what an engine of another kind looks like."""

    def edit(engine: Path) -> None:
        manifest: Manifest = decode((engine / MANIFEST_FILE).read_bytes())
        (engine / MANIFEST_FILE).write_bytes(encode(msgspec.structs.replace(manifest, **fields)))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(format_version=99), "format version: expected 3, got 99: compile the engine with this version of v41c"),
        (edited(cpu_features=["avx1024"]), "compiled for a processor with avx1024, which this one lacks"),
        (edited(target="tpu:v5"), "target: expected one of cpu, cuda, got 'tpu:v5'"),
        (lambda engine: (engine / "weights.bin").unlink(), "weights.bin: missing: compile the engine again"),
        (lambda engine: (engine / "extra").touch(), "extra: not part of the engine: remove it"),
        (
            lambda engine: (engine / MANIFEST_FILE).unlink(),
            f"expected an engine folder, found no {MANIFEST_FILE} in it",
        ),
        (lambda engine: (engine / MANIFEST_FILE).write_text("{}"), "damaged or not an engine's manifest"),
        (lambda engine: os.truncate(engine / "weights.bin", 100), "weights.bin: size: expected "),
    ],
)
def test_a_damaged_or_foreign_engine(v41c: Run, engine: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(engine)
    for verb in (("run", engine, "--tokens", "5"), ("inspect", engine), ("bench", engine), ("compare", engine)):
        done = v41c(*verb)
        assert message in done.line
        assert done.code == 1


# --- damaged checkpoints ------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
NORM = "layers.0.attn_norm.weight"


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a checkpoint."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)

    return damage


def configured(**keys: object) -> Callable[[Path], None]:
    """Changes keys of a checkpoint's configuration; None removes one."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= keys
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: os.truncate(c / WEIGHTS, 3), WEIGHTS),
        (lambda c: os.truncate(c / WEIGHTS, 5000), WEIGHTS),
        (lambda c: os.truncate(c / WEIGHTS, (c / WEIGHTS).stat().st_size - 1), WEIGHTS),
        (lambda c: (c / WEIGHTS).write_bytes(b""), WEIGHTS),
        (lambda c: (c / WEIGHTS).write_bytes(b"PK\x03\x04" + bytes(4000)), WEIGHTS),
        (lambda c: (c / WEIGHTS).write_text("not a checkpoint" * 100), WEIGHTS),
        (lambda c: (c / WEIGHTS).unlink(), "model.safetensors"),
        (lambda c: save_file({"foreign": torch.ones(3)}, c / WEIGHTS), "foreign"),
        (rewritten(lambda t: t.pop(NORM)), f"{NORM}"),
        (rewritten(lambda t: t.update(extra=t[NORM].clone())), "extra"),
        (rewritten(lambda t: t.update({NORM: t[NORM][:-1]})), f"{NORM}: expected BF16 [64], found BF16 [63]"),
        (rewritten(lambda t: t.update({NORM: t[NORM].float()})), f"{NORM}: expected BF16 [64], found F32 [64]"),
        (rewritten(lambda t: t.update({NORM: t[NORM].double()})), f"{NORM}: expected BF16 [64], found F64 [64]"),
        (configured(n_heads=5), "o_groups = 2: expected a divisor of the 5 attention heads"),
        (configured(kv_source_layers=[4, 2]), "kv_source_layers"),
        (configured(compress_ratios=[0, 0]), "compress_ratios"),
        (configured(window_size="wide"), "window_size"),
        (configured(dim=None), "dim"),
        (configured(n_layers=-1), "n_layers"),
        (lambda c: (c / "config.json").write_text("{"), "config.json"),
        (lambda c: (c / "config.json").write_text("[]"), "config.json"),
        (lambda c: (c / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
        (lambda c: (c / "config.json").unlink(), "config.json"),
        (lambda c: (c / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda c: (c / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
)
def test_a_damaged_or_foreign_checkpoint(
    v41c: Run, copy: Path, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    damage(copy)
    before = left(tmp_path)
    done = v41c("compile", copy, "-o", tmp_path / "engine")
    assert message in done.line
    assert done.code == 1
    assert left(tmp_path) == before


def test_a_shard_that_is_missing(v41c: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINED_CHECKPOINT, tmp_path / "copy")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in v41c("compile", folder, "-o", tmp_path / "engine").line
    assert left(tmp_path) == {"copy"}


def test_an_engine_takes_no_place_of_something_else(v41c: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    assert (
        "thesis: expected an engine folder to replace or a free name"
        in v41c("compile", tiny, "-o", tmp_path / "thesis").line
    )
    assert left(tmp_path / "thesis") == {"chapter"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bench", "e", "--draft"], "Option '--draft' requires an argument. See `v41c bench --help`."),
        (["run"], "Missing argument 'ENGINE'. See `v41c run --help`."),
        (["runs"], "No such command 'runs'."),
    ],
)
def test_wrong_usage_points_to_the_verb_s_help(v41c: Run, arguments: list[str], line: str) -> None:
    done = v41c(*arguments)
    assert done.code == 2
    assert line in done.line


def test_benchmarks_need_the_engine_s_own_checkpoint(v41c: Run, engine_of: EngineOf, tiny: Path) -> None:
    engine = engine_of(TRAINED_CHECKPOINT, "release")
    assert "context: expected at least" in v41c("bench", engine).line
    assert "expected the checkpoint of" in v41c("compare", engine, "--checkpoint", tiny).line


# --- the machine gets in the way ----------------------------------------------------------------------------------


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "v41c", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def finish(process: subprocess.Popen[str]) -> Done:
    """What it did, once it is done."""
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


@pytest.mark.parametrize("limit_bytes", [4 << 10, 1 << 20])
def test_a_full_disk_leaves_nothing(tiny: Path, tmp_path: Path, limit_bytes: int) -> None:
    """A limit on the size of files stands for the disk: the graphs do not fit, or the weights do not."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    done = finish(start("compile", tiny, "-o", tmp_path / "engine", preexec_fn=full))
    assert "cannot be written: File too large" in done.line
    assert left(tmp_path) == set()
    done = finish(start("init", tmp_path / "checkpoint", "--preset", "tiny", preexec_fn=full))
    assert "checkpoint: cannot be written" in done.line
    assert left(tmp_path) == set()


def test_a_folder_that_cannot_be_written(v41c: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for verb in (("compile", tiny, "-o"), ("init",)):
        assert "cannot be written" in v41c(*verb, tmp_path / "file" / "below").line
    assert left(tmp_path) == {"file"}


@pytest.mark.parametrize(
    ("number", "stage", "code", "message"),
    [
        (signal.SIGINT, "graphs", 130, "interrupted"),
        (signal.SIGTERM, "kernels", 143, "terminated"),
        (signal.SIGINT, "kernels", 130, "interrupted"),
    ],
)
def test_an_interrupted_compilation_leaves_nothing(
    tiny: Path, tmp_path: Path, number: signal.Signals, stage: str, code: int, message: str
) -> None:
    process = start("compile", tiny, "-o", tmp_path / "engine")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(f".engine.*/{stage}")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.out, done.err) == (code, "", f"v41c: error: {message}\n")
    assert left(tmp_path) == set()


#: a process that is told to stop at the worst moment: a lock is taken, and not yet known to be
_STOPPED_IN_A_LOCK = """
import functools, os, signal, sys, threading, time, types
import v41c.cli, v41c.init

def init(*given):
    stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    condition = threading.Condition()
    condition._lock = types.SimpleNamespace(__enter__=stop, __exit__=lambda *error: print("given back"))
    with condition:
        pass
    time.sleep(60)

v41c.init.init = init
sys.exit(v41c.cli.main(["init", "nowhere"]))
"""


def test_a_signal_leaves_no_lock_taken() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED_IN_A_LOCK], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "given back\n", "v41c: error: terminated\n")


def test_the_release_configuration_is_read_from_either_spelling(v41c: Run, tmp_path: Path) -> None:
    """Without weights a configuration alone is checked: a contradiction is found before anything is traced."""
    config = json.loads(RELEASE_CONFIG.read_text())
    config["text_config"]["num_hidden_layers"] = 39
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "compress_ratios" in v41c("compile", tmp_path / "config.json", "-o", tmp_path / "e", "--no-weights").line
    assert left(tmp_path) == {"config.json"}
