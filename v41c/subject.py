"""What is compared: an engine or the eager model, behind one interface that shows and replaces what lies inside.

Landmarks are the values that the eager model names (`layers.3.out`, `layers.4.selection`, `mtp.0.attn_out`,
`main_hidden`, …): the tracer carries their names into the graphs, and the engine's values have them still.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from v41c.errors import ContextError
from v41c.runtime.states import as_bf16, as_float
from v41c.runtime.vision import ImagePrompt, images_of, place_rows, tower_inputs

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from v41c.frontend.config import ModelConfig
    from v41c.frontend.model import Model
    from v41c.manifest import Program
    from v41c.runtime.artifact import Engine
    from v41c.runtime.device import Observation
    from v41c.runtime.images import Picture
    from v41c.runtime.session import Session

Array = npt.NDArray[Any]
#: token ids [T], which may hold images
Tokens = Array | ImagePrompt
Arithmetic = Literal["release", "exact"]
#: what follows a layer's name in the landmarks that are compared
STREAMS = ("in", "attn_in", "attn_out", "ffn_in", "ffn_out", "out", "pre_out")
INTEGERS = ("engram_rows", "selection", "pool", "experts")
#: of an image: what leaves the vision tower's last norm [P, vision D], and the rows that are placed [R, D]
TOWER = ("vit_out", "features")
#: what enters a layer or one of its sublayers: forced, it keeps every difference where it arises
FORCED = ("in", "attn_in", "ffn_in", "out", "pre_out", "selection", "pool", "main_hidden")
#: stored weights, up to two to a byte, that the eager model holds as f32: below 4 GB
_EXPANDED_WEIGHTS = 5 * 10**8
#: names of the values that are compared layer by layer
LANDMARK = re.compile(rf"(layers|mtp)\.\d+\.({'|'.join(STREAMS + INTEGERS)})|main_hidden|{'|'.join(TOWER)}")
#: shown a landmark's name, the number of its first row within the call, and its rows (floats as f32); rows that it
#: returns take their place
Look = Callable[[str, int, Array], Array | None]


@dataclass(frozen=True, eq=False)
class Drafted:
    """Of one draft block: logits f32 [B, V] with the Markov bias, drafts [B], confidence logits f32 [B]."""

    logits: Array
    drafts: Array
    confidence: Array


class Subject(Protocol):
    """One sequence at a time through something that computes the model."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""

    @property
    def arithmetic(self) -> Arithmetic:
        """`release` or `exact`."""

    @property
    def companions(self) -> frozenset[str]:
        """Values that it computes together with what enters a layer: to force the one, all must be forced."""

    def start(self, context: int) -> None:
        """Begin an empty sequence of up to `context` tokens, with whatever the draft head keeps."""

    def see(self, picture: Picture, look: Look) -> None:
        """Run the vision tower over a picture alone: tokens that hold it find its rows there, as the look left them."""

    def feed(self, tokens: Tokens, look: Look) -> Array:
        """Append tokens [T] and their images, all of them through the whole model: logits f32 [T, V]."""

    def decode(self, token: int, look: Look) -> Array:
        """Append one token, by what serves single tokens: logits f32 [V]."""

    def draft(self, token: int, look: Look) -> Drafted:
        """The draft block for `token`, the next of the sequence, which is not appended."""


def unseen(name: str, row: int, rows: Array) -> None:
    """The look of a call into which nobody looks."""


class Notes:
    """A look that keeps every landmark [T, …] of a call and puts `forced` rows [T, …] in the place of those named."""

    def __init__(self, forced: Mapping[str, Array] | None = None) -> None:
        self._forced = forced or {}
        self._parts: dict[str, dict[int, Array]] = {}

    def __call__(self, name: str, row: int, rows: Array) -> Array | None:
        self._parts.setdefault(name, {})[row] = rows
        forced = self._forced.get(name)
        return None if forced is None else forced[row : row + len(rows)]

    @property
    def values(self) -> dict[str, Array]:
        """What was seen, before it was replaced."""
        return {name: np.concatenate([parts[row] for row in sorted(parts)]) for name, parts in self._parts.items()}


