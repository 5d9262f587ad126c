"""Bodies of requests, as the OpenAI API spells them: checked, and turned into what the runtime does.

A field that the API has and an engine has not is refused where its value asks for something, and taken where it asks
for nothing. Fields that only label a request are taken and not looked at.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from v41c.errors import RefusedError, UsageError
from v41c.runtime.request import Options
from v41c.runtime.sampling import Sampling
from v41c.runtime.vision import PLACEHOLDER

#: values of fields that ask for nothing, beside null
_NOTHING: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
}
_MOST_STOPS = 4
_MOST_ALTERNATIVES = 20


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests have. `top_k` and `min_p` are ours."""

    #: tokens to generate where that is left to us, None for as many as fit
    usual_tokens: ClassVar[int | None] = None
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def require_supported(self) -> None:
        """RefusedError for a field that asks for what there is not."""
        for name, values in _NOTHING.items():
            value = getattr(self, name, None)
            if value is not None and value not in values:
                raise RefusedError(f"{name}: not supported: leave it out", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise RefusedError("stream_options: expected with stream only", param="stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to generate, None where it is left to us."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to each token that are shown with log probabilities, None for no log probabilities."""
        return None

    def options(self, max_new_tokens: int) -> Options:
        """How to generate. RefusedError for a value out of range."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS:
            raise RefusedError(f"stop: expected at most {_MOST_STOPS} strings, got {len(stops)}", param="stop")
        shown = self.alternatives
        if shown is not None and not 0 <= shown <= _MOST_ALTERNATIVES:
            raise RefusedError(f"logprobs: expected 0 to {_MOST_ALTERNATIVES}, got {shown}", param="logprobs")
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        try:
            sampling = Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                seed=seed,
            )
            return Options(max_new_tokens, sampling, stop_strings=tuple(stops), logprobs=shown)
        except UsageError as error:
            raise _of_a_field(error) from error


class CompletionBody(Body, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/completions."""

    usual_tokens: ClassVar[int | None] = 16
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: Any = None
    best_of: Any = None
    suffix: Any = None

    @property
    def alternatives(self) -> int | None:
        """As asked for."""
        return self.logprobs

    def content(self) -> str | list[int]:
        """The one prompt: text or token ids. RefusedError for several."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if all(type(token) is int for token in prompt):
            return prompt
        several = len(prompt) > 1 and all(isinstance(each, str | list) for each in prompt)
        got = f"{len(prompt)} prompts: send a request for each" if several else "a list of something else"
        raise RefusedError(f"prompt: expected one text or a list of token ids, got {got}", param="prompt")


class ImageUrl(msgspec.Struct):
    """Where an image is: in the URL itself."""

    url: str
    detail: Any = None

    def content(self, where: str) -> bytes:
        """The bytes of the image. RefusedError for an image that is elsewhere: nothing is fetched."""
        head, comma, data = self.url.partition(",")
        if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
            raise RefusedError(f"{where}: expected data:image/…;base64,…: nothing is fetched", param="messages")
        try:
            return base64.b64decode(data, validate=True)
        except ValueError as error:
            raise RefusedError(f"{where}: expected base64: {error}", param="messages") from error


class ContentPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None

    def plain(self, where: str) -> str:
        """The text, and for an image what stands for one. RefusedError for a part of another kind."""
        if self.type == "text" and self.text is not None:
            return self.text
        if self.type == "image_url" and self.image_url is not None:
            return PLACEHOLDER
        raise RefusedError(f"{where}: expected text or an image, got a part {self.type!r}", param="messages")


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    refusal: Any = None

    def plain(self, number: int) -> dict[str, Any]:
        """What a template sees, `<image>` for an image. RefusedError for parts of other kinds and calls of tools."""
        where = f"messages[{number}]"
        if self.tool_calls or self.tool_call_id:
            raise RefusedError(f"{where}.tool_calls: not supported: this server calls no tools", param="messages")
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.plain(f"{where}.content") for p in parts)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})

    def images(self, number: int) -> dict[str, bytes]:
        """The images in it, by where they stand."""
        parts = self.content if isinstance(self.content, list) else []
        named = {f"messages[{number}].content[{place}]": part.image_url for place, part in enumerate(parts)}
        return {where: url.content(where) for where, url in named.items() if url is not None}


class ChatBody(Body, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None

    @property
    def wanted_tokens(self) -> int | None:
        """By its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """As asked for, with `logprobs` only."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedError("top_logprobs: expected with logprobs only", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def plain_messages(self) -> list[dict[str, Any]]:
        """The conversation; RefusedError for an empty one."""
        if not self.messages:
            raise RefusedError("messages: expected at least one, got none", param="messages")
        return [message.plain(number) for number, message in enumerate(self.messages)]

    def images(self) -> dict[str, bytes]:
        """The images of the conversation in order, by where they stand."""
        found = [message.images(number) for number, message in enumerate(self.messages)]
        return {where: content for images in found for where, content in images.items()}


def _of_a_field(error: UsageError) -> RefusedError:
    """What the runtime says of a value, with the field's name in the place of the option's."""
    option, _, rest = str(error).partition(":")
    field = "max_tokens" if option == "max-new-tokens" else option.replace("-", "_")
    return RefusedError(f"{field}:{rest}", param=field)


Kind = TypeVar("Kind", bound=Body)


def parse(content: bytes, kind: type[Kind]) -> Kind:
    """A body; RefusedError when it is no JSON or not as the API has it."""
    try:
        body = msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"body: {error}") from error
    body.require_supported()
    return body
