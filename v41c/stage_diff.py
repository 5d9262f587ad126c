"""What changed between two stages of the pipeline: graph by graph and operation by operation, as people read it.

Offsets, kernels and origins are left out of the lines, so that an operation that only got a kernel or a place does not
count as changed; what was chosen or placed is said in a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from v41c.errors import UsageError
from v41c.ir.graph import Graph, Module, Node
from v41c.layers import layer_of
from v41c.operations import wanted_graph
from v41c.stages import variant

#: unchanged lines that are shown around a change
CONTEXT_LINES = 2
#: entries of a list in an attribute that are shown
_SHOWN_ENTRIES = 4
_LIST = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class GraphDiff:
    """The change from some graphs to others: one graph and its rewritten self, or a graph and the ones it was cut into.

    `operations` gives the counts before and after of every kind of operation whose number changed; `lines` are those
    of a unified difference.
    """

    before: list[str]
    after: list[str]
    nodes: tuple[int, int]
    launches: tuple[int, int]
    operations: dict[str, tuple[int, int]]
    kernels: tuple[int, int]
    placed: tuple[int, int]
    lines: list[str]

    @property
    def changed(self) -> bool:
        """Whether any operation was added, removed or rewritten."""
        return bool(self.lines)


@dataclass(frozen=True)
class StageDiff:
    """The change of every graph from the stage `before` to the stage `after`."""

    before: str
    after: str
    graphs: list[GraphDiff]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The same for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"--- {self.before}"
        yield f"+++ {self.after}"
        for graph in self.graphs:
            yield ""
            yield _headline(graph)
            yield from graph.lines


def stage_diff(
    before: tuple[str, Module], after: tuple[str, Module], graph: str | None = None, layer: str | None = None
) -> StageDiff:
    """The difference of two stages given by name and module, of one graph or layer when they are named."""
    pairs = [
        (old, new) for old, new in _pairs(before[1], after[1]) if any(wanted_graph(one, graph) for one in (*old, *new))
    ]
    if not pairs:
        names = dict.fromkeys(one.name for module in (before[1], after[1]) for one in module)
        raise UsageError(f"graph: expected one of {', '.join(names)}, got {graph!r}")
    diffs = [_diff(old, new, layer) for old, new in pairs]
    return StageDiff(before[0], after[0], _merged([diff for diff in diffs if any(diff.nodes)]))


def _merged(diffs: Sequence[GraphDiff]) -> list[GraphDiff]:
    """Neighbours that changed alike, such as the variants of a graph for several numbers of tokens, as one."""
    merged: list[GraphDiff] = []
    for diff in diffs:
        last = merged[-1] if merged else diff
        alike = replace(diff, before=last.before, after=last.after) == last
        if merged and alike and {_bare(name) for name in diff.after} == {_bare(name) for name in last.after}:
            merged[-1] = replace(last, before=_joined(last.before, diff.before), after=_joined(last.after, diff.after))
        else:
            merged.append(diff)
    return merged


def _joined(names: Sequence[str], more: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*names, *more]))


def _bare(name: str) -> str:
    return name.partition(":")[0]


def _pairs(before: Module, after: Module) -> list[tuple[list[Graph], list[Graph]]]:
    """Graphs that became each other: by their bare names, what is left over on both sides together."""
    old, new = _by_name(before), _by_name(after)
    kept = [name for name in old if name in new]
    pairs: list[tuple[list[Graph], list[Graph]]] = []
    gone = [graph for name, graphs in old.items() if name not in new for graph in graphs[:1]]
    made = [graph for name, graphs in new.items() if name not in old for graph in graphs[:1]]
    if gone or made:
        pairs.append((gone, made))
    for name in kept:
        by_tokens = {variant(graph)[1]: graph for graph in old[name]}
        for graph in new[name]:
            pairs.append(([by_tokens.get(variant(graph)[1], old[name][0])], [graph]))
    return pairs


def _by_name(module: Module) -> dict[str, list[Graph]]:
    found: dict[str, list[Graph]] = {}
    for graph in module:
        found.setdefault(variant(graph)[0], []).append(graph)
    return found


def _diff(before: Sequence[Graph], after: Sequence[Graph], layer: str | None) -> GraphDiff:
    old, new = _nodes(before, layer), _nodes(after, layer)
    counts = [Counter(node.op.name() for node in nodes) for nodes in (old, new)]
    changed = {op: (counts[0][op], counts[1][op]) for op in sorted(counts[0] | counts[1])}
    return GraphDiff(
        before=[graph.name for graph in before],
        after=[graph.name for graph in after],
        nodes=(len(old), len(new)),
        launches=(_launches(old), _launches(new)),
        operations={op: pair for op, pair in changed.items() if pair[0] != pair[1]},
        kernels=(_with_kernel(old), _with_kernel(new)),
        placed=(_placed(old), _placed(new)),
        lines=list(_unified([(_line(node), node) for node in old], [(_line(node), node) for node in new])),
    )


def _nodes(graphs: Sequence[Graph], layer: str | None) -> list[Node]:
    return [node for graph in graphs for node in graph.nodes if layer in (None, layer_of(node.origin.module))]


def _launches(nodes: Sequence[Node]) -> int:
    return sum(not node.op.view for node in nodes)


def _with_kernel(nodes: Sequence[Node]) -> int:
    return sum(node.kernel is not None for node in nodes)


def _placed(nodes: Sequence[Node]) -> int:
    return sum(result.offset is not None for node in nodes for result in node.results)


def _line(node: Node) -> str:
    """An operation without its kernel, offsets and origin; long lists and the names of its own layer are cut."""
    results = ", ".join(f"{value.name} : {value.type}" for value in node.results)
    operands = ", ".join("_" if value is None else value.name for value in node.operands)
    attributes = _LIST.sub(lambda found: _shortened(found[1]), node.op.text())
    line = f"{results} = {node.op.name()}({operands}) {attributes}".rstrip()
    layer = layer_of(node.origin.module)
    return re.sub(rf"(?<![\w.]){re.escape(layer)}\.", ".", line) if layer else line


def _shortened(entries: str) -> str:
    listed = entries.split(", ")
    if len(listed) <= _SHOWN_ENTRIES:
        return f"[{entries}]"
    return f"[{', '.join(listed[:_SHOWN_ENTRIES])}, … {len(listed)} in all]"


def _unified(old: Sequence[tuple[str, Node]], new: Sequence[tuple[str, Node]]) -> Iterator[str]:
    """Lines of a unified difference whose hunks are headed by the layers that changed."""
    matcher = SequenceMatcher(None, [line for line, _ in old], [line for line, _ in new], autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        steps = [step for step in group if step[0] != "equal"]
        changed = [node for step in steps for _, node in (*old[step[1] : step[2]], *new[step[3] : step[4]])]
        layers = dict.fromkeys(layer_of(node.origin.module) or "outside the layers" for node in changed)
        yield f"@@ {', '.join(layers)} @@"
        for kind, begin, end, new_begin, new_end in group:
            if kind == "equal":
                yield from (f"  {line}" for line, _ in old[begin:end])
            else:
                yield from (f"- {line}" for line, _ in old[begin:end])
                yield from (f"+ {line}" for line, _ in new[new_begin:new_end])


def _headline(graph: GraphDiff) -> str:
    names = [", ".join(side) or "nothing" for side in (graph.before, graph.after)]
    parts = [
        f"{names[0]} → {names[1]}" if names[0] != names[1] else names[0],
        f"operations {_change(graph.nodes)}, launches {_change(graph.launches)}",
    ]
    if graph.kernels[0] != graph.kernels[1]:
        parts.append(f"kernels chosen for {graph.kernels[1]}")
    if graph.placed[0] != graph.placed[1]:
        parts.append(f"{graph.placed[1]} results placed in the arena")
    counts = ", ".join(f"{op} {_change(pair)}" for op, pair in graph.operations.items())
    tail = f"\n  {counts}" if counts else ""
    return f"graph {'; '.join(parts)}" + ("" if graph.changed else "; every operation as before") + tail


def _change(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} → {pair[1]}"
