"""The chat template of a tokenizer folder, wherever it stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from v41c.errors import CheckpointError

_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


def read_chat_template(folder: Path) -> str | None:
    """Jinja text of `chat_template.jinja`, else of `tokenizer_config.json`; None where neither has one.

    Of several named templates it is the one called default. CheckpointError for files that cannot be read as that.
    """
    for name, found in ((_FILE, str), (_CONFIG_FILE, _of_config)):
        path = folder / name
        if path.is_file():
            try:
                text = found(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, ValueError) as error:
                raise CheckpointError(f"{path}: expected UTF-8 text with a chat template: {error}") from error
            if text is not None:
                return text
    return None


def _of_config(content: str) -> str | None:
    config = json.loads(content)
    template: Any = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template: expected text, got {type(template).__name__}")
    return template
