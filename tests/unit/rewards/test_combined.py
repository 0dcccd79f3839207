from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from argusrl.config.sections import RewardSection
from argusrl.errors import ConfigError
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rewards.combined import open_rewards

USER = Path(__file__).with_name("user_rewards.py")


def scorable(reply: str = "four", **values) -> Scorable:
    return Scorable(**{"reply": reply, "replies": (reply,), "prompt": "?", "answer": "4", **values})


def python(function: str, **values) -> RewardSection:
    return RewardSection(kind="python", function=f"{USER}:{function}", **values)


def with_rewards(sections, scenario):
    async def run():
        rewards = open_rewards(sections)
        try:
            return await scenario(rewards)
        finally:
            await rewards.close()

    return asyncio.run(run())


def scored(sections, item: Scorable) -> tuple[float, dict[str, float]]:
    return with_rewards(sections, lambda rewards: rewards.score(item))


def test_rewards_are_added_up_with_their_weights() -> None:
    sections = [
        RewardSection(kind="number", weight=2.0),
        RewardSection(kind="format", pattern=r"<answer>.*</answer>", weight=0.5, name="tags"),
        RewardSection(kind="exact", name="strict", pattern=r"<answer>(.*)</answer>"),
        RewardSection(kind="math"),
        RewardSection(kind="environment", weight=10.0),
        python("length", weight=-0.1, options={"scale": 0.5}, name="length"),
    ]
    reply = "<answer>4</answer>"
    total, scores = scored(sections, scorable(reply, environment_reward=0.25))
    assert scores == {"number": 1.0, "tags": 1.0, "strict": 1.0, "math": 1.0, "environment": 0.25, "length": 9.0}
    assert total == pytest.approx(2.0 + 0.5 + 1.0 + 1.0 + 2.5 - 0.9)


def test_a_sum_that_overflows_fails_that_sample_and_not_its_group() -> None:
    sections = [RewardSection(kind="environment", weight=10.0)]
    with pytest.raises(RewardFailed, match="weighted sum"):
        scored(sections, scorable(environment_reward=1e308))


def test_a_function_is_given_what_it_names() -> None:
    item = scorable(replies=("a", "b"), info={"bonus": 10}, environment_reward=0.5)
    assert scored([python("by_turns")], item)[0] == 2 + 10 + 0.5 + 1
    assert scored([python("sees_all")], item)[0] == 7
    assert scored([python("waits")], item)[0] == 4


def test_a_function_that_raises_twice_is_its_own_fault(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed, match="ValueError: cannot read four") as caught:
        scored([python("raises", name="mine")], scorable())
    assert caught.value.source == "mine"
    assert "user_rewards.py" in caught.value.message
    assert not caught.value.infrastructure
    assert scored([python("raises_once")], scorable(info={"marker": str(tmp_path / "m")}))[0] == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1]])
def test_an_answer_that_is_no_finite_number_fails_by_name(value: object) -> None:
    with pytest.raises(RewardFailed, match="answered") as caught:
        scored([RewardSection(kind="exact"), python("answers", name="mine")], scorable(info={"value": value}))
    assert caught.value.source == "mine"
    assert not caught.value.infrastructure


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (3, 3.0)])
def test_what_is_a_number_is_taken(value: object, number: float) -> None:
    assert scored([python("answers")], scorable(info={"value": value}))[0] == number


def test_a_hang_is_killed_and_fails_alone() -> None:
    async def scenario(rewards):
        items = [scorable("hang"), scorable("a"), scorable("b")]
        return await asyncio.gather(*map(rewards.score, items), return_exceptions=True)

    hung, *others = with_rewards([python("hangs", timeout_seconds=2.0)], scenario)
    assert isinstance(hung, RewardFailed)
    assert hung.infrastructure
    assert "longer than 2 s" in hung.message
    assert [total for total, _ in others] == [1.0, 1.0]


def test_a_regular_expression_that_never_ends_is_killed() -> None:
    section = RewardSection(kind="exact", pattern=r"((?:a+)+)b", timeout_seconds=1.0)
    with pytest.raises(RewardFailed, match="killed"):
        scored([section], scorable("a" * 200))


def test_a_function_that_ends_its_process_is_infrastructure() -> None:
    with pytest.raises(RewardFailed, match="exited with code 3") as caught:
        scored([python("ends")], scorable())
    assert caught.value.infrastructure


def test_a_function_that_forks_is_paid_once() -> None:
    async def scenario(rewards):
        return [(await rewards.score(scorable()))[0] for _ in range(3)]

    assert with_rewards([python("forks")], scenario) == [2.0, 2.0, 2.0]


def test_of_several_failures_the_hopeless_one_is_reported() -> None:
    sections = [python("ends", name="ends"), python("raises", name="raises")]
    with pytest.raises(RewardFailed) as caught:
        scored(sections, scorable())
    assert caught.value.source == "raises"


def test_preparing_finds_every_mistake_at_once() -> None:
    sections = [
        python("needs_more", name="more"),
        python("length", name="surplus", options={"scael": 1}),
        python("nothing_here", name="missing"),
        RewardSection(kind="number", options={"tolerances": 1}),
        RewardSection(kind="http", url="http://localhost/", token="env:ARGUSRL_TEST_NO_SUCH"),
        python("length", name="fine"),
    ]
    with pytest.raises(ConfigError) as caught:
        with_rewards(sections, lambda rewards: rewards.prepare())
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for words in ("needs 'rubric'", "no option 'scael'", "nothing_here", "'tolerances'", "ARGUSRL_TEST_NO_SUCH"):
        assert words in text


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'exact'"):
        open_rewards([RewardSection(kind="exact"), RewardSection(kind="number", name="exact")])


def test_built_in_rules_without_pattern_start_no_process() -> None:
    async def scenario(rewards):
        await rewards.score(scorable())
        return [slot.process for slot in rewards._pool._slots]

    kinds = ("exact", "choice", "number")
    assert with_rewards([RewardSection(kind=kind) for kind in kinds], scenario) == [None]
