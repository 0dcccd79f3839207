"""What sequences have in common, as a tree: every shared beginning is there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORTH_SHARING = 1 / 50
"""Share of a subtree's tokens that its first node has to save. A node that continues another cannot use plain causal
attention, which costs more than a few tokens do."""

WORTH_BRANCHING = 1 / 250
"""The same of a node that continues another anyway: one more only makes more pieces of its subtree. So this is the most
that is computed twice for the sake of one level below the first."""


@dataclass(slots=True)
class Node:
    """Tokens [start, end) of the sequence `owner`, which continue those of the node `parent`."""

    owner: int
    start: int
    end: int
    parent: int | None


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Parents come before their children; children are in the order in which sequences bring them up."""

    nodes: tuple[Node, ...]
    last: tuple[int, ...]  # for each sequence the node that holds its last token, perhaps not as the node's last

    @property
    def tokens(self) -> int:
        return sum(node.end - node.start for node in self.nodes)

    def path(self, sequence: int) -> list[int]:
        """The nodes that hold a sequence, from its first token on."""
        found: list[int] = []
        number: int | None = self.last[sequence]
        while number is not None:
            found.append(number)
            number = self.nodes[number].parent
        return found[::-1]


def grow(sequences: Sequence[tuple[int, ...]], worth: float = 1.0) -> PrefixTree:
    """The tree of non-empty sequences. `worth` scales what nodes have to save: 0 gives the fewest tokens."""
    nodes: list[Node] = []
    last = [0] * len(sequences)
    children: list[list[int]] = []
    pending: list[tuple[int | None, int, list[int]]] = [
        (None, 0, alike) for alike in reversed(_by_next(sequences, range(len(sequences)), 0))
    ]
    while pending:
        parent, start, members = pending.pop()
        owner, end, longer = _common(sequences, members, start)
        number = len(nodes)
        nodes.append(Node(owner, start, end, parent))
        children.append([])
        if parent is not None:
            children[parent].append(number)
        for member in members:
            last[member] = number  # children put it right for those that go on
        pending += [(number, end, alike) for alike in reversed(_by_next(sequences, longer, end))]
    return _pruned(nodes, children, last, worth)


def _by_next(sequences: Sequence[tuple[int, ...]], members: Sequence[int], position: int) -> list[list[int]]:
    """Members with the same token at a position together, in the order in which they come."""
    found: dict[int, list[int]] = {}
    for member in members:
        found.setdefault(sequences[member][position], []).append(member)
    return list(found.values())


def _common(sequences: Sequence[tuple[int, ...]], members: Sequence[int], start: int) -> tuple[int, int, list[int]]:
    """(one that has it all, end of what is common from `start` on, members that go on and differ there).

    A sequence that ends on the way, being the beginning of others, does not end what these have in common.
    """
    while True:
        first, final = (pick(members, key=sequences.__getitem__) for pick in (min, max))
        low, high = sequences[first], sequences[final]
        if low == high[: len(low)]:
            longer = [member for member in members if len(sequences[member]) > len(low)]
            if not longer:
                return members[0], len(low), []
            members = longer
            continue
        end, above = start, len(low)  # the first difference, which sorted neighbours show: by bisection
        while end < above:
            middle = (end + above + 1) // 2
            if low[start:middle] == high[start:middle]:
                end = middle
            else:
                above = middle - 1
        return members[0], end, [member for member in members if len(sequences[member]) > end]


def _pruned(nodes: list[Node], children: list[list[int]], last: list[int], worth: float) -> PrefixTree:
    """Without the nodes that save too little: their children begin where they began."""
    sizes = [node.end - node.start for node in nodes]
    for number in reversed(range(len(nodes))):
        sizes[number] += sum(sizes[child] for child in children[number])
    gone: dict[int, int] = {}  # node -> the child that holds its tokens for whoever ended in it
    for number, node in enumerate(nodes):
        least = worth * (WORTH_SHARING if node.parent is None else WORTH_BRANCHING)
        saved = (node.end - node.start) * (len(children[number]) - 1)
        if len(children[number]) > 1 and saved < least * (saved + sizes[number]):
            gone[number] = children[number][0]
            for child in children[number]:
                nodes[child].start, nodes[child].parent = node.start, node.parent
    kept = [number for number in range(len(nodes)) if number not in gone]
    places = {number: place for place, number in enumerate(kept)}
    for number in kept:
        parent = nodes[number].parent
        nodes[number].parent = None if parent is None else places[parent]
    ends = []
    for number in last:
        while number in gone:
            number = gone[number]
        ends.append(places[number])
    return PrefixTree(tuple(nodes[number] for number in kept), tuple(ends))
