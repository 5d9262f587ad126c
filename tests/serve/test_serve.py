"""The server against the official client: what it answers is what a generation gives, whatever else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.serve.serving import Running, running
from v41c.errors import ArtifactError, RefusedError, TokenizerError, UsageError
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.manifest import CHAT_TEMPLATE_FILE, MANIFEST_FILE, FileEntry, decode, encode
from v41c.prefix_cache import PrefixCache
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch, Event
from v41c.runtime.generate import Generation
from v41c.runtime.request import Options
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session
from v41c.runtime.text import Text
from v41c.serve.app import Limits
from v41c.serve.server import ServeOptions, make_service, serve

EngineOf = Callable[..., Path]
ROOT = Path(__file__).parents[2]
PROMPT = "And it came to pass,"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "Who built the ark?"}]
CHAT_PROMPT = "user: Who built the ark?\nassistant:"


def with_template(engine: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """A copy of an engine whose checkpoint had a chat template."""
    shutil.copytree(engine, folder)
    (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    content = template.encode()
    manifest = decode((folder / MANIFEST_FILE).read_bytes())
    files = manifest.files | {CHAT_TEMPLATE_FILE: FileEntry(len(content), hashlib.sha256(content).hexdigest())}
    (folder / MANIFEST_FILE).write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    return folder


@pytest.fixture(scope="module")
def engine(engine_of: EngineOf, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The shipped model's engine, with a chat template."""
    return load(with_template(engine_of(TRAINED_CHECKPOINT, "release"), tmp_path_factory.mktemp("served") / "tiny"))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    """A server of two slots that takes two more requests, and has little patience."""
    limits = Limits(body_bytes=4096, waiting=2, body_seconds=0.5)
    with running(engine, ServeOptions(port=0, slots=2, name="tiny", limits=limits)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client."""
    with server.client() as one:
        yield one


def generated(engine: Engine, prompt: str, options: Options) -> Generation:
    """A generation of one's own that has run."""
    text = Text(engine)
    generation = Generation(Session(engine), text.encode(prompt), options, text)
    for _ in generation:
        pass
    return generation


def post(server: Running, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    """Status and object of an answer to any bytes."""
    connection = http.client.HTTPConnection(*server.place, timeout=30)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    value = json.loads(answer.read())
    connection.close()
    assert isinstance(value, dict)
    return answer.status, value


def get(server: Running, path: str) -> tuple[int, str]:
    """Status and text of an answer."""
    connection = http.client.HTTPConnection(*server.place, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def body(**fields: object) -> bytes:
    """A completion request."""
    return json.dumps({"model": "tiny", "prompt": PROMPT, "temperature": 0, **fields}).encode()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_completion_is_a_generation(engine: Engine, client: openai.OpenAI) -> None:
    wanted = generated(engine, PROMPT, Options(12)).result
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (wanted.text, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 12, 19)
    ids = Text(engine).encode(PROMPT)
    by_tokens = client.completions.create(model="tiny", prompt=ids, max_tokens=12, temperature=0)
    assert by_tokens.choices[0].text == wanted.text


def test_sampling_is_that_of_a_seed(engine: Engine, client: openai.OpenAI) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=7)
    wanted = generated(engine, PROMPT, Options(16, sampling)).result.text
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=1.3, top_p=0.9, seed=7)
    assert answer.choices[0].text == wanted


def test_a_stream_is_the_same_in_pieces(engine: Engine, client: openai.OpenAI) -> None:
    wanted = generated(engine, PROMPT, Options(12)).result.text
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_a_chat_goes_through_the_template(engine: Engine, client: openai.OpenAI) -> None:
    wanted = generated(engine, CHAT_PROMPT, Options(9)).result
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == wanted.prompt_tokens
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == wanted.text
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Who built the"}, {"type": "text", "text": " ark?"}]}
    ]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=9, temperature=0)  # type: ignore[arg-type]
    assert again.choices[0].message.content == wanted.text


