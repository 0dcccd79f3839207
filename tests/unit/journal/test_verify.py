"""Each invariant is broken in turn; verify must say which."""

import json
import shutil
from dataclasses import replace

import msgspec
import pytest

from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.commits import encode_commit, metrics_line
from argusrl.journal.epochs import claim_epoch
from argusrl.journal.verify import canonical_config_sha256, verify_run
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import append_line
from argusrl.storage.sealed_json import encode_sealed
from argusrl.types import AdapterRef, EpisodeFailure, TrajectoryKey


@pytest.fixture
def healthy(builder):
    for _ in range(3):
        builder.step()
    assert verify_run(builder.run) == []
    return builder


def problems(builder):
    found = verify_run(builder.run)
    assert found, "verify found nothing"
    return "\n".join(found)


def commit_as_is(builder, commit):
    """Commit without the checks a driver makes, so that only verify can object."""
    written = builder.chain.append(commit)
    append_line(builder.run.metrics, metrics_line(written))


def test_a_run_without_a_step_is_healthy(builder):
    assert verify_run(builder.run) == []


def test_several_drivers_leftovers_and_open_steps_are_healthy(healthy):
    healthy.play(healthy.journal(4, "dead"), "p0", 0)
    healthy.reopen()
    healthy.step()
    healthy.play(healthy.journal(5, "open"), "p0", 0)
    assert verify_run(healthy.run) == []


def test_a_missing_run(tmp_path):
    assert "does not exist" in verify_run(RunFolder(tmp_path / "none"))[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"config": {"run": {"seed": 1}}}, "has sha256"),
        ({"format_version": 2}, "format version 2"),
        ({"sha256": "0"}, "has sha256"),
    ],
)
def test_the_config_digest_and_version(healthy, change, expected):
    fields = json.loads(healthy.run.config.read_bytes())
    healthy.run.config.write_text(json.dumps({**fields, **change}))
    assert expected in problems(healthy)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "config: {}"])
def test_a_config_that_is_none(healthy, text):
    healthy.run.config.write_text(text)
    assert "config.yaml is damaged" in problems(healthy)
    healthy.run.config.unlink()
    assert "config.yaml is missing" in problems(healthy)


def test_the_canonical_config_digest_ignores_the_order_of_keys():
    assert canonical_config_sha256({"a": 1, "b": {"c": 2, "d": 3}}) == canonical_config_sha256(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )


def test_an_epoch_under_another_number(healthy):
    claim_epoch(healthy.run)
    healthy.run.epoch(2).rename(healthy.run.epoch(4))
    assert "is the record of epoch 2" in problems(healthy)


def test_a_claim_that_nobody_was_told_of_may_be_lost(healthy):
    claim_epoch(healthy.run)
    claim_epoch(healthy.run)
    healthy.run.epoch(2).unlink()
    assert verify_run(healthy.run) == []


def test_commits_are_of_claimed_epochs(healthy):
    healthy.run.epoch(1).unlink()
    assert "epoch 1, which nobody claimed" in problems(healthy)


def test_commits_are_consecutive(healthy):
    healthy.run.commit(2).unlink()
    assert "commits is not consecutive: [0, 1, 3]" in problems(healthy)


def test_the_hash_chain(healthy):
    forged = msgspec.structs.replace(healthy.chain.read(1), state_digest="forged")
    healthy.run.commit(1).write_bytes(encode_commit(forged))
    assert "hash chain is broken" in problems(healthy)


def test_a_newer_format(healthy):
    newer = msgspec.structs.replace(healthy.head, format_version=2)
    healthy.run.commit(3).write_bytes(encode_commit(newer))
    assert "format version 2" in problems(healthy)


@pytest.mark.parametrize("folder", ["trajectories", "images", "adapters", "checkpoints"])
def test_a_missing_file_of_a_commit(healthy, folder):
    files = [path for path in (healthy.run.path / folder).rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert files
    for path in files:
        path.rename(path.with_name("away"))
        assert path.name in problems(healthy)
        path.with_name("away").rename(path)
    assert verify_run(healthy.run) == []


def test_a_missing_adapter_manifest(healthy):
    (healthy.run.adapter(2, 1) / "manifest.json").unlink()
    assert "manifest.json is missing" in problems(healthy)


def test_a_deletion_needs_its_record(healthy):
    shutil.rmtree(healthy.run.adapter(1, 1))
    assert "v000001.e0001" in problems(healthy)


def test_a_record_for_another_path_excuses_nothing(healthy):
    shutil.rmtree(healthy.run.adapter(1, 1))
    healthy.run.retired.mkdir()
    record = healthy.run.retired / "adapters.v000001.e0001.json"
    record.write_bytes(encode_sealed({"path": "adapters/v000002.e0001"}))
    assert "v000001.e0001" in problems(healthy)
    record.write_bytes(encode_sealed({"path": "adapters/v000001.e0001"}))
    assert verify_run(healthy.run) == []


def test_a_segment_that_is_whole_but_another(healthy):
    shutil.copy(healthy.run.segment(1, "w0", 1), healthy.run.segment(2, "w0", 1))
    text = problems(healthy)
    assert "commit 2 says" in text
    assert "of step 1" in text
    assert "is not at byte" in text


def test_every_trajectory_counts_once_in_its_own_step(healthy):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0)
    commit_as_is(healthy, healthy.commit(4, [journal.seal()], [ref, ref]))
    assert "counts TrajectoryKey(step=4, prompt_id='p0', sample=0) 2 times" in problems(healthy)


