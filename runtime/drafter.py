"""Drafts for the sequences of a batch: which of them draft before a step, how far, and what is learned of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from v41c.errors import UsageError
from v41c.runtime.draft_experience import Outcome
from v41c.runtime.draft_policy import Auto, Fixed, Policy
from v41c.runtime.drafting import Doubles, DraftReport, survival
from v41c.runtime.request import Request
from v41c.runtime.session import Session


@dataclass(frozen=True, eq=False)
class Proposal:
    """Drafts of a sequence that the next step verifies, and survivals f64 [B] of all that the draft head gave."""

    tokens: list[int]
    survived: Doubles


NOTHING = Proposal([], np.empty(0))


def check_drafts(session: Session, choice: int | str) -> None:
    """UsageError for a number of drafts that the session cannot verify."""
    if isinstance(choice, str):
        return
    most = session.engine.manifest.draft_block
    if not session.engine.programs("draft"):
        raise UsageError(f"draft: expected auto or off, got {choice}: this engine has no draft head")
    if choice > most:
        raise UsageError(f"draft: expected at most {most} tokens, what the draft head gives, got {choice}")
    if not session.draft_block:
        raise UsageError("draft: open the session with drafting=True")


class Drafter:
    """Drafts for one session. Sequences that ask for the same share a policy, and its experience."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._policies: dict[int | str, Policy] = {}
        #: of the sequences that decode: slots by policy, and by slot what the step verifies and what was accepted of it
        self._members: dict[Policy, list[int]] = {}
        self._proposals: dict[int, Proposal] = {}
        self._accepted: dict[int, int] = {}
        self._requests: Mapping[int, Request] = {}
        self._asked: Mapping[int, Policy] = {}
        self._wanting: list[Policy] = []
        #: whether this step is one of those, and how many more there are, that no policy need be asked or told about
        self._rests, self._resting = False, 0

    def policy(self, choice: int | str) -> Policy | None:
        """How a request drafts that asks for `choice`; None if not at all. It may measure: see `Session.times`."""
        if choice == "off" or not self._session.draft_block:
            return None
        if choice not in self._policies:
            policy = self._auto() if isinstance(choice, str) else Fixed(choice)
            if policy is None:
                return None
            self._policies[choice] = policy
        return self._policies[choice]

    def _auto(self) -> Policy | None:
        times, manifest = self._session.times(), self._session.engine.manifest
        return None if times is None else Auto(times, manifest.draft_block, manifest.window)

    def begin(self, policies: Mapping[int, Policy], requests: Mapping[int, Request]) -> bool:
        """Look at what the next step decodes, `requests`, and say whether any of it is drafted for.

        Both by slot; `policies` has those of sequences whose prompts are still being fed as well.
        """
        self._rests = self._resting > 0 and requests == self._requests and policies == self._asked
        if self._rests:
            self._resting -= 1
            return False
        self._members, self._proposals, self._accepted = {}, {}, {}
        self._requests, self._asked = requests, policies
        if not policies:
            return False
        for slot in requests:
            if slot in policies:
                self._members.setdefault(policies[slot], []).append(slot)
        self._wanting = [policy for policy, slots in self._members.items() if policy.wants(len(slots))]
        self._session.drafting = any(policy.follows for policy in policies.values())
        return bool(self._wanting)

    def draft(self, most_drafts: int) -> None:
        """Draft where `begin` said so, at most `most_drafts` in all."""
        requests = self._requests
        room = {slot: self._room(slot, requests[slot]) for policy in self._wanting for slot in self._members[policy]}
        last = {slot: requests[slot].result.tokens[-1] for slot, most in room.items() if most}
        drafts = self._session.draft(last) if last else {}
        survivals = {slot: survival(draft.confidence) for slot, draft in drafts.items()}
        for policy in self._wanting:
            slots = self._members[policy]
            possible = {slot: survivals.get(slot, NOTHING.survived)[: room[slot]] for slot in slots}
            lengths = policy.lengths(possible, most_drafts)
            most_drafts -= sum(lengths.values())
            for slot in slots:
                if slot in drafts:
                    self._proposals[slot] = Proposal(drafts[slot].drafts[: lengths[slot]].tolist(), survivals[slot])

    def proposal(self, slot: int) -> Proposal:
        """What the next step verifies of a sequence."""
        return self._proposals.get(slot, NOTHING)

    def count(self, slot: int, request: Request, accepted: int) -> None:
        """Notice how many drafts of a sequence were accepted."""
        if slot not in self._asked:
            return
        if request.result.drafts is None:
            request.result.drafts = DraftReport(self._session.draft_block)
        if slot in self._proposals:
            self._accepted[slot] = accepted
            proposal = self._proposals[slot]
            request.result.drafts.count(proposal.survived[: len(proposal.tokens)], accepted)
        else:
            request.result.drafts.count(NOTHING.survived, accepted)

    def learn(self, seconds: float | None) -> None:
        """Let the policies take notice of the step, and of its time if it did nothing but decode."""
        if self._rests or not self._members:
            return
        rests = []
        for policy, slots in self._members.items():
            drafted = [self._proposals[slot] for slot in slots if slot in self._proposals]
            outcome = Outcome(
                sequences=len(slots),
                seconds=seconds if len(slots) == len(self._requests) else None,
                survivals=[proposal.survived for proposal in drafted],
                verified=sum(len(proposal.tokens) for proposal in drafted),
                accepted=sum(self._accepted.get(slot, 0) for slot in slots),
                promised=sum(float(p.survived[: len(p.tokens)].sum()) for p in drafted),
            )
            rests.append(policy.learn(outcome))
        self._resting = min(rests)

    def _room(self, slot: int, request: Request) -> int:
        """Drafts that a sequence has a use and a place for."""
        wanted = request.options.max_new_tokens - len(request.result.tokens) - 1
        free = self._session.max_context - self._session.length(slot) - 1
        return max(0, min(wanted, free))
