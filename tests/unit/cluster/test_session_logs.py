from __future__ import annotations

import os

from argusrl.cluster.session_logs import keep_logs


def write(path, text: str, changed: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (changed, changed))


def test_the_newest_logs_are_kept_within_the_limit_and_only_what_changed_is_copied(tmp_path):
    source, target = tmp_path / "logs", tmp_path / "kept"
    write(source / "raylet.out", "raylet", 30.0)
    write(source / "events" / "event.log", "event", 20.0)
    write(source / "old.err", "0123456\n89", 10.0)
    write(source / "socket", "no log", 40.0)
    assert keep_logs(source, target, 14) == 13
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "raylet.out": "raylet",
        "events_event.log": "event",
        "old.err": "89",  # the end says how it ended, from the beginning of a line
    }
    assert keep_logs(source, target, 14) == 0
    write(source / "worker.out", "x" * 9, 50.0)
    assert keep_logs(source, target, 15) == 9
    assert sorted(path.name for path in target.iterdir()) == ["raylet.out", "worker.out"]


def test_secrets_do_not_come_along(tmp_path):
    source, target = tmp_path / "logs", tmp_path / "kept"
    write(source / "runtime_env_agent.log", "env_vars: {TOKEN: hunter22}", 1.0)
    write(source / "worker.err", "GET /?token=hunter22 refused\n", 1.0)
    assert keep_logs(source, target, 1000, [b"hunter22"]) == 29
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [
        ("worker.err", "GET /?token=******** refused\n")
    ]


def test_a_node_without_logs_leaves_nothing(tmp_path):
    assert keep_logs(tmp_path / "none", tmp_path / "kept", 100) == 0
    assert not (tmp_path / "kept").exists()
