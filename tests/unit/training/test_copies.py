import asyncio
import threading
from types import SimpleNamespace

import pytest

from argusrl.config.sections import Config
from argusrl.training.copies import copies_for, copies_sent, copy_best, copy_last, copy_name
from argusrl.training.evaluation_file import BestAdapter
from fakes.run_folder import RunBuilder, memory_folder

VALUES = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}]}


@pytest.fixture
def run():
    with memory_folder() as folder:
        builder = RunBuilder(folder)
        for _ in range(3):
            builder.step()
        asked = []
        copies = SimpleNamespace(copy=lambda *given: asked.append(given))
        yield SimpleNamespace(folder=builder.run, chain=builder.chain, copies=copies, asked=asked)


async def copied(run, loop):
    run.copies = copies_for(run, loop)
    run.copies.copy(run.folder.path / "gone", "gone")
    run.copies._report("copied", "all")
    run.copies._report("copy_failed", "one")
    await copies_sent(run)


def test_a_recipe_without_copies_starts_no_thread(run):
    run.config = Config.model_validate(VALUES)
    assert copies_for(run, None) is None


def test_what_became_of_copies_is_said_in_the_loop_of_the_run(run):
    said = []
    run.config = Config.model_validate({**VALUES, "run": {"copy_to": "s3://bucket/prefix"}})
    run.display = SimpleNamespace(message=lambda text: None)
    run.say = lambda kind, text, warning: said.append((kind, warning, threading.current_thread().name))

    async def work():
        await copied(run, asyncio.get_running_loop())

    asyncio.run(work())
    assert said == [("copied", False, "MainThread"), ("copy_failed", True, "MainThread")]
    assert str(run.copies._to) == "s3://bucket/prefix/run"
    run.copies._report("copied", "after the end")  # hurts nobody


def test_the_best_and_the_last_are_named_by_version_and_digest(run):
    copy_best(run, BestAdapter(step=2, accuracy=0.75))
    copy_last(run)
    best, last = run.chain.read(2), run.chain.read(3)
    pointer = {"step": 2, "accuracy": 0.75, "sha256": best.adapter.sha256, "path": copy_name(best)}
    assert copy_name(best) == f"adapters/v000002-{best.adapter.sha256[:12]}"
    assert run.asked == [
        (run.folder.absolute(best.adapter.path), copy_name(best), pointer),
        (run.folder.absolute(last.adapter.path), copy_name(last)),
    ]


def test_without_an_evaluation_none_is_best(run):
    copy_best(run, BestAdapter())
    assert run.asked == []


def test_without_a_wish_nothing_is_copied(run):
    run.copies = None
    asyncio.run(copies_sent(run))
    copy_best(run, BestAdapter(step=1, accuracy=1.0))
    copy_last(run)