def test_a_chat_may_take_what_the_context_leaves(engine: Engine, server: Running, client: openai.OpenAI) -> None:
    wanted = generated(engine, CHAT_PROMPT, Options(10**6, stop_strings=("the",))).result
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, stop="the")
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == ("stop" if wanted.stop == "stop string" else "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cross_tokens(engine: Engine, client: openai.OpenAI, stream: bool) -> None:
    whole = generated(engine, PROMPT, Options(12)).result.text
    string = whole[7:12]
    create: Any = client.completions.create
    answer = create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=["nowhere", string], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == whole[: whole.find(string)]
    assert choices[-1].finish_reason == "stop"


def test_log_probabilities_are_shown(engine: Engine, client: openai.OpenAI) -> None:
    shown = list(Generation(Session(engine), Text(engine).encode(PROMPT), Options(4, logprobs=2), Text(engine)))
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [piece.logprobs.chosen for piece in shown if piece.logprobs]
    assert found.tokens is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset == [sum(map(len, found.tokens[:n])) for n in range(4)]
    assert [len(top) for top in found.top_logprobs or []] == [2] * 4
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    for token in content.content:
        assert [top.logprob for top in token.top_logprobs] == sorted(t.logprob for t in token.top_logprobs)[::-1]
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes or []).decode() == token.token


def test_requests_at_once_do_not_change_each_other(engine: Engine, server: Running) -> None:
    prompts = [PROMPT, "And", "The LORD is my", "In the beginning"]
    wanted = [generated(engine, prompt, Options(20)).result.text for prompt in prompts]

    def ask(prompt: str) -> str:
        with server.client() as client:
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0)
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == wanted


def test_drafts_change_no_text(engine: Engine) -> None:
    prompts = [PROMPT, "In the beginning"]
    wanted = [generated(engine, prompt, Options(20)).result.text for prompt in prompts]
    with running(engine, ServeOptions(port=0, slots=2, name="tiny", draft=2)) as server:
        for prompt, text in zip(prompts, wanted, strict=True):
            status, value = post(server, body(prompt=prompt, max_tokens=20))
            assert (status, value["choices"][0]["text"]) == (200, text)


