"""Rewards from a service: POST {"items": [...], "options": {...}} is answered by {"rewards": [...]}, in order.

An item holds the fields of a Scorable. Items that come up within a moment travel together. Connection errors,
timeouts, 429 and 5xx are tried again after growing pauses; another 4xx is shown with its body, after the batch was
halved down to the item that the service refuses.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from argusrl.config.secrets import resolve_secret
from argusrl.config.sections import RewardSection
from argusrl.errors import ConfigError
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rewards.pooled import finite

if TYPE_CHECKING:
    import httpx

WAIT_SECONDS = 0.02  # an item waits this long for company
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SHOWN_CHARACTERS = 500  # of a refusal's body
_CLOSED = "was closed before the service answered"
ABOUT_THE_ITEMS = (400, 413, 422)  # other 4xx are about the service: it may be mended while the run waits


@dataclass(slots=True)
class _Waiting:
    item: dict[str, Any]
    reward: asyncio.Future[float]


class HttpReward:
    """A reward service. To be used from one event loop."""

    def __init__(self, section: RewardSection) -> None:
        self.name, self.weight = section.name or section.kind, section.weight
        self._section = section
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._posting: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None

    async def prepare(self) -> None:
        """Look the token up. Raises ConfigError."""
        self._token()

    async def score(self, item: Scorable) -> float:
        """The service's reward for one item. Raises RewardFailed."""
        fields = asdict(item)
        try:
            json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardFailed(self.name, f"the row cannot be sent as JSON: {error}", infrastructure=False) from None
        loop = asyncio.get_running_loop()
        waiting = _Waiting(fields, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._section.batch_size:
            self._post_waiting()
        elif self._timer is None:
            self._timer = loop.call_later(WAIT_SECONDS, self._post_waiting)
        return await waiting.reward

    async def close(self) -> None:
        """Cancel what is under way and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        self._fail(self._waiting, _CLOSED, infrastructure=True)
        for task in self._posting:
            task.cancel()
        await asyncio.gather(*self._posting, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def _post_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        batch, self._waiting = [w for w in self._waiting if not w.reward.done()], []
        if batch:
            task = asyncio.ensure_future(self._settle(batch))
            self._posting.add(task)
            task.add_done_callback(self._posting.discard)

    async def _settle(self, batch: list[_Waiting]) -> None:
        """Give every future of the batch its reward or its failure."""
        try:
            rewards = await self._post_with_retries([waiting.item for waiting in batch])
        except _Refused as refused:
            if len(batch) > 1:
                half = len(batch) // 2
                await asyncio.gather(self._settle(batch[:half]), self._settle(batch[half:]))
            else:
                self._fail(batch, str(refused), infrastructure=False)
        except RewardFailed as failed:
            self._fail(batch, failed.message, failed.infrastructure)
        except asyncio.CancelledError:
            self._fail(batch, _CLOSED, infrastructure=True)
            raise
        else:
            for waiting, reward in zip(batch, rewards, strict=True):
                if waiting.reward.done():
                    continue
                try:
                    waiting.reward.set_result(finite(self.name, reward))
                except RewardFailed as failed:
                    waiting.reward.set_exception(failed)

    def _fail(self, batch: list[_Waiting], message: str, infrastructure: bool) -> None:
        for waiting in batch:
            if not waiting.reward.done():
                waiting.reward.set_exception(RewardFailed(self.name, message, infrastructure))

    async def _post_with_retries(self, items: list[dict[str, Any]]) -> list[Any]:
        attempts = self._section.attempts
        for attempt in range(attempts):
            if attempt > 0:
                longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
                # Jitter: many workers that failed together must not come back together.
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))
            try:
                return await self._post(items)
            except _Unavailable as unavailable:
                problem = str(unavailable)
        tries = "1 try" if attempts == 1 else f"{attempts} tries"
        raise RewardFailed(self.name, f"{problem} ({tries})", infrastructure=True)

    async def _post(self, items: list[dict[str, Any]]) -> list[Any]:
        import httpx

        try:
            token = self._token()
        except ConfigError as error:
            raise RewardFailed(self.name, str(error), infrastructure=True) from None
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)  # the deadline below is for the whole exchange
        url, body = self._section.url or "", {"items": items, "options": self._section.options}
        try:
            async with asyncio.timeout(self._section.timeout_seconds):
                response = await self._client.post(
                    url, json=body, headers={"Authorization": f"Bearer {token}"} if token else {}
                )
        except TimeoutError:
            raise _Unavailable(f"{_shown_url(url)} did not answer in {self._section.timeout_seconds:g} s") from None
        except httpx.HTTPError as error:
            reason = _without(token, str(error) or type(error).__name__)
            raise _Unavailable(f"{_shown_url(url)} cannot be reached: {reason}") from None
        text = f"{_shown_url(url)} answered {response.status_code}"
        detail = _without(token, response.text)[:SHOWN_CHARACTERS].strip()
        text += f": {detail}" if detail else ""
        if response.status_code == 429 or response.status_code >= 500:
            raise _Unavailable(text)
        if response.status_code in ABOUT_THE_ITEMS:
            raise _Refused(text)
        if not response.is_success:
            raise RewardFailed(self.name, text, infrastructure=True)
        try:
            rewards = response.json()["rewards"]
        except (ValueError, KeyError, TypeError):
            rewards = None
        if not isinstance(rewards, list) or len(rewards) != len(items):
            wanted = f'wanted {{"rewards": [{len(items)} numbers]}}'
            raise RewardFailed(self.name, f"{wanted}, but {text}", infrastructure=True)
        return rewards

    def _token(self) -> str:
        return resolve_secret(self._section.token) if self._section.token else ""


class _Unavailable(Exception):
    """The same request may be answered later."""


class _Refused(Exception):
    """The service does not want these items."""


def _shown_url(url: str) -> str:
    """Without user, password and query, which may be secrets."""
    import httpx

    return str(httpx.URL(url).copy_with(userinfo=b"", query=None))


def _without(secret: str, text: str) -> str:
    return text.replace(secret, "***") if secret else text
