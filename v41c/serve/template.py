"""Chat templates: the Jinja text of a tokenizer folder that turns messages into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from v41c.errors import ArtifactError, RefusedError


class ChatTemplate:
    """A template, which runs in a sandbox: it sees the messages and nothing else."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        """`names`: texts that the template may refer to, `bos_token` and `eos_token`. ArtifactError for bad syntax."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._names = names
        try:
            self._template = environment.from_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            raise ArtifactError(f"{path}: expected a Jinja template: {error}") from error

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt after which the assistant's next message begins; RefusedError where the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RefusedError(f"messages: the chat template refuses them: {error}", param="messages") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
