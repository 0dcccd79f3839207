from __future__ import annotations

import asyncio
from pathlib import Path

from argusrl.config.sections import EnvironmentSection
from argusrl.environments.check import BLIND_REPLIES, gymnasium_problems, play_at_random, valid_replies
from argusrl.environments.sessions import open_sessions
from argusrl.types import Prompt

LAKE = EnvironmentSection(
    kind="gymnasium",
    id="FrozenLake-v1",
    options={"desc": ["SFG"], "is_slippery": False},
    actions={"left": 0, "right": 2},
    max_turns=4,
)
PYTHON = EnvironmentSection(
    kind="python", factory=f"{Path(__file__).with_name('user_environments.py')}:Scripted", max_turns=3
)


def in_sessions(section: EnvironmentSection, scenario):
    async def run():
        sessions = open_sessions(section)
        try:
            return await scenario(sessions)
        finally:
            await sessions.close()

    return asyncio.run(run())


def test_replies_are_made_from_the_pattern() -> None:
    assert valid_replies(LAKE) == ["<action>left</action>", "<action>right</action>"]
    bare = LAKE.model_copy(update={"action_pattern": "left|right"})
    assert valid_replies(bare) == ["left", "right"]
    assert valid_replies(PYTHON) == BLIND_REPLIES


def test_random_play_is_repeatable_understood_and_counted() -> None:
    async def scenario(sessions):
        prompt = Prompt(id="a")
        one, same = [await play_at_random(sessions, LAKE, prompt, 1) for _ in range(2)]
        others = [await play_at_random(sessions, LAKE, prompt, seed) for seed in range(2, 8)]
        assert (one.replies, one.digests, one.reward) == (same.replies, same.digests, same.reward)
        assert {other.replies for other in others} != {one.replies}
        for episode in (one, *others):
            assert episode.terminated or episode.truncated
            assert episode.understood == len(episode.replies) == len(episode.step_seconds) <= 4
            assert episode.images == len(episode.replies)  # the first, and one after every reply but the last
            assert episode.reward == float(episode.terminated)

    in_sessions(LAKE, scenario)


def test_play_ends_at_the_turn_limit_where_the_environment_does_not() -> None:
    episode = in_sessions(PYTHON, lambda sessions: play_at_random(sessions, PYTHON, Prompt(id="a"), 0))
    assert len(episode.replies) == 3
    assert not episode.terminated


def test_gymnasiums_checker_runs_in_the_pool() -> None:
    def problems(section):
        return in_sessions(section, lambda sessions: gymnasium_problems(sessions.pool, section, Prompt(id="a")))

    assert problems(LAKE)[0] == ""
    assert "no_such" in problems(LAKE.model_copy(update={"options": {"no_such": 1}}))[0]
