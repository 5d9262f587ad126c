"""How a tensor that should have stayed the same has changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v41c.playback import Seen


@dataclass(frozen=True)
class Change:
    """A value or state that differs after a step: relative L2 and largest difference, rows of it that changed.

    Infinite where one of them is no number and the other is, or where the shapes differ. Of integers the rows count,
    and their relative L2 is 0.
    """

    step: str
    name: str
    is_integer: bool
    relative_l2: float
    max_abs: float
    rows_changed: int


def change_of(step: str, seen: Seen, wanted: Tensor) -> Change | None:
    """The change of a tensor of the same shape; None where every bit, or across dtypes every number, is equal."""
    found = seen.tensor
    if found.dtype == wanted.dtype and torch.equal(_bytes(found), _bytes(wanted)):
        return None
    left, right = found.double(), wanted.double()
    differ = ~((left == right) | (left.isnan() & right.isnan()))
    if found.dtype == wanted.dtype:  # zeros of different signs
        differ |= (_bytes(found) != _bytes(wanted)).reshape(*found.shape, -1).any(-1) & ~left.isnan()
    if not differ.any():
        return None
    rows = int(differ.reshape(len(differ), -1).any(1).sum()) if differ.dim() else 1
    integer = not found.is_floating_point() and not wanted.is_floating_point()
    error = (left - right)[differ]
    if not error.isfinite().all():
        return Change(step, seen.name, integer, float("inf"), float("inf"), rows)
    if integer:
        return Change(step, seen.name, integer, 0.0, float(error.abs().max()), rows)
    size = float(right[right.isfinite()].norm())
    relative = float(error.norm()) / size if size else (float("inf") if float(error.norm()) else 0.0)
    return Change(step, seen.name, integer, relative, float(error.abs().max()), rows)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
