"""Drafts for the sequences of a batch: which of them draft before a step, how far, and what is learned of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from v41c.errors import UsageError
from v41c.runtime.draft_policy import Auto, Fixed, Outcome, Policy
from v41c.runtime.drafting import Doubles, DraftReport, survival
from v41c.runtime.request import Request
from v41c.runtime.session import Session


@dataclass(frozen=True, eq=False)
class Proposal:
    """Drafts of a sequence that the next step verifies, and survivals f64 [B] of all that the draft head gave."""

    tokens: list[int]
    survived: Doubles


NOTHING = Proposal([], np.empty(0))


@dataclass(eq=False)
class _Group:
    """Sequences of a policy that decode in a step: what they verify, by slot, and how much of it was accepted."""

    proposals: dict[int, Proposal]
    accepted: dict[int, int] = field(default_factory=dict)


class Drafter:
    """Drafts for one session. Sequences that ask for the same share a policy, and its experience."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._policies: dict[int | str, Policy] = {}
        self._groups: dict[Policy, _Group] = {}
        self._decoding = 0

    def check(self, choice: int | str) -> None:
        """UsageError for a number of drafts that the session cannot verify."""
        if isinstance(choice, str):
            return
        most = self._session.engine.manifest.draft_block
        if not self._session.engine.programs("draft"):
            raise UsageError(f"draft: expected auto or off, got {choice}: this engine has no draft head")
        if choice > most:
            raise UsageError(f"draft: expected at most {most} tokens, what the draft head gives, got {choice}")
        if not self._session.draft_block:
            raise UsageError("draft: open the session with drafting=True")

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

    def propose(self, policies: Mapping[int, Policy], requests: Mapping[int, Request], most_drafts: int) -> None:
        """Draft for what the next step decodes: `requests`, those of them with a policy, both by slot.

        At most `most_drafts` in all. `policies` has those of sequences whose prompts are being fed as well.
        """
        self._groups, self._decoding = {}, len(requests)
        members: dict[Policy, list[int]] = {}
        for slot in requests:
            if slot in policies:
                members.setdefault(policies[slot], []).append(slot)
        room = {slot: self._room(slot, request) for slot, request in requests.items()}
        wanting = [policy for policy, slots in members.items() if policy.wants(len(slots))]
        if policies:
            self._session.drafting = any(policy.follows for policy in policies.values())
        asked = [slot for policy in wanting for slot in members[policy] if room[slot] > 0]
        drafts = self._session.draft({slot: requests[slot].result.tokens[-1] for slot in asked}) if asked else {}
        for policy, slots in members.items():
            survivals = {slot: survival(drafts[slot].confidence) for slot in slots if slot in drafts}
            possible = {slot: survivals[slot][: room[slot]] if slot in drafts else np.empty(0) for slot in slots}
            lengths = policy.lengths(possible, most_drafts) if survivals else {}
            most_drafts -= sum(lengths.values())
            proposals = {
                slot: Proposal(drafts[slot].drafts[: lengths[slot]].tolist(), survivals[slot])
                if slot in drafts
                else NOTHING
                for slot in slots
            }
            self._groups[policy] = _Group(proposals)

    def proposal(self, slot: int) -> Proposal:
        """What the next step verifies of a sequence."""
        found = (group.proposals[slot] for group in self._groups.values() if slot in group.proposals)
        return next(found, NOTHING)

    def count(self, slot: int, request: Request, accepted: int) -> None:
        """Notice how many drafts of a sequence were accepted."""
        for group in self._groups.values():
            if slot in group.proposals:
                group.accepted[slot] = accepted
                proposal = group.proposals[slot]
                if request.result.drafts is None:
                    request.result.drafts = DraftReport(self._session.draft_block)
                request.result.drafts.count(proposal.survived[: len(proposal.tokens)], accepted)

    def learn(self, seconds: float | None) -> None:
        """Let the policies take notice of the step, and of its time if it did nothing but decode."""
        for policy, group in self._groups.items():
            alone = seconds if len(group.proposals) == self._decoding else None
            drafted = [proposal for proposal in group.proposals.values() if len(proposal.survived)]
            policy.learn(
                Outcome(
                    sequences=len(group.proposals),
                    seconds=alone,
                    survivals=[proposal.survived for proposal in drafted],
                    verified=sum(len(proposal.tokens) for proposal in drafted),
                    accepted=sum(group.accepted.values()),
                    promised=sum(float(p.survived[: len(p.tokens)].sum()) for p in drafted),
                )
            )

    def _room(self, slot: int, request: Request) -> int:
        """Drafts that a sequence has a use and a place for."""
        wanted = request.options.max_new_tokens - len(request.result.tokens) - 1
        free = self._session.max_context - self._session.length(slot) - 1
        return max(0, min(wanted, free))
