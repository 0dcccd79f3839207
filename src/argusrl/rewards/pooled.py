"""Rewards computed by a function: the fixed rules, mathematics, and the user's own code, with a deadline that kills."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from argusrl.cluster.pool import PoolDied, PoolError, PoolRaised, PoolTimeout, ProcessPool
from argusrl.cluster.pool_worker import signature_of
from argusrl.config.objects import load_object
from argusrl.config.sections import RewardSection
from argusrl.errors import ConfigError
from argusrl.rewards import rules
from argusrl.rewards.base import RewardFailed, Scorable

OFFERED = tuple(field.name for field in fields(Scorable))
TRACEBACK_CHARACTERS = 2_000


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises RewardFailed for None, NaN, infinity and what is no number."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardFailed(name, f"answered {value!r:.200}, which is not a number", infrastructure=False) from None
    if not math.isfinite(number):
        raise RewardFailed(name, f"answered {number}, which is not finite", infrastructure=False)
    return number


class EnvironmentReward:
    """What the environment paid over the episode."""

    def __init__(self, section: RewardSection) -> None:
        self.name, self.weight = section.name or section.kind, section.weight

    async def prepare(self) -> None:
        """Nothing to look up."""

    async def score(self, item: Scorable) -> float:
        return finite(self.name, item.environment_reward)

    async def close(self) -> None:
        """Nothing is held."""


class FunctionReward:
    """A function of some fields of a Scorable (those it names as parameters) and of `options`.

    It runs in the pool; the fixed rules run in place unless the recipe gives them a pattern, since a regular
    expression can take forever on an unlucky reply.
    """

    def __init__(self, section: RewardSection, pool: ProcessPool) -> None:
        self.name, self.weight = section.name or section.kind, section.weight
        self._section = section
        self._pool = pool
        self._options = dict(section.options)
        if section.pattern is not None:
            self._options["pattern"] = section.pattern
        self._in_place = section.kind in ("exact", "choice", "number") and section.pattern is None
        self._offered: tuple[str, ...] | None = None

    @property
    def reference(self) -> str:
        """Where the function is: `module:name` or `file.py:name`."""
        kind = self._section.kind
        if kind == "python":
            return self._section.function or ""
        if kind == "math":
            return "argusrl.rewards.mathematics:score"
        return f"argusrl.rewards.rules:{'format_share' if kind == 'format' else kind}"

    async def prepare(self) -> None:
        """Import the function (the user's in a child) and match its parameters. Raises ConfigError."""
        if self._offered is not None:
            return
        try:
            if self._section.kind == "python":
                description = await self._pool.describe(self.reference)
            else:  # part of argusrl, and cheap to import
                description = signature_of(load_object(self.reference))
        except PoolError as error:
            raise ConfigError(f"reward '{self.name}': {self.reference} cannot be used: {error}") from None
        names, problems = description["parameters"], []
        label = f"reward '{self.name}': {self.reference}"
        missing = [name for name in description["required"] if name not in OFFERED and name not in self._options]
        if missing:
            problems.append(f"{label} needs {', '.join(map(repr, missing))}, which nothing gives")
        surplus = [name for name in self._options if name not in names and not description["takes_any"]]
        if surplus:
            problems.append(f"{label} takes no option {', '.join(map(repr, surplus))}")
        if problems:
            raise ConfigError(problems, f"a reward is given {', '.join(OFFERED)}, and its options")
        takes = OFFERED if description["takes_any"] else tuple(name for name in names if name in OFFERED)
        self._offered = tuple(name for name in takes if name not in self._options)

    async def score(self, item: Scorable) -> float:
        """A finite number. What raises (or answers nonsense) twice is the code's own fault."""
        for last in (False, True):
            try:
                return finite(self.name, await self._value(item))
            except (PoolTimeout, PoolDied) as error:
                raise RewardFailed(self.name, str(error), infrastructure=True) from None
            except PoolRaised as error:
                if last:
                    message = f"{error}\n{error.traceback[-TRACEBACK_CHARACTERS:]}"
                    raise RewardFailed(self.name, message, infrastructure=False) from None
            except RewardFailed:
                if last:
                    raise
        raise AssertionError("unreachable")

    async def _value(self, item: Scorable) -> Any:
        try:
            await self.prepare()
        except ConfigError as error:
            raise RewardFailed(self.name, str(error), infrastructure=False) from None
        assert self._offered is not None
        arguments = {name: getattr(item, name) for name in self._offered} | self._options
        if self._in_place:
            return getattr(rules, self._section.kind)(**arguments)
        return await self._pool.call(self.reference, arguments, self._section.timeout_seconds)

    async def close(self) -> None:
        """The pool is closed by who opened it."""
