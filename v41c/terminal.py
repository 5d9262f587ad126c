"""What people see: progress while something long runs, tables, and numbers with units. Nothing moves in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

Show = Callable[[str], None]


@contextlib.contextmanager
def progress() -> Iterator[Show]:
    """A function that shows what is being done: on standard error where that is a terminal, nowhere otherwise."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(escape(text))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def bytes_text(count: float) -> str:
    """A size in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def number_text(count: float) -> str:
    """A count in units of 1000, three digits."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def flops_text(count: float) -> str:
    """A count of floating-point operations."""
    text = number_text(count)
    return f"{text}flop" if " " in text else f"{text} flop"
