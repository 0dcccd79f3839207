"""Counting what was computed against the least that would have done."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from argusrl.policy.policy import Policy
from argusrl.policy.rows import Row
from argusrl.policy.step_work import ImageFeatures, StepWork, of_all


def replies(row: Row, count: int, length: int = 10) -> list[Row]:
    """Rows of one prompt whose replies differ from their first token on."""
    turns = (
        replace(row.turns[0], response_ids=tuple(range(20 + i, 20 + i + length)), logprobs=(-1.0,) * length)
        for i in range(count)
    )
    return [replace(row, turns=(turn,), advantage=(-1.0) ** i) for i, turn in enumerate(turns)]


def test_a_group_in_one_micro_batch_is_the_least(policy: Policy, rows: list[Row]) -> None:
    group = replies(rows[0], 4)
    prompt = len(group[0].turns[0].prompt_ids)
    policy.forward_backward([group], 40)
    work = policy.finish_step()
    assert work.tokens == work.unique_tokens == prompt + 40
    assert work.row_tokens == 4 * (prompt + 10)
    assert (work.patches, work.unique_patches, work.row_patches) == (16, 16, 64)
    assert work.places - work.padding == work.tokens


def test_a_group_that_was_cut_is_seen(policy: Policy, rows: list[Row]) -> None:
    group = replies(rows[0], 4)
    prompt = len(group[0].turns[0].prompt_ids)
    policy.forward_backward([group[:2], group[2:]], 40)
    policy.optimizer_step(1e-3)
    work = policy.finish_step()
    assert work.tokens == work.unique_tokens + prompt
    assert work.patches == work.unique_patches == 16  # its image went through the tower once all the same
    assert policy.finish_step().tokens == 0


def test_the_updates_of_a_step_share_images(policy: Policy, rows: list[Row], settings: Any) -> None:
    policy.settings = replace(settings, updates_per_step=2)
    for batch in (replies(rows[0], 2), replies(rows[0], 3)):
        policy.forward_backward([batch], 40)
        policy.optimizer_step(1e-3)
    work = policy.finish_step()
    assert work.patches == 16
    assert work.tokens == work.unique_tokens  # weights are others in the second: its prompt has to be computed again


def test_other_forwards_do_not_count(policy: Policy, rows: list[Row]) -> None:
    turn = rows[0].turns[0]
    policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids)
    policy.logprob_digest(rows)
    work = policy.finish_step()
    assert work.tokens == work.patches == 0


def test_a_fault_forgets_the_step(policy: Policy, rows: list[Row]) -> None:
    policy.forward_backward([rows], 40)
    policy.discard_gradients()
    assert policy.finish_step().tokens == 0


def part(sequences: list[tuple[int, ...]], images: list[bytes]) -> Any:
    """One rank that computed prompts of two tokens, the second an image."""
    work = StepWork()
    work.begin_update()
    for image in images:
        number = work.number(image, 16)
    for sequence in sequences:
        work.note((7, -1 - number, *sequence), 2)
        work.tokens += 2 + len(sequence)
    work.patches = 16 * len(images)
    return work.share()


def test_what_ranks_have_in_common_is_needed_once() -> None:
    one, other = part([(1, 2)], [b"a"]), part([(3,)], [b"other", b"a"])
    work = of_all([one, other], passes=1)
    assert (work.tokens, work.unique_tokens, work.row_tokens) == (7, 5, 7)
    assert (work.patches, work.unique_patches) == (48, 32)
    assert (
        of_all([one, part([(3,)], [b"b"])], passes=1).unique_tokens == 6
    )  # other pixels: what is before them is shared
    assert of_all([one, other], passes=2).unique_tokens == 10


def test_ranks_are_compared_update_by_update() -> None:
    """A rank without rows in the first update has its rows in the second; the prompt has to be computed in both."""
    early, late = StepWork(), StepWork()
    for work, rows in ((early, [(1, 2, 3), None]), (late, [None, (1, 2, 4)])):
        for row in rows:
            work.begin_update()
            if row is not None:
                work.note(row, 2)
    assert of_all([early.share(), late.share()], passes=1).unique_tokens == 6
    late.note((1, 2, 5), 2)
    both = StepWork()
    both.begin_update()
    both.begin_update()
    both.note((1, 2, 6), 2)
    assert of_all([early.share(), late.share(), both.share()], passes=1).unique_tokens == 3 + (2 + 3)


def test_features_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argusrl.policy.step_work.FEATURE_BYTES", 100)
    work = StepWork()
    for image in (b"a", b"b", b"c"):
        work.features[image] = ImageFeatures(torch.tensor([1, 2, 2]), torch.zeros(1, 6), (torch.zeros(1, 6),))
    work.keep()
    assert list(work.features) == [b"b", b"c"]
    work.keep({b"c", b"d"})
    assert list(work.features) == [b"c"]
