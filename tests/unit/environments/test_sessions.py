from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from argusrl.config.sections import EnvironmentSection
from argusrl.environments.base import EnvironmentFailed
from argusrl.environments.sessions import open_sessions
from argusrl.environments.single_turn import SingleTurnSession
from argusrl.types import Prompt

USER = Path(__file__).with_name("user_environments.py")
PROMPT = Prompt(id="p1")


def section(name: str = "Scripted", **values) -> EnvironmentSection:
    return EnvironmentSection(kind="python", factory=f"{USER}:{name}", max_turns=9, **values)


def with_sessions(settings: EnvironmentSection, scenario):
    async def run():
        factory = open_sessions(settings)
        try:
            return await scenario(factory)
        finally:
            await factory.close()

    return asyncio.run(run())


def text(messages) -> str:
    return messages[0].content[0]


def test_single_turn_needs_no_process() -> None:
    async def scenario(factory):
        assert isinstance(factory.new(), SingleTurnSession)

    with_sessions(EnvironmentSection(), scenario)


def test_an_episode_runs_in_a_process_and_can_be_reset() -> None:
    async def scenario(factory):
        session = factory.new()
        assert text(await session.reset(PROMPT, 7)) == "seed 7 prompt p1"
        assert text((await session.step("a")).messages) == "turn 1: a"
        done = await session.step("done")
        assert done.terminated
        assert done.messages == ()
        assert done.reward == 0.5
        assert text(await session.reset(PROMPT, 8)) == "seed 8 prompt p1"
        await session.close()
        await session.close()

    with_sessions(section(), scenario)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("raise", "ValueError: as told"),
        ("nonsense", "must return a StepResult, got str"),
        ("nan", "reward nan"),
        ("silent", "no message, but the episode is not over"),
    ],
)
def test_user_code_that_fails_twice_is_its_own_fault(reply: str, words: str) -> None:
    async def scenario(factory):
        session = factory.new()
        await session.reset(PROMPT, 1)
        with pytest.raises(EnvironmentFailed, match=words) as caught:
            await session.step(reply)
        assert not caught.value.infrastructure
        assert "user_environments.py" in caught.value.source
        await session.close()

    with_sessions(section(), scenario)


def test_user_code_that_fails_once_is_replayed_and_goes_on(tmp_path: Path) -> None:
    async def scenario(factory):
        session = factory.new()
        await session.reset(PROMPT, 1)
        await session.step("a")
        reply = f"raise once {tmp_path / 'marker'}"
        assert text((await session.step(reply)).messages) == f"turn 2: {reply}"

    with_sessions(section(), scenario)


def test_a_process_that_ends_is_infrastructure() -> None:
    async def scenario(factory):
        session = factory.new()
        await session.reset(PROMPT, 1)
        with pytest.raises(EnvironmentFailed, match="exited with code 9") as caught:
            await session.step("exit")
        assert caught.value.infrastructure
        await session.close()

    with_sessions(section(), scenario)


def test_a_hang_costs_its_own_episode_and_the_neighbour_is_replayed() -> None:
    async def scenario(factory):
        bad, neighbour = factory.new(), factory.new()
        await bad.reset(PROMPT, 1)
        await neighbour.reset(PROMPT, 2)
        await neighbour.step("a")
        before = (await neighbour.step("process")).info["pid"]
        hanging = asyncio.create_task(bad.step("hang"))
        await asyncio.sleep(0)
        result = await neighbour.step("c")
        assert text(result.messages) == "turn 3: c"  # the two turns before were replayed
        with pytest.raises(EnvironmentFailed, match=r"longer than 2 s") as caught:
            await hanging
        assert caught.value.infrastructure
        assert (await neighbour.step("process")).info["pid"] != before
        await bad.reset(PROMPT, 1)  # the same session plays again
        assert text((await bad.step("b")).messages) == "turn 1: b"

    with_sessions(section(step_timeout_seconds=2.0), scenario)


def test_an_environment_that_answers_otherwise_after_replay_starts_whole() -> None:
    async def scenario(factory):
        bad, neighbour = factory.new(), factory.new()
        await bad.reset(PROMPT, 1)
        await neighbour.reset(PROMPT, 2)
        with pytest.raises(EnvironmentFailed):
            await bad.step("exit")
        with pytest.raises(EnvironmentFailed, match="answered otherwise") as caught:
            await neighbour.step("a")
        assert caught.value.infrastructure

    with_sessions(section("Forgetful"), scenario)


def test_a_missing_class_is_named() -> None:
    async def scenario(factory):
        with pytest.raises(EnvironmentFailed, match="Scriptd") as caught:
            await factory.new().reset(PROMPT, 1)
        assert not caught.value.infrastructure

    with_sessions(section("Scriptd"), scenario)
