from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from argusrl.config.sections import RewardSection
from argusrl.rewards import http
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rewards.http import HttpReward
from fakes.reward_service import Service


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.01)
    service = Service()
    yield service
    service.close()


def score_all(section: RewardSection, replies: list[str]) -> list[Any]:
    async def run():
        reward = HttpReward(section)
        items = [Scorable(reply=r, replies=(r,), prompt="?", answer=4, info={"row": 1}) for r in replies]
        try:
            return await asyncio.gather(*map(reward.score, items), return_exceptions=True)
        finally:
            await reward.close()

    return asyncio.run(run())


def section(service: Service, **values) -> RewardSection:
    return RewardSection(**{"kind": "http", "url": service.url, "batch_size": 4, "options": {"model": "m"}, **values})


def test_items_travel_in_batches_and_rewards_come_back_in_order(service: Service) -> None:
    replies = ["a" * length for length in range(10)]
    assert score_all(section(service), replies) == list(range(10))
    assert sorted(len(body["items"]) for body in service.bodies) == [2, 4, 4]
    body = next(body for body in service.bodies if body["items"][0]["reply"] == "")
    assert body["options"] == {"model": "m"}
    assert body["items"][1] == {
        "reply": "a",
        "replies": ["a"],
        "prompt": "?",
        "answer": 4,
        "info": {"row": 1},
        "environment_reward": 0.0,
        "terminated": True,
    }
    assert service.authorizations[0] is None


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_service_that_recovers_is_asked_again(service: Service, status: int) -> None:
    good = service.answer
    service.answer = lambda number, body: (status, "busy") if number < 2 else good(number, body)
    assert score_all(section(service), ["abc"]) == [3.0]
    assert len(service.bodies) == 3


def test_a_service_that_stays_down_is_infrastructure(service: Service) -> None:
    service.answer = lambda *_: (503, "overloaded, come back")
    (failed,) = score_all(section(service, attempts=2, name="judge"), ["abc"])
    assert isinstance(failed, RewardFailed)
    assert failed.source == "judge"
    assert failed.infrastructure
    assert "503: overloaded, come back (2 tries)" in failed.message
    assert len(service.bodies) == 2


def test_no_service_at_all_is_infrastructure(service: Service) -> None:
    service.close()
    (failed,) = score_all(section(service, attempts=2), ["abc"])
    assert failed.infrastructure
    assert "cannot be reached" in failed.message


def test_a_service_that_hangs_meets_the_deadline(service: Service) -> None:
    release = threading.Event()

    def hang(*_):
        release.wait(30)
        return 200, {"rewards": [0]}

    service.answer = hang
    (failed,) = score_all(section(service, attempts=1, timeout_seconds=0.2), ["abc"])
    release.set()
    assert failed.infrastructure
    assert "did not answer in 0.2 s (1 try)" in failed.message


def test_the_token_is_sent_and_never_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret-value")
    service.answer = lambda *_: (403, "token s3cret-value is not welcome")
    (failed,) = score_all(section(service, token="env:JUDGE_TOKEN"), ["abc"])
    assert service.authorizations == ["Bearer s3cret-value"]  # and not asked again: that does not help
    assert failed.infrastructure  # a person can mend it while the run waits
    assert "s3cret" not in repr(failed)
    assert "403: token *** is not welcome" in failed.message


def test_a_refused_item_does_not_take_its_batch_with_it(service: Service) -> None:
    def picky(_, body):
        replies = [item["reply"] for item in body["items"]]
        return (422, f"cannot score {replies}") if "bad" in replies else (200, {"rewards": [1.0] * len(replies)})

    service.answer = picky
    results = score_all(section(service), ["a", "bad", "c", "d"])
    assert [results[0], *results[2:]] == [1.0, 1.0, 1.0]
    assert not results[1].infrastructure
    assert "cannot score ['bad']" in results[1].message


@pytest.mark.parametrize("answer", ["no json", {"scores": [1]}, {"rewards": [1, 2]}, {"rewards": 1}, [1]])
def test_an_answer_of_another_shape_is_shown(service: Service, answer: object) -> None:
    service.answer = lambda *_: (200, answer)
    (failed,) = score_all(section(service), ["abc"])
    assert 'wanted {"rewards": [1 numbers]}' in failed.message


def test_a_reward_that_is_no_number_fails_alone(service: Service) -> None:
    service.answer = lambda *_: (200, '{"rewards": [1.5, null, NaN]}')
    good, none, nan = score_all(section(service, name="judge"), ["a", "b", "c"])
    assert good == 1.5
    assert "answered None" in none.message
    assert "answered nan" in nan.message


def test_a_row_that_is_no_json_fails_before_it_is_sent(service: Service) -> None:
    async def run():
        reward = HttpReward(section(service))
        await reward.score(Scorable(reply="", replies=(), prompt="", answer={1, 2}))

    with pytest.raises(RewardFailed, match="JSON"):
        asyncio.run(run())
    assert service.bodies == []


def test_closing_ends_what_waits(service: Service) -> None:
    async def run():
        reward = HttpReward(section(service))
        waiting = asyncio.create_task(reward.score(Scorable(reply="", replies=(), prompt="", answer=1)))
        await asyncio.sleep(0)
        await reward.close()
        await waiting

    with pytest.raises(RewardFailed, match="closed"):
        asyncio.run(run())
