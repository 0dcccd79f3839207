"""With rollout.staleness the next step is sampled while this one is trained: which adapter, and what faults leave."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from argusrl.errors import Interrupted
from argusrl.training import run as run_module
from argusrl.training.run import Run, RunState, Serving
from argusrl.types import AdapterRef

PROMPTS = 2


def adapter(version: int, epoch: int = 1) -> AdapterRef:
    return AdapterRef(version=version, epoch=epoch, path="", sha256=f"{version}.{epoch}", file_sha256="")


def commit(step: int) -> Any:
    return SimpleNamespace(step=step, adapter=adapter(step), algorithm_state={"canary_logprobs": [float(step)]})


class FakeRollout:
    """Remembers what it was begun with, and ends at once unless `gate` is closed."""

    gate: asyncio.Event

    def __init__(self, **options: Any) -> None:
        self.adapter, self.abandoned = options["settings"], False
        self.begin: Callable[..., None] = lambda indices, ids, adopted: setattr(self, "indices", list(indices))

    async def end(self) -> FakeRollout:
        await self.gate.wait()
        return self

    def abandon(self) -> None:
        self.abandoned = True


class FakeEpisodes:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin(self) -> None:
        self.calls.append("begin")

    async def seal(self) -> None:
        self.calls.append("seal")

    async def adopt(self, sha256: str, _: Any) -> list[Any]:
        self.calls.append(f"adopt {sha256}")
        leftovers = SimpleNamespace(trajectories=(), damaged=(), foreign=0)
        return [SimpleNamespace(leftovers=leftovers, rows={}, unfinished=0)]


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run after `step` committed steps of `steps`."""
    monkeypatch.setattr(run_module, "Rollout", FakeRollout)
    monkeypatch.setattr(run_module, "settings_for", lambda _, reference: reference)
    monkeypatch.setattr(run_module, "quarantined", lambda *_: [])

    def make(*, staleness: int, step: int = 0, steps: int = 9) -> Run:
        FakeRollout.gate = asyncio.Event()
        FakeRollout.gate.set()
        algorithm = SimpleNamespace(prompts_per_step=PROMPTS, num_steps=steps, group_size=1)
        config: Any = SimpleNamespace(rollout=SimpleNamespace(staleness=staleness), algorithm=algorithm)
        position = SimpleNamespace(epoch=1, step=step, ahead=0)

        async def progress() -> dict[Any, Any]:
            return {}

        engines = SimpleNamespace(members=[0], progress=progress)
        workers = SimpleNamespace(episodes=FakeEpisodes(), engines=engines, position=position)
        given: dict[str, Any] = {
            "config": config,
            "workers": workers,
            "chain": SimpleNamespace(read=commit, adapter=adapter),
            "order": SimpleNamespace(take=lambda at, count: range(at, at + count)),
            "display": SimpleNamespace(phase=lambda _: None),
            "on_phase": lambda _: None,
        }
        required = [one.name for one in dataclasses.fields(Run) if one.default is one.default_factory]  # both missing
        run = Run(**(dict.fromkeys(required) | given))
        run.state = RunState(step=step, adapter=adapter(step), prompt_position=PROMPTS * step)
        return run

    return make


async def play(run: Run, step: int) -> Any:
    """The rollout of a step, as run_step asks for it, and its commit."""
    run.workers.position.step, run.workers.position.ahead = step, 0
    result: Any = await run.rollout(step)
    return result


def committed(run: Run, step: int) -> None:
    run.state = RunState(step=step, adapter=adapter(step), prompt_position=PROMPTS * step)


def calls(run: Run) -> list[str]:
    return cast(Any, run.workers.episodes).calls


@pytest.mark.parametrize(("staleness", "sampled"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_each_step_has_its_own_prompts_and_the_adapter_of_its_place(
    run_of: Callable[..., Run], staleness: int, sampled: list[int]
) -> None:
    async def work() -> None:
        run = run_of(staleness=staleness, steps=4)
        for step in range(1, 5):
            result = await play(run, step)
            assert result.indices == [PROMPTS * (step - 1), PROMPTS * (step - 1) + 1]
            assert result.adapter == adapter(sampled[step - 1])
            assert (run.ahead is not None) == (staleness == 1 and step < 4)
            assert run.workers.position.ahead == (1 if run.ahead else 0)
            committed(run, step)

    asyncio.run(work())


@pytest.mark.parametrize(("staleness", "adopting"), [(0, ["3.1"]), (1, ["2.1", "3.1"])])
def test_leftovers_are_looked_for_in_the_steps_that_were_open(
    run_of: Callable[..., Run], staleness: int, adopting: list[str]
) -> None:
    async def work() -> None:
        run = run_of(staleness=staleness, step=3)
        for step in (4, 5, 6):
            await play(run, step)
            committed(run, step)
        assert [call for call in calls(run) if call.startswith("adopt")] == [f"adopt {sha256}" for sha256 in adopting]

    asyncio.run(work())


def test_a_stop_while_ahead_seals_what_is_ahead(run_of: Callable[..., Run]) -> None:
    async def work() -> None:
        run = run_of(staleness=1)
        await play(run, 1)
        committed(run, 1)
        FakeRollout.gate.clear()
        begun: Any = run.ahead
        run.stop.set()
        with pytest.raises(Interrupted):
            await play(run, 2)
        assert calls(run)[-1] == "seal"
        assert begun is not None

    asyncio.run(work())


def test_what_is_ahead_is_let_go_of_with_the_step(run_of: Callable[..., Run]) -> None:
    async def work() -> None:
        run = run_of(staleness=1)
        await play(run, 1)
        begun: Any = run.ahead
        run.abandon_ahead()
        assert (begun.abandoned, run.ahead) == (True, None)

    asyncio.run(work())


@pytest.mark.parametrize(("staleness", "served"), [(0, [3]), (1, [2, 3])])
def test_after_a_fault_engines_serve_what_the_next_step_is_sampled_under(
    run_of: Callable[..., Run], staleness: int, served: list[int]
) -> None:
    async def work() -> None:
        run = run_of(staleness=staleness, step=3)
        run.serving = (Serving(adapter(3), [3.0]), Serving(adapter(4), [4.0]))  # the second was never committed
        for one in (*run.served_before(commit(3)), Serving(adapter(3), [3.0])):
            run.serve_too(one)
        assert run.serving == tuple(Serving(adapter(version), [float(version)]) for version in served)
        assert run.served_before(commit(0)) == []

    asyncio.run(work())
