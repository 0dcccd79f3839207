from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from argusrl.environments.base import EnvironmentFailed
from argusrl.errors import EngineError, StorageError
from argusrl.rewards.base import RewardFailed
from argusrl.rollout.engine import Completion
from argusrl.rollout.player import EpisodePlayer, PlaySettings, Sample
from argusrl.types import EpisodeEnd, EpisodeFailure, Message, Prompt, StopReason, Trajectory, TrajectoryKey
from fakes.players import (
    END,
    HANG,
    IMAGE,
    Ask,
    CharacterRenderer,
    LengthScorer,
    Notes,
    ScriptedEngine,
    Walk,
    picture,
    reply,
)

SETTINGS = PlaySettings(
    temperature=1.0,
    max_response_tokens=8,
    max_prompt_tokens=50,
    max_tokens=100,
    max_turns=1,
    adapter_version=3,
    adapter_sha256="abc",
    request_timeout_seconds=5.0,
    episode_timeout_seconds=5.0,
    retries=1,
)
WALK = replace(SETTINGS, max_turns=5)
PROMPT = Prompt(id="p", messages=(picture(0, "how many?"),), answer="yes", info={"row": 1})


def play(engine, *, session=Ask, scorer=None, settings=SETTINGS, samples=3, prompt=PROMPT, notes=None, heard=None):
    player = EpisodePlayer(CharacterRenderer(), session, scorer or LengthScorer())
    tasks = [Sample(key=TrajectoryKey(1, prompt.id, n), seed=100 + n) for n in range(samples)]
    hear = None if heard is None else lambda outcome, patches: heard.append((outcome, patches))
    return asyncio.run(player.play_group(prompt, tasks, 7, engine, notes or Notes(), settings, hear))


def always(text: str, stop: StopReason = StopReason.STOP) -> ScriptedEngine:
    return ScriptedEngine(lambda number, request, seed: reply(text, stop))


def test_siblings_share_one_request_with_their_own_seeds():
    engine = always("yes")
    heard = []
    outcomes = play(engine, heard=heard)
    (request,) = engine.requests
    assert request.seeds == (100, 101, 102)
    assert request.collapsed_ids.count(IMAGE) == 1
    assert request.expanded_ids.count(IMAGE) == 3
    assert (request.temperature, request.max_tokens, request.adapter_version) == (1.0, 8, 3)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 1.0]
    assert all(outcome.end is EpisodeEnd.TERMINATED for outcome in outcomes)
    assert [patches for _, patches in heard] == [4, 4, 4]
    assert outcomes[0].info == {"row": 1, "prompt": "how many?", "environment_reward": 0.0}


def test_turns_append_tokens_and_never_tokenise_again():
    notes = Notes()
    engine = ScriptedEngine(lambda number, request, seed: reply("ab"[number % 2]))
    (outcome,) = play(engine, session=lambda: Walk(3), settings=WALK, samples=1, notes=notes)
    assert isinstance(outcome, Trajectory)
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        reply_ids = outcome.turns[engine.requests.index(earlier)].response_ids
        assert later.collapsed_ids[: len(earlier.collapsed_ids) + len(reply_ids)] == earlier.collapsed_ids + reply_ids
    whole = [token for turn in outcome.turns[:-1] for token in (*turn.prompt_ids, *turn.response_ids)]
    assert [*whole, *outcome.turns[-1].prompt_ids] == list(engine.requests[-1].expanded_ids)
    assert [len(request.images) for request in engine.requests] == [1, 2, 3]
    assert [turn.action for turn in outcome.turns] == ["a", "b", "a"]
    assert (outcome.reward, outcome.end, len(notes.turns)) == (1.0, EpisodeEnd.TERMINATED, 3)


def test_a_reply_that_was_cut_is_closed_for_the_model():
    engine = always("a", StopReason.LENGTH)
    (outcome,) = play(engine, session=lambda: Walk(2), settings=WALK, samples=1)
    assert outcome.turns[1].prompt_ids[:2] == tuple(map(ord, "$\n"))


@pytest.mark.parametrize(
    ("settings", "turns"),
    [(replace(WALK, max_turns=2), 2), (replace(WALK, max_tokens=12), 2)],
)
def test_limits_truncate_and_do_not_terminate(settings, turns):
    (outcome,) = play(always("a"), session=lambda: Walk(9), settings=settings, samples=1)
    assert outcome.end is EpisodeEnd.TRUNCATED
    assert len(outcome.turns) == turns


def test_a_single_reply_that_hit_its_limit_is_truncated():
    assert play(always("yes", StopReason.LENGTH), samples=1)[0].end is EpisodeEnd.TRUNCATED


