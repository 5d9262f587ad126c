"""The tokenizer of a checkpoint, and the smaller id space in which the Engram hashes (DeepSeek-V4.1 report, Engram)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer as Library

from v41c.errors import TokenizerError

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"

# The usual spellings of the special tokens, for configurations that do not number them.
_ROLES = {
    "bos": ("<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<|begin_of_sentence|>", "<s>", "<bos>"),
    "eos": ("<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|end_of_sentence|>", "</s>", "<eos>", "<|endoftext|>"),
    "pad": ("<｜▁pad▁｜>", "<|pad|>", "<pad>"),
}

_BLANKS = re.compile("[ \t\r\n]+")
# Characters with the Unicode property White_Space; str.strip() would also take the separators U+001C to U+001F.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


class Tokenizer:
    """Text to token ids and back. Ids come from tokenizer.json; which of them begin, end and pad comes from the config.

    Where the config is silent the special tokens' usual spellings decide. bos_id and pad_id may be None, eos_ids empty.
    """

    def __init__(self, path: str | Path, config: ModelConfig | None = None) -> None:
        """Read a tokenizer.json, or the one in a folder; TokenizerError, one line, for a missing or foreign file."""
        given = Path(path)
        self.path = given / TOKENIZER_FILE if given.is_dir() else given
        self._library = _load(self.path)
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        known = self._library.get_vocab(with_added_tokens=True)
        highest = max(known.values(), default=-1)
        if config is not None and highest >= config.vocab_size:
            raise TokenizerError(
                f"{self.path}: expected ids below the model's vocab_size {config.vocab_size}, found id {highest}"
            )
        found = {
            role: next((known[token] for token in names if token in known), None) for role, names in _ROLES.items()
        }
        eos = (found["eos"],) if found["eos"] is not None else ()
        self.bos_id: int | None = found["bos"] if config is None or config.bos_id is None else config.bos_id
        self.pad_id: int | None = found["pad"] if config is None or config.pad_id is None else config.pad_id
        self.eos_ids: tuple[int, ...] = eos if config is None or not config.eos_ids else config.eos_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is put in front or behind, special tokens written out in it become their ids."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that form no character become U+FFFD, ids without an entry become nothing."""
        text: str = self._library.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id as the file spells it, None for an id without one."""
        entry: str | None = self._library.id_to_token(token_id)
        return entry

    def texts(self) -> dict[int, str]:
        """What each known id decodes to on its own, special tokens kept, by ascending id."""
        ids = sorted(self._library.get_vocab(with_added_tokens=True).values())
        return dict(zip(ids, self._library.decode_batch([[i] for i in ids], skip_special_tokens=False), strict=True))


def count_compressed_ids(tokenizer: Tokenizer) -> int:
    """How many ids remain when tokens whose texts normalise alike share one."""
    return len(set(_share(tokenizer).values()))


def compressed_ids(tokenizer: Tokenizer, config: ModelConfig) -> np.ndarray:
    """The Engram id of every token id: i32 [vocab_size].

    Ids that normalise alike share one new id, numbered by first appearance. Ids of the model that the tokenizer has no
    entry for count as padding: no text produces them. What stands before a sequence is `table[config.engram_pad_id]`.
    TokenizerError when the number of new ids is not `engram_compressed_vocab_size`: rows would mean other text.
    """
    shared = _share(tokenizer)
    size = len(set(shared.values()))
    if size != config.engram_compressed_vocab_size:
        expected = config.engram_compressed_vocab_size
        raise TokenizerError(
            f"{tokenizer.path}: expected {expected} compressed ids (engram_compressed_vocab_size), got {size}: "
            "use the tokenizer that the checkpoint was made with"
        )
    if max(shared) >= config.vocab_size:
        raise TokenizerError(
            f"{tokenizer.path}: expected ids below vocab_size {config.vocab_size}, found {max(shared)}"
        )
    pad = shared.get(config.engram_pad_id)
    if pad is None:
        raise TokenizerError(f"{tokenizer.path}: expected a token for engram_pad_id {config.engram_pad_id}, found none")
    table = np.full(config.vocab_size, pad, dtype=np.int32)
    table[list(shared)] = list(shared.values())
    return table


def normalize(text: str) -> str:
    """The form under which two tokens are the same to the Engram; empty when nothing is left of the text.

    NFKC, NFD, without non-spacing marks, lower case, runs of blanks as one space, stripped unless all is one space.
    """
    if text.isascii():
        folded = text.lower()
    else:
        decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        # Character by character: str.lower() of a whole word would make a final sigma of the last one.
        folded = "".join(c.lower() for c in decomposed if unicodedata.category(c) != "Mn")
    spaced = _BLANKS.sub(" ", folded)
    return spaced if spaced == " " else spaced.strip(_WHITE_SPACE)


def _share(tokenizer: Tokenizer) -> dict[int, int]:
    """New id by token id, in ascending order of token ids."""
    new_ids: dict[str, int] = {}
    shared: dict[int, int] = {}
    for token, text in tokenizer.texts().items():
        # Bytes that are no text of their own have only their vocabulary entry to tell them apart.
        key = (tokenizer.token(token) or text) if "\ufffd" in text else (normalize(text) or text)
        shared[token] = new_ids.setdefault(key, len(new_ids))
    return shared


def _load(path: Path) -> Library:
    if not path.is_file():
        raise TokenizerError(f"{path}: expected a tokenizer file, found none")
    read: Callable[[str], Library] = Library.from_file
    try:
        return read(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of a file
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{path}: expected a tokenizer.json that the tokenizers library reads: {reason}"
        ) from error
