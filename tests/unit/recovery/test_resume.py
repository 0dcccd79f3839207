from __future__ import annotations

import time
from pathlib import Path

import pytest

from argusrl.config.load import load_config, read_resolved
from argusrl.errors import ConfigError, CorruptionError, StorageError
from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.recovery.fork import forked
from argusrl.recovery.resume import choose_run, create_run
from argusrl.storage.layout import RunFolder

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.fixture
def config(tmp_path):
    def load(*overrides):
        return load_config(RECIPE, [f"run.root={tmp_path}", "algorithm.num_steps=3", *overrides]).config

    return load


def start(config, steps: int = 0) -> RunFolder:
    """A run of this config with `steps` committed steps (by name, which is all that choosing looks at)."""
    choice = choose_run(config)
    assert choice.action == "new"
    create_run(choice)
    choice.folder.commits.mkdir()
    for step in range(steps + 1):
        choice.folder.commit(step).write_text("{}")
    return choice.folder


def end(folder: RunFolder, **details) -> None:
    verdict = Verdict(outcome="complete", exit_code=0, reason="done", time=time.time(), details=details)
    write_verdict(folder, next_attempt(folder), verdict)


def test_a_new_run_has_the_recipes_name_and_a_pinned_schedule(config):
    choice = choose_run(config())
    assert (choice.action, choice.folder.name) == ("new", "quickstart")
    assert choice.config.optimizer.schedule_steps == 3


def test_an_unfinished_run_goes_on_and_says_where(config):
    folder = start(config(), steps=2)
    choice = choose_run(config())
    assert (choice.action, choice.folder) == ("resume", folder)
    assert "after step 2 of 3" in choice.message


def test_finished_runs_are_followed_by_numbered_ones(config):
    for name in ("quickstart", "quickstart-2", "quickstart-3"):
        folder = start(config(), steps=3)
        assert folder.name == name
        end(folder)


def test_another_recipe_is_refused_with_the_difference(config):
    start(config(), steps=1)
    with pytest.raises(ConfigError) as raised:
        choose_run(config("optimizer.learning_rate=0.5"))
    assert "optimizer.learning_rate: 0.001 → 0.5" in str(raised.value)
    assert "--from" in str(raised.value)


@pytest.mark.parametrize("change", ["cluster.slots=2", "observe.display=plain", "algorithm.num_steps=9"])
def test_what_may_change_is_told_and_allowed(config, change):
    start(config(), steps=1)
    choice = choose_run(config(change))
    assert choice.action == "resume"
    assert change.partition("=")[0] in choice.message
    assert choice.config.optimizer.schedule_steps == 3  # the committed part of the schedule stays what it was


def test_more_steps_continue_a_complete_run(config):
    folder = start(config(), steps=3)
    end(folder)
    choice = choose_run(config("algorithm.num_steps=5"))
    assert (choice.action, choice.folder) == ("resume", folder)


def test_a_run_that_stopped_early_is_finished(config):
    folder = start(config(), steps=2)
    end(folder, stopped_early="accuracy")
    assert choose_run(config()).folder.name == "quickstart-2"


def test_a_recipe_that_never_came_to_a_commit_may_be_mended(config):
    create_run(choose_run(config("data.train_size=1")))
    choice = choose_run(config())
    assert (choice.action, choice.folder.name) == ("new", "quickstart")
    create_run(choice)
    assert read_resolved(choice.folder.config).data.train_size == 2048


def test_an_attempt_that_is_still_starting_keeps_its_config(config):
    create_run(choose_run(config()))
    next_attempt(choose_run(config()).folder)
    with pytest.raises(ConfigError, match=r"data\.train_size"):
        choose_run(config("data.train_size=64"))
    assert choose_run(config()).action == "resume"


def test_lost_commits_are_damage_and_not_a_new_run(config):
    create_run(choose_run(config()))
    folder = choose_run(config()).folder
    folder.checkpoint(2, 1).mkdir(parents=True)
    before = folder.config.read_bytes()
    with pytest.raises(CorruptionError, match="commits"):
        choose_run(config("data.train_size=64"))
    assert folder.config.read_bytes() == before
    assert choose_run(config(), fresh=True).folder.name == "quickstart-2"


def test_a_lost_config_is_damage_where_there_are_commits(config):
    folder = start(config(), steps=2)
    folder.config.unlink()
    with pytest.raises(CorruptionError, match=r"config\.yaml is missing"):
        choose_run(config())
    assert not folder.config.exists()


def test_a_root_that_is_a_file_is_a_storage_error(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        create_run(choose_run(config(f"run.root={tmp_path}/file")))


def test_fresh_starts_over_and_deletes_nothing(config):
    folder = start(config(), steps=1)
    choice = choose_run(config(), fresh=True)
    assert (choice.action, choice.folder.name) == ("new", "quickstart-2")
    assert folder.commit(1).exists()


@pytest.mark.parametrize("origin", ["quickstart", "quickstart@x", "@3", "nothing@1"])
def test_a_fork_needs_a_run_and_a_step(config, origin):
    with pytest.raises(ConfigError, match="--from"):
        forked(config(), origin)