def test_a_prompt_that_is_too_long_is_refused_without_a_second_try():
    engine = always("yes")
    (outcome,) = play(engine, settings=replace(SETTINGS, max_prompt_tokens=5), samples=1)
    assert (outcome.kind, outcome.infrastructure, engine.requests) == ("refused", False, [])
    assert "12 tokens" in outcome.message


class Failing:
    """Raises `error` the first `times` times it is asked."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.asked = error, times, 0

    def __call__(self, *_: object) -> None:
        self.asked += 1
        if self.asked <= self.times:
            raise self.error


@pytest.mark.parametrize("infrastructure", [True, False])
@pytest.mark.parametrize(("times", "lives"), [(1, True), (2, False)])
def test_an_environment_gets_one_more_try_with_the_same_seed(infrastructure, times, lives):
    failing = Failing(EnvironmentFailed("Walk", "fell over", infrastructure), times)
    engine = always("a")
    (outcome,) = play(engine, session=lambda: Walk(1, failing), settings=WALK, samples=1)
    assert isinstance(outcome, Trajectory) is lives
    if lives:
        assert {request.seeds for request in engine.requests} <= {(100,)}
    else:
        assert (outcome.kind, outcome.source, outcome.infrastructure) == ("environment", "Walk", infrastructure)


@pytest.mark.parametrize(
    ("infrastructure", "retries", "tries"), [(True, 0, 1), (True, 3, 4), (False, 0, 2), (False, 3, 2)]
)
def test_own_code_fails_twice_and_infrastructure_as_often_as_the_recipe_says(infrastructure, retries, tries):
    failing = Failing(EnvironmentFailed("Walk", "fell over", infrastructure), 99)
    closed = Walk.closed
    (outcome,) = play(always("a"), session=lambda: Walk(1, failing), settings=replace(WALK, retries=retries), samples=1)
    assert (outcome.kind, outcome.infrastructure, failing.asked) == ("environment", infrastructure, tries)
    assert Walk.closed - closed == tries  # every session that was opened


def test_a_second_try_starts_over_with_the_same_seed():
    fallen = []

    def fall(verb: str, step: int) -> None:
        if (verb, step) == ("step", 2) and not fallen:
            fallen.append(step)
            raise EnvironmentFailed("Walk", "process died", True)

    heard = []
    engine = always("a")
    (outcome,) = play(engine, session=lambda: Walk(3, fall), settings=WALK, samples=1, heard=heard)
    assert [len(request.images) for request in engine.requests] == [1, 2, 1, 2, 3]
    assert {request.seeds for request in engine.requests} == {(100,)}
    assert len({request.id for request in engine.requests}) == 5
    assert (len(outcome.turns), outcome.reward) == (3, 1.0)
    assert heard == [(outcome, 12)]  # patches of the episode that counts


def test_reply_ids_are_kept_although_their_text_would_give_others():
    odd = Completion(response_ids=(97, END, 98, IMAGE + 1, END), logprobs=(-0.1,) * 5, stop=StopReason.STOP)
    engine = ScriptedEngine(lambda number, request, seed: odd)
    (outcome,) = play(engine, session=lambda: Walk(2), settings=WALK, samples=1)
    assert outcome.text == ("ab", "ab")
    first, second = engine.requests
    assert second.expanded_ids[: len(first.expanded_ids) + 5] == first.expanded_ids + odd.response_ids
    assert [turn.response_ids for turn in outcome.turns] == [odd.response_ids] * 2
    assert outcome.turns[1].prompt_ids[:1] == (ord("\n"),)  # it ended: no end token is added


def test_siblings_part_where_their_replies_do():
    class Together(ScriptedEngine):
        async def sample(self, request):
            for span in [span async for span in super().sample(request)]:
                yield span

    engine = Together(lambda number, request, seed: reply("ab"[seed % 2]))
    outcomes = play(engine, session=lambda: Walk(2), settings=WALK, samples=4)
    assert [request.seeds for request in engine.requests] == [(100, 101, 102, 103), (100, 102), (101, 103)]
    assert [outcome.turns[0].action for outcome in outcomes] == ["a", "b", "a", "b"]


def test_the_room_that_is_left_limits_a_reply():
    engine = always("a")
    play(engine, settings=replace(SETTINGS, max_tokens=15), samples=1)
    assert engine.requests[0].max_tokens == 3  # of 15, the prompt has 12


def test_an_engine_that_forgets_a_seed_has_failed_the_request():
    class Forgetful(ScriptedEngine):
        async def sample(self, request):
            async for span in super().sample(request):
                if request.seeds[span.index] != 101:
                    yield span

    engine = Forgetful(lambda number, request, seed: reply("yes"))
    outcomes = play(engine, settings=replace(SETTINGS, retries=0))
    assert [isinstance(outcome, Trajectory) for outcome in outcomes] == [True, False, True]
    assert (outcomes[1].kind, outcomes[1].message) == (
        "request",
        "request 1/p/0/1 ended without a reply for every seed",
    )


def test_an_environment_that_hangs_meets_the_deadline_of_the_episode():
    class Stuck(Walk):
        async def step(self, reply):
            await asyncio.sleep(3600)

    closed = Stuck.closed
    settings = replace(WALK, episode_timeout_seconds=0.05, retries=1)
    (outcome,) = play(always("a"), session=lambda: Stuck(2), settings=settings, samples=1)
    assert (outcome.kind, outcome.source, outcome.infrastructure) == ("timeout", "episode", True)
    assert "environment.episode_timeout_seconds = 0.05" in outcome.message
    assert Stuck.closed - closed == 2


def test_every_sample_is_heard_of_once_whatever_became_of_it():
    heard = []
    engine = ScriptedEngine(lambda n, request, seed: EngineError("lost") if seed == 102 else reply("yes"))
    outcomes = play(engine, heard=heard)
    assert sorted(outcome.key for outcome, _ in heard) == [outcome.key for outcome in outcomes]
    assert [type(outcome) for outcome in outcomes] == [Trajectory, Trajectory, EpisodeFailure]


def test_a_reward_that_fails_is_a_failure_and_no_zero():
    scorer = LengthScorer(Failing(RewardFailed("judge", "503", True), 99))
    (outcome,) = play(always("yes"), scorer=scorer, samples=1)
    assert (outcome.kind, outcome.source, outcome.message) == ("reward", "judge", "503")
    assert len(scorer.items) == 2  # retries: 1


def test_a_failure_costs_only_its_own_episode():
    scorer = LengthScorer(Failing(RewardFailed("judge", "no", False), 0))
    engine = ScriptedEngine(lambda n, request, seed: EngineError("lost") if seed == 101 and n < 9 else reply("yes"))
    outcomes = play(engine, scorer=scorer, settings=replace(SETTINGS, retries=5))
    assert [isinstance(outcome, Trajectory) for outcome in outcomes] == [True, False, True]
    assert (outcomes[1].kind, outcomes[1].infrastructure) == ("request", True)


def test_a_request_that_hangs_meets_its_deadline_and_is_cancelled():
    engine = ScriptedEngine(lambda n, request, seed: HANG)
    (outcome,) = play(engine, settings=replace(SETTINGS, request_timeout_seconds=0.05, retries=0), samples=1)
    assert (outcome.kind, outcome.source) == ("timeout", "engine")
    assert engine.cancelled == 1


def test_storage_is_nobodys_own_fault():
    class Full(Notes):
        def turn(self, *_: object) -> None:
            raise StorageError("disk full")

    with pytest.raises(StorageError):
        play(always("yes"), notes=Full())


def test_cancelling_leaves_no_task_behind():
    async def run() -> set[asyncio.Task]:
        player = EpisodePlayer(CharacterRenderer(), Ask, LengthScorer())
        engine = ScriptedEngine(lambda n, request, seed: HANG)
        samples = [Sample(key=TrajectoryKey(1, "p", n), seed=n) for n in range(4)]
        group = asyncio.create_task(player.play_group(PROMPT, samples, 7, engine, Notes(), SETTINGS))
        await asyncio.sleep(0.05)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == set()


class Jammed(Walk):
    async def close(self):
        await super().close()
        raise EnvironmentFailed("Walk", "does not close", True)


def test_a_played_episode_counts_although_its_environment_does_not_close():
    engine = always("a")
    (outcome,) = play(engine, session=lambda: Jammed(1), settings=WALK, samples=1)
    assert isinstance(outcome, Trajectory)
    assert len(engine.requests) == 1


def test_cancelling_waits_for_the_engine_and_is_not_lost_in_an_environment_that_does_not_close():
    aborted = []

    class Slow(ScriptedEngine):
        async def sample(self, request):
            try:
                async for span in super().sample(request):
                    yield span
            except asyncio.CancelledError:
                await asyncio.sleep(0.02)
                aborted.append(request.id)
                raise

    async def run() -> set[asyncio.Task]:
        player = EpisodePlayer(CharacterRenderer(), lambda: Jammed(1), LengthScorer())
        engine = Slow(lambda n, request, seed: HANG)
        samples = [Sample(key=TrajectoryKey(1, "p", n), seed=n) for n in range(2)]
        group = asyncio.create_task(player.play_group(PROMPT, samples, 7, engine, Notes(), WALK))
        await asyncio.sleep(0.02)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert len(aborted) == len(engine.requests) == 1  # nothing was played again
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == set()


def test_text_only_prompts_have_no_patches():
    heard = []
    prompt = Prompt(id="t", messages=(Message(role="user", content=("hello",)),))
    play(always("yes"), prompt=prompt, samples=1, heard=heard)
    assert heard[0][1] == 0
    assert not isinstance(heard[0][0], EpisodeFailure)