def test_models_health_and_metrics(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "v41c"
    with pytest.raises(openai.NotFoundError, match="model: expected tiny, got 'other'"):
        client.models.retrieve("other")
    assert 'path="/v1/models",status="404"' in get(server, "/metrics")[1]
    assert "other" not in get(server, "/metrics")[1]
    assert get(server, "/health") == (200, '{"status":"ok"}')
    before = server.service.metrics.text().decode()
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
    status, after = get(server, "/metrics")

    def count(text: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith("v41c_generated_tokens_total ")]
        return float(lines[0].split()[1])

    assert status == 200
    until(lambda: count(server.service.metrics.text().decode()) == count(before) + 3)
    assert 'v41c_requests_total{path="/v1/completions",status="200"}' in after
    assert "v41c_running 0.0" in server.service.metrics.text().decode()


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, "body: Input data was truncated"),
        (b"{", 400, "body: Input data was truncated"),
        (b"\xff\xfe", 400, "body: "),
        (b"[]", 400, "body: Expected `object`, got `array`"),
        (b"[" * 4000, 400, "body: "),
        (b'{"prompt": "a"}', 400, "body: Object missing required field `model`"),
        (body(model="other"), 404, "model: expected tiny, got 'other'"),
        (body(prompt=""), 400, "prompt: expected text, got none"),
        (body(prompt=[]), 400, "prompt: expected at least one token, got none"),
        (body(prompt=["a", "b"]), 400, "prompt: expected one text or a list of token ids, got 2 prompts"),
        (body(prompt=[1.5]), 400, "prompt: expected one text or a list of token ids, got a list of something else"),
        (body(prompt=[5, 2048]), 400, "prompt: token 1: expected an id of 0 to 2047, got 2048"),
        (body(prompt=[5] * 513), 400, "prompt: 513 tokens do not fit"),
        (body(max_tokens=507), 400, "max_tokens: expected at most 506 behind 7 tokens of prompt, got 507"),
        (body(max_tokens=-1), 400, "max_tokens: expected 0 or more, got -1"),
        (body(max_tokens="x"), 400, "body: Expected `int | null`, got `str` - at `$.max_tokens`"),
        (body(temperature=-1), 400, "temperature: expected 0"),
        (body(top_p=0), 400, "top_p: expected more than 0"),
        (body(logprobs=21), 400, "logprobs: expected 0 to 20, got 21"),
        (body(stop=[""]), 400, "stop: expected strings of at least one character"),
        (body(stop=["a"] * 5), 400, "stop: expected at most 4 strings, got 5"),
        (body(n=2), 400, "n: not supported"),
        (body(echo=True), 400, "echo: not supported"),
        (body(presence_penalty=0.5), 400, "presence_penalty: not supported"),
        (body(stream_options={}), 400, "stream_options: expected with stream only"),
        (body(unheard="of"), 400, "body: Object contains unknown field `unheard`"),
        (body(prompt="a" * 5000), 413, "body: expected at most 4096 bytes"),
    ],
)
def test_what_is_wrong_is_said(server: Running, content: bytes, status: int, message: str) -> None:
    found, value = post(server, content)
    assert found == status
    assert message in value["error"]["message"]
    assert value["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: expected at least one, got none"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages: the chat template refuses them: no tools here"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: expected text"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools: not supported"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs: expected with logprobs only"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format: not supported"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said(server: Running, fields: Mapping[str, object], message: str) -> None:
    status, value = post(server, json.dumps({"model": "tiny", **fields}).encode(), "/v1/chat/completions")
    assert (status, message in value["error"]["message"]) == (400, True), value


def test_paths_and_methods(server: Running) -> None:
    assert get(server, "/v1/nothing")[0] == 404
    assert get(server, "/v1/completions")[0] == 405
    assert json.loads(get(server, "/v1/completions")[1])["error"]["message"].startswith("GET /v1/completions: ")


def test_a_body_that_does_not_arrive(server: Running) -> None:
    with socket.create_connection(server.place, timeout=30) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in raw.recv(4096).splitlines()[0]


@pytest.mark.parametrize(
    ("before", "begin"),
    [(b"", b""), (b"", b"GET /health HTTP"), (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /health HTTP")],
)
def test_a_head_that_does_not_arrive(server: Running, before: bytes, begin: bytes) -> None:
    with socket.create_connection(server.place, timeout=10) as raw:
        raw.sendall(before)
        assert not before or raw.recv(4096).startswith(b"HTTP/1.1 200 OK")
        raw.sendall(begin)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass


def test_a_chat_without_a_template(engine_of: EngineOf) -> None:
    engine = load(engine_of(TRAINED_CHECKPOINT, "release"))
    with running(engine, ServeOptions(port=0, slots=1, name="bare")) as server:
        content = json.dumps({"model": "bare", "messages": MESSAGES}).encode()
        status, value = post(server, content, "/v1/chat/completions")
        assert (status, value["error"]["code"]) == (400, "no_chat_template")
        assert "this engine has no chat template: use /v1/completions" in value["error"]["message"]


def test_what_cannot_be_served(engine: Engine, engine_of: EngineOf, tmp_path: Path) -> None:
    odd = with_template(engine_of(TRAINED_CHECKPOINT, "release"), tmp_path / "odd", "{% for %}")
    with pytest.raises(ArtifactError, match=r"chat_template.jinja: expected a Jinja template: "):
        make_service(load(odd), ServeOptions())
    bare = msgspec.structs.replace(engine.manifest, files={})
    with pytest.raises(TokenizerError, match="this engine has no tokenizer"):
        make_service(replace(engine, manifest=bare), ServeOptions())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127.0.0.1:{port}: cannot listen there: Address already in use$"):
            serve(engine.path, ServeOptions(port=port))
    for seconds in (math.nan, math.inf, -1.0):
        with pytest.raises(UsageError, match=f"timeout: expected seconds, more than 0, got {seconds:g}"):
            Limits(seconds=seconds)
        with pytest.raises(UsageError, match=f"grace: expected seconds, 0 or more, got {seconds:g}"):
            ServeOptions(grace_seconds=seconds)


# --- clients that go away, wait, or do not read -------------------------------------------------------------------


def asking(place: tuple[str, int], content: bytes) -> socket.socket:
    """A connection with a request on it."""
    raw = socket.create_connection(place, timeout=30)
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    return raw


def stream_of(server: Running) -> socket.socket:
    """A connection on which a stream has begun."""
    raw = asking(server.place, body(stream=True, max_tokens=400))
    assert b" 200 OK" in raw.recv(64)
    return raw


def test_a_client_that_goes_away_makes_room(server: Running, client: openai.OpenAI) -> None:
    streams = [stream_of(server) for _ in range(2)]
    assert server.service.worker.running == 2
    for stream in streams:
        stream.close()
    until(lambda: server.service.worker.running == 0)
    assert 'status="499"' in server.service.metrics.text().decode()
    assert (
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0).choices[0].text == " when"
    )


def test_a_client_that_goes_away_while_it_waits(server: Running) -> None:
    streams = [stream_of(server) for _ in range(2)]
    raw = asking(server.place, body(max_tokens=400))
    until(lambda: server.service.worker.waiting == 1)
    raw.close()
    until(lambda: server.service.worker.waiting == 0)
    for stream in streams:
        stream.close()
    until(lambda: server.service.worker.running == 0)


def test_more_than_may_wait_are_turned_away(server: Running) -> None:
    streams = [stream_of(server) for _ in range(2)]
    waiting = []
    for number in range(2):
        waiting.append(asking(server.place, body(max_tokens=1)))
        until(lambda number=number: server.service.worker.waiting == number + 1)  # type: ignore[misc]
    status, value = post(server, body(max_tokens=1))
    assert (status, value["error"]["code"]) == (429, "queue_full")
    for stream in streams:
        stream.close()
    for raw in waiting:
        assert b" 200 OK" in raw.recv(4096)
        raw.close()
    until(lambda: server.service.worker.running == 0)


def test_a_request_that_takes_too_long(engine: Engine) -> None:
    options = ServeOptions(port=0, slots=1, name="tiny", limits=Limits(seconds=0.02))
    with running(engine, options) as server:
        status, value = post(server, body(max_tokens=500))
        assert (status, value["error"]["message"]) == (504, "not done within 0.02 s")
        with server.client() as client, pytest.raises(openai.APIError, match=r"not done within 0.02 s"):
            list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=500, temperature=0, stream=True))
        until(lambda: server.service.worker.running == 0)


