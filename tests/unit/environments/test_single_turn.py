from __future__ import annotations

import asyncio

from argusrl.environments.single_turn import SingleTurnSession
from argusrl.types import Message, Prompt


def test_the_prompt_is_asked_once_and_pays_nothing() -> None:
    async def play() -> None:
        session = SingleTurnSession()
        prompt = Prompt(id="q", messages=(Message(role="user", content=("how many?",)),))
        assert await session.reset(prompt, 1) == prompt.messages
        result = await session.step("4")
        assert (result.reward, result.terminated, result.truncated, result.messages) == (0.0, True, False, ())
        await session.close()
        assert await session.reset(prompt, 2) == prompt.messages

    asyncio.run(play())
