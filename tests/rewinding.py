"""Sequences of which parts are taken back, beside sequences that were never fed those parts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from v41c.runtime.session import Session


def play(session: Session, plain: Session, seed: int, rounds: int, longest_prompt: int = 20) -> Iterator[list[str]]:
    """Feed both sessions the same tokens, in pieces; `session` verifies others behind them and takes those back.

    A round is a prompt for one sequence, or a verification of several ones of which any part remains. Yields what the
    sessions differ in after each: names of states, by their bytes, and slots by where their sequences stand.
    """
    r = Random(seed)
    vocabulary, block = session.engine.manifest.vocabulary, session.engine.manifest.draft_block
    for _ in range(rounds):
        if r.random() < 0.3:
            slot, prompt = r.randrange(session.slots), _tokens(r, vocabulary, longest_prompt)
            for one in (session, plain):
                one.prefill(prompt, slot=slot, mode="full")
            yield _differing(session, plain)
            continue
        slots = r.sample(range(session.slots), r.randint(1, session.slots))
        verified = {slot: _tokens(r, vocabulary, block + 1) for slot in slots}
        kept = {slot: tokens[: r.randint(0, len(tokens))] for slot, tokens in verified.items()}
        lengths = {slot: session.length(slot) + len(tokens) for slot, tokens in kept.items()}
        session.verify(verified)
        for slot, length in lengths.items():
            session.rewind(length, slot=slot)
        plain.step({slot: tokens for slot, tokens in kept.items() if tokens})
        yield _differing(session, plain)


def _differing(session: Session, plain: Session) -> list[str]:
    found, wanted = session.states, plain.states
    names = [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]
    return names + [f"slot {s}" for s in range(plain.slots) if session.standing(s) != plain.standing(s)]


def _tokens(r: Random, vocabulary: int, most: int) -> list[int]:
    return [r.randrange(5, vocabulary - 4) for _ in range(r.randint(1, most))]
