"""Text in and out of a session: prompts to token ids, and token ids to text that can be shown as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from v41c.errors import TokenizerError, UsageError
from v41c.runtime.artifact import Engine

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Text:
    """The tokenizer of an engine."""

    def __init__(self, engine: Engine) -> None:
        """TokenizerError when the engine has no tokenizer, or one that is not byte-level."""
        if engine.tokenizer_path is None:
            raise TokenizerError(f"{engine.path}: this engine has no tokenizer: give token ids with --tokens")
        self.path = engine.tokenizer_path
        self._vocabulary = engine.manifest.vocabulary
        self._bos = engine.manifest.bos_token
        self._library = _load(self.path)
        self._special = {
            token
            for token, added in self._library.get_added_tokens_decoder().items()
            if getattr(added, "special", False)
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, the begin token in front unless the text starts with it or there is none.

        Special tokens written out in the text become their ids. UsageError for an empty prompt.
        """
        if not text:
            raise UsageError("prompt: expected text, got none")
        return self.begun(self.pieces(text))

    def begun(self, ids: list[int]) -> list[int]:
        """Token ids with the begin token in front, unless it is there or there is none."""
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def pieces(self, text: str) -> list[int]:
        """Token ids of a part of a prompt, which may be empty. UsageError for what is no UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"prompt: expected UTF-8, got a stray byte at character {error.start}") from error
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, special tokens left out; bytes that form no character become U+FFFD."""
        stream = self.stream()
        return "".join(stream.push(token) for token in tokens) + stream.finish()

    def spelled(self, token: int) -> str:
        """The entry of the vocabulary, special tokens as they are written in a prompt; empty for an id without one."""
        entry: str | None = self._library.id_to_token(token)
        return entry or ""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; nothing for special tokens and ids without an entry."""
        entry: str | None = self._library.id_to_token(token)
        if entry is None or token in self._special:
            return b""
        if all(character in _BYTES for character in entry):
            return bytes(_BYTES[character] for character in entry)
        return entry.encode()


class TextStream:
    """Text of tokens as they come: a character is given out with the token that completes it."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes, often none."""
        return self._decoder.decode(self._text.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD when the last character was never completed."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Text up to the string of some that is complete first, as it comes: what may be its beginning is held back.

    `found` once one is complete, of two the longer: nothing more comes then.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = False
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to stand before any of the strings."""
        if self.found:
            return ""
        self._held += text
        found = [(place + len(string), place) for string in self._strings if (place := self._held.find(string)) >= 0]
        self.found = bool(found)
        certain = min(found)[1] if found else len(self._held) - self._undecided()
        given, self._held = self._held[:certain], "" if found else self._held[certain:]
        return given

    def finish(self) -> str:
        """What was held back and is no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _undecided(self) -> int:
        """Characters at the end of what is held that begin one of the strings."""
        longest = max(map(len, self._strings), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(string.startswith(self._held[-count:]) for string in self._strings):
                return count
        return 0


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2): printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _load(path: Path) -> Tokenizer:
    # Imported here: an engine that is given token ids starts without the library.
    from tokenizers import Tokenizer, decoders

    read: Callable[[str], Tokenizer] = Tokenizer.from_file
    try:
        library = read(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of a file
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path}: expected a tokenizer that the tokenizers library reads: {reason}") from error
    if not isinstance(library.decoder, decoders.ByteLevel):
        kind = type(library.decoder).__name__
        raise TokenizerError(f"{path}: decoder: expected ByteLevel, got {kind}: give token ids with --tokens")
    return library
