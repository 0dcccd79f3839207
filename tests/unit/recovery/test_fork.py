"""Forks of a run folder that the real journal wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from argusrl.config.load import load_config
from argusrl.errors import ConfigError, CorruptionError
from argusrl.recovery.fork import forked
from argusrl.recovery.resume import choose_run, create_run, read_fork
from fakes.run_folder import RunBuilder

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


@pytest.fixture
def origin(tmp_path):
    """A run `run` with three committed steps."""
    builder = RunBuilder(tmp_path)
    for _ in range(3):
        builder.step()
    return builder


@pytest.fixture
def config(tmp_path):
    def load(*overrides):
        return load_config(RECIPE, [f"run.root={tmp_path}", "run.name=other", *overrides]).config

    return load


def begin(config, fork):
    """What the command does with --from: the folder that it chose, with its first commit."""
    changed, origin = forked(config, fork)
    choice = choose_run(changed, fork=origin)
    if choice.action == "new":
        create_run(choice, origin)
        choice.folder.commits.mkdir()
        choice.folder.commit(0).write_text("{}")
    return choice


@pytest.mark.parametrize("by_path", [False, True])
def test_a_fork_begins_with_the_committed_adapter(origin, config, by_path):
    changed, fork = forked(config(), f"{origin.run.path if by_path else 'run'}@2")
    adapter = origin.chain.read(2).adapter
    assert changed.adapter.initial == origin.run.absolute(adapter.path)
    assert fork == {"run": str(origin.run.path), "step": 2, "adapter_sha256": adapter.sha256}


def test_a_folder_of_that_name_in_the_working_folder_is_not_in_the_way(origin, config, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert forked(config(), "run@1")[1]["run"] == str(origin.run.path)


def test_a_step_that_is_not_committed_is_refused(origin, config):
    with pytest.raises(ConfigError, match="last committed step is 3"):
        forked(config(), "run@4")


def test_an_adapter_that_was_removed_or_damaged_is_refused(origin, config):
    adapter = origin.run.absolute(origin.chain.read(2).adapter.path)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(CorruptionError):
        forked(config(), "run@2")
    shutil.rmtree(adapter)
    with pytest.raises(ConfigError, match="retention"):
        forked(config(), "run@2")


def test_full_parameter_training_has_no_adapter_to_begin_with(origin, config):
    with pytest.raises(ConfigError, match="lora"):
        forked(config("adapter.kind=full"), "run@2")


def test_the_same_command_goes_on_with_an_interrupted_fork(origin, config):
    first = begin(config(), "run@2")
    again = begin(config(), "run@2")
    assert (first.action, again.action, again.folder) == ("new", "resume", first.folder)
    assert read_fork(first.folder)["step"] == 2


@pytest.mark.parametrize(("step", "change"), [(1, ()), (2, ("optimizer.learning_rate=0.5",))])
def test_another_step_or_config_is_another_fork(origin, config, step, change):
    begin(config(), "run@2")
    other = begin(config(*change), f"run@{step}")
    assert (other.action, other.folder.name) == ("new", "other-2")


def test_a_plain_run_passes_forks_of_its_name_by(origin, config):
    plain = choose_run(config())
    create_run(plain)
    plain.folder.commits.mkdir()
    plain.folder.commit(0).write_text("{}")
    assert begin(config(), "run@2").folder.name == "other-2"
    assert (choose_run(config()).action, choose_run(config()).folder) == ("resume", plain.folder)


def test_a_fork_that_never_began_leaves_no_trace_in_a_plain_run(origin, config):
    changed, fork = forked(config(), "run@2")
    create_run(choose_run(changed, fork=fork), fork)
    plain = choose_run(config())
    create_run(plain)
    assert plain.folder.name == "other"
    assert read_fork(plain.folder) is None
