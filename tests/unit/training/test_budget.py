"""A run with a byte budget prunes before it gives up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import StorageUnusable
from argusrl.journal.usage import total, usage
from argusrl.journal.verify import verify_run
from argusrl.training import budget as budget_module
from argusrl.training.budget import ByteBudget
from argusrl.training.collecting import Collector
from argusrl.training.evaluation_file import BestAdapter
from fakes.run_folder import RunBuilder, memory_folder


@pytest.fixture
def builder():
    with memory_folder() as folder:
        built = RunBuilder(folder)
        for _ in range(6):
            built.step()
        yield built


def run_of(builder: RunBuilder, max_bytes: int | None, *, keep_trajectories: bool = True, step_bytes: int = 100) -> Any:
    said: list[str] = []
    faults: list[Exception] = []

    async def nothing() -> None:
        return None

    return SimpleNamespace(
        staged=nothing,
        workers=SimpleNamespace(ranks=SimpleNamespace(finish_checkpoint=nothing)),
        folder=builder.run,
        chain=builder.chain,
        config=SimpleNamespace(
            run=SimpleNamespace(max_bytes=max_bytes),
            checkpoint=SimpleNamespace(keep_trajectories=keep_trajectories),
            rollout=SimpleNamespace(staleness=0),
        ),
        state=SimpleNamespace(step=6),
        rehearsal=None,
        step_bytes=step_bytes,
        written_bytes=6 * step_bytes,
        say=lambda kind, text, **_: said.append(kind),
        said=said,
        give_up=faults.append,
        faults=faults,
    )


def make_room(run: Any, best: int = 0) -> ByteBudget:
    budget = ByteBudget(run, BestAdapter(step=best), Collector())
    asyncio.run(budget.make_room())
    return budget


def held(builder: RunBuilder) -> int:
    return total(usage(builder.run)).bytes


def names(folder: Any) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_a_budget_nothing_is_measured(builder, monkeypatch):
    monkeypatch.setattr(budget_module, "usage", lambda run: pytest.fail("measured"))
    make_room(run_of(builder, None))


def test_within_the_budget_nothing_goes_and_it_is_measured_once(builder, monkeypatch):
    measured = []
    monkeypatch.setattr(budget_module, "usage", lambda run: measured.append(run) or usage(run))
    run = run_of(builder, held(builder) + 1000)
    budget = make_room(run)
    for _ in range(9):
        run.written_bytes += 100
        asyncio.run(budget.make_room())
    assert (len(measured), run.said) == (1, [])
    run.written_bytes += 100  # now it may be beyond: it is not, so that it is measured anew and nothing goes
    asyncio.run(budget.make_room())
    assert (len(measured), run.said) == (2, [])


def test_beyond_it_all_goes_that_a_restart_does_not_need(builder):
    run = run_of(builder, held(builder))
    make_room(run, best=3)
    assert run.said == ["pruned"]
    assert names(builder.run.checkpoints) == ["000006.e0001"]
    assert names(builder.run.adapters) == ["v000000.e0001", "v000003.e0001", "v000006.e0001"]
    assert len(names(builder.run.path / "trajectories")) == 6
    assert verify_run(builder.run) == []
    assert run.faults == []


def test_trajectories_go_where_the_recipe_lets_them(builder):
    run = run_of(builder, held(builder) - 5000, keep_trajectories=False)
    with pytest.raises(StorageUnusable):
        make_room(run_of(builder, 100))
    make_room(run)
    assert names(builder.run.path / "trajectories") == []
    assert verify_run(builder.run) == []


def test_a_checkpoint_under_way_is_waited_for_before_it_is_given_up(builder):
    """Once it is durable, the one before it may go."""
    limit = held(builder)
    newest = builder.run.checkpoint(6, 1)
    hidden = newest.rename(newest.with_name(f".{newest.name}.1-ab.tmp"))

    async def land() -> None:
        hidden.rename(newest)

    needed = sum(path.stat().st_size for path in newest.with_name("000005.e0001").iterdir())
    probe = run_of(builder, limit)
    make_room(probe)  # all that may go without it has gone
    run = run_of(builder, held(builder) + 100 - needed)
    run.workers.ranks.finish_checkpoint = land
    make_room(run)
    assert names(builder.run.checkpoints) == ["000006.e0001"]
    assert run.faults == []


def test_what_does_not_fit_all_the_same_ends_the_run_with_the_figures(builder):
    run = run_of(builder, 1 << 20, step_bytes=2 << 20)
    with pytest.raises(StorageUnusable) as caught:
        make_room(run)
    assert run.faults == [caught.value], "waiting or healing would be of no use"
    assert "the next step writes about 2 MiB, and run.max_bytes is 1 MiB" in caught.value.message
    assert "keep_trajectories: false" in caught.value.hint
    with pytest.raises(StorageUnusable) as caught:
        make_room(run_of(builder, 100, keep_trajectories=False))
    assert "keep_trajectories" not in caught.value.hint
