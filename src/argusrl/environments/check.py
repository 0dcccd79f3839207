"""Plays a few episodes at random and says whether an environment can be trained on."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from argusrl.cluster.pool import PoolError, ProcessPool
from argusrl.config.patterns import HOLE, fitted_text
from argusrl.config.sections import EnvironmentSection
from argusrl.environments.base import StepResult
from argusrl.environments.sessions import SessionFactory, answer_digest
from argusrl.types import Prompt

BLIND_REPLIES = ("", "1", "<answer>1</answer>", "yes", "left")  # for environments that do not tell their actions


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One episode of random replies, with what it showed as digests."""

    prompt_id: str
    replies: tuple[str, ...]
    digests: tuple[str, ...]  # of the first messages, then of each answer
    reward: float  # sum
    terminated: bool
    truncated: bool  # by the environment
    understood: int  # replies that named an action
    images: int
    reset_seconds: float
    step_seconds: tuple[float, ...]


async def play_at_random(
    sessions: SessionFactory, section: EnvironmentSection, prompt: Prompt, seed: int
) -> PlayedEpisode:
    """Play one episode with valid actions drawn by `seed`, to its end or `max_turns`. Raises EnvironmentFailed."""
    draw = random.Random(f"{seed} {prompt.id}")
    choices = valid_replies(section)
    session = sessions.new()
    results: list[StepResult] = []
    replies: list[str] = []
    step_seconds: list[float] = []
    try:
        started = time.perf_counter()
        first = await session.reset(prompt, seed)
        reset_seconds = time.perf_counter() - started
        while len(results) < section.max_turns and not (results and (results[-1].terminated or results[-1].truncated)):
            replies.append(draw.choice(choices))
            started = time.perf_counter()
            results.append(await session.step(replies[-1]))
            step_seconds.append(time.perf_counter() - started)
    finally:
        await session.close()
    shown = [first, *(result.messages for result in results)]
    return PlayedEpisode(
        prompt_id=prompt.id,
        replies=tuple(replies),
        digests=(answer_digest(first), *map(answer_digest, results)),
        reward=sum(result.reward for result in results),
        terminated=results[-1].terminated,
        truncated=results[-1].truncated,
        understood=sum(result.action is not None for result in results),
        images=sum(len(message.images) for messages in shown for message in messages),
        reset_seconds=reset_seconds,
        step_seconds=tuple(step_seconds),
    )


def valid_replies(section: EnvironmentSection) -> Sequence[str]:
    """A reply for each action of the recipe; blind guesses where it names none."""
    if not section.actions:
        return BLIND_REPLIES
    form = fitted_text(section.action_pattern) or HOLE
    return [form.replace(HOLE, word) for word in section.actions]


async def gymnasium_problems(pool: ProcessPool, section: EnvironmentSection, prompt: Prompt) -> tuple[str, list[str]]:
    """What Gymnasium's own checker says: (error or "", warnings). Runs in the pool."""
    arguments = {"section": section, "info": dict(prompt.info)}
    try:
        return "", await pool.call(f"{__name__}:run_gymnasium_checker", arguments, section.step_timeout_seconds)
    except PoolError as error:
        return str(error), []


def run_gymnasium_checker(section: EnvironmentSection, info: dict[str, object]) -> list[str]:
    """Gymnasium's `check_env` on the unwrapped environment of one start; its warnings. Raises what it finds wrong."""
    from gymnasium.utils.env_checker import check_env

    from argusrl.environments.gymnasium_adapter import make_environment

    env = make_environment(section, info)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Rendering in every mode the environment knows would want a display.
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
    finally:
        env.close()
    return sorted({str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)})