def test_a_trajectory_that_finished_cannot_have_failed(healthy):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0)
    failure = EpisodeFailure(key=ref.key, kind="reward", source="f", message="raised")
    commit = healthy.commit(4, [journal.seal()], [ref])
    commit_as_is(healthy, msgspec.structs.replace(commit, failures=(failure,)))
    assert "2 times" in problems(healthy)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key": TrajectoryKey(3, "p0", 0)}, "is not at byte"),
        ({"offset": 1}, "is not at byte"),
        ({"reward": 7.0}, "has reward 0.5, not 7.0"),
        ({"segment": 5}, "names segment 5 of 2"),
    ],
)
def test_what_a_commit_says_of_a_trajectory(healthy, change, expected):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0)
    commit = healthy.commit(4, [journal.seal()], [ref])
    wrong = msgspec.structs.replace(commit.trajectories[0], **change)
    commit_as_is(healthy, msgspec.structs.replace(commit, trajectories=(wrong,)))
    assert expected in problems(healthy)


def test_a_trajectory_of_another_step(healthy):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0)
    sealed = journal.seal()
    healthy.reopen()
    healthy.step()
    commit_as_is(healthy, healthy.commit(5, [sealed], [ref]))
    text = problems(healthy)
    assert "of step 4" in text
    assert "is not at byte" in text


def test_a_trajectory_of_an_older_adapter(healthy):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0, adapter=healthy.chain.read(2).adapter)
    commit_as_is(healthy, healthy.commit(4, [journal.seal()], [ref]))
    assert "was sampled under adapter (2," in problems(healthy)


def test_images_lie_in_segments_of_the_same_commit(healthy):
    journal = healthy.journal(4)
    ref = healthy.play(journal, "p0", 0)
    sealed = journal.seal()
    commit_as_is(healthy, healthy.commit(4, [replace(sealed, segments=sealed.segments[:1])], [ref]))
    assert "an image of turn 0" in problems(healthy)


@pytest.mark.parametrize("field", ["version", "sha256", "file_sha256", "epoch"])
def test_the_adapter_a_commit_names(healthy, field):
    commit = healthy.commit(4, [], [])
    value = 9 if field in ("version", "epoch") else "another"
    adapter: AdapterRef = replace(commit.adapter, **{field: value})
    commit_as_is(healthy, msgspec.structs.replace(commit, adapter=adapter))
    assert f"has {field} " in problems(healthy)


def test_a_checkpoint_of_another_state(healthy):
    healthy.reopen()
    healthy.checkpoint(msgspec.structs.replace(healthy.chain.read(2), state_digest="x"))
    assert "another state digest than commit 2" in problems(healthy)


def test_a_checkpoint_under_another_name(healthy):
    shutil.copytree(healthy.run.checkpoint(1, 1), healthy.run.checkpoint(2, 9))
    assert "is the checkpoint 1 of epoch 1" in problems(healthy)


def test_a_checkpoint_of_another_run(healthy):
    manifest = healthy.run.checkpoint(3, 1) / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    del fields["seal"]
    for change in ({"commit_sha256": "0"}, {"step": 9}, {"step": -1}):
        manifest.write_bytes(encode_sealed({**fields, **change}))
        assert "that is not in this run" in problems(healthy)


def test_metrics_have_each_step_once(healthy):
    lines = healthy.run.metrics.read_bytes().splitlines(keepends=True)
    healthy.run.metrics.write_bytes(lines[0] + lines[0] + lines[2])
    text = problems(healthy)
    assert "2 lines of step 1" in text
    assert "no line of step 2" in text
    healthy.run.metrics.write_bytes(b"".join(lines) + b'{"step": 9}\n')
    assert "step 9, which is not committed" in problems(healthy)


def test_the_newest_line_is_owed_by_a_complete_run_only(healthy):
    lines = healthy.run.metrics.read_bytes().splitlines(keepends=True)
    healthy.run.metrics.write_bytes(b"".join(lines[:2]))
    assert verify_run(healthy.run) == []
    write_verdict(healthy.run, next_attempt(healthy.run), Verdict(outcome="complete", exit_code=0, reason="done"))
    assert "no line of step 3" in problems(healthy)


def test_a_damaged_verdict(healthy):
    attempt = next_attempt(healthy.run)
    write_verdict(healthy.run, attempt, Verdict(outcome="complete", exit_code=0, reason="done"))
    path = healthy.run.attempt(attempt) / "verdict.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert "verdict.json is damaged" in problems(healthy)
