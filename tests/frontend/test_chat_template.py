"""Chat templates: found in either file, and refused in one line where they are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from v41c.errors import CheckpointError
from v41c.frontend.chat_template import read_chat_template


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, None),
        ([], None),
        ({"chat_template": None}, None),
        ({"chat_template": "x"}, "x"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None),
    ],
)
def test_a_template_in_the_tokenizer_s_configuration(tmp_path: Path, config: object, wanted: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(tmp_path) == wanted


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new ü", encoding="utf-8")
    assert read_chat_template(tmp_path) == "new ü"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json: expected UTF-8 text with a chat template: Expecting"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template: expected text, got int"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: expected UTF-8 text with a chat template"),
    ],
)
def test_what_is_no_template(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_chat_template(tmp_path)
