"""Packed rows that share their beginnings give what each gives alone: log-probabilities, loss, LoRA gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argusrl.policy.policy import Policy
from argusrl.policy.prefix_tree import grow
from argusrl.policy.rows import Row, RowTurn
from argusrl.policy.selftest import _image

IMAGES = [_image(64, 64, 40), _image(128, 64, 200), _image(64, 96, 90)]
IMAGE_TOKENS = [4, 8, 6]


def turn(words: tuple[int, ...], reply: tuple[int, ...], image: int | None = None) -> RowTurn:
    shown = () if image is None else (3, *(5,) * IMAGE_TOKENS[image], 4)
    return RowTurn(prompt_ids=(*shown, *words), response_ids=reply, logprobs=tuple(-1.0 - 0.01 * t for t in reply))


def row(*turns: tuple[Any, ...], advantage: float = 1.0) -> Row:
    """Of turns (words, reply, image or None)."""
    shown = tuple(IMAGES[image] for _, _, image in turns if image is not None)
    return Row(turns=tuple(turn(*one) for one in turns), advantage=advantage, images=shown)


def group(*rows: Row) -> list[Row]:
    return [replace(one, advantage=(-1.0) ** number * (1 + number)) for number, one in enumerate(rows)]


A, B, C, D = (10, 11, 12), (10, 11, 13, 14), (20, 21), (22, 23, 24, 25)
CASES: dict[str, list[Row]] = {
    "single turn": group(row((A, B, 0)), row((A, C, 0)), row((A, D, 0))),
    "members lost": group(row((A, B, 0))),
    "identical": group(row((A, B, 1)), row((A, B, 1)), row((A, B, 1))),
    "depth 2": group(row((A, (30, 31, 32), 0)), row((A, (30, 31, 33), 0)), row((A, C, 0))),
    "turns branch": group(
        row((A, B, 0), (C, D, 1), ((), C, 2)),
        row((A, B, 0), (C, D, 1), ((40,), C, 0)),
        row((A, B, 0), (C, C, 1)),
        row((A, D, 0), (C, D, 1)),
    ),
    "another image in the second turn": group(row((A, B, 0), (C, D, 1)), row((A, B, 0), (C, D, 2))),
    "a prompt that begins another": group(row((A, C, 0)), row(((*A, *C, 50), D, 0))),
    "text only": group(row((A, B, None)), row((A, C, None)), row((D, C, None)), row((A, B, 0))),
    "nothing sampled in the last turn": group(row((A, B, 0), (C, (), None)), row((A, B, 0), (C, D, None))),
}


def fewest_tokens(rows: list[Row]) -> int:
    """Different beginnings of the rows, images told apart by their bytes."""
    found = set()
    for one in rows:
        images, seen = iter(one.images), ()
        for token in one.ids:
            if token == 3:
                image = next(images)
            seen = (*seen, (token, image if token == 5 else b""))
            found.add(seen)
    return len(found)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference, as a share of the largest value."""
    scale = max(value.abs().max().item() for value in other.values())
    return max((one[name] - other[name]).abs().max().item() for name in one) / scale


@pytest.fixture
def moved(policy: Policy) -> Policy:
    """With an adapter that changes something."""
    for name, parameter in policy.state.parameters.items():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.to_local().data.copy_(values * 0.1)
    return policy


def logprobs(policy: Policy, rows: list[Row]) -> torch.Tensor:
    with torch.no_grad():
        return policy._scorer(policy._pack(rows), 0.7, policy._banned)[0]


def require_equal(policy: Policy, rows: list[Row], gradients: Callable[[Policy], dict[str, torch.Tensor]]) -> None:
    packed = logprobs(policy, rows)
    alone = torch.cat([logprobs(policy, [one]) for one in rows])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    total = sum(len(turn.response_ids) for one in rows for turn in one.turns)
    whole = policy.forward_backward([rows], total)
    shared = gradients(policy)
    policy.discard_gradients()
    pieces = policy.forward_backward([[one] for one in rows], total)
    assert close(shared, gradients(policy)) < 1e-5
    policy.discard_gradients()
    assert whole.loss == pytest.approx(pieces.loss, abs=1e-5)
    assert whole.tokens == pieces.tokens == total


@pytest.mark.parametrize("case", CASES)
def test_equals_separate_rows(moved: Policy, case: str, gradients: Any) -> None:
    rows = CASES[case]
    assert fewest_tokens(rows) <= moved._inputs.pack(rows).input_ids.shape[1] <= 1.05 * fewest_tokens(rows)
    require_equal(moved, rows, gradients)


def test_all_at_once(moved: Policy, gradients: Any) -> None:
    require_equal(moved, [one for rows in CASES.values() for one in rows], gradients)


def test_the_order_is_a_function_of_the_rows(moved: Policy, gradients: Any) -> None:
    rows = CASES["turns branch"]
    found = []
    for _ in range(2):
        moved.forward_backward([list(rows)], 10)
        found.append(gradients(moved))
        moved.discard_gradients()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


REPLIES = st.lists(st.integers(60, 62), max_size=5).map(tuple)
TURNS = st.tuples(
    st.lists(st.integers(70, 71), min_size=1, max_size=3).map(tuple), REPLIES, st.sampled_from([None, 0, 1, 2])
)
ROWS = st.lists(st.lists(TURNS, min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_random_trees(moved: Policy, gradients: Any, drawn: list[list[tuple[Any, ...]]]) -> None:
    rows = [row(*turns, advantage=number - 1.5) for number, turns in enumerate(drawn)]
    if not any(turn.response_ids for one in rows for turn in one.turns):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argusrl.policy.inputs.grow", partial(grow, worth=0.0))
        assert moved._inputs.pack(rows).input_ids.shape[1] == fewest_tokens(rows)
        require_equal(moved, rows, gradients)
