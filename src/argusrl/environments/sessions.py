"""Episodes as the player sees them: asynchronous, with deadlines, in processes that may be killed.

An environment shares its process with others. When a neighbour hangs, that process is killed, and every other episode
in it is made anew: reset with its seed, its replies so far replayed, and what it shows compared with what it showed.
If they differ the episode cannot be continued and has to start whole. The same is done once when user code raises, so
that only code that raises twice at the same place is called faulty.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import Any

from argusrl.cluster.pool import PoolDied, PoolError, PoolObject, PoolRaised, PoolTimeout, ProcessPool
from argusrl.config.sections import EnvironmentSection
from argusrl.environments.base import EnvironmentFailed, EnvironmentSession, StepResult
from argusrl.environments.single_turn import SingleTurnSession
from argusrl.types import Image, Message, Prompt

REMAKES = 20  # an episode that lost its process this often in one call is given up
TRACEBACK_CHARACTERS = 2_000

_CLASSES = {
    "gymnasium": "argusrl.environments.gymnasium_adapter:GymnasiumEnvironment",
    "python": "argusrl.environments.python:PythonEnvironment",
}


def open_sessions(section: EnvironmentSection) -> SessionFactory:
    """What makes the sessions of a recipe's environment. Starts nothing yet; use it from one event loop."""
    return SessionFactory(section)


class SessionFactory:
    """Makes sessions; holds the processes they share."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section
        self.pool = ProcessPool(section.processes)

    def new(self) -> EnvironmentSession:
        """A session for one episode; `reset` may be called again for another."""
        if self._section.kind == "single_turn":
            return SingleTurnSession()
        return PooledSession(self.pool, self._section)

    async def close(self) -> None:
        """Kill the processes; sessions under way fail as infrastructure."""
        await self.pool.close()


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that was answered, for replay: what was asked, and the digest of the answer."""

    method: str
    arguments: tuple[Any, ...]
    digest: str


class PooledSession:
    """One episode of an environment that lives in the pool. Every verb raises EnvironmentFailed."""

    def __init__(self, pool: ProcessPool, section: EnvironmentSection) -> None:
        self._pool = pool
        self._class = _CLASSES[section.kind]
        self._section = section
        self._source = section.id or section.factory or section.kind
        self._object: PoolObject | None = None
        self._answered: list[_Call] = []

    async def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        self._answered = []
        return await self._played("reset", prompt, seed)

    async def step(self, reply: str) -> StepResult:
        return await self._played("step", reply)

    async def close(self) -> None:
        """Close and forget the environment; what its `close` raises is no longer of interest."""
        held, self._object = self._object, None
        if held is not None:
            with contextlib.suppress(PoolError):
                await held.call("close", deadline_seconds=self._section.step_timeout_seconds)
            await held.release()

    async def _played(self, method: str, *arguments: Any) -> Any:
        raised = False
        for _ in range(REMAKES + 1):
            try:
                answer = await self._call(method, *arguments)
            except PoolRaised as error:
                await self.close()
                if raised:
                    raise self._failed(method, error, infrastructure=False) from None
                raised = True
            except (PoolTimeout, PoolDied) as error:
                await self.close()
                if not (isinstance(error, PoolDied) and error.innocent):
                    raise self._failed(method, error, infrastructure=True) from None
            else:
                self._answered.append(_Call(method, arguments, answer_digest(answer)))
                return answer
        message = f"{method}: other episodes ended its process {REMAKES + 1} times"
        raise EnvironmentFailed(self._source, message, infrastructure=True)

    async def _call(self, method: str, *arguments: Any) -> Any:
        deadline_seconds = self._section.step_timeout_seconds
        if self._object is None:
            self._object = await self._pool.create(self._class, {"section": self._section}, deadline_seconds)
            await self._replay(self._object)
        return await self._object.call(method, *arguments, deadline_seconds=deadline_seconds)

    async def _replay(self, environment: PoolObject) -> None:
        for number, past in enumerate(self._answered):
            answer = await environment.call(
                past.method, *past.arguments, deadline_seconds=self._section.step_timeout_seconds
            )
            if answer_digest(answer) != past.digest:
                await self.close()
                message = f"was made anew after its process ended, and call {number} ({past.method}) answered otherwise"
                raise EnvironmentFailed(self._source, message, infrastructure=True)

    def _failed(self, method: str, error: PoolError, infrastructure: bool) -> EnvironmentFailed:
        message = f"{method}: {error}"
        if isinstance(error, PoolRaised):
            message += "\n" + error.traceback[-TRACEBACK_CHARACTERS:]
        return EnvironmentFailed(self._source, message, infrastructure)


def answer_digest(answer: tuple[Message, ...] | StepResult) -> str:
    """Of everything the model or the reward gets to see: texts, images by their bytes, reward, and how it ended."""
    messages, outcome = (answer.messages, answer) if isinstance(answer, StepResult) else (answer, None)
    ending = outcome and (outcome.reward, outcome.terminated, outcome.truncated, outcome.action)
    shown = [
        (message.role, [part.sha256 if isinstance(part, Image) else part for part in message.content])
        for message in messages
    ]
    return hashlib.sha256(repr((ending, shown)).encode()).hexdigest()
