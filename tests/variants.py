"""Engines with programs for other token counts than their target's, so that small models take little to compile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from v41c.targets import x86_64


def compile_variants(patch: pytest.MonkeyPatch, variants: tuple[int, ...]) -> None:
    """From now on compile for this machine's processor, programs of up to so many tokens."""
    patch.setattr("v41c.targets.target.find_target", lambda spec: replace(x86_64.host(), variants=variants))
