"""What of a driver's log may happen at the same time, and whether any of that touches the same bytes of the arena.

Nothing of how memory was planned is used, nor where the plan says that commands are waited for: what a command reads is
what the last command before it wrote at the place that it is told, and what comes before what is known from streams and
events alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.codegen.cuda.driver import Asked, Launched, Marked, Moved, Waited
from v41c.manifest import Command, LaunchEntry, Manifest, Program
from v41c.runtime.bounds import extent_bytes


@dataclass(frozen=True)
class Access:
    """Something that one of two streams does: what it reads and writes, and how much of each stream it comes after."""

    what: str
    aside: bool
    number: int
    after: Mapping[bool, int]
    reads: tuple[range, ...]
    writes: tuple[range, ...]

    def comes_after(self, other: Access) -> bool:
        """Whether `other` is done when this begins."""
        return self.after[other.aside] > other.number


def accesses(asked: Iterable[Asked], touched: Iterator[tuple[str, list[range], list[range]]]) -> Iterator[Access]:
    """Everything that touches memory; `touched` says what each launch does, in the order in which they were asked for.

    A stream does one thing after the other. What waits for an event comes after all that came before its mark.
    """
    done = {False: 0, True: 0}
    after = {False: {False: 0, True: 0}, True: {False: 0, True: 0}}
    marks: dict[int, dict[bool, int]] = {}
    for entry in asked:
        match entry:
            case Marked(event, aside):
                marks[event] = after[aside] | {aside: done[aside]}
            case Waited(event, aside):
                after[aside] = {stream: max(after[aside][stream], marks[event][stream]) for stream in (False, True)}
            case Moved(read, written):
                spans = [(span,) if span is not None else () for span in (read, written)]
                before = after[False] | {False: done[False]}
                yield Access("a copy", False, done[False], before, spans[0], spans[1])
                done[False] += 1
            case Launched(aside=aside):
                what, reads, writes = next(touched)
                before = after[aside] | {aside: done[aside]}
                yield Access(what, aside, done[aside], before, tuple(reads), tuple(writes))
                done[aside] += 1


def conflicts(found: Iterable[Access]) -> Iterator[str]:
    """Pairs that may happen at the same time, of which one writes what the other reads or writes, said in words."""
    everything = list(found)
    for left in (access for access in everything if access.aside):
        for right in everything:
            if right is left or left.comes_after(right) or right.comes_after(left):
                continue
            for name, ours, theirs in (
                ("writes what is written by", left.writes, right.writes),
                ("writes what is read by", left.writes, right.reads),
                ("reads what is written by", left.reads, right.writes),
            ):
                if any(a.start < b.stop and b.start < a.stop for a in ours for b in theirs):
                    yield f"{left.what} {name} {right.what}"


def touched(
    manifest: Manifest, ran: Iterable[tuple[Program, int, int]], arena: int
) -> Iterator[tuple[str, list[range], list[range]]]:
    """Name, and addresses of the arena read and written, of every launch of programs that ran with so many T and R."""
    for program, tokens, rows in ran:
        dims = {"T": program.max_tokens, "R": program.max_rows, "S": manifest.slots}
        standing = {program.values[index].offset: program.values[index] for index in program.inputs}
        for command in program.commands:
            told = [argument.index for argument in command.arguments if argument.kind == "arena"]
            workspace = [range(told[-1], told[-1] + command.workspace_bytes)] if command.workspace_bytes else []
            results = [program.values[index] for index in command.results]
            operands = told[: len(told) - len(workspace) - len(results)]
            reads = [_span(standing[offset].offset, extent_bytes(standing[offset], dims)) for offset in operands]
            writes = [_span(value.offset, extent_bytes(value, dims)) for value in results]
            standing |= {value.offset: value for value in results}
            name = f"{program.graph}:{program.max_tokens} {command.op} of {command.origin}"
            for _ in launches(manifest, command, tokens, rows):
                yield name, [_moved(s, arena) for s in reads], [_moved(s, arena) for s in (*writes, *workspace)]


def launches(manifest: Manifest, command: Command, tokens: int, rows: int) -> Iterator[LaunchEntry]:
    """The launches of a command in a step: none over no tokens or no rows."""
    sizes = {"T": tokens, "R": rows}
    for launch in manifest.launches[command.kernel]:
        if all(axis.dim is None or sizes.get(manifest.dims[axis.dim], 1) for axis in launch.grid):
            yield launch


def _span(offset: int, size: int) -> range:
    return range(offset, offset + size)


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def without(asked: Iterable[Asked], *, aside: bool) -> Iterator[Asked]:
    """A log in which a stream waits for nothing."""
    return (entry for entry in asked if not (isinstance(entry, Waited) and entry.aside == aside))
