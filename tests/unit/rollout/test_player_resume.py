"""Episodes that are interrupted and go on: the journal is the real one, the clock is not."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from argusrl.environments.base import EnvironmentFailed, StepResult
from argusrl.errors import EngineError
from argusrl.journal.episodes import EpisodeJournal, read_trajectory
from argusrl.rollout.engine import Span
from argusrl.rollout.player import EpisodePlayer, PlaySettings, Sample
from argusrl.storage.layout import RunFolder
from argusrl.types import EpisodeFailure, Prompt, StopReason, Trajectory, TrajectoryKey, Unfinished
from fakes.players import (
    END,
    Ask,
    CharacterRenderer,
    ImpatientLoop,
    LengthScorer,
    NoiseEngine,
    Notes,
    ScriptedEngine,
    Walk,
    picture,
    reply,
)
from fakes.run_folder import memory_folder

ADAPTER = "abc"
ONE_TURN = PlaySettings(
    temperature=1.0,
    max_response_tokens=12,
    max_prompt_tokens=50,
    max_tokens=60,
    max_turns=1,
    adapter_version=3,
    adapter_sha256=ADAPTER,
    request_timeout_seconds=50.0,
    episode_timeout_seconds=50.0,
    retries=1,
    partial_seconds=0.025,  # of the clock of NoiseEngine, which takes 0.01 a token
)
TURNS = replace(ONE_TURN, max_turns=5)
PROMPT = Prompt(id="p", messages=(picture(0, "how many?"),))
KEYS = [TrajectoryKey(1, "p", number) for number in range(4)]
GAMES = pytest.mark.parametrize(
    ("session", "settings"), [(Ask, ONE_TURN), (lambda: Walk(3), TURNS)], ids=["one turn", "turns"]
)


def run(work):
    with asyncio.Runner(loop_factory=ImpatientLoop) as runner:
        return runner.run(work)


async def play(session, settings, engine, recorder, unfinished, keys=KEYS, on_end=None, on_restart=None):
    player = EpisodePlayer(CharacterRenderer(), session, LengthScorer())
    samples = [Sample(key=key, seed=100 + key.sample, unfinished=unfinished.get(key)) for key in keys]
    return await player.play_group(PROMPT, samples, 7, engine, recorder, settings, on_end, on_restart)


def whole(session, settings) -> dict[TrajectoryKey, Trajectory]:
    """The same episodes, undisturbed."""
    outcomes = run(play(session, settings, NoiseEngine(), Notes(), {}))
    return {outcome.key: outcome for outcome in outcomes}


def content(trajectory: Trajectory):
    """Everything but where images lie and how long it took."""
    turns = [replace(turn, images=tuple(image.sha256 for image in turn.images)) for turn in trajectory.turns]
    return replace(trajectory, turns=turns, seconds=0.0)


def begin(journal: EpisodeJournal, keys) -> None:
    for key in keys:
        journal.started(key, attempt=0, seed=key.sample, adapter_version=3, adapter_sha256=ADAPTER, environment={})


def interrupted(session, settings, folder: RunFolder, epoch: int, seconds: float, restarts=None) -> bool:
    """Adopt, go on, and die after `seconds`. True once there is nothing left to do."""
    journal = EpisodeJournal(folder, 1, epoch, "w0")
    leftovers = journal.adopt(ADAPTER)
    done = {ref.key for ref in leftovers.trajectories}
    keys = [key for key in KEYS if key not in done]
    begin(journal, keys)

    def on_end(outcome, patches) -> None:
        assert isinstance(outcome, Trajectory)
        journal.finished(outcome, image_patches=patches)

    async def work() -> None:
        on_restart = None if restarts is None else lambda key, reason: restarts.append(reason)
        game = play(session, settings, NoiseEngine(), journal, leftovers.unfinished, keys, on_end, on_restart)
        task = asyncio.create_task(game)
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work())
    journal.abandon()
    return not keys


@GAMES
@pytest.mark.parametrize("seed", range(25))
def test_episodes_that_are_killed_at_any_moment_end_as_if_nothing_had_happened(session, settings, seed):
    draws = random.Random(seed)
    restarts = []
    with memory_folder() as root:
        folder = RunFolder(root)
        for epoch in range(1, 200):
            if interrupted(session, settings, folder, epoch, draws.uniform(0.0, 0.08), restarts):
                break
            if draws.random() < 0.3:  # the machine died, too: the end of the segment never reached the disk
                path = folder.segment(1, "w0", epoch)
                path.write_bytes(path.read_bytes()[: -draws.randrange(1, 200)])
        journal = EpisodeJournal(folder, 1, epoch + 1, "reader")
        adopted = {ref.key: read_trajectory(folder, ref) for ref in journal.adopt(ADAPTER).trajectories}
    expected = whole(session, settings)
    assert epoch > 2
    assert restarts == []
    assert {key: content(one) for key, one in adopted.items()} == {key: content(one) for key, one in expected.items()}


@GAMES
def test_a_killed_episode_asks_only_for_the_tokens_it_does_not_have(session, settings):
    with memory_folder() as root:
        folder = RunFolder(root)
        interrupted(session, settings, folder, 1, 0.08)
        journal = EpisodeJournal(folder, 1, 2, "w0")
        leftovers = journal.adopt(ADAPTER)
        assert len(leftovers.unfinished) + len(leftovers.trajectories) == len(KEYS)
        engine = NoiseEngine()
        outcomes = run(play(session, settings, engine, Notes(), leftovers.unfinished, list(leftovers.unfinished)))
        known = sum(
            len(one.ids) + sum(len(turn.response_ids) for turn in one.turns) for one in leftovers.unfinished.values()
        )
        assert known > 0
        open_ones = {100 + key.sample: one for key, one in leftovers.unfinished.items() if one.ids}
        assert open_ones
        for seed, one in open_ones.items():
            request = next(request for request in engine.requests if seed in request.seeds)
            assert request.expanded_ids[-len(one.ids) :] == one.ids
            assert request.collapsed_ids[-len(one.ids) :] == one.ids
            assert request.max_tokens == settings.max_response_tokens - len(one.ids)
            assert len(request.seeds) == 1
    expected = whole(session, settings)
    assert [content(one) for one in outcomes] == [content(expected[one.key]) for one in outcomes]


@GAMES
def test_a_second_kill_right_after_the_first_loses_nothing_either(session, settings):
    with memory_folder() as root:
        folder = RunFolder(root)
        interrupted(session, settings, folder, 1, 0.08)
        first = EpisodeJournal(folder, 1, 2, "w0").adopt(ADAPTER).unfinished
        interrupted(session, settings, folder, 3, 0.0)  # replayed, and not a token more
        again = EpisodeJournal(folder, 1, 4, "w0").adopt(ADAPTER).unfinished
    assert first
    assert {key: one.ids for key, one in again.items()} == {key: one.ids for key, one in first.items()}
    assert {key: len(one.turns) for key, one in again.items()} == {key: len(one.turns) for key, one in first.items()}


# ---- partial records


def test_partials_follow_each_other_and_hold_what_was_there():
    notes = Notes()
    outcomes = run(play(Ask, ONE_TURN, NoiseEngine(), notes, {}))
    for outcome in outcomes:
        mine = [(offset, ids) for key, index, offset, ids in notes.partials if (key, index) == (outcome.key, 0)]
        ids = outcome.turns[0].response_ids
        together = [token for _, part in mine for token in part]
        assert [offset for offset, _ in mine] == [sum(len(part) for _, part in mine[:n]) for n in range(len(mine))]
        assert together == list(ids[: len(together)])
        assert len(ids) - 3 <= len(together) < len(ids)  # what the last moments brought is in the turn alone
    assert max(len(outcome.turns[0].response_ids) for outcome in outcomes) > 6


def test_a_reply_that_is_done_before_the_first_record_has_none():
    notes = Notes()
    run(play(Ask, replace(ONE_TURN, partial_seconds=1.0), NoiseEngine(), notes, {}))
    assert notes.partials == []


def test_without_new_tokens_there_is_no_record():
    notes = Notes()
    outcomes = run(play(Ask, ONE_TURN, NoiseEngine(seconds=0.2), notes, {}))
    assert len(notes.partials) <= sum(len(outcome.turns[0].response_ids) for outcome in outcomes)


def test_a_retry_begins_its_partials_anew():
    class FailsOnce(NoiseEngine):
        async def sample(self, request):
            count = 0
            async for span in super().sample(request):
                count += 1
                if len(self.requests) == 1 and count > 5:
                    raise EngineError("lost")
                yield span

    notes = Notes()
    (outcome,) = run(play(Ask, ONE_TURN, FailsOnce(), notes, {}, KEYS[:1]))
    assert content(outcome) == content(whole(Ask, ONE_TURN)[KEYS[0]])
    assert [offset for _, _, offset, _ in notes.partials].count(0) == 2


def test_a_player_that_is_stopped_records_every_token_it_has():
    async def stop_after(seconds):
        playing = asyncio.create_task(play(Ask, replace(ONE_TURN, partial_seconds=10.0), NoiseEngine(), notes, {}))
        await asyncio.sleep(seconds)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    notes = Notes()
    run(stop_after(0.035))
    whole_ones = whole(Ask, ONE_TURN)
    kept = {key: tuple(ids) for key, _, offset, ids in notes.partials if offset == 0}
    assert kept
    for key, outcome in whole_ones.items():
        ids = outcome.turns[0].response_ids
        assert len(ids) <= 3 or kept[key] == ids[:3]


# ---- replies that had ended


@pytest.mark.parametrize("stop", [StopReason.STOP, StopReason.LENGTH])
def test_an_open_reply_that_is_complete_asks_for_nothing(stop):
    ids = (*map(ord, "ab"), END) if stop is StopReason.STOP else (ord("a"),) * ONE_TURN.max_response_tokens
    notes, engine = Notes(), NoiseEngine()
    unfinished = Unfinished(turns=(), ids=ids, logprobs=(-0.5,) * len(ids))
    (outcome,) = run(play(Ask, ONE_TURN, engine, notes, {KEYS[0]: unfinished}, KEYS[:1]))
    assert engine.requests == []
    assert (outcome.turns[0].response_ids, outcome.turns[0].stop) == (ids, stop)
    assert [(offset, tuple(part)) for _, _, offset, part in notes.partials] == [(0, ids)]


def test_an_episode_whose_last_turn_is_journalled_only_needs_its_reward():
    expected = whole(lambda: Walk(3), TURNS)[KEYS[0]]
    engine, notes = NoiseEngine(), Notes()
    unfinished = {KEYS[0]: Unfinished(turns=expected.turns)}
    (outcome,) = run(play(lambda: Walk(3), TURNS, engine, notes, unfinished, KEYS[:1]))
    assert engine.requests == []
    assert content(outcome) == content(expected)
    assert [index for _, index, _ in notes.turns] == [0, 1, 2]


# ---- environments that do not come back to the same place


class Elsewhere(Walk):
    """Understands or shows something else in its second step."""

    def __init__(self, change) -> None:
        super().__init__(3)
        self.change = change

    async def step(self, reply: str) -> StepResult:
        result = await super().step(reply)
        return self.change(result) if self.steps == 2 else result


def fails(result):
    raise EnvironmentFailed("Walk", "fell over", True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda result: replace(result, action="other"), "understood as 'other'"),
        (lambda result: replace(result, messages=(picture(9),)), "other images before turn 2"),
        (lambda result: replace(result, messages=(picture(2, "hm"),)), "messages before turn 2"),
        (lambda result: replace(result, terminated=True), "ended after 2 turns"),
        (fails, "fell over"),
    ],
)
def test_an_episode_that_cannot_be_replayed_starts_whole_and_says_so(change, reason):
    expected = whole(lambda: Walk(3), TURNS)[KEYS[0]]
    sessions = iter([Elsewhere(change), Walk(3)])
    restarts, engine = [], NoiseEngine()
    work = play(
        lambda: next(sessions),
        replace(TURNS, retries=0),  # a restart is no retry
        engine,
        Notes(),
        {KEYS[0]: Unfinished(turns=expected.turns)},
        KEYS[:1],
        on_restart=lambda key, why: restarts.append((key, why)),
    )
    (outcome,) = run(work)
    assert content(outcome) == content(expected)
    assert len(engine.requests) == 3
    assert [key for key, _ in restarts] == KEYS[:1]
    assert reason in restarts[0][1]


def test_an_open_reply_is_not_continued_after_other_messages():
    unfinished = Unfinished(turns=(), ids=(ord("a"),), logprobs=(-0.5,), place="another place")
    restarts = []
    work = play(
        Ask,
        ONE_TURN,
        NoiseEngine(),
        Notes(),
        {KEYS[0]: unfinished},
        KEYS[:1],
        on_restart=lambda key, why: restarts.append(why),
    )
    (outcome,) = run(work)
    assert content(outcome) == content(whole(Ask, ONE_TURN)[KEYS[0]])
    assert restarts == ["the open reply followed other messages"]


def test_after_the_replay_a_failure_counts_as_ever():
    expected = whole(lambda: Walk(3), TURNS)[KEYS[0]]
    engine = ScriptedEngine(lambda number, request, seed: EngineError("lost") if number < 2 else reply("a"))
    restarts = []
    unfinished = {KEYS[0]: Unfinished(turns=expected.turns[:1])}
    work = play(
        lambda: Walk(3),
        TURNS,
        engine,
        Notes(),
        unfinished,
        KEYS[:1],
        on_restart=lambda key, why: restarts.append(why),
    )
    (outcome,) = run(work)
    assert isinstance(outcome, EpisodeFailure)  # retries: 1
    assert (outcome.kind, restarts) == ("request", [])
    assert [len(request.images) for request in engine.requests] == [2, 1]  # went on, then anew


def test_a_sibling_that_was_given_up_is_not_sampled_to_its_end():
    """One reply of a shared request ran past its deadline: once the others are done, nothing is sampled for it."""

    class Stuck(NoiseEngine):
        closed = 0

        async def sample(self, request):
            try:
                for index in range(len(request.seeds) - 1):
                    yield Span(index=index, ids=(END,), logprobs=(-0.5,), stop=StopReason.STOP)
                await asyncio.sleep(3600)
            finally:
                type(self).closed += 1

    settings = replace(ONE_TURN, retries=0, request_timeout_seconds=1.0)
    outcomes = run(play(Ask, settings, Stuck(), Notes(), {}))
    assert [isinstance(outcome, Trajectory) for outcome in outcomes] == [True, True, True, False]
    assert Stuck.closed == 1