class EagerSubject:
    """The eager model. `chunk`: tokens per step of `feed`, all at once when None. `states` are the sequence's."""

    companions: frozenset[str] = frozenset()

    def __init__(self, model: Model, *, chunk: int | None = None) -> None:
        self._model = model
        self._chunk = chunk
        self.states: dict[str, torch.Tensor] = {}
        self._length = 0
        self._rows: dict[Picture, Array] = {}

    @classmethod
    def of_checkpoint(cls, path: Path, arithmetic: Arithmetic) -> EagerSubject:
        """The eager model of a folder, weights as f32 where they fit: the same bits, and no conversion per product."""
        from v41c.frontend.loading import dequantize_parameters, load

        model = load(path, arithmetic)
        if sum(parameter.numel() for parameter in model.parameters()) <= _EXPANDED_WEIGHTS:
            dequantize_parameters(model)
        return cls(model)

    def grouped(self, chunk: int) -> EagerSubject:
        """The same model, fed in steps of `chunk` tokens."""
        return EagerSubject(self._model, chunk=chunk)

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"eager model, {self.arithmetic} arithmetic"

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def arithmetic(self) -> Arithmetic:
        """`release` or `exact`."""
        return "release" if self._model.arithmetic.round_trips else "exact"

    def start(self, context: int) -> None:
        """Begin an empty sequence."""
        self.states = self._model.new_states(1, context)
        self._length = 0
        self._rows = {}

    def see(self, picture: Picture, look: Look) -> None:
        """Keep the picture's rows, as f32."""
        import torch

        from v41c.frontend.vision import Patches

        patches = Patches(*tower_tensors(picture, self.arithmetic).values())
        with torch.inference_mode():
            self._rows[picture] = self._model.see(patches, _recorder(look, 0)).float().numpy()

    def feed(self, tokens: Tokens, look: Look) -> Array:
        """Logits f32 [T, V]."""
        size = self._chunk or len(tokens)
        parts = [self._step(tokens[row : row + size], row, look) for row in range(0, len(tokens), size)]
        return np.concatenate(parts)

    def decode(self, token: int, look: Look) -> Array:
        """Logits f32 [V]."""
        logits: Array = self._step(np.array([token]), 0, look)[0]
        return logits

    def draft(self, token: int, look: Look) -> Drafted:
        """The draft block for the next token."""
        import torch

        c = self.config
        block = torch.full((c.dspark_block_size,), c.dspark_noise_token_id, dtype=torch.int32)
        block[0] = token
        positions, zeros = self._places(len(block))
        with torch.inference_mode():
            results = self._model.draft(block, positions, zeros, zeros, self.states, _recorder(look, 0))
        logits, drafts, confidence = (result.numpy() for result in results)
        return Drafted(logits, drafts, confidence[:, 0])

    def _step(self, tokens: Tokens, row: int, look: Look) -> Array:
        import torch

        positions, zeros = self._places(len(tokens))
        rows = torch.arange(len(tokens), dtype=torch.int32)
        ids = torch.from_numpy(np.asarray(tokens, np.int32))
        with torch.inference_mode():
            record = _recorder(look, row)
            logits, hidden = self._model.step(
                ids, positions, zeros, zeros, rows, self.states, record, **self._images(tokens)
            )
            if hidden is not None:
                self._model.draft_context(hidden, positions, zeros, self.states)
        self._length += len(tokens)
        return logits.numpy()

    def _images(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """What stands in the place of tokens of images, nothing where there are none."""
        return placed_tensors(self, tokens, self._rows) if images_of(tokens) else {}

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions after the sequence's last, and a zero for each."""
        import torch

        positions = torch.arange(self._length, self._length + count, dtype=torch.int32)
        return positions, torch.zeros_like(positions)


def tower_tensors(picture: Picture, arithmetic: Arithmetic) -> dict[str, torch.Tensor]:
    """Inputs of the vision tower for a picture, by name."""
    import torch

    inputs = {name: torch.from_numpy(array) for name, array in tower_inputs([picture]).items()}
    return inputs | {"patches": inputs["patches"].to(_activation(arithmetic))}


def placed_tensors(subject: Subject, tokens: Tokens, rows_of: Mapping[Picture, Array]) -> dict[str, torch.Tensor]:
    """`image_rows` and `image_values` of a step of tokens, from rows f32 [R, D] of the pictures that they hold.

    The subject sees those that have no rows yet, which gives them some.
    """
    import torch

    images = images_of(tokens)
    for image in images:
        if image.picture not in rows_of:
            subject.see(image.picture, unseen)
    placed = place_rows([(0, len(tokens), images)], rows_of, np.empty((0, subject.config.dim), np.float32))
    codes, values = (torch.from_numpy(placed[name]) for name in ("image_rows", "image_values"))
    return {"image_rows": codes, "image_values": values.to(_activation(subject.arithmetic))}


def _activation(arithmetic: Arithmetic) -> torch.dtype:
    import torch

    return torch.bfloat16 if arithmetic == "release" else torch.float32


def _recorder(look: Look, row: int) -> Callable[[str, torch.Tensor], None]:
    """A record that shows tensors as numpy and writes replacements into them: later operations read those."""
    import torch

    def record(name: str, tensor: torch.Tensor) -> None:
        seen = tensor.float() if tensor.is_floating_point() else tensor
        instead = look(name, row, seen.numpy().copy())
        if instead is not None:
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(instead)))

    return record


