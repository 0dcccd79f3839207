from __future__ import annotations

import asyncio

import pytest

from argusrl.config.sections import RolloutSection
from argusrl.errors import WorkerError
from argusrl.journal.episodes import SealedStep
from argusrl.training.rollout import Rollout, RolloutResult, describe_failures
from argusrl.types import EpisodeFailure, TrajectoryKey, TrajectoryRef

SECTION = RolloutSection(max_failed_share=0.25, pause_probe_seconds=0.01, pause_limit_seconds=0.2)


def ref(index: int, sample: int, tokens: int = 5) -> TrajectoryRef:
    return TrajectoryRef(
        key=TrajectoryKey(1, f"p{index}", sample),
        segment="s",
        offset=0,
        length=1,
        reward=1.0,
        rewards={},
        prompt_tokens=9,
        response_tokens=tokens,
        image_patches=0,
        truncated=False,
    )


class Episodes:
    """Plays everything; `broken(call)` says which (index, sample) fail in the n-th call of play."""

    def __init__(self, broken=lambda index, sample, attempt: False) -> None:
        self.broken = broken
        self.orders = []
        self.sealed = 0

    async def play(self, order, settings, attempt):
        self.orders.append((order, attempt))
        await asyncio.sleep(0.001 * ((order.index * 7) % 5))  # ends out of order
        results = []
        for sample in order.samples:
            if self.broken(order.index, sample, attempt):
                key = TrajectoryKey(1, f"p{order.index}", sample)
                results.append(EpisodeFailure(key=key, kind="reward", source="judge", message="503\nmore"))
            else:
                results.append(ref(order.index, sample))
        return results

    async def seal(self):
        self.sealed += 1
        return [SealedStep(step=1, segments=())]


def play(episodes: Episodes, adopted=(), said=None, engines: int = 2) -> RolloutResult:
    heard = [] if said is None else said
    rollout = Rollout(
        episodes=episodes, engines=engines, group_size=2, section=SECTION, settings=None, say=heard.append
    )
    ids = {f"p{index}": index for index in range(9)}

    async def begin_and_end() -> RolloutResult:
        rollout.begin([3, 1, 2], ids, adopted)
        return await rollout.end()

    return asyncio.run(begin_and_end())


def test_order_is_by_prompt_and_sample_whatever_ends_first():
    episodes = Episodes()
    result = play(episodes)
    keys = [(item.key.prompt_id, item.key.sample) for item in result.trajectories]
    assert keys == [("p3", 0), ("p3", 1), ("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1)]
    assert [order.samples for order, _ in episodes.orders] == [(0, 1)] * 3
    assert [order.engine for order, _ in episodes.orders] == [0, 1, 0]  # a group stays on one engine
    assert (result.adopted, result.sampled_tokens, episodes.sealed) == (0, 30, 1)


def test_only_what_is_missing_is_played():
    episodes = Episodes()
    result = play(episodes, adopted=[ref(3, 0, 50), ref(3, 1, 50), ref(1, 1, 50)])
    assert [(order.index, order.samples) for order, _ in episodes.orders] == [(1, (0,)), (2, (0, 1))]
    assert (result.adopted, result.sampled_tokens, len(result.trajectories)) == (3, 15, 6)


def test_an_adopted_sample_beyond_the_group_does_not_count():
    assert play(Episodes(), adopted=[ref(3, 7)]).adopted == 0


def test_a_few_failures_are_left_out_and_named():
    result = play(Episodes(lambda index, sample, attempt: (index, sample) == (1, 1)))
    assert len(result.trajectories) == 5
    assert [failure.key.prompt_id for failure in result.failures] == ["p1"]


def test_too_many_failures_pause_until_the_service_answers():
    said: list[str] = []
    episodes = Episodes(lambda index, sample, attempt: index != 3 and attempt < 2)
    result = play(episodes, said=said)
    assert len(result.trajectories) == 6
    assert result.failures == ()
    assert len(said) == 2
    assert "4 of 6 episodes failed: reward judge (4): 503" in said[0]
    again = [order.index for order, attempt in episodes.orders if attempt]
    assert 3 not in again  # what is finished is not played again


def test_a_pause_has_an_end_that_names_the_service():
    episodes = Episodes(lambda index, sample, attempt: True)
    with pytest.raises(WorkerError, match=r"reward judge \(6\): 503"):
        play(episodes)


def test_results_do_not_depend_on_which_group_ends_first():
    class Reversed(Episodes):
        async def play(self, order, settings, attempt):
            await asyncio.sleep(0.001 * (4 - order.index))
            return await super().play(order, settings, attempt)

    def broken(index, sample, attempt):
        return (index, sample) == (2, 0)

    assert play(Episodes(broken)) == play(Reversed(broken))


def test_a_step_that_was_finished_before_plays_nothing():
    episodes = Episodes()
    adopted = [ref(index, sample) for index in (1, 2, 3) for sample in (1, 0)]
    result = play(episodes, adopted=adopted)
    assert (episodes.orders, result.adopted, result.sampled_tokens, episodes.sealed) == ([], 6, 0, 1)
    assert [item.key.prompt_id for item in result.trajectories] == ["p3", "p3", "p1", "p1", "p2", "p2"]


def test_adopted_prompts_of_another_step_or_unknown_ones_do_not_count():
    assert play(Episodes(), adopted=[ref(5, 0), ref(42, 0)]).adopted == 0


def test_only_what_failed_is_tried_again():
    episodes = Episodes(lambda index, sample, attempt: sample == 1 and attempt == 0)
    result = play(episodes)
    assert [(order.index, order.samples) for order, attempt in episodes.orders if attempt == 1] == [
        (3, (1,)),
        (1, (1,)),
        (2, (1,)),
    ]
    assert (len(result.trajectories), result.sampled_tokens) == (6, 30)


def test_the_commonest_cause_is_named_first():
    def failure(sample: int, source: str, message: str) -> EpisodeFailure:
        return EpisodeFailure(key=TrajectoryKey(1, "p", sample), kind="reward", source=source, message=message)

    failures = [failure(0, "format", "odd"), failure(1, "judge", "503\nbody"), failure(2, "judge", "503\nother")]
    assert describe_failures(failures, 8) == "3 of 8 episodes failed: reward judge (2): 503 and 1 other reasons"


def test_half_way_is_told_once_when_half_of_the_missing_groups_are_there():
    episodes, heard = Episodes(), []
    rollout = Rollout(
        episodes=episodes,
        engines=1,
        group_size=2,
        section=SECTION,
        settings=None,
        say=lambda text: None,
        half_way=lambda: heard.append(len(rollout.outcomes)),
    )

    async def begin_and_end() -> None:
        rollout.begin([0, 1, 2, 3], {}, ())
        await rollout.end()

    asyncio.run(begin_and_end())
    assert heard == [4]  # two groups of two
