import shutil

import pytest

from argusrl.journal import retention
from argusrl.journal.commits import Commit, rebuild_metrics
from argusrl.journal.retention import collect_garbage, durable_checkpoints, is_retired, sweep_temporaries
from argusrl.journal.verify import verify_run
from argusrl.storage.publish import append_line
from fakes.run_folder import publish_adapter


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def collect(builder, **options):
    options = {"keep_checkpoints": 2, "keep_adapters": 2, **options}
    return collect_garbage(builder.run, builder.chain, **options)


@pytest.fixture
def five(builder):
    for _ in range(5):
        builder.step()
    return builder


def test_the_newest_stay_and_the_run_stays_healthy(five):
    collected = collect(five)
    assert names(five.run.checkpoints) == ["000004.e0001", "000005.e0001"]
    assert names(five.run.adapters) == ["v000004.e0001", "v000005.e0001"]
    assert names(five.run.path / "trajectories") == [f"{step:06d}" for step in range(1, 6)]
    assert len(collected.retired) == 7
    assert collected.garbage == []
    assert all(is_retired(five.run, path) for path in collected.retired)
    assert verify_run(five.run) == []
    assert collect(five).retired == []


def test_the_best_adapter_is_protected(five):
    collect(five, protected_versions={2})
    assert names(five.run.adapters) == ["v000002.e0001", "v000004.e0001", "v000005.e0001"]


def test_adapters_from_the_oldest_kept_checkpoint_on_stay(five):
    collect(five, keep_checkpoints=4, keep_adapters=1)
    assert names(five.run.adapters) == [f"v{version:06d}.e0001" for version in range(2, 6)]


def test_trajectories_go_only_before_the_oldest_kept_checkpoint(five):
    collect(five, keep_trajectories=False)
    assert names(five.run.path / "trajectories") == names(five.run.path / "images") == ["000005"]
    assert verify_run(five.run) == []


def test_without_a_checkpoint_nothing_is_retired(builder):
    for _ in range(4):
        builder.step(checkpoint=False)
    assert collect(builder, keep_trajectories=False).retired == []
    assert len(names(builder.run.adapters)) == 5


def test_a_skipped_step_keeps_the_adapter_it_goes_on_with(five):
    for step in (6, 7, 8):
        commit = Commit(
            step=step,
            epoch=1,
            outcome="skipped",
            adapter=five.head.adapter,
            state_digest=five.head.state_digest,
        )
        five.checkpoint(five.chain.append(commit))
    rebuild_metrics(five.run)
    collect(five, keep_adapters=1)
    assert names(five.run.adapters) == ["v000005.e0001"]
    assert verify_run(five.run) == []


def test_garbage_goes_once_its_step_is_committed(builder):
    old = builder.journal(1, "dead")
    builder.play(old, "p0", 0)
    old.abandon()
    publish_adapter(builder.run, 1, 1)
    builder.run.checkpoint(1, 1).mkdir(parents=True)
    builder.reopen()
    collect(builder)
    assert names(builder.run.trajectories(1)) == ["dead.e0001.seg"], "step 1 is still open"
    builder.step()
    open_step = builder.journal(2, "open")
    builder.play(open_step, "p0", 0)
    collected = collect(builder)
    assert sorted(collected.garbage) == [
        "adapters/v000001.e0001",
        "checkpoints/000001.e0001",
        "images/000001/dead.e0001.seg",
        "trajectories/000001/dead.e0001.seg",
    ]
    assert names(builder.run.trajectories(1)) == ["w0.e0002.seg"]
    assert names(builder.run.trajectories(2)) == ["open.e0002.seg"]
    assert verify_run(builder.run) == []


def test_an_unfinished_checkpoint_of_the_present_driver_is_left_alone(builder):
    builder.step()
    builder.run.checkpoint(1, 1).rename(builder.run.checkpoints / "000000.e0001")
    unfinished = builder.run.checkpoint(1, 1)
    unfinished.mkdir()
    collect(builder)
    assert unfinished.is_dir()


def test_a_deletion_that_died_half_way_is_finished(five, monkeypatch):
    def die(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            collect(five)
    assert verify_run(five.run) == []
    five.reopen()
    sweep_temporaries(five.run)
    collect(five)
    assert names(five.run.checkpoints) == ["000004.e0001", "000005.e0001"]
    assert verify_run(five.run) == []


def test_nothing_is_deleted_before_its_record_is_durable(five, monkeypatch):
    def refuse(path, _):
        raise OSError(f"no {path}")

    monkeypatch.setattr(retention, "publish_file", refuse)
    with pytest.raises(OSError, match="no "):
        collect(five)
    assert len(names(five.run.checkpoints)) == 5


def test_only_checkpoints_of_this_history_count(five):
    shards = list(durable_checkpoints(five.run, five.chain))
    assert [checkpoint.step for checkpoint in shards] == [1, 2, 3, 4, 5]
    (shards[4].path / "shard.distcp").write_bytes(b"short")
    shutil.copytree(shards[0].path, five.run.checkpoint(3, 9))
    assert [checkpoint.step for checkpoint in durable_checkpoints(five.run, five.chain)] == [1, 2, 3, 4]


def test_half_published_folders_are_swept(builder):
    builder.step()
    dead = builder.run.adapters / ".v000009.e0001.123-abc.tmp"
    dead.mkdir()
    (dead / "x").touch()
    assert sweep_temporaries(builder.run) == [builder.run.relative(dead)]
    assert not dead.exists()
    append_line(builder.run.events, {"time": "now", "kind": "swept", "message": "one"})
    assert verify_run(builder.run) == []