class EngineSubject:
    """An engine. `feed` takes as many tokens per step as get logits, `decode` goes through the smallest programs."""

    def __init__(self, engine: Engine) -> None:
        from v41c.frontend.config import parse_config

        self._engine = engine
        self._config = parse_config(engine.manifest.config, str(engine.path))
        self._drafting = bool(engine.programs("draft"))
        programs = engine.programs("decoder") or engine.programs("model")
        self._chunk = max(min(program.max_tokens, program.max_rows) for program in programs)
        self._companions = {
            name: _companions(engine.programs(name)) for name in ("model", "encoder", "decoder", "draft")
        }
        self._session: Session | None = None
        self._look: Look = unseen
        self._row = 0

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"engine, {self.arithmetic} arithmetic"

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._config

    @property
    def arithmetic(self) -> Arithmetic:
        """`release` or `exact`."""
        return self._engine.manifest.arithmetic

    @property
    def companions(self) -> frozenset[str]:
        """Values that fused operations compute together with what enters a layer."""
        return frozenset().union(*self._companions.values())

    def start(self, context: int) -> None:
        """Begin an empty sequence; ContextError when the engine has no room for it."""
        from v41c.runtime.session import Session

        self._session = Session(
            self._engine, max_context=context, drafting=self._drafting, observe=self._observe, poison=True
        )

    def see(self, picture: Picture, look: Look) -> None:
        """Keep the picture's rows in the session."""
        self._open(look).see(picture)

    def feed(self, tokens: Tokens, look: Look) -> Array:
        """Logits f32 [T, V], in steps that give logits of all their tokens."""
        session, parts = self._open(look), []
        for row in range(0, len(tokens), self._chunk):
            self._row = row
            parts.append(session.prefill_all(tokens[row : row + self._chunk], mode="full"))
        self._row = 0
        return np.concatenate(parts)

    def decode(self, token: int, look: Look) -> Array:
        """Logits f32 [V]."""
        return self._open(look).decode(token)

    def draft(self, token: int, look: Look) -> Drafted:
        """The draft block for the next token."""
        draft = self._open(look).draft({0: token}, logits=True)[0]
        return Drafted(draft.logits, draft.drafts, draft.confidence.reshape(-1))

    def _open(self, look: Look) -> Session:
        if self._session is None:
            raise ContextError("sequence: expected one that was started")
        self._look = look
        return self._session

    def _observe(self, seen: Observation) -> Array | None:
        if LANDMARK.fullmatch(seen.name) is None and seen.name not in self._companions.get(seen.graph, ()):
            return None
        instead = self._look(seen.name, self._row, as_float(seen.array, seen.dtype))
        if instead is None:
            return None
        return as_bf16(instead) if seen.dtype == "bf16" else instead.astype(seen.array.dtype)


def _companions(programs: Sequence[Program]) -> frozenset[str]:
    """Names of values that some command of the programs computes together with one that is forced."""
    names: set[str] = set()
    for program in programs:
        for command in program.commands:
            results = [program.values[index].name for index in command.results]
            if len(results) > 1 and any(name.rpartition(".")[2] in FORCED for name in results):
                names.update(results)
    return frozenset(names)
