"""Text: prompts to tokens, and tokens to text that never breaks a character and never loses one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.runtime.fake_engine import Built, write_engine
from v41c.errors import TokenizerError, UsageError
from v41c.runtime.artifact import Engine, load
from v41c.runtime.text import Text

SHIPPED = Path(__file__).parents[2] / "v41c/data/tiny-v41/tokenizer.json"
VOCABULARY = 2048
HEAVY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def engine(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with the shipped checkpoint's tokenizer. Its graphs are the toy's and are not run."""
    folder = tmp_path_factory.mktemp("text") / "toy"
    return load(write_engine(built, folder, tokenizer=SHIPPED.read_bytes(), bos_token=0, eos_tokens=[1]))


@pytest.fixture(scope="module")
def text(engine: Engine) -> Text:
    return Text(engine)


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED))


def test_the_begin_token_comes_first_exactly_once(text: Text) -> None:
    plain = text.encode(" Joseph's sons,")
    assert plain == text.encode("<|begin_of_text|> Joseph's sons,")
    assert (plain[0], plain.count(0)) == (0, 1)
    assert text.decode(plain) == " Joseph's sons,"


def test_without_a_begin_token_none_is_added(built: Built, tmp_path: Path) -> None:
    text = Text(load(write_engine(built, tmp_path / "toy", tokenizer=SHIPPED.read_bytes())))
    assert 0 not in text.encode("In the beginning")


@HEAVY
@given(written=st.text(min_size=1))
def test_any_text_comes_back(text: Text, written: str) -> None:
    try:
        written.encode()
    except UnicodeEncodeError:
        with pytest.raises(UsageError, match="prompt: expected UTF-8"):
            text.encode(written)
        return
    assert text.decode(text.encode(written)) == written


@HEAVY
@given(tokens=st.lists(st.integers(0, VOCABULARY + 5), max_size=60))
def test_streaming_equals_decoding_the_whole(text: Text, library: Tokenizer, tokens: list[int]) -> None:
    stream = text.stream()
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == library.decode(tokens, skip_special_tokens=True)


def test_a_character_appears_with_its_last_byte(text: Text, library: Tokenizer) -> None:
    ids = library.encode("€", add_special_tokens=False).ids
    assert len(ids) == 3
    stream = text.stream()
    assert [stream.push(token) for token in ids] == ["", "", "€"]
    assert stream.finish() == ""
    assert [stream.push(token) for token in ids[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_special_and_unknown_tokens_are_no_text(text: Text) -> None:
    assert text.decode([0, 2, 4, 1, 100_000]) == ""


def test_an_empty_prompt_is_refused(text: Text) -> None:
    with pytest.raises(UsageError, match="prompt: expected text, got none"):
        text.encode("")


def test_engines_without_a_usable_tokenizer(built: Built, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"bare: this engine has no tokenizer: give token ids with --tokens"):
        Text(load(write_engine(built, tmp_path / "bare")))
    with pytest.raises(TokenizerError, match=r"tokenizer.json: expected a tokenizer that the tokenizers library reads"):
        Text(load(write_engine(built, tmp_path / "broken", tokenizer=json.dumps({"version": "9"}).encode())))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"tokenizer.json: decoder: expected ByteLevel, got WordPiece"):
        Text(load(write_engine(built, tmp_path / "words", tokenizer=words.to_str().encode())))