def test_a_client_that_does_not_read_is_dropped(engine: Engine) -> None:
    """An application's `send` waits while a client's buffers are full: here, for ever."""
    service = make_service(engine, ServeOptions(slots=1, name="tiny", limits=Limits(send_seconds=0.1)))
    content = body(stream=True, max_tokens=300)
    dropped, sent = list[Any](), list[bytes]()
    service.abort = dropped.append
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
    }

    async def ask() -> None:
        bodies = [{"type": "http.request", "body": content}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            return await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if len(sent) > 3:
                await asyncio.Future()

        await service.app(scope, receive, send)

    asyncio.run(ask())
    assert [one["client"] for one in dropped] == [("127.0.0.1", 1)]
    assert len(sent) == 4
    until(lambda: service.worker.running == 0)
    service.close()


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grace", "finishes"), [("30", True), ("0", False)])
def test_sigterm_lets_what_runs_finish(engine: Engine, grace: str, finishes: bool) -> None:
    command = [sys.executable, "-m", "v41c", "serve", str(engine.path), "--port", "0", "--grace", grace]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"serving {engine.path} at http://127.0.0.1:")
        host, _, port = line.split()[-1].removeprefix("http://").rpartition(":")
        with asking((host, int(port)), body(model=engine.path.name, stream=True, max_tokens=200)) as raw:
            received = raw.recv(64)
            process.send_signal(signal.SIGTERM)
            while part := raw.recv(65536):
                received += part
        assert (b"data: [DONE]" in received) == finishes
        assert (b"the server is shutting down" in received) != finishes
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_prompts_begin_with_what_earlier_ones_left(engine: Engine, tmp_path: Path) -> None:
    options = ServeOptions(port=0, slots=1, name="tiny", cache=PrefixCache(tmp_path / "cache"))
    prompts = [PROMPT, f"{PROMPT} and said unto them,", PROMPT]
    wanted = [generated(engine, prompt, Options(5)).result.text for prompt in prompts]
    for cached in ([0, 6, 6], [6, 10, 6]):
        with running(engine, options) as server:
            found = [
                server.client().completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
                for prompt in prompts
            ]
        # within the window nothing but the work changes
        assert [answer.choices[0].text for answer in found] == wanted
        details = [answer.usage.prompt_tokens_details for answer in found if answer.usage]
        assert [one.cached_tokens for one in details if one] == cached


def test_a_batch_that_fails_ends_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Batch) -> list[Event]:
        raise RuntimeError("out of luck")

    options = ServeOptions(port=0, slots=1, name="tiny")
    ready = Future[str]()
    monkeypatch.setattr(Batch, "step", fail)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(serve, engine.path, options, ready.set_result)
        host, _, port = ready.result(60).removeprefix("http://").rpartition(":")
        with asking((host, int(port)), body()) as raw:
            received = b""
            while part := raw.recv(65536):
                received += part
        assert b" 500 " in received.splitlines()[0]
        assert b"the batch has failed: out of luck" in received
        with pytest.raises(RefusedError, match="the batch has failed: out of luck"):
            done.result(60)
