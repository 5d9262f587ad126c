"""Generation: what stops it, what it reports, and what a process that generates has to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.fake_engine import CONTEXT, VOCABULARY, Built, expected, write_engine
from v41c.errors import ContextError, UsageError
from v41c.runtime.artifact import Engine, load
from v41c.runtime.generate import Generation
from v41c.runtime.request import Options, Piece
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session
from v41c.runtime.text import Text

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SHIPPED = Path(__file__).parents[2] / "v41c/data/tiny-v41/tokenizer.json"


def greedy_tokens(prompt: list[int], count: int) -> list[int]:
    """Tokens that the toy model continues a prompt with."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(expected(tokens, [(0, len(tokens), 0)]).logits[len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_greedy_generation_equals_the_model(engine: Engine) -> None:
    wanted = greedy_tokens(PROMPT, 12)
    session = Session(engine, poison=True)
    generation = Generation(session, PROMPT, Options(12, mode="full"))
    assert list(generation) == [Piece(token, "") for token in wanted]
    result = generation.result
    assert (result.tokens, result.text, result.stop) == (wanted, "", "max new tokens")
    assert (result.prompt_tokens, result.decode_steps) == (8, 11)
    assert session.length() == 8 + 11
    assert result.prefill_tokens_per_second == 8 / result.prefill_seconds
    assert result.decode_tokens_per_second == 11 / result.decode_seconds
    again = Generation(session, result.tokens[-1:], Options(3, mode="full"))
    assert [piece.token for piece in again] == greedy_tokens(PROMPT + wanted, 3)


def test_nothing_runs_before_the_iteration(engine: Engine) -> None:
    generation = Generation(Session(engine), [99], Options(1))
    assert generation.result.stop is None
    assert generation.result.prefill_tokens_per_second == generation.result.decode_tokens_per_second == 0
    with pytest.raises(ContextError, match="token 0: expected an id of 0 to 30, got 99"):
        next(iter(generation))


def test_no_new_tokens_is_a_prefill(engine: Engine) -> None:
    generation = Generation(Session(engine), PROMPT, Options(0))
    assert list(generation) == []
    assert generation.result.stop == "max new tokens"
    assert generation.result.prefill_seconds > 0


def test_the_end_token_stops_and_is_not_text(engine: Engine, built: Built, tmp_path: Path) -> None:
    wanted = greedy_tokens(PROMPT, 12)
    end, never = wanted[6], next(token for token in range(VOCABULARY) if token not in wanted)
    before = wanted[: wanted.index(end)]
    ending = load(write_engine(built, tmp_path / "toy", eos_tokens=[never, end]))
    for one, stops in ((ending, ()), (engine, (end,))):
        generation = Generation(Session(one), PROMPT, Options(12, mode="full", stop_tokens=stops))
        assert [piece.token for piece in generation] == before
        assert (generation.result.tokens, generation.result.stop) == (before, "end token")


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT])
def test_the_context_limit_stops(engine: Engine, length: int) -> None:
    session = Session(engine)
    prompt = [(7 * i) % VOCABULARY for i in range(length)]
    generation = Generation(session, prompt, Options(100))
    assert len(list(generation)) == CONTEXT - length + 1
    assert generation.result.stop == "context limit"
    assert session.length() == CONTEXT


def test_a_seed_reproduces_a_generation(engine: Engine) -> None:
    def tokens(seed: int) -> list[int]:
        generation = Generation(Session(engine), PROMPT, Options(20, Sampling(temperature=30.0, seed=seed)))
        return [piece.token for piece in generation if piece.token is not None]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_text_streams_and_nothing_is_left_behind(built: Built, tmp_path: Path) -> None:
    engine = load(write_engine(built, tmp_path / "toy", tokenizer=SHIPPED.read_bytes()))
    text = Text(engine)
    generation = Generation(Session(engine), PROMPT, Options(30, Sampling(temperature=50.0, seed=4)), text)
    pieces = list(generation)
    result = generation.result
    assert "".join(piece.text for piece in pieces) == result.text == text.decode(result.tokens)
    assert [piece.token for piece in pieces if piece.token is not None] == result.tokens


def test_an_unfinished_character_is_the_last_piece(built: Built, tmp_path: Path) -> None:
    # In this vocabulary every token is the first byte of a longer character.
    vocabulary = {chr(0xE0 + token): token for token in range(15)} | {f"é{chr(0xE0 + t)}": 15 + t for t in range(16)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    engine = load(write_engine(built, tmp_path / "toy", tokenizer=json.dumps(tokenizer).encode()))
    generation = Generation(Session(engine), PROMPT, Options(1), Text(engine))
    *_, last = list(generation)
    assert last == Piece(None, "\ufffd")
    assert generation.result.text.endswith("\ufffd")
    assert len(generation.result.tokens) == 1


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="max-new-tokens: expected 0 or more, got -1"):
        Options(-1)


def test_generating_imports_neither_torch_nor_a_compiler(built: Built, tmp_path: Path) -> None:
    folder = write_engine(built, tmp_path / "toy", tokenizer=SHIPPED.read_bytes())
    script = (
        "import sys; from v41c.runtime.artifact import load; from v41c.runtime.session import Session;"
        "from v41c.runtime.generate import Generation; from v41c.runtime.request import Options;"
        "from v41c.runtime.text import Text;"
        f"engine = load({str(folder)!r}); list(Generation(Session(engine), [1, 2], Options(2), Text(engine)));"
        "print(*{name.partition('.')[0] for name in sys.modules});"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('v41c.')}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    modules, ours = done.stdout.splitlines()
    assert not {"torch", "triton", "tvm", "tvm_ffi", "onnx", "safetensors", "ml_dtypes"} & set(modules.split())
    assert ours.split() == ["errors", "manifest", "runtime"]
