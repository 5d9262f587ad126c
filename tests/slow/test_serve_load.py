"""A thousand requests, 32 at a time, with clients that leave, send nonsense or do not read: a few minutes on two cores.

pytest tests/slow/test_serve_load.py -s
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI

from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import load
from v41c.runtime.generate import Generation
from v41c.runtime.request import Options
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session
from v41c.runtime.text import Text

EngineOf = Callable[..., Path]
ROOT = Path(__file__).parents[2]
REQUESTS, AT_ONCE, WARM = 1000, 32, 300
PROMPTS = ["And it came to pass,", "The LORD is my", "In the beginning", "And", "Thus saith", "Who is this that"]
NONSENSE = [b"", b"{", b"\xff" * 9, b"[]", b'{"model": "tiny"}', b'{"model": "tiny", "prompt": 7}', b"[" * 3000]
#: bytes that the server's memory may grow by after its warm-up: what an allocator keeps at hand
FLAT_BYTES = 12 << 20


@dataclass(frozen=True)
class Ask:
    """A request that is to be answered."""

    prompt: str
    tokens: int
    temperature: float
    seed: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        """Fields of it."""
        asked = {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": self.temperature, "seed": self.seed}
        return {"model": "tiny", "stream": stream, **asked}


@dataclass
class Tally:
    """What happened to the requests."""

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, wrong: str | None = None) -> None:
        """One more."""
        with self.lock:
            self.answered[kind] += 1
            if wrong is not None:
                self.wrong.append(wrong)


@contextmanager
def served(engine: Path) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A server in a process of its own, and where it is."""
    command = [sys.executable, "-m", "v41c", "serve", str(engine), "--port", "0", "--name", "tiny"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        host, _, port = process.stderr.readline().split()[-1].removeprefix("http://").rpartition(":")
        yield process, (host, int(port))
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def resident_bytes(process: subprocess.Popen[str]) -> int:
    """Memory of a process that belongs to it alone: the weights are mapped from a file."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def raw_request(place: tuple[str, int], content: bytes) -> socket.socket:
    """A connection with a request on it."""
    raw = socket.create_connection(place, timeout=120)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    raw.sendall(head.encode() + content)
    return raw


def answer_of(client: OpenAI, ask: Ask, *, stream: bool) -> str:
    """The text of an answer."""
    create: Any = client.completions.create
    answer = create(**ask.body(stream=stream))
    if not stream:
        return str(answer.choices[0].text)
    return "".join(chunk.choices[0].text for chunk in answer)


def test_a_thousand_requests(engine_of: EngineOf) -> None:
    folder = engine_of(TRAINED_CHECKPOINT, "release")
    engine = load(folder)
    text, session = Text(engine), Session(engine)
    draw = random.Random(1)
    asks = [
        Ask(draw.choice(PROMPTS), draw.randint(1, 16), draw.choice([0.0, 1.2]), draw.randint(0, 99)) for _ in range(40)
    ]
    wanted: dict[Ask, str] = {}
    for ask in asks:
        session.reset()
        options = Options(ask.tokens, Sampling(temperature=ask.temperature, seed=ask.seed))
        generation = Generation(session, text.encode(ask.prompt), options, text)
        wanted[ask] = "".join(piece.text for piece in generation)
    tally, memory = Tally(), dict[int, int]()
    with served(folder) as (process, place):
        client = OpenAI(base_url=f"http://{place[0]}:{place[1]}/v1", api_key="none", max_retries=0, timeout=300)

        def one(number: int) -> None:
            kind = random.Random(number).random()
            ask = asks[number % len(asks)]
            if kind < 0.7:
                found = answer_of(client, ask, stream=number % 2 == 0)
                tally.note("right", None if found == wanted[ask] else f"{ask}: {found!r}, not {wanted[ask]!r}")
            elif kind < 0.85:
                with raw_request(place, json.dumps(ask.body(stream=True) | {"max_tokens": 300}).encode()) as raw:
                    raw.recv(random.Random(number).choice([1, 500]))
                tally.note("left")
            elif kind < 0.99:
                with raw_request(place, NONSENSE[number % len(NONSENSE)]) as raw:
                    line = raw.recv(4096).splitlines()[0].decode()
                tally.note("nonsense", None if " 400 " in line else line)
            else:
                silent.append(raw_request(place, json.dumps(ask.body(stream=True) | {"max_tokens": 480}).encode()))
                tally.note("silent")
            if number % 100 == 99:
                memory[number + 1] = resident_bytes(process)

        silent: list[socket.socket] = []
        began = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, range(REQUESTS)))
        seconds = time.perf_counter() - began
        shown = {number: f"{size / 2**20:.1f} MiB" for number, size in sorted(memory.items())}
        print(f"\n{REQUESTS} requests in {seconds:.0f} s: {dict(tally.answered)}; memory {shown}")
        assert tally.wrong == []
        assert tally.answered.total() == REQUESTS
        late = [size for number, size in memory.items() if number > WARM]
        assert max(late) - memory[WARM] < FLAT_BYTES
        with ThreadPoolExecutor(4) as pool:
            last = [pool.submit(answer_of, client, asks[number], stream=False) for number in range(4)]
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            ends = [future.exception() for future in last]
        assert all(end is None or type(end).__name__ in ("APIConnectionError", "InternalServerError") for end in ends)
        assert process.wait(90) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        for raw in silent:
            raw.close()
        client.close()
