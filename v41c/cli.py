"""The command line: every verb parses its arguments and calls the driver function of the same name.

Drivers are imported when their verb runs: `v41c run` starts without torch, triton or the TVM compiler.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import augment_usage_errors

from v41c import __version__
from v41c.errors import MovedError, UsageError, V41CError
from v41c.terminal import progress

if TYPE_CHECKING:
    from v41c.prefix_cache import PrefixCache
    from v41c.runtime.request import Options

#: exit codes of a process that was told to stop, as a shell reports them: 128 and the signal's number
INTERRUPTED, TERMINATED = 130, 143


#: seconds between attempts to stop where stopping is safe
_RETRY_SECONDS = 0.05


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised where the program stands so that what is half written is removed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process when None) and give its exit code: 0, 2 for wrong usage, 1 else."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with _raised_signals():
            code = _invoke(given or ["--help"])
            if sys.stdout is not None:
                sys.stdout.flush()
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "v41c"
        return _fail(f"{error.format_message()} See `{where} --help`.", error.exit_code)
    except V41CError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone: what is still buffered must not be written at exit either.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", 1)
    except MemoryError:
        return _fail("not enough memory", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Terminated:
        return _fail("terminated", TERMINATED)
    return code


def _invoke(arguments: list[str]) -> int:
    try:
        with cli.make_context("v41c", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    return 0


@contextlib.contextmanager
def _raised_signals() -> Iterator[None]:
    """Within this context, where it is entered in the main thread, SIGINT, SIGTERM and SIGHUP raise.

    Only where it is safe: a signal that comes elsewhere is tried again a moment later, so who waits for long does so
    outside of `threading` (as `v41c.codegen.workers` does).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[type[BaseException]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            told[:] = [KeyboardInterrupt if number == signal.SIGINT else Terminated]
        if told and not _may_raise(frame):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
        elif told:
            raise told.pop()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


#: modules whose bookkeeping an exception from outside breaks: a lock stays taken, and its next user waits for ever, or
#: the exception is lost in a callback of a weak reference
_BOOKKEEPING = ("threading", "concurrent.futures.", "importlib._bootstrap", "weakref", "_weakrefset")


def _may_raise(frame: FrameType | None) -> bool:
    """Not in the standard library's bookkeeping, and not while the kernel compiler is calling back into Python.

    There an exception would cross the compiler's C++ frames and abort the process.
    """
    if frame is not None and _module(frame).startswith(_BOOKKEEPING):
        return False
    while frame is not None:
        if _module(frame).partition(".")[0] in ("tvm", "tvm_ffi"):
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"v41c: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _emit(report: Any, as_json: bool) -> None:
    """Print a report: one JSON object, or the same for people."""
    if as_json:
        _print_json(report.to_json())
    else:
        print(report.summary())


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entries(value: str | None) -> list[str]:
    """What stands between the commas."""
    return [entry for part in (value or "").split(",") if (entry := part.strip())]


def _token_ids(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between them; a usage error names what is none."""
    if value is None:
        return None
    try:
        return tuple(int(entry) for entry in value.split(",")) if value.strip() else ()
    except ValueError:
        raise click.BadParameter("expected token ids with commas between them: 1,2,3.", context, option) from None


def _drafts(context: click.Context, option: click.Parameter, value: str) -> int | str:
    """auto, off, or a number; a usage error for anything else."""
    if value in ("auto", "off"):
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"expected auto, off or a number of tokens, got {value!r}.", context, option)
    return int(value)


def _baselines(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of baselines with commas between them, each once; a usage error names a stranger."""
    names = tuple(dict.fromkeys(_entries(value)))
    for name in names:
        if name not in ("eager", "compile"):
            raise click.BadParameter(f"expected eager, compile or eager,compile, got {name!r}.", context, option)
    return names


class _Path(click.Path):
    """A path as `Path`; a usage error for an empty one, which would be the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("expected a path, got an empty one.", param, ctx)
        return super().convert(value, param, ctx)


_draft = click.option(
    "--draft",
    default="off",
    show_default=True,
    callback=_drafts,
    help="Tokens to draft in a step: auto, off or 1, 2, …",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
_engine = click.argument("engine", type=_Path())
_checkpoint = click.option(
    "--checkpoint",
    type=_Path(),
    help="The checkpoint the engine was made of; without it the shipped one, if it fits.",
)


class _Verb(click.Command):
    """A verb whose every error of usage knows whose help to point to, those of the option parser included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with augment_usage_errors(ctx):
            return super().parse_args(ctx, args)


class _Verbs(click.Group):
    command_class = _Verb


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="v41c")
def cli() -> None:
    """Compile models of the DeepSeek-V4.1-Flash architecture and run them.

    \b
    First steps:
      v41c demo                                   compile the shipped model and continue a prompt
      v41c init m --preset tiny                   a random checkpoint in release format
      v41c compile m -o e                         make an engine of it
      v41c run e --prompt "And it came to pass,"  continue a text
      v41c inspect e                              see what the engine is made of
    """


@cli.command(short_help="Write a random checkpoint in release format.")
@click.argument("directory", type=_Path())
@click.option("--preset", default="tiny", show_default=True, help="tiny, small, small-bf16 or release-config-only.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random weights.")
@_json
def init(directory: Path, preset: str, seed: int, as_json: bool) -> None:
    """Write a random checkpoint in release format to DIRECTORY.

    \b
    Presets:
      tiny                 8 layers of width 64 with every feature: tests, first steps
      small                8 layers of width 1024, about 190 M parameters: benchmarks
      small-bf16           the same with every weight stored as bf16: compile it with --passes +quantize
      release-config-only  the release's configuration, no weights: compile it with --no-weights
    """
    from v41c.init import init

    with progress() as show:
        report = init(directory, preset, seed, show)
    _emit(report, as_json)


@cli.command(short_help="Make an engine of a checkpoint.")
@click.argument("checkpoint", type=_Path())
@click.option("-o", "--output", "engine", required=True, type=_Path(), help="The engine folder.")
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="cpu, cuda: what this machine has; or cpu:x86-64-v3, cuda:sm_90, …",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["release", "exact"]),
    default="release",
    show_default=True,
    help="exact: f32 everywhere and no quantisation of activations and caches, for checking.",
)
@click.option(
    "--passes", default="all", show_default=True, help="Passes to run (a,b), or to add and leave out (+a,-b)."
)
@click.option("--max-context", type=click.IntRange(min=1), help="Tokens a sequence may have.  [default: 4096]")
@click.option("--slots", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences at once, at most.")
@click.option("--dump-ir", type=_Path(), help="Also write the graphs after each pass here.")
@click.option("--no-weights", is_flag=True, help="CHECKPOINT is a config.json: make everything but the weights.")
@click.option("--verify", is_flag=True, help="Interpret the graphs before and after each pass and compare.")
@_json
def compile(
    checkpoint: Path,
    engine: Path,
    target: str,
    arithmetic: Literal["release", "exact"],
    passes: str,
    max_context: int | None,
    slots: int,
    dump_ir: Path | None,
    no_weights: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Compile the folder CHECKPOINT into an engine.

    The engine appears complete or not at all; equal inputs give equal bytes. An engine that is already there is
    replaced, anything else is refused. --verify says of every pass whether it
    moved any number, by how much and in which layer it first shows; a pass that must be exact and is not: no engine,
    and exit code 1.

    \b
    Examples:
      v41c compile m -o e
      v41c compile m -o e --passes -plan-memory --dump-ir stages
      v41c compile m -o e --passes +quantize
      v41c compile m -o e --arithmetic exact --max-context 512
      v41c compile config.json -o e --no-weights
      v41c compile m -o e --verify
    """
    import msgspec

    from v41c.compile import CompileOptions, compile
    from v41c.ledger import compile_summary

    options = CompileOptions(
        target=target,
        arithmetic=arithmetic,
        passes=passes,
        max_context=max_context,
        slots=slots,
        dump_ir=dump_ir,
        no_weights=no_weights,
        verify=verify,
    )
    try:
        with progress() as show:
            report = compile(checkpoint, engine, options, show)
    except MovedError as error:
        _emit(error.report, as_json)
        raise
    if as_json:
        _print_json(msgspec.to_builtins(report))
    else:
        print(compile_summary(report))


@cli.command(short_help="Continue a prompt.")
@_engine
@click.option("--prompt", "text", help="The text to continue.")
@click.option("--prompt-file", "file", help="A file of UTF-8 text to continue; - is standard input.")
@click.option("--tokens", callback=_token_ids, help="Token ids to continue: 1,2,3.")
@click.option(
    "--image", "images", multiple=True, help="A PNG, JPEG or WebP file for an <image> of the prompt, in order."
)
@click.option("--prompts", help="A file of prompts to continue, one JSON object a line; - is standard input.")
@click.option(
    "--batch", type=click.IntRange(min=1), help="With --prompts: so many at once.  [default: the engine's slots]"
)
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Of the most likely tokens, this share.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Only so many tokens; 0 is all.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Relative to the most likely token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling.")
@click.option("--prefill", type=click.Choice(["ced", "full"]), help="The decoder on a tail, or on every token.")
@click.option("--replay", type=click.IntRange(min=1), help="Length of that tail.  [default: the window]")
@_draft
@click.option("--prefix-cache", type=_Path(), help="A folder of prefixes to begin with and add to.")
@click.option("--prefix-cache-bytes", type=click.IntRange(min=0), help="The size of that folder.  [default: 4 GiB]")
@_json
def run(
    engine: Path,
    text: str | None,
    file: str | None,
    tokens: tuple[int, ...] | None,
    images: tuple[str, ...],
    prompts: str | None,
    batch: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    prefill: str | None,
    replay: int | None,
    draft: int | str,
    prefix_cache: Path | None,
    prefix_cache_bytes: int | None,
    as_json: bool,
) -> None:
    """Continue a prompt with ENGINE: text to standard output, timings to standard error.

    \b
    Examples:
      v41c run e --prompt "And it came to pass,"
      v41c run e --prompt-file psalm.txt --temperature 0.8 --top-p 0.9 --seed 7
      v41c run e --tokens 0,17,42 --max-new-tokens 8 --json
      v41c run e --prompts prompts.jsonl --batch 4 > continued.jsonl
      v41c run e --prompt "And it came to pass," --draft auto
      v41c run e --image a.png --image b.jpg --prompt "<image> and <image> are"

    The default prefill, ced, runs the decoder half of the layers over the last tokens only: about half the work, equal
    to full for prompts up to the window, an approximation beyond it that --replay makes finer.

    With --draft the model's own draft head proposes tokens and the model verifies them, several in a step: the same
    tokens, sooner where a step of several takes hardly longer than one. auto finds out: it times steps on this machine
    once, keeps that in ENGINE.profile.json beside the engine, and drafts as far as it pays, or not at all.

    With --prefix-cache what stays of a sequence is kept in a folder, and a prompt that begins like an earlier one, of
    this run or another of the same engine, begins from there. Up to the window that changes nothing; beyond, it is an
    approximation, as ced is: the tokens of the last window are fed again, without what lies before them.

    A line of --prompts is {"prompt": "text"} or {"tokens": [1, 2, 3]}, with max_new_tokens, temperature, top_p, top_k,
    min_p, seed and stop (a list of strings) where a prompt wants others, and images (a list of files) for each <image>
    in it. Its result is a line of standard output, in the order of the prompts.
    """
    from v41c.run import Prompt, require_temperature, run
    from v41c.runtime.request import Options
    from v41c.runtime.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    require_temperature(sampling)
    options = Options(max_new_tokens, sampling, mode=prefill, replay=replay, draft=draft)
    cache = _prefix_cache(prefix_cache, prefix_cache_bytes)
    if prompts is not None:
        if text is not None or file is not None or tokens is not None or images or as_json:
            raise click.UsageError("expected --prompts without --prompt, --prompt-file, --tokens, --image and --json.")
        _run_prompts(engine, prompts, options, batch, cache)
        return
    if batch is not None:
        raise click.UsageError("expected --batch with --prompts only.")
    report = run(engine, Prompt(text, file, tokens, images), options, _hide if as_json else _stream, cache)
    if as_json:
        _emit(report, as_json)
        return
    print(flush=True)
    print(report.summary(), file=sys.stderr)


def _prefix_cache(folder: Path | None, limit_bytes: int | None) -> PrefixCache | None:
    from v41c.prefix_cache import PrefixCache

    if folder is not None:
        return PrefixCache(folder, limit_bytes)
    if limit_bytes is not None:
        raise click.UsageError("expected --prefix-cache-bytes with --prefix-cache only.")
    return None


def _run_prompts(engine: Path, file: str, options: Options, slots: int | None, cache: PrefixCache | None) -> None:
    from v41c.run_prompts import run_prompts

    with progress() as show:
        report = run_prompts(engine, file, options, slots, _print_line, show, cache)
    print(report.summary(), file=sys.stderr)
    if report.failed:
        raise click.exceptions.Exit(1)


def _print_line(result: Any) -> None:
    print(json.dumps(_finite(result.to_json()), ensure_ascii=False, allow_nan=False), flush=True)


def _stream(text: str) -> None:
    print(text, end="", flush=True)


def _hide(text: str) -> None:
    pass


@cli.command(short_help="Answer requests over HTTP, as the OpenAI API does.")
@_engine
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 is any free one.")
@click.option("--slots", type=click.IntRange(min=1), help="Sequences at once.  [default: the engine's slots]")
@click.option("--token-budget", type=click.IntRange(min=1), help="Tokens of a step.  [default: what the engine takes]")
@click.option("--name", help="What clients call the model.  [default: the engine folder's name]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of one answer.  [default: what the context holds]")
@click.option("--queue", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that may wait.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one request.")
@click.option("--grace", type=float, default=30.0, show_default=True, help="Seconds to finish in when told to stop.")
@click.option("--prefix-cache", type=_Path(), help="A folder of prefixes to begin with and add to.")
@click.option("--prefix-cache-bytes", type=click.IntRange(min=0), help="The size of that folder.  [default: 4 GiB]")
@_draft
def serve(
    engine: Path,
    host: str,
    port: int,
    slots: int | None,
    token_budget: int | None,
    name: str | None,
    max_tokens: int | None,
    queue: int,
    timeout: float,
    grace: float,
    prefix_cache: Path | None,
    prefix_cache_bytes: int | None,
    draft: int | str,
) -> None:
    """Answer requests with ENGINE over HTTP: /v1/completions, /v1/chat/completions and /v1/models of the OpenAI API.

    Requests share the steps of one batch. Chats need the chat template of the checkpoint's folder. /health says whether
    it is well, /metrics how it does, for Prometheus. SIGTERM and SIGINT let what runs finish. With --prefix-cache, as
    in run, prompts begin with what earlier ones left; the next turn of a chat goes on where the last one ended. --draft
    is that of run.

    \b
    Examples:
      v41c serve e
      v41c serve e --port 9000 --slots 4 --name tiny
      curl localhost:8000/v1/completions -d '{"model": "e", "prompt": "And it came"}'
    """
    try:
        from v41c.serve.app import Limits
        from v41c.serve.server import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise UsageError(f"serve: expected the package {error.name}: pip install 'v41c[serve]'") from error

    limits = Limits(max_tokens=max_tokens, waiting=queue, seconds=timeout)
    cache = _prefix_cache(prefix_cache, prefix_cache_bytes)
    options = ServeOptions(host, port, slots, token_budget, name, grace, limits, cache, draft)
    serve(engine, options, lambda url: print(f"serving {engine} at {url}", file=sys.stderr, flush=True))


@cli.command(short_help="Hold an engine against the eager model or golden tensors.")
@_engine
@click.option("--against", type=click.Choice(["eager"]), default="eager", show_default=True)
@click.option("--golden", type=_Path(), help="A folder of golden tensors to compare with instead.")
@_checkpoint
@_json
def compare(engine: Path, against: str, golden: Path | None, checkpoint: Path | None, as_json: bool) -> None:
    """Show how far ENGINE is from the eager model, layer by layer, beside the noise floor.

    With --golden, judge the engine and the eager model by the criteria of golden tensors: exit code 1 when one fails.
    ENGINE may then be a checkpoint folder as well, whose eager model is judged in both arithmetics.

    \b
    Examples:
      v41c compare e
      v41c compare e --checkpoint m --json
      v41c compare e --golden tests/data/golden/case_00
    """
    from v41c.compare import compare

    with progress() as show:
        report = compare(engine, against, golden, checkpoint, progress=show)
    _emit(report, as_json)
    if not report.passed:
        raise click.exceptions.Exit(1)


@cli.command(short_help="Show what an engine is made of.")
@_engine
@click.option("--graph", help="Only this graph: encoder, decoder, decoder:512, …")
@click.option("--layer", help="Only this layer: 3, mtp.0, …")
@click.option("--pass", "after", help="Print the graphs as they stood after this pass; trace is before the first.")
@click.option("--diff", nargs=2, metavar="A B", help="Show what changed from the graphs after pass A to those after B.")
@click.option("--html", "page", type=_Path(), help="Write one page to look at all of it in a browser.")
@click.option("--kernels", is_flag=True, help="Of a CUDA engine: registers, instructions, bounds of time, launches.")
@_json
def inspect(
    engine: Path,
    graph: str | None,
    layer: str | None,
    after: str | None,
    diff: tuple[str, str] | None,
    page: Path | None,
    kernels: bool,
    as_json: bool,
) -> None:
    """Show what ENGINE is made of: passes and what they cost, layers, programs, states, or the graphs themselves.

    \b
    Examples:
      v41c inspect e
      v41c inspect e --layer 3
      v41c inspect e --pass split-encoder-decoder --graph encoder
      v41c inspect e --diff trace fuse-mhc --layer 3
      v41c inspect e --html e.html
      v41c inspect e --kernels --graph decoder:1
    """
    from v41c.inspect import difference, graph_text, inspect

    if sum((after is not None, diff is not None, page is not None, kernels)) > 1:
        raise click.UsageError("expected one of --pass, --diff, --html and --kernels, got several.")
    if kernels:
        from v41c.kernel_report import kernel_report

        if layer is not None:
            raise click.UsageError("expected --kernels without --layer: launches of every layer are in its last table.")
        _emit(kernel_report(engine, graph), as_json)
    elif page is not None:
        if graph is not None or layer is not None:
            raise click.UsageError("expected --html without --graph and --layer: the page has every graph and layer.")
        from v41c.html_page import write_page

        _emit(write_page(engine, page), as_json)
    elif diff is not None:
        _emit(difference(engine, *diff, graph, layer), as_json)
    elif after is None:
        _emit(inspect(engine, graph, layer), as_json)
    else:
        text = graph_text(engine, after, graph, layer)
        if as_json:
            _print_json({"engine": str(engine), "pass": after, "graph": graph, "layer": layer, "text": text})
        else:
            print(text, end="")


@cli.command(short_help="Write a graph of an engine as an ONNX model.")
@_engine
@click.option("--onnx", "file", required=True, type=_Path(), help="The file to write.")
@click.option("--after", help="The graph as it stood after this pass.  [default: the last one that has it]")
@click.option("--graph", default="model", show_default=True, help="encoder, decoder, draft, …")
@_checkpoint
@_json
def export(engine: Path, file: Path, after: str | None, graph: str, checkpoint: Path | None, as_json: bool) -> None:
    """Write a graph of ENGINE as an ONNX model that viewers open and ONNX Runtime runs.

    Every operation is a call of a local function in standard operators; states are inputs and outputs. Weights are
    stored as in the checkpoint; without one that fits they are inputs. It is for looking and checking, not for speed.

    \b
    Examples:
      v41c export e --onnx model.onnx
      v41c export e --onnx decoder.onnx --graph decoder --after fuse-mhc
    """
    from v41c.export import export

    with progress() as show:
        report = export(engine, file, after, graph, checkpoint, show)
    _emit(report, as_json)


@cli.command(short_help="Figures of an architecture, computed from its graphs.")
@click.argument("model", type=_Path())
@click.option("--context", type=click.IntRange(min=1), help="Tokens of the prompt.  [default: 1048576]")
@_json
def report(model: Path, context: int | None, as_json: bool) -> None:
    """Show the figures of MODEL, an engine, a checkpoint or a configuration, and where each comes from.

    Parameters, bytes of caches, traffic of the residual stream, arithmetic and launches: all from the graphs, so that
    a changed configuration shows what it changes. Weights are not needed.

    \b
    Examples:
      v41c report e
      v41c report v41c/data/release/config.json --context 100000 --json
    """
    from v41c.report import report

    with progress() as show:
        show("reading the graphs")
        figures = report(model, context)
    _emit(figures, as_json)


@cli.command(short_help="Time an engine, PyTorch beside it, and the machine.")
@_engine
@click.option("--against", callback=_baselines, help="eager, compile or eager,compile.")
@click.option("--batch", type=click.IntRange(min=2), help="Also decode so many sequences at once.")
@click.option(
    "--draft", default="off", callback=_drafts, help="Also write texts with drafts and without: auto, 1, 2, …"
)
@click.option("--ablate", is_flag=True, help="Leave out each pass in turn; ENGINE may be a checkpoint.")
@click.option("--context", type=click.IntRange(min=1), help="With --ablate: decode behind so many tokens.")
@click.option("--plot", type=_Path(), help="With --ablate: also draw it to this .png or .svg.")
@_checkpoint
@_json
def bench(
    engine: Path,
    against: tuple[str, ...],
    batch: int | None,
    draft: int | str,
    ablate: bool,
    context: int | None,
    plot: Path | None,
    checkpoint: Path | None,
    as_json: bool,
) -> None:
    """Time ENGINE, and PyTorch beside it, and compare both with what the machine can do.

    One process, medians of several runs: prefill of 512 and 2048 tokens, decode at context 2048, with --batch also of
    several sequences in the same steps, with --draft of the same texts with drafts and without. eager is the reference
    model in PyTorch, compile is torch.compile of it (that takes minutes). --ablate compiles the engine anew without
    each of its optional passes and says which of them pay.

    \b
    Examples:
      v41c bench e
      v41c bench e --against eager,compile --checkpoint m --json
      v41c bench e --batch 8 --draft auto
      v41c bench m --ablate --plot passes.svg
    """
    if ablate and (against or batch is not None or draft != "off"):
        raise click.UsageError("expected --ablate without --against, --batch and --draft.")
    if not ablate and (context is not None or plot is not None):
        raise click.UsageError("expected --context and --plot with --ablate only.")
    if ablate:
        _ablate(engine, checkpoint, context, plot, as_json)
        return
    from v41c.bench import BenchOptions, bench

    with progress() as show:
        report = bench(engine, against, checkpoint, BenchOptions(batch=batch or 0, draft=draft), show)
    _emit(report, as_json)


def _ablate(path: Path, checkpoint: Path | None, context: int | None, plot: Path | None, as_json: bool) -> None:
    from v41c.ablate import AblateOptions, ablate

    options = AblateOptions() if context is None else AblateOptions(context=context)
    with progress() as show:
        report = ablate(path, checkpoint, options, plot, show)
    _emit(report, as_json)


@cli.command(short_help="Compile the shipped model and continue a prompt.")
@click.option("--prompt", default=None, help="Another prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=60, show_default=True)
def demo(prompt: str | None, max_new_tokens: int) -> None:
    """Compile the shipped model, step by step, and let it continue a prompt.

    The model is small, was trained on one book and knows nothing else. Its engine is kept in the cache folder of the
    user, so that the second time starts at once.
    """
    from v41c.demo import PROMPT, demo

    with progress() as show:
        demo(PROMPT if prompt is None else prompt, max_new_tokens, _stream, show)
