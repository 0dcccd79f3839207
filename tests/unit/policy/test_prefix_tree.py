import random

from hypothesis import given
from hypothesis import strategies as st

from argusrl.policy.prefix_tree import PrefixTree, grow

Sequences = list[tuple[int, ...]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=10)


def tokens_of(tree: PrefixTree, sequences: Sequences, number: int) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    for node in (tree.nodes[place] for place in tree.path(number)):
        assert node.start == len(found)
        found += sequences[node.owner][node.start : node.end]
    return found


def prefixes(sequences: Sequences) -> int:
    return len({sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)})


@given(SEQUENCES, st.sampled_from([0.0, 1.0, 15.0, 250.0]))
def test_every_sequence_is_on_its_path(sequences: Sequences, worth: float) -> None:
    tree = grow(sequences, worth)
    for number, sequence in enumerate(sequences):
        assert tokens_of(tree, sequences, number)[: len(sequence)] == sequence
    for place, node in enumerate(tree.nodes):
        assert node.start < node.end
        assert node.parent is None or node.parent < place
        assert node.start == (0 if node.parent is None else tree.nodes[node.parent].end)
    on_paths = {place for number in range(len(sequences)) for place in tree.path(number)}
    assert on_paths == set(range(len(tree.nodes)))


@given(SEQUENCES)
def test_the_whole_tree_has_every_beginning_once(sequences: Sequences) -> None:
    assert grow(sequences, 0.0).tokens == prefixes(sequences)


@given(SEQUENCES)
def test_what_saves_little_is_left(sequences: Sequences) -> None:
    assert prefixes(sequences) <= grow(sequences).tokens <= sum(map(len, sequences))


def test_a_beginning_of_others_is_no_branch() -> None:
    tree = grow([(1, 2), (1, 2, 3, 4), (1, 2, 3)], 0.0)
    assert [(node.start, node.end) for node in tree.nodes] == [(0, 4)]
    assert tree.last == (0, 0, 0)


def test_a_few_tokens_in_common_are_not_worth_a_branch() -> None:
    prompts = [(1, 2, *(10 + number,) * 100) for number in range(4)]
    replies = [(*prompt, *(50 + sample,) * 20) for prompt in prompts for sample in range(8)]
    tree = grow(replies)
    assert [node.start for node in tree.nodes if node.parent is None] == [0] * 4
    assert tree.tokens == 4 * (102 + 8 * 20)


def test_what_is_left_stays_small() -> None:
    """Groups of episodes whose short replies often agree, with an observation after each."""
    draw = random.Random(0)
    for words, observed, turns in ((3, 20, 8), (8, 70, 4), (12, 1, 1), (2, 3, 10)):
        group = []
        for _ in range(8):
            sequence: tuple[int, ...] = tuple(range(20))
            for turn in range(turns):
                reply = tuple(draw.choices((50, 51, 52), weights=(4, 1, 1), k=words))
                sequence += (*reply, *(hash((*reply, turn, place)) for place in range(observed)))
            group.append(sequence)
        assert grow(group).tokens <= 1.03 * prefixes(group)
