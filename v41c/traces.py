"""Traces of models that were traced before: half a minute for the release's layers, half a second from the cache."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from v41c.cache import cache_folder
from v41c.codegen.store import keep, sources_key
from v41c.ir.graph import Module
from v41c.ir.text import parse_module, print_module

if TYPE_CHECKING:
    from v41c.compile import Source


def kept_trace(source: Source) -> Module:
    """The traced module of a source, from the cache where the same code has traced the same model.

    The cache holds the text of the graphs behind its SHA-256: what does not fit is traced anew.
    """
    from v41c.compile import trace_source

    path = cache_folder() / "traces" / f"{_key(source)}.ir"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        seal, _, text = path.read_text(encoding="utf-8").partition("\n")
        if seal == _seal(text):
            return parse_module(text)
    module = trace_source(source)
    text = print_module(module)
    with contextlib.suppress(OSError):  # without a cache it only takes longer
        keep(path, f"{_seal(text)}\n{text}".encode())
    return module


def _key(source: Source) -> str:
    import torch

    code = sources_key("v41c.frontend", "v41c.ir")
    text = repr((source.config, source.formats, source.engram_pad, torch.__version__, code))
    return hashlib.sha256(text.encode()).hexdigest()


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
