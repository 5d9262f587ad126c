"""Tokenizers: text round trips, special ids, and the Engram's smaller id space."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from v41c.errors import TokenizerError
from v41c.frontend.config import parse_config, read_config
from v41c.frontend.presets import build_tokenizer
from v41c.frontend.tokenizer import Tokenizer, compressed_ids, count_compressed_ids, normalize

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
TRAINED = ROOT / "v41c" / "data" / "tiny-v41"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer(TRAINED, read_config(TRAINED))


def test_special_ids(trained: Tokenizer) -> None:
    assert (trained.bos_id, trained.eos_ids, trained.pad_id, trained.vocab_size) == (0, (1,), 2, 2048)
    golden = Tokenizer(GOLDEN / "case_00" / "tokenizer.json")
    assert (golden.bos_id, golden.eos_ids, golden.pad_id, golden.vocab_size) == (0, (1,), 2, 512)


def test_the_configuration_decides_the_special_ids() -> None:
    numbered = json.loads((TRAINED / "config.json").read_text()) | {"eos_token_id": [7, 9], "bos_token_id": 3}
    tokenizer = Tokenizer(TRAINED, parse_config(numbered))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (3, (7, 9), 2)


def test_encoding_adds_nothing_and_knows_special_tokens(trained: Tokenizer) -> None:
    ids = trained.encode("<|begin_of_text|> Joseph's sons,")
    golden = load_file(GOLDEN / "tiny-v41-golden" / "prompt5.safetensors")
    assert ids == golden["input_ids"].tolist()
    assert trained.decode(ids) == "<|begin_of_text|> Joseph's sons,"
    assert trained.decode(ids, skip_special=True) == " Joseph's sons,"
    assert trained.encode("") == []


def test_golden_text(trained: Tokenizer) -> None:
    prompts = json.loads((GOLDEN / "tiny-v41-golden" / "golden.json").read_text())["prompts"]
    for prompt in prompts:
        golden = load_file(GOLDEN / "tiny-v41-golden" / prompt["file"])
        assert trained.encode(prompt["prompt_text"]) == golden["input_ids"].tolist()
        assert trained.decode(golden["greedy_ids"]) == prompt["greedy_text"]


@given(st.text())
@settings(deadline=None)
def test_every_text_survives(text: str) -> None:
    tokenizer = Tokenizer(TRAINED)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The", "the"),
        (" The", "the"),
        ("\tTHE \r\n", "the"),
        ("a \t\n b", "a b"),
        (" ", " "),
        ("\n\t \r", " "),
        ("", ""),
        ("\u00a0", " "),  # compatibility form of a space
        ("\u3000 x", "x"),
        ("É", "e"),
        ("e\u0301", "e"),
        ("\u0301", ""),
        ("\ufb01", "fi"),
        ("Ａ１", "a1"),
        ("ΑΣ", "ας".replace("ς", "σ")),
        ("İ", "i"),
        ("\x1c", "\x1c"),
        ("\u2028x\x85", "x"),
        ("\u0939\u093f", "\u0939\u093f"),  # a spacing mark is kept
    ],
)
def test_normal_forms(text: str, normal: str) -> None:
    assert normalize(text) == normal


@given(st.text())
def test_ascii_shortcut_changes_nothing(text: str) -> None:
    ascii_only = "".join(c for c in text if c.isascii())
    assert normalize(ascii_only) == normalize(ascii_only + "\u0301")


def test_compressed_ids_equal_golden() -> None:
    config = read_config(GOLDEN / "case_00")
    table = compressed_ids(Tokenizer(GOLDEN / "case_00", config), config)
    assert table.dtype == np.int32
    assert np.array_equal(table, load_file(GOLDEN / "units.safetensors")["engram.token_map"])


def test_compressed_ids_count_by_first_appearance(trained: Tokenizer) -> None:
    config = read_config(TRAINED)
    table = compressed_ids(trained, config)
    assert table.shape == (2048,)
    first = [int(np.flatnonzero(table == new)[0]) for new in range(config.engram_compressed_vocab_size)]
    assert first == sorted(first)
    words = [
        ids[0] for text in ("lord", " lord", "Lord", " Lord", "LORD", " LORD") if len(ids := trained.encode(text)) == 1
    ]
    assert len(words) > 1
    assert len(set(table[words].tolist())) == 1


def test_ids_without_a_token_count_as_padding(trained: Tokenizer) -> None:
    wider = parse_config(json.loads((TRAINED / "config.json").read_text()) | {"vocab_size": 2100})
    table = compressed_ids(trained, wider)
    assert table.shape == (2100,)
    assert set(table[2048:].tolist()) == {wider.engram_pad_id}


def test_size_must_be_the_configured_one(trained: Tokenizer) -> None:
    config = parse_config(json.loads((TRAINED / "config.json").read_text()) | {"engram_compressed_vocab_size": 1767})
    with pytest.raises(
        TokenizerError, match=r"expected 1767 compressed ids \(engram_compressed_vocab_size\), got 1766"
    ):
        compressed_ids(trained, config)


def test_pad_id_needs_a_token(trained: Tokenizer) -> None:
    wider = {"vocab_size": 2100, "engram_pad_id": 2099}
    config = parse_config(json.loads((TRAINED / "config.json").read_text()) | wider)
    with pytest.raises(TokenizerError, match="expected a token for engram_pad_id 2099, found none"):
        compressed_ids(trained, config)


def test_tokenizer_larger_than_the_model() -> None:
    with pytest.raises(TokenizerError, match="expected ids below the model's vocab_size 512, found id 2047"):
        Tokenizer(TRAINED, read_config(GOLDEN / "case_00"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"version": "9"}'])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"expected a tokenizer.json that the tokenizers library reads") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json: expected a tokenizer file, found none"):
        Tokenizer(tmp_path)


def test_release_sized_vocabulary_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(129280), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    started = time.process_time()
    assert 2048 < count_compressed_ids(tokenizer) < 129280
    assert time.process_time() - started < 10.0  # measured 0.6 s
